"""Tiles on a Dask cluster: workers open the model themselves, and the tile of a dead worker is run again elsewhere.

Every worker reports its version of headspan with every tile, and other versions are refused. If the cluster fails,
the run ends with a message within a minute; the run keeps the finished tiles and can continue later.
``local`` is a cluster inside this process, so it needs no ``if __name__ == "__main__"`` around the script.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import headspan
from headspan.models.observed import ObservedWeights, Roots
from headspan.node_kinds.beside_heads import AddedNodes, WithNodes
from headspan.vocabulary.errors import HeadspanError, missing_extra

if TYPE_CHECKING:
    from headspan.models.weights import AttentionWeights
    from headspan.scoring.factors import Ranks
    from headspan.scoring.plan import Plan, Tile

_PATIENCE = 30.0  # seconds without a heartbeat from the scheduler or workers
_RETRIES = 2  # for a tile that raised an error; the death of a worker is not counted here
_KEPT = "With an output file, finished tiles are kept: run the same command again to continue"


class Done(NamedTuple):
    """What a worker returns: the tile's arrays, and the version of headspan that made them."""

    arrays: dict[str, np.ndarray]
    build: str


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
        import distributed
    except ImportError:
        raise missing_extra("distributed", "dask", "running on a cluster") from None
    if not weights.reopenable:
        raise HeadspanError(
            "a cluster's workers must be able to open the model. Give a path or hub id, not arrays or a live model"
        )
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        client = _connect(distributed, address, stack)
        _check_workers(client, address)
        about = weights.reference, weights.folding, str(weights.provenance["fingerprint"])
        added, base = (weights.added, weights.inner) if isinstance(weights, WithNodes) else (None, weights)

        def submit(tile: Tile) -> Any:
            # A task carries only its own tile: a plan stored on a worker would be lost with it.
            mine = replace(plan, tiles=[tile])
            roots = _roots_of(tile, plan, base) if isinstance(base, ObservedWeights) else None
            return client.submit(_work, *about, mine, device, added, roots, retries=_RETRIES, pure=False)

        for tile, arrays in _collect(client, address, submit, tiles):
            tick(1.0)
            yield tile, arrays


def _roots_of(tile: Tile, plan: Plan, weights: ObservedWeights) -> Roots | None:
    """The part of the statistics that a tile needs."""
    if not plan.metric(tile.metric).observed:
        return None
    places = [(panel.role, layer) for panel in tile.panels for layer in plan.blocks[tile.metric][panel.block]]
    return {place: weights.roots[place] for place in places if place in weights.roots}


def _connect(distributed: Any, address: str, stack: ExitStack) -> Any:
    try:
        if address == "local":
            where: Any = stack.enter_context(
                distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None)
            )
        else:
            where = address
        client = distributed.Client(where, timeout=_PATIENCE / 2, set_as_default=False)
    except (OSError, ValueError, TimeoutError, TypeError, RuntimeError, ImportError, AssertionError) as error:
        raise HeadspanError(
            f"no Dask scheduler answers at {address!r} ({error}). Start one with dask scheduler, or use local"
        ) from None
    stack.callback(_close, client)
    return client


def _close(client: Any) -> None:
    with suppress(Exception):  # an error here does not affect the result
        client.close(timeout=5)


def _check_workers(client: Any, address: str) -> None:
    """Check that there is at least one worker and that all workers run this version of headspan."""
    pulse = _Pulse(client, address)
    while not pulse.workers():
        pulse.check()
        time.sleep(0.2)

    def ask() -> str:  # pickled by value, so that a worker without this module can answer
        try:
            from headspan.scoring.dask import build
        except ImportError:
            try:
                import headspan
            except ImportError:
                return "no headspan"
            return headspan.__version__
        return build()

    try:
        answers = client.run(ask, on_error="return")
    except Exception as error:  # a worker died just now; tiles report their version themselves
        answers = {}
        if client.status != "running":
            raise _lost(address) from error
    for worker, answer in answers.items():
        if isinstance(answer, str):
            _check_build(answer, worker)


def _check_build(found: str, worker: str) -> None:
    if found != build():
        version = found.split("+")[0]
        same = ", of the same version but with other source code" if version == headspan.__version__ else ""
        raise HeadspanError(
            f"the worker {worker} runs headspan {version}, this machine {headspan.__version__}{same}: "
            f"install the same version everywhere. {_KEPT}"
        )


def _collect(
    client: Any, address: str, submit: Callable[[Tile], Any], tiles: Sequence[Tile]
) -> Iterator[tuple[Tile, dict[str, np.ndarray]]]:
    """Submit a few more tiles than the cluster has threads, and yield the results as they arrive."""
    pulse, waiting = _Pulse(client, address), list(reversed(tiles))
    done: Queue[Any] = Queue()
    running: dict[Any, Tile] = {}
    while waiting or running:
        while waiting and len(running) < max(4, 2 * pulse.threads):
            tile = waiting.pop()
            future = submit(tile)
            running[future.key] = tile
            future.add_done_callback(done.put)
        try:
            future = done.get(timeout=1.0)
        except Empty:
            pulse.check()
            continue
        yield running[future.key], _result(future, address)
        del running[future.key]


