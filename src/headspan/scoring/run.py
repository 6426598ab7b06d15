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
from headspan.heads import ROLES, Head, Pairing, PairSet, Role, layers_of, pair_mask, parse_pairings
from headspan.models.weights import AttentionWeights
from headspan.scores import Scores, is_result
from headspan.scoring.contraction import Route, contract
from headspan.scoring.metrics import FACTOR_METRICS, LayerWeight, parse_metrics, procrustes_all_pairs, triangular_factor
from headspan.scoring.plan import Panel, Plan, Tile, make_plan
from headspan.scoring.tiles import TileStore, is_sound
from headspan.system.memory import default_memory, parse_memory
from headspan.system.outputs import check_output
from headspan.system.threads import parallel_map

Progress = Callable[[int, int], None]
_UNITS = 1000  # progress steps of a tile


def score(
    weights: AttentionWeights,
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
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Scores:
    """Similarities of all pairs of heads.

    weights: an opened model (``headspan.open``) or folded weights (``headspan.fold``).
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
    """
    names = parse_metrics(list(metrics) if not isinstance(metrics, str) else metrics)
    chosen = parse_pairings(pairings)
    if pairs == "same-type":
        chosen = tuple(p for p in chosen if p.same_type)
    if not names or not chosen:
        raise HeadspanError("nothing to score: choose at least one similarity and one pairing that has pairs")
    budget = parse_memory(memory) if memory is not None else default_memory()
    identity = {"model": weights.provenance, "version": headspan.__version__, "device": device}
    plan = make_plan(weights, names, chosen, pairs, budget, route, identity)
    if out is not None:
        check_output(out, "result", inputs=[weights.reference], force=force)
    with TileStore(out, plan.key, say) if out is not None else nullcontext() as store:
        finished = _kept_tiles(store, plan, say) if store is not None and resume else {}
        left = [tile for tile in plan.tiles if tile.name not in finished]
        ticker = _Ticker(progress, len(plan.tiles), len(finished))
        run = _run_here if dask is None else _run_on_dask(dask)
        for tile, arrays in run(weights, plan, left, device, ticker):
            finished[tile.name] = arrays
            if store is not None:
                store.save(tile.name, arrays)
        weights.check_unchanged()
        result = _assemble(weights, plan, finished)
        for sentence in result.provenance["rank_deficient"]:
            say(sentence)
        if out is not None:
            result.save(out, force=force)
    return result


def _kept_tiles(store: TileStore, plan: Plan, say: Callable[[str], None]) -> dict[str, dict[str, np.ndarray]]:
    """Tiles that an earlier run of this plan finished."""
    finished = {}
    for tile in plan.tiles:
        arrays = store.load(tile.name, most=sum(16 * job.needed.size for job in tile.jobs))
        if arrays is not None and _is_whole(tile, arrays):
            finished[tile.name] = arrays
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
    progress: Progress = lambda done, total: None,
) -> Scores:
    """The scores in a result file, or those of a model that is opened and scored on the spot."""
    if is_result(reference):
        return Scores.load(reference)
    from headspan.models.folding import fold as folded
    from headspan.models.weights import open

    weights = open(reference)
    return score(folded(weights) if fold else weights, metrics, pairings, progress=progress)


def _is_whole(tile: Tile, arrays: dict[str, np.ndarray]) -> bool:
    """Whether a kept tile has every array of its jobs, with numbers that can be scores; or it is computed again."""
    ranks: dict[str, np.ndarray] = {}
    if tile.metric == "pk":
        for job in tile.jobs:
            for panel, n in zip((job.first, job.second), job.needed.shape, strict=True):
                name = f"rank-{panel.role}{panel.block}"  # type: ignore[union-attr]
                ranks[name] = arrays.get(name, np.empty(0))
                if ranks[name].shape != (n,) or ranks[name].dtype != np.int32 or (ranks[name] < 0).any():
                    return False
    largest = float(max(map(np.max, ranks.values()))) if ranks else 1.0
    values = ((arrays.get(_job_name(job.first, job.second)), job.needed) for job in tile.jobs)  # type: ignore[arg-type]
    return all(found is not None and is_sound(found, needed, largest) for found, needed in values)


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
    for tile in tiles:
        yield tile, compute_tile(weights, plan, tile, device, tick)


def _run_on_dask(address: str) -> Callable[..., Iterator[tuple[Tile, dict[str, np.ndarray]]]]:
    from headspan.scoring.dask import run_on_dask

    return lambda weights, plan, tiles, device, tick: run_on_dask(address, weights, plan, tiles, device, tick)


def compute_tile(
    weights: AttentionWeights,
    plan: Plan,
    tile: Tile,
    device: str = "cpu",
    tick: Callable[[float], None] = lambda share: None,
) -> dict[str, np.ndarray]:
    """Kernel values of one tile by job ("Q0-K1": role and block of both sides), and subspace ranks for pk."""
    factors = {panel: _factors(weights, plan, tile.metric, panel) for panel in tile.panels}
    if tile.metric == "procrustes":
        values = list(_procrustes(factors, tile, tick))
    else:
        route = plan.routes[tile.metric]
        values = contract(factors, tile.jobs, route=route, work_bytes=plan.work_bytes, device=device, tick=tick)
        finish = FACTOR_METRICS[tile.metric].finish
        values = [finish(value) for value in values]
    arrays = {_job_name(job.first, job.second): v for job, v in zip(tile.jobs, values, strict=True)}  # type: ignore[arg-type]
    if tile.metric == "pk":
        arrays |= {f"rank-{p.role}{p.block}": np.any(f, axis=1).sum(axis=1, dtype=np.int32) for p, f in factors.items()}
    return arrays


