"""Score all pairs of heads of a model: plan tiles, run them here or on a cluster, assemble the result.

>>> import headspan as hs
>>> scores = score("demo", metric="pk", pairing="OK")
>>> scores["pk", "OK"].values.shape
(16, 16)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import headspan
from headspan.models.folding import fold as folded
from headspan.models.folding import fold_advice, folding_is_advised
from headspan.models.opening import ModelLike, open
from headspan.models.weights import AttentionWeights
from headspan.results.identity import short_name
from headspan.results.observations import StatisticsLike, given_statistics
from headspan.results.scores import Scores
from headspan.scoring.assembly import Assembly, is_whole
from headspan.scoring.contraction import Route
from headspan.scoring.factors import FactorStore
from headspan.scoring.plan import Plan, Tile, make_plan
from headspan.scoring.screening import DELTA
from headspan.scoring.screening import screen as find_strongest
from headspan.scoring.tile import compute_tile
from headspan.scoring.tiles import TileStore
from headspan.subspaces.metrics import DEFAULT_METRICS, PK, MetricsLike, check_statistics, parse_metrics, split_metrics
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.memory import default_memory, parse_memory
from headspan.system.outputs import check_output
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.errors import HeadspanError, inform, refuse_ignored, warn
from headspan.vocabulary.heads import NODE_PAIRINGS, PAIRING_WORDS, Pairing, PairSet, pair_mask, parse_pairings
from headspan.vocabulary.ports import PortTable

if TYPE_CHECKING:
    from headspan.node_kinds.opening import NodesLike

_UNITS = 1000  # progress steps per tile
_LONG = 10.0  # minutes above which screening is suggested
_SURELY_SHORT = 1e13  # operations that take less than that on any machine
_OVERHEAD = 1.4  # time of a run relative to its arithmetic


@renamed(weights="model", metrics="metric", pairings="pairing")
@checked
def score(
    model: ModelLike,
    metric: MetricsLike = DEFAULT_METRICS,
    pairing: str | Pairing | Sequence[str | Pairing] = "all",
    pairs: PairSet = "default",
    *,
    fold: bool = False,
    nodes: NodesLike | None = None,
    stats: StatisticsLike | None = None,
    screen: int | None = None,
    delta: float | None = None,
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    resume: bool = True,
    memory: str | int | None = None,
    route: Route | None = None,
    device: str = "cpu",
    dask: str | None = None,
    progress: Update | None = None,
) -> Scores:
    """Similarities of all pairs of heads.

    model: an opened model (``headspan.open``), folded weights (``headspan.fold``), or anything that can be opened.
    metric: of pk, cs, simple_cs, linear_cka, procrustes; or "all". Your own is a function of two weights, each
        (d_model, d_head), that returns a number, called as ``metric(source, target)`` for every pair, or a
        ``headspan.Metric``. Its name is that of the function; a run with one does not resume.
    pairing: "OK" or ["OQ", "OK"]; "flow" for OQ, OK, OV; "all" for the sixteen. Nodes add OR, WQ, WK, WV and WR;
        "nodes" means only these; RR and WW are scored only if named.
    pairs: "default" (forward pairs, and same-type pairs for QQ, KK, VV, OO), "forward", "same-type" or "all".
    fold: fold the norms into the weights first, as ``headspan.fold`` does.
    nodes: other readers and writers of the stream: files of directions (``"probe.npy@14"``), ``headspan.Node`` objects,
        ``{"neurons": "L3:17", "tokens": " Paris"}`` by the arguments of ``headspan.nodes``, or a list of these; at most
        2,000 nodes (``headspan.nodes`` takes any number).
    stats: statistics of a run (``headspan.observe``), or their file; needed for influence, and used by nothing else.
    screen: keep only this many strongest pairs of every pairing, by pk, found by sketches and computed exactly; the
        provenance reports how many of them are certified, with error probability ``delta`` (0.01 by default).
    seed: seed of the sketches of ``screen``; by default derived from the content of the model.
    out: write the result to this file; finished tiles stay in the cache folder until it is complete.
    force: overwrite a file that is not a result (never an input).
    resume: use the finished tiles of an interrupted run with the same plan and model.
    memory: memory limit, for example "2GB"; by default half of the free memory.
    route: "gram" or "direct"; by default the cheaper one.
    device: "cpu", or a torch device for the large products ("cuda", "mps", "torch:cpu"); "cuda+bf16" multiplies in
        bfloat16, with an error of PK of at most 0.006·√(m·m').
    dask: address of a Dask scheduler, or "local" for a cluster on this machine.
    progress: called with (done, total); by default a bar in a terminal or notebook.
    """
    if screen is None:
        refuse_ignored("without screening", delta=delta, seed=seed)
    weights = open(model)
    if fold and weights.folding == "none":
        weights = folded(weights)
    if out is not None:
        if folding_is_advised(weights):
            inform(f"{short_name(weights.reference)}: folding the norms is {fold_advice(weights)}. Add `fold=True`")
        check_output(out, "result", inputs=[weights.reference], force=force)
    shipped, own = split_metrics(metric)
    names = parse_metrics(shipped, observed=stats is not None)
    observed = check_statistics(names, stats is not None)
    if stats is not None:
        weights = _with_statistics(weights, stats)
    if nodes is not None:
        if screen is not None:
            raise HeadspanError("screening compares heads only. Leave out the nodes, or use `hs.nodes(model)` for them")
        weights = _with_nodes(weights, nodes)
    chosen = _chosen(weights.ports, pairing, pairs)
    names = (*names, *own)
    if own and dask is not None:
        raise HeadspanError(f"a cluster cannot compute your own similarity {next(iter(own))}. Leave out `dask`")
    if not names or not chosen:
        raise HeadspanError("nothing to score. Choose at least one similarity and one pairing that has pairs")
    budget = parse_memory(memory) if memory is not None else default_memory()
    for sentence in weights.notes:
        warn(sentence)
    if screen is not None:
        if route is not None:
            raise HeadspanError("screening has no route. Leave out `route`")
        delta = DELTA if delta is None else delta
        scores = _screened(weights, names, chosen, pairs, screen, delta, seed, budget, device, dask, progress)
        if out is not None:
            scores.save(out, force=force)
        return scores
    plan = make_plan(weights, names, chosen, pairs, budget, route, own)  # raises if the model does not fit
    for sentence in plan.remarks():
        warn(sentence)
    if observed and weights.folding == "none":
        inform(f"{observed[0]} folds the norms into the weights; other similarities use them as they are stored")
    plan.identity = {"model": weights.provenance, "version": headspan.__version__, "device": device}
    if (minutes := _minutes(plan)) > _LONG:
        inform(
            f"this may take about {minutes:.0f} minutes. `screen=100` finds the 100 strongest pairs of every pairing "
            "in a fraction of that time, with exact values and a certificate"
        )
    result = Assembly(weights, plan)
    with (
        TileStore(out, plan.key) if out is not None and not own else nullcontext() as store,
        progress_bar("scoring", progress) as update,
    ):
        finished = _take_over(store, plan, result) if store is not None and resume else set[str]()
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
            warn(sentence)
        if out is not None:
            scores.save(out, force=force)
    return scores


def _with_statistics(weights: AttentionWeights, stats: StatisticsLike) -> AttentionWeights:
    from headspan.models.observed import observed_weights

    return observed_weights(weights, given_statistics(stats))


def _with_nodes(weights: AttentionWeights, nodes: NodesLike) -> AttentionWeights:
    from headspan.node_kinds.beside_heads import add_nodes
    from headspan.node_kinds.opening import node_sets

    found = add_nodes(weights, node_sets(weights, nodes))
    for sentence in found.added.notes:  # how they were read
        inform(sentence)
    return found


def _chosen(ports: PortTable, pairings: str | Pairing | Sequence[str | Pairing], pairs: PairSet) -> tuple[Pairing, ...]:
    """The pairings to score: those requested, and those of the nodes that have pairs."""
    asked = [pairings] if isinstance(pairings, (str, Pairing)) else list(pairings)
    words = [word for text in asked for word in (text.split(",") if isinstance(text, str) else [text])]
    chosen, named = parse_pairings(words), [w for w in words if str(w).strip().lower() not in PAIRING_WORDS]
    chosen = tuple(dict.fromkeys([*chosen, *(NODE_PAIRINGS if ports.nodes else ())]))
    if pairs == "same-type":
        chosen = tuple(p for p in chosen if p.same_type)
    for pairing in (p for p in chosen if p.of_nodes):
        sources, targets = ports.of(pairing.source), ports.of(pairing.target)
        if pair_mask(pairing, sources, targets, pairs).any():
            continue
        if pairing in parse_pairings(named):
            why = "the nodes come after all their partners" if sources and targets else "none has that role"
            raise HeadspanError(
                f"{pairing} has no pairs: {why}" if ports.nodes else f"{pairing} compares nodes: give some with nodes"
            )
        chosen = tuple(p for p in chosen if p != pairing)
    return chosen


def _screened(
    weights: AttentionWeights,
    names: tuple[str, ...],
    pairings: tuple[Pairing, ...],
    pairs: PairSet,
    k: int,
    delta: float,
    seed: int | None,
    memory: int,
    device: str,
    dask: str | None,
    progress: Update | None,
) -> Scores:
    """Find only the strongest pairs; see :mod:`headspan.scoring.screening`."""
    if k < 1 or not 0 < delta < 1:
        raise HeadspanError(f"screening needs at least 1 pair and a delta between 0 and 1, not {k} and {delta:g}")
    if seed is not None and not 0 <= seed < 2**64:
        raise HeadspanError(f"the seed must be a whole number from 0 to 2**64 - 1, not {str(seed)[:40]}")
    if names != (PK,):
        raise HeadspanError(f"screening works with pk only, not with {', '.join(names)}. Choose `metric='pk'`")
    if dask is not None or device != "cpu":
        raise HeadspanError("screening runs on this machine's CPU only. Leave out `dask` and `device`")
    with progress_bar("screening", progress) as update:
        scores = find_strongest(weights, pairings, pairs, k, memory=memory, delta=delta, seed=seed, progress=update)
    for pairing in pairings:
        about = scores.provenance["screen"][str(pairing)]
        inform(
            f"{pairing}: {about['certified']} of the {about['found']} strongest pairs are certified (each has "
            f"its true rank, with error probability {delta:g}); {about['compared']:,} of {about['pairs']:,} "
            "pairs were compared exactly"
        )
    return scores


def _take_over(store: TileStore, plan: Plan, result: Assembly) -> set[str]:
    """Load the tiles that an earlier run of this plan finished; return their names."""
    finished: set[str] = set()
    for tile in plan.tiles:
        jobs = plan.jobs(tile)
        arrays = store.load(tile.name, most=sum(16 * job.needed.size for job in jobs) + 2**16)
        if arrays is not None and is_whole(plan, tile, jobs, arrays):
            result.add(tile, arrays)
            finished.add(tile.name)
        elif arrays is not None:
            store.reject(tile.name, "its values are not valid scores")
    if finished:
        inform(f"continuing an unfinished run: {len(finished)} of {len(plan.tiles)} tiles are done")
    elif store.other_runs():
        inform("an unfinished run to this file had another plan or model, so this run starts from the beginning")
    return finished


def _minutes(plan: Plan) -> float:
    """Estimated minutes of a plan on this machine, from the speed of one product; 0 for a short plan."""
    if plan.operations < _SURELY_SHORT:
        return 0.0
    n = 1500
    square = np.ones((n, n), dtype=np.float32)
    seconds: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        _ = square @ square
        seconds.append(time.perf_counter() - started)
    return _OVERHEAD * plan.operations / (2 * n**3 / min(seconds)) / 60


class _Ticker:
    """Progress in thousandths of a tile, as whole numbers."""

    def __init__(self, progress: Update, tiles: int, done: int) -> None:
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

    return partial(run_on_dask, address)
