"""Assemble finished tiles into the matrices of a result, one tile at a time to save memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import headspan
from headspan.models.weights import AttentionWeights
from headspan.results.scores import Scores
from headspan.scoring.arrangement import Job
from headspan.scoring.factors import FactorStore
from headspan.scoring.plan import Panel, Plan, Tile
from headspan.scoring.tiles import is_sound
from headspan.vocabulary.heads import ROLES, HeadOrNode, Pairing, Role


def pair_name(first: Panel, second: Panel) -> str:
    """The key of the values of two panels in a tile."""
    return f"{first.role}{first.block}-{second.role}{second.block}"


def rank_name(panel: Panel) -> str:
    """The key of the ranks of a panel's heads in a tile."""
    return f"rank-{panel.role}{panel.block}"


def size_name(panel: Panel) -> str:
    """The key of the sizes of a panel's factors in a tile."""
    return f"size-{panel.role}{panel.block}"


def is_whole(plan: Plan, tile: Tile, jobs: Sequence[Job], arrays: dict[str, np.ndarray]) -> bool:
    """Whether a saved tile has all its arrays with valid scores; if not, it is computed again."""
    metric, largest, sizes = plan.metric(tile.metric), dict[Panel, float](), dict[Panel, float]()
    for panel in tile.panels:
        rows, ranks = plan.rows(tile.metric, panel), arrays.get(rank_name(panel), np.empty(0))
        if ranks.shape != (rows.stop - rows.start,) or ranks.dtype != np.int32 or (ranks < 0).any():
            return False
        size = arrays.get(size_name(panel), np.ones(ranks.shape) if not metric.observed else np.empty(0))
        if size.shape != ranks.shape or not (np.isfinite(size) & (size >= 0)).all():
            return False
        largest[panel], sizes[panel] = float(ranks.max(initial=0)), float(size.max(initial=0))
    for (first, second), job in zip(tile.pairs, jobs, strict=True):
        values = arrays.get(pair_name(first, second))
        most = metric.largest(largest[first], largest[second], sizes[first] * sizes[second])
        if values is None or not is_sound(values, job.needed, most):
            return False
    return True


class Assembly:
    """The matrices of a run, filled tile by tile."""

    def __init__(self, weights: AttentionWeights, plan: Plan) -> None:
        self._weights, self._plan = weights, plan
        self._arrays = {
            (metric, pairing): np.full(
                (len(weights.heads(pairing.source)), len(weights.heads(pairing.target))), np.nan, dtype=np.float32
            )
            for metric in plan.metrics
            for pairing in plan.pairings_of(metric)
        }
        self._ranks = {role: np.full(len(weights.heads(role)), -1, dtype=np.int32) for role in plan.roles}
        self._sizes = {
            (metric, role): np.zeros(len(weights.heads(role)), dtype=np.float32)
            for metric in plan.metrics
            if plan.metric(metric).observed
            for role in {role for pairing in plan.pairings_of(metric) for role in pairing}
        }

    def add(self, tile: Tile, arrays: dict[str, np.ndarray]) -> None:
        """Store a tile's values in the matrices of its one or two pairings, and the ranks of its heads."""
        for first, second in tile.pairs:
            values = arrays[pair_name(first, second)]
            for pairing in self._plan.pairings_of(tile.metric):
                if pairing == (first.role, second.role):
                    self._put(tile.metric, pairing, first, second, values)
                if pairing == (second.role, first.role) and (first != second or pairing.same_type):
                    self._put(tile.metric, pairing, second, first, values.T)
        for panel in tile.panels:
            self._ranks[panel.role][self._plan.rows(tile.metric, panel)] = arrays[rank_name(panel)]
            if size_name(panel) in arrays:
                sizes = self._sizes[tile.metric, panel.role]
                sizes[self._plan.rows(tile.metric, panel)] = arrays[size_name(panel)]

    def _put(self, metric: str, pairing: Pairing, source: Panel, target: Panel, values: np.ndarray) -> None:
        rows, columns = self._plan.rows(metric, source), self._plan.rows(metric, target)
        chosen = self._plan.mask(metric, pairing, source, target) & ~np.isnan(values)
        np.copyto(self._arrays[metric, pairing][rows, columns], values, casting="same_kind", where=chosen)

    def scores(self) -> Scores:
        """The finished result; weights that are in no tile are read to find their ranks."""
        store = FactorStore(self._weights, self._plan)
        for role, ranks in self._ranks.items():
            for layer in self._weights.places:
                span = self._weights.ports.span(role, layer)
                if (ranks[span] < 0).any():
                    ranks[span] = store.layer_ranks(role, layer)
        weights = self._weights
        found = Scores(self._arrays, weights.ports, weights.d_model, self._ranks, self._provenance())
        found.sizes |= self._sizes
        return found

    def _provenance(self) -> dict[str, Any]:
        plan, weights = self._plan, self._weights
        return {
            **plan.identity["model"],  # as it was when the run began; a change during the run is an error
            "headspan": headspan.__version__,
            "pairs": plan.pairs,
            "routes": dict(plan.routes),
            "blocks": {metric: len(blocks) for metric, blocks in plan.blocks.items()},
            "groupings": dict(plan.groupings),
            "d_head": {str(role): weights.d_head(role) for role in plan.roles},
            "rank_deficient": list(self._rank_sentences()),
            **({"products": "bfloat16"} if plan.identity["device"].endswith("+bf16") else {}),
            **({"left_out": plan.remarks()} if plan.left_out else {}),
            **self._same_layer_chance(),
        }

    def _same_layer_chance(self) -> dict[str, Any]:
        """Mean and standard deviation of PK by chance inside a layer, by pairing and layer, under latent attention."""
        found: dict[str, dict[str, list[float]]] = {}
        for pairing in self._plan.pairings if any(self._plan.metric(m).random_null for m in self._plan.metrics) else ():
            inside = pairing.same_type if self._plan.pairs == "default" else self._plan.pairs in ("same-type", "all")
            if not inside or not set(pairing) <= {*ROLES}:
                continue
            chances = {n: self._weights.same_layer_chance(*pairing, n) for n in self._weights.layers}
            known = {str(n): [chance.mean, chance.sd] for n, chance in chances.items() if chance is not None}
            found |= {str(pairing): known} if known else {}
        return {"same_layer_chance": found} if found else {}

    def _rank_sentences(self) -> Iterator[str]:
        for role, ranks in self._ranks.items():
            full = np.minimum(self._weights.widths(role), self._weights.d_model)
            for i in np.flatnonzero(ranks < full):
                yield _rank_sentence(self._weights.heads(role)[i], role, int(ranks[i]), int(full[i]))


def _rank_sentence(head: HeadOrNode, role: Role, rank: int, full: int) -> str:
    return f"{head}.{role} (layer {head.layer}) has rank {rank} of {full}"