def _factors(weights: AttentionWeights, plan: Plan, metric: str, panel: Panel) -> np.ndarray:
    """Factors of all heads of a panel; read layer after layer, made on all cores. Float32 but for Procrustes."""
    make = triangular_factor if metric == "procrustes" else FACTOR_METRICS[metric].factor
    dtype = np.float64 if metric == "procrustes" else np.float32
    role = panel.role

    def read() -> Iterator[LayerWeight]:
        for layer in plan.blocks[metric][panel.block]:
            own = weights.read(role, layer)
            partner = weights.read(role.partner, layer) if metric == "cs" else own
            yield LayerWeight(own, partner, weights.storage_dtype(role, layer))

    return np.concatenate(list(parallel_map(lambda weight: make(weight).astype(dtype), read(), plan.workers)))


def _procrustes(factors: dict[Panel, np.ndarray], tile: Tile, tick: Callable[[float], None]) -> Iterator[np.ndarray]:
    for job in tile.jobs:
        values = procrustes_all_pairs(factors[job.first], factors[job.second], job.needed)  # type: ignore[index]
        tick(1 / len(tile.jobs))
        yield values


def _job_name(first: Panel, second: Panel) -> str:
    return f"{first.role}{first.block}-{second.role}{second.block}"


def _assemble(weights: AttentionWeights, plan: Plan, finished: dict[str, dict[str, np.ndarray]]) -> Scores:
    """Kernel blocks into one matrix per role pair, and from it the matrices of its one or two pairings."""
    layer_of = {role: layers_of(weights.heads(role)) for role in ROLES}
    ranks = {r: np.full(len(weights.heads(r)), min(weights.d_head(r), weights.d_model), dtype=np.int32) for r in ROLES}
    arrays: dict[tuple[str, Pairing], np.ndarray] = {}
    for metric in plan.metrics:
        blocks = plan.blocks[metric]
        kernels: dict[tuple[Role, Role], np.ndarray] = {}
        for tile in (t for t in plan.tiles if t.metric == metric):
            parts = finished[tile.name]
            for job in tile.jobs:
                (first, a), (second, b) = job.first, job.second  # type: ignore[misc]
                if (first, second) not in kernels:
                    kernels[first, second] = np.full((len(layer_of[first]), len(layer_of[second])), np.nan)
                where = np.ix_(np.isin(layer_of[first], blocks[a]), np.isin(layer_of[second], blocks[b]))
                kernels[first, second][where] = parts[_job_name(*job[:2])]  # type: ignore[arg-type]
            if metric == "pk":
                for role, block in tile.panels:
                    ranks[role][np.isin(layer_of[role], blocks[block])] = parts[f"rank-{role}{block}"]
        for pairing in plan.pairings:
            arrays[metric, pairing] = _matrix(weights, plan, kernels, pairing)
    return Scores(arrays, weights.ports, weights.d_model, ranks, _provenance(weights, plan, ranks))


def _matrix(
    weights: AttentionWeights, plan: Plan, kernels: dict[tuple[Role, Role], np.ndarray], pairing: Pairing
) -> np.ndarray:
    mask = pair_mask(pairing, weights.heads(pairing.source), weights.heads(pairing.target), plan.pairs)
    if (pairing.source, pairing.target) in kernels:
        kernel = kernels[pairing.source, pairing.target]
        if pairing.same_type:
            kernel = np.where(np.isnan(kernel), kernel.T, kernel)
    elif (pairing.target, pairing.source) in kernels:
        kernel = kernels[pairing.target, pairing.source].T
    else:
        kernel = np.full(mask.shape, np.nan)  # a model of one layer has no forward pairs
    return np.where(mask, kernel, np.nan).astype(np.float32)


def _provenance(weights: AttentionWeights, plan: Plan, ranks: dict[Role, np.ndarray]) -> dict[str, Any]:
    return {
        **weights.provenance,
        "headspan": headspan.__version__,
        "pairs": plan.pairs,
        "routes": dict(plan.routes),
        "blocks": {metric: len(blocks) for metric, blocks in plan.blocks.items()},
        "d_head": {str(role): weights.d_head(role) for role in ROLES},
        "rank_deficient": list(_rank_sentences(weights, ranks)),
    }


def _rank_sentences(weights: AttentionWeights, ranks: dict[Role, np.ndarray]) -> Iterator[str]:
    for role in ROLES:
        full = min(weights.d_head(role), weights.d_model)
        for i in np.flatnonzero(ranks[role] < full):
            head: Head = weights.heads(role)[i]
            yield f"{head}.{role} (layer {head.layer}) has rank {ranks[role][i]} of {full}"
