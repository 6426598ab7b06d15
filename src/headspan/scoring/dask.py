"""Tiles on a Dask cluster: workers open the model themselves, and a tile whose worker dies is done again elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from headspan.errors import HeadspanError, missing_extra

if TYPE_CHECKING:
    from headspan.models.weights import AttentionWeights
    from headspan.scoring.plan import Plan, Tile

_RETRIES = 5


def run_on_dask(
    address: str,
    weights: AttentionWeights,
    plan: Plan,
    tiles: Sequence[Tile],
    device: str,
    tick: Callable[[float], None],
) -> Iterator[tuple[Tile, dict[str, np.ndarray]]]:
    """Results of the tiles as they come in. ``address`` is that of a scheduler, or ``local``."""
    try:
        from distributed import Client, LocalCluster, as_completed
        from distributed.scheduler import KilledWorker
    except ImportError:
        raise missing_extra("distributed", "dask", "running on a cluster") from None
    if not weights.reopenable:
        raise HeadspanError(
            "a cluster needs a reference that its workers can open: give a path or hub id, not arrays or a live model"
        )
    with ExitStack() as stack:
        if address == "local":
            cluster = stack.enter_context(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=""))
            client = stack.enter_context(Client(cluster))
        else:
            try:
                client = stack.enter_context(Client(address, timeout="30s"))
            except (OSError, ValueError, TimeoutError) as error:
                raise HeadspanError(
                    f"no Dask scheduler answers at {address!r} ({error}): start one with dask scheduler, or use local"
                ) from None
        # One copy of the plan for each worker; a tile is then a number.
        shared = client.scatter(plan, broadcast=True, hash=False)
        place = {plan.tiles[i].name: i for i in range(len(plan.tiles))}
        fingerprint = str(weights.provenance["fingerprint"])
        futures = {
            client.submit(
                _work,
                weights.reference,
                weights.folding,
                fingerprint,
                shared,
                place[tile.name],
                device,
                retries=_RETRIES,
                pure=False,
            ): tile
            for tile in tiles
        }
        for future in as_completed(list(futures)):
            try:
                arrays = future.result()
            except KilledWorker as error:
                raise HeadspanError(f"the cluster lost too many workers on one tile ({error})") from None
            tick(1.0)
            yield futures[future], arrays


def _work(reference: str, folding: str, fingerprint: str, plan: Plan, index: int, device: str) -> dict[str, np.ndarray]:
    from headspan.scoring.run import compute_tile

    return compute_tile(_open_here(reference, folding, fingerprint), plan, plan.tiles[index], device)


@lru_cache(maxsize=1)
def _open_here(reference: str, folding: str, fingerprint: str) -> AttentionWeights:
    """The model, opened once per worker process, if it is the same there."""
    from headspan.models.folding import fold
    from headspan.models.weights import open

    weights = open(reference)
    if folding != "none":
        weights = fold(weights)
    if weights.provenance["fingerprint"] != fingerprint:
        raise HeadspanError(f"{reference} on a worker differs from the one here: all machines must see the same files")
    return weights
