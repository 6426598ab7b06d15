"""Score all pairs of heads of a model: plan tiles, run them here or on a cluster, put the result together.

>>> import headspan as hs
>>> scores = score(hs.open("demo"), metrics="pk", pairings="OK")
>>> scores["pk", "OK"].values.shape
(16, 16)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

import headspan
from headspan.errors import HeadspanError
from headspan.heads import Pairing, PairSet, parse_pairings
from headspan.models.weights import AttentionWeights, open
from headspan.scores import Scores, is_result
from headspan.scoring.assembly import Assembly, is_whole, pair_name, rank_name
from headspan.scoring.contraction import Route, contract
from headspan.scoring.factors import FactorStore
from headspan.scoring.metrics import METRICS, parse_metrics
from headspan.scoring.plan import Plan, Tile, make_plan
from headspan.scoring.tiles import TileStore
from headspan.system.arguments import checked
from headspan.system.memory import default_memory, parse_memory
from headspan.system.outputs import check_output
from headspan.system.progress import progress_bar

Progress = Callable[[int, int], None]
_UNITS = 1000  # progress steps of a tile


@checked
def score(
    weights: Any,
    metrics: str | Sequence[str] = ("pk", "cs"),
    pairings: str | Pairing | Sequence[str | Pairing] = "all",
    pairs: PairSet = "default",
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    resume: bool = True,
    memory: str | int | None = None,
    route: Route | None = None,
    device: str = "cpu",
    dask: str | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Scores:
    """Similarities of all pairs of heads.

    weights: an opened model (``headspan.open``), folded weights (``headspan.fold``), or whatever can be opened.
    metrics: of pk, cs, simple_cs, linear_cka, procrustes; or "all".
    pairings: like "OK" or ["OQ", "OK"]; "flow" for OQ, OK, OV; "all" for the sixteen.
    pairs: "default" (forward pairs, and same-type pairs for QQ, KK, VV, OO), "forward", "same-type" or "all".
    out: write the result there, and keep finished tiles in the cache folder until it is complete.
    force: replace a file that is not a result; one that is read is never replaced.
    resume: take over finished tiles of a run with the same plan and model.
    memory: the most to use, like "2GB"; half of what is free by default.
    route: "gram" or "direct"; the cheaper one by default.
    device: "cpu", or a torch device for the large products ("cuda", "mps", "torch:cpu").
    dask: address of a Dask scheduler, or "local" for a cluster on this machine.
    progress: called with (done, total); a bar in a terminal or notebook by default.
    """
    weights = open(weights)
    if out is not None:
        check_output(out, "result", inputs=[weights.reference], force=force)
    names = parse_metrics(metrics)
    chosen = parse_pairings(pairings)
    if pairs == "same-type":
        chosen = tuple(p for p in chosen if p.same_type)
    if not names or not chosen:
        raise HeadspanError("nothing to score: choose at least one similarity and one pairing that has pairs")
    budget = parse_memory(memory) if memory is not None else default_memory()
    plan = make_plan(weights, names, chosen, pairs, budget, route)  # refuses what does not fit, before anything is read
    plan.identity = {"model": weights.provenance, "version": headspan.__version__, "device": device}
    result = Assembly(weights, plan)
    with (
        TileStore(out, plan.key, say) if out is not None else nullcontext() as store,
        progress_bar("scoring", progress) as update,
    ):
        finished = _take_over(store, plan, result, say) if store is not None and resume else set()
        left = [tile for tile in plan.tiles if tile.name not in finished]
        ticker = _Ticker(update, len(plan.tiles), len(finished))
        run = _run_here if dask is None else _run_on_dask(dask)
        for tile, arrays in run(weights, plan, left, device, ticker):
            result.add(tile, arrays)
            if store is not None:
                store.save(tile.name, arrays)
        scores = result.scores()
        weights.check_unchanged()
        for sentence in scores.provenance["rank_deficient"]:
            say(sentence)
        if out is not None:
            scores.save(out, force=force)
    return scores


def _take_over(store: TileStore, plan: Plan, result: Assembly, say: Callable[[str], None]) -> set[str]:
    """Put the tiles that an earlier run of this plan finished into the result; their names."""
    finished = set()
    for tile in plan.tiles:
        jobs = plan.jobs(tile)
        arrays = store.load(tile.name, most=sum(16 * job.needed.size for job in jobs) + 2**16)
        if arrays is not None and is_whole(plan, tile, jobs, arrays):
            result.add(tile, arrays)
            finished.add(tile.name)
        elif arrays is not None:
            store.reject(tile.name, "its numbers cannot be scores")
    if finished:
        say(f"going on with an unfinished run: {len(finished)} of {len(plan.tiles)} tiles are done")
    elif store.other_runs():
        say("an unfinished run to this file had another plan or model: starting anew")
    return finished


def scores_of(
    reference: str,
    metrics: str | Sequence[str] = ("pk", "cs"),
    pairings: str | Sequence[str | Pairing] = "all",
    *,
    fold: bool = False,
    progress: Progress | None = None,
) -> Scores:
    """The scores in a result file, or those of a model that is opened and scored on the spot."""
    if is_result(reference):
        return Scores.load(reference)
    from headspan.models.folding import fold as folded

    weights = open(reference)
    return score(folded(weights) if fold else weights, metrics, pairings, progress=progress)


class _Ticker:
    """Progress in thousandths of a tile, told as whole numbers."""

    def __init__(self, progress: Progress, tiles: int, done: int) -> None:
        self._progress, self._total, self._done = progress, tiles * _UNITS, float(done * _UNITS)

    def __call__(self, share: float) -> None:
        self._done += share * _UNITS
        self._progress(min(round(self._done), self._total), self._total)


def _run_here(
    weights: AttentionWeights, plan: Plan, tiles: Iterable[Tile], device: str, tick: Callable[[float], None]
) -> Iterator[tuple[Tile, dict[str, np.ndarray]]]:
    store = FactorStore(weights, plan)
    for tile in tiles:
        yield tile, compute_tile(weights, plan, tile, device, tick, store)


def _run_on_dask(address: str) -> Callable[..., Iterator[tuple[Tile, dict[str, np.ndarray]]]]:
    from headspan.scoring.dask import run_on_dask

    return lambda weights, plan, tiles, device, tick: run_on_dask(address, weights, plan, tiles, device, tick)


def compute_tile(
    weights: AttentionWeights,
    plan: Plan,
    tile: Tile,
    device: str = "cpu",
    tick: Callable[[float], None] = lambda share: None,
    store: FactorStore | None = None,
) -> dict[str, np.ndarray]:
    """Scores of one tile by pair of panels ("Q0-K1": role and block of both sides), and subspace ranks ("rank-Q0")."""
    store = store or FactorStore(weights, plan)
    factors, jobs, metric = store.of(tile), plan.jobs(tile), METRICS[tile.metric]
    if metric.all_pairs is None:
        route = plan.routes[tile.metric]
        kernels = contract(factors, jobs, route=route, work_bytes=plan.work_bytes, device=device, tick=tick)
        values = [metric.finish(kernel) for kernel in kernels]
    else:
        values = []
        for job in jobs:
            values.append(metric.all_pairs(factors[job.first], factors[job.second], job.needed))  # type: ignore[index]
            tick(1 / len(jobs))
    arrays = {pair_name(*pair): value for pair, value in zip(tile.pairs, values, strict=True)}
    return arrays | {rank_name(panel): store.ranks(panel, tile.metric) for panel in tile.panels}