def _result(future: Any, address: str) -> dict[str, np.ndarray]:
    from concurrent.futures import CancelledError

    from distributed.scheduler import KilledWorker

    try:
        found = future.result(timeout=_PATIENCE)
    except HeadspanError:
        raise
    except KilledWorker as error:
        raise HeadspanError(
            f"several workers died on one tile, the last at {error.last_worker.address}; they may have too little "
            f"memory (see `memory`). {_KEPT}"
        ) from None
    except (CancelledError, TimeoutError, OSError):
        raise _lost(address) from None
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise HeadspanError(
            f"a worker failed on a tile ({what}); all machines need the same headspan and packages. {_KEPT}"
        ) from None
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], str)):
        _check_build("of an older version", "that did a tile")
    _check_build(found[1], "that did a tile")
    return found[0]


def _lost(address: str) -> HeadspanError:
    return HeadspanError(f"the Dask scheduler at {address!r} stopped answering during the run: start it again. {_KEPT}")


class _Pulse:
    """When the cluster last answered. A worker counts as alive while its last heartbeat changes."""

    def __init__(self, client: Any, address: str) -> None:
        self._client, self._address = client, address
        self._seen: dict[str, Any] = {}
        self._heard = time.monotonic()
        self.threads = 1

    def workers(self) -> dict[str, Any]:
        """What the scheduler reports about its workers; nothing if it does not answer."""
        try:
            found = self._client.sync(self._client.scheduler.identity, callback_timeout=_PATIENCE / 3)["workers"]
        except Exception:  # many kinds of exception, all of which mean that there was no answer
            return {}
        self.threads = sum(worker.get("nthreads", 1) for worker in found.values()) or 1
        return found

    def check(self) -> None:
        """Raise if there has been no answer for too long."""
        if self._client.status not in ("running", "connecting"):
            raise _lost(self._address)
        found = self.workers()
        seen = {worker: about.get("last_seen") for worker, about in found.items()}
        if any(self._seen.get(worker) != when for worker, when in seen.items()):
            self._heard = time.monotonic()
        self._seen = seen
        if time.monotonic() - self._heard > _PATIENCE:
            if found:
                why = "its workers do not answer"
            else:
                why = "it has no workers (start some with dask worker ADDRESS, and read their logs if they die)"
            raise HeadspanError(f"the Dask cluster at {self._address!r} makes no progress: {why}. {_KEPT}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the cluster's own log messages; headspan reports what matters."""
    loggers = [logging.getLogger(name) for name in ("distributed", "tornado", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@lru_cache(maxsize=1)
def build() -> str:
    """Version and source hash of this headspan: equal if two machines compute equal tiles."""
    digest = hashlib.sha256()
    home = Path(headspan.__file__).parent
    for path in sorted(
        path
        for part in ("checkpoints", "models", "node_kinds", "results", "scoring", "subspaces", "vocabulary")
        for path in (home / part).rglob("*.py")
    ):
        digest.update(path.relative_to(home).as_posix().encode() + path.read_bytes())
    return f"{headspan.__version__}+{digest.hexdigest()[:16]}"


def _work(
    reference: str,
    folding: str,
    fingerprint: str,
    plan: Plan,
    device: str,
    added: AddedNodes | None = None,
    roots: Roots | None = None,
) -> Done:
    from headspan.scoring.factors import FactorStore
    from headspan.scoring.tile import compute_tile

    def compute() -> Done:
        weights, ranks = _open_here(reference, folding, fingerprint)
        if roots is not None:
            weights = ObservedWeights(weights, roots, {})
        if added is None:
            store = FactorStore(weights, plan, ranks)
        else:  # ranks of nodes belong to one run
            weights = WithNodes(weights, added)
            store = FactorStore(weights, plan)
        return Done(compute_tile(weights, plan, plan.tiles[0], device, store=store), build())

    before = _open_here.cache_info().misses
    try:
        return compute()
    except HeadspanError:
        if _open_here.cache_info().misses > before:
            raise
        # A worker outlives runs: the file may have been touched or rewritten with the same content.
        _open_here.cache_clear()
        return compute()


@lru_cache(maxsize=1)
def _open_here(reference: str, folding: str, fingerprint: str) -> tuple[AttentionWeights, Ranks]:
    """The model, opened once per worker process and checked to be the same there, and the ranks found by its tiles."""
    from headspan.models.folding import fold
    from headspan.models.opening import open

    weights = open(reference)
    if folding != "none":
        weights = fold(weights)
    if weights.provenance["fingerprint"] != fingerprint:
        raise HeadspanError(f"{reference} on a worker differs from the one here. All machines must see the same files")
    return weights, {}
