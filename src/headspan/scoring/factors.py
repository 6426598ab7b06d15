"""Factors of a model's weights, each computed once if memory allows.

A tensor is read once for all factors made from it: for all similarities and roles if the factors of a
whole run fit into memory, otherwise for those of one tile. Layers are read one after the other, all roles of a
layer together, because a fused or quantised tensor holds several of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.scoring.plan import Panel, Plan, Tile
from headspan.subspaces.metrics import Metric
from headspan.subspaces.weight_factors import LayerWeight, factor_sizes
from headspan.system.threads import parallel_map
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Role


class Item(NamedTuple):
    """The factor array of one panel for one similarity."""

    metric: str
    panel: Panel


Ranks: TypeAlias = dict[tuple[Role, int], np.ndarray]  # by role and layer


class Work(NamedTuple):
    """The factors to make from one role in one layer, and the rows of the panels' arrays that they fill."""

    role: Role
    layer: int
    weight: LayerWeight
    places: list[tuple[Metric, np.ndarray]]  # similarity, and the array for its factors, (n, p, q)
    ranks: np.ndarray | None  # if they are known


class FactorStore:
    """The factors that tiles need, with the rank of every weight read for them and the sizes of observed factors.

    ranks: those found before, for the same weights; new ones are added.
    """

    def __init__(self, weights: AttentionWeights, plan: Plan, ranks: Ranks | None = None) -> None:
        self._weights, self._plan = weights, plan
        self._kept: dict[Item, np.ndarray] = {}
        self._ranks: Ranks = {} if ranks is None else ranks
        self._sizes: Ranks = {}

    def of(self, tile: Tile) -> dict[Panel, np.ndarray]:
        """The factor arrays of a tile's panels, (n, p, q) each."""
        wanted = [Item(tile.metric, panel) for panel in tile.panels]
        if self._plan.together:
            later = {Item(t.metric, panel) for t in self._plan.tiles[self._place(tile) :] for panel in t.panels}
            self._keep_only(later)
            missing = [item for item in sorted(later) if item not in self._kept] if self._lacks(wanted) else []
        else:
            self._keep_only(set(wanted))
            missing = [item for item in wanted if item not in self._kept]
        self._make(missing)
        return {item.panel: self._kept[item] for item in wanted}

    def ranks(self, panel: Panel, metric: str) -> np.ndarray:
        """Dimensions of the subspaces of a panel's heads."""
        return np.concatenate([self.layer_ranks(panel.role, layer) for layer in self._layers(Item(metric, panel))])

    def sizes(self, panel: Panel, metric: str) -> np.ndarray:
        """Norms of the factors of a panel's heads before they were divided by them."""
        return np.concatenate([self._sizes[panel.role, layer] for layer in self._layers(Item(metric, panel))])

    def layer_ranks(self, role: Role, layer: int) -> np.ndarray:
        """Dimensions of the subspaces of one role in one layer."""
        if (role, layer) not in self._ranks:
            own = self._weights.read(role, layer)
            self._ranks[role, layer] = LayerWeight(own, None, self._weights.storage_dtype(role, layer)).ranks
        return self._ranks[role, layer]

    def _place(self, tile: Tile) -> int:
        return next(i for i, other in enumerate(self._plan.tiles) if other.name == tile.name)

    def _lacks(self, items: Iterable[Item]) -> bool:
        return any(item not in self._kept for item in items)

    def _keep_only(self, items: set[Item]) -> None:
        self._kept = {item: array for item, array in self._kept.items() if item in items}

    def _layers(self, item: Item) -> list[int]:
        """The layers of a panel in which its role has heads."""
        role, layers = item.panel.role, self._plan.blocks[item.metric][item.panel.block]
        return [layer for layer in layers if self._plan.ports.span(role, layer).stop]

    def _make(self, items: list[Item]) -> None:
        """Make the factors of some panels in one pass over their layers."""
        wanted: dict[int, dict[Role, list[Item]]] = {}
        for item in items:
            for layer in self._layers(item):
                wanted.setdefault(layer, {}).setdefault(item.panel.role, []).append(item)
        for role, layer, ranks, sizes in parallel_map(_make_factors, self._read(wanted), self._plan.workers):
            self._ranks[role, layer] = ranks
            if sizes is not None:
                self._sizes[role, layer] = sizes

    def _read(self, wanted: dict[int, dict[Role, list[Item]]]) -> Iterator[Work]:
        for layer in sorted(wanted):
            held: dict[Role, np.ndarray] = {}

            def weight(role: Role, layer: int = layer, held: dict[Role, np.ndarray] = held) -> np.ndarray:
                if role not in held:
                    held[role] = self._weights.read(role, layer)
                return held[role]

            for role, items in wanted[layer].items():
                partner = None
                if any(self._plan.metric(item.metric).reads_partner for item in items):
                    partner = self._weights.partner(role, layer, weight(role.partner) if role in ROLES else None)
                observed = None
                if any(self._plan.metric(item.metric).observed for item in items):
                    observed = self._weights.observed(role, layer)
                layer_weight = LayerWeight(weight(role), partner, self._weights.storage_dtype(role, layer), observed)
                places = [(self._plan.metric(item.metric), self._place_of(item, layer)) for item in items]
                yield Work(role, layer, layer_weight, places, self._ranks.get((role, layer)))

    def _place_of(self, item: Item, layer: int) -> np.ndarray:
        """A layer's part of a panel's array, which is allocated at the first request.

        Columns are contiguous in memory, as the contraction expects.
        """
        whole = self._plan.rows(item.metric, item.panel)
        if item not in self._kept:
            metric, role = self._plan.metric(item.metric), item.panel.role
            p, q = metric.factor_shape(self._weights.d_model, self._weights.d_head(role))
            self._kept[item] = np.zeros((whole.stop - whole.start, q, p), metric.dtype).transpose(0, 2, 1)
        span = self._plan.ports.span(item.panel.role, layer)
        return self._kept[item][span.start - whole.start : span.stop - whole.start]


def _factor_of(metric: Metric, weight: LayerWeight, shape: tuple[int, ...]) -> np.ndarray:
    """The factors of some heads by a similarity, which may be a caller's own."""
    found = np.asarray(metric.factor(weight))
    p, q = shape
    if (
        found.ndim != 3
        or len(found) != len(weight.own)
        or found.shape[2] > q
        or not (found.shape[1] == p or (metric.inside_head and found.shape[1] < p))
    ):
        raise HeadspanError(
            f"the factors of {metric.key} have the shape {found.shape}, but {len(weight.own)} heads need "
            f"({len(weight.own)}, {p}, {q} or less)"
        )
    return found


def _make_factors(work: Work) -> tuple[Role, int, np.ndarray, np.ndarray | None]:
    """Write the factors of one role in one layer into their arrays, a few heads at a time; return ranks and sizes."""
    ranks = []
    for heads, weight in work.weight.parts():
        for metric, place in work.places:
            factor = _factor_of(metric, weight, place.shape[1:])
            place[heads, : factor.shape[1], : factor.shape[2]] = factor  # zeros beyond the columns of narrower heads
        if work.ranks is None:
            ranks.append(weight.ranks)
    found = np.concatenate(ranks) if work.ranks is None else work.ranks
    return work.role, work.layer, found, None if work.weight.observed is None else factor_sizes(work.weight)
