"""Plan a run: cut the work into tiles that fit into memory and can run in any order, on any machine.

The layers are cut into blocks, and a tile is one similarity between some of them. The pairs of panels of a tile are
chosen to repeat the least work: those of two blocks, or of one block and everything before it, or of two roles.
A tile needs the factors of its panels and nothing else. Each kernel value is computed once: ⟨O of h, Q of h'⟩ serves
OQ and, transposed, QO.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.scoring.arrangement import Job
from headspan.scoring.contraction import Route, route_cost
from headspan.scoring.defined import check_dimensions, left_out
from headspan.subspaces.metrics import METRICS, Metric
from headspan.system.threads import cores
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import (
    FLOW_PAIRINGS,
    NODE_ROLES,
    ROLES,
    Pairing,
    PairSet,
    Role,
    mask_of,
    other_node,
    positions_of,
)
from headspan.vocabulary.ports import PortTable

_BASE_BYTES = 200 * 10**6  # the interpreter with numpy and scipy
_SMALL_TILE = 2  # layers, if each pair costs a factorisation
_FACTOR_COST = 12  # operations for a factor of p×q, in p·q², at the speed of a large product
_ALL_PAIRS_COST = 40  # operations for a singular value decomposition of m×m, in m³, at the speed of a large product
_MOST_WORK = 2**30  # bytes of intermediate arrays; more does not make a product faster


class Panel(NamedTuple):
    """The heads of one role in one block of layers: the content of one factor array."""

    role: Role
    block: int


class Tile(NamedTuple):
    """One similarity between some blocks of layers: the pairs of panels whose kernel matrices it fills."""

    metric: str
    number: int
    pairs: tuple[tuple[Panel, Panel], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(dict.fromkeys(panel for pair in self.pairs for panel in pair))

    @property
    def name(self) -> str:
        return f"{self.metric}-{self.number:05d}"


# Which pairs of panels make a tile. If memory does not hold everything, tiles of one grouping may share more
# than those of another: with few roles on one side, that whole side with one block of the other at a time.
_GROUPINGS: dict[str, Callable[[Panel, Panel], Any]] = {
    "blocks": lambda a, b: (min(a.block, b.block), max(a.block, b.block)),
    "before": lambda a, b: max(a.block, b.block),
    "roles": lambda a, b: (a.role.value, b.role.value),
}


@dataclass
class Plan:
    """All tiles of a run, and everything that determines their values."""

    metrics: tuple[str, ...]
    pairings: tuple[Pairing, ...]
    pairs: PairSet
    ports: PortTable
    identity: dict[str, Any] = field(default_factory=dict)  # of the model and of all that changes the numbers
    routes: dict[str, Route] = field(default_factory=dict)
    blocks: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)  # per metric: layers of each block
    groupings: dict[str, str] = field(default_factory=dict)  # per metric: which pairs of panels make a tile
    work_bytes: int = 0
    workers: int = 1  # layers whose factors are made at the same time
    together: bool = False  # whether the factors of all tiles fit into memory at once
    tiles: list[Tile] = field(default_factory=list)
    operations: float = 0.0  # approximate number of floating-point operations of all tiles
    left_out: dict[str, dict[Pairing, str]] = field(default_factory=dict)  # per metric: pairings left out, and why
    own: dict[str, Metric] = field(default_factory=dict[str, Metric])  # similarities of the caller, by name

    def metric(self, name: str) -> Metric:
        return self.own[name] if name in self.own else METRICS[name]

    def pairings_of(self, metric: str) -> tuple[Pairing, ...]:
        """The pairings that a similarity is computed for: all, except those of nodes for which it is not defined."""
        without = self.left_out.get(metric, {})
        return tuple(pairing for pairing in self.pairings if pairing not in without)

    def remarks(self) -> list[str]:
        """One message per reason why a similarity has no scores for some nodes."""
        grouped: dict[tuple[str, str], list[str]] = {}
        for metric, without in self.left_out.items():
            for pairing, reason in without.items():
                grouped.setdefault((metric, reason), []).append(str(pairing))
        return [f"{metric} is left out for {', '.join(names)}: {reason}" for (metric, reason), names in grouped.items()]

    @property
    def key(self) -> str:
        """A hash that is equal if and only if one run can use the finished tiles of another."""
        parts = {
            "metrics": self.metrics,
            "pairings": [str(p) for p in self.pairings],
            "pairs": self.pairs,
            "routes": self.routes,
            "blocks": self.blocks,
            "groupings": self.groupings,
            "work_bytes": self.work_bytes,
            "identity": self.identity,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that some pairing compares."""
        return tuple(role for role in (*ROLES, *NODE_ROLES) if any(role in pairing for pairing in self.pairings))

    @cached_property
    def _positions(self) -> dict[Role, np.ndarray]:
        return {role: positions_of(self.ports.of(role)) for role in self.roles}

    def rows(self, metric: str, panel: Panel) -> slice:
        """The indices of a panel's heads in the list of their role."""
        return _rows(self.ports, panel.role, self.blocks[metric][panel.block])

    def mask(self, metric: str, pairing: Pairing, source: Panel, target: Panel) -> np.ndarray:
        """Which pairs of two panels belong to the pair set of a pairing."""
        first, second = self._positions[pairing.source], self._positions[pairing.target]
        rows, columns = self.rows(metric, source), self.rows(metric, target)
        chosen = mask_of(pairing, first, second, self.pairs, rows, columns)
        if not pairing.between_nodes:
            return chosen
        return chosen & other_node(self.ports.of(pairing.source)[rows], self.ports.of(pairing.target)[columns])

    def jobs(self, tile: Tile) -> list[Job]:
        """What to compute for a tile: kernel matrices, and the entries that some pairing needs.

        A same-role kernel is symmetric, so entries needed below its diagonal are computed above it.
        """
        return [Job(*pair, np.logical_or(*self.directions(tile.metric, *pair))) for pair in tile.pairs]

    def directions(self, metric: str, first: Panel, second: Panel) -> tuple[np.ndarray, np.ndarray]:
        """The entries of two panels that are needed: with the first as the source, and with the second."""
        rows, columns = self.rows(metric, first), self.rows(metric, second)
        onward = np.zeros((rows.stop - rows.start, columns.stop - columns.start), dtype=bool)
        back = onward.copy()
        for pairing in self.pairings_of(metric):
            if pairing == (first.role, second.role):
                onward |= self.mask(metric, pairing, first, second)
            if pairing == (second.role, first.role):
                back |= self.mask(metric, pairing, second, first).T
        if first.role is second.role:
            upper = np.arange(rows.start, rows.stop)[:, None] <= np.arange(columns.start, columns.stop)
            onward, back = onward & upper, back & upper
        return onward, back


def make_plan(
    weights: AttentionWeights,
    metrics: tuple[str, ...],
    pairings: tuple[Pairing, ...],
    pairs: PairSet,
    memory: int,
    route: Route | None = None,
    own: Mapping[str, Metric] | None = None,
) -> Plan:
    """Cut the work into as few tiles as memory allows, or raise an error with the memory needed.

    own: similarities of the caller among the metrics, by name.
    """
    plan = Plan(metrics, pairings, pairs, weights.ports, own=dict(own or {}))
    check_dimensions(weights, [plan.metric(name) for name in metrics], pairings)
    plan.left_out = {name: left for name in metrics if (left := left_out(weights, plan.metric(name), pairings))}
    for name, left in plan.left_out.items():
        if plan.metric(name).flow_only and not plan.pairings_of(name):
            raise HeadspanError(
                f"{name} is not defined for {', '.join(map(str, left))}: {next(iter(left.values()))}. "
                f"Choose from {', '.join(map(str, FLOW_PAIRINGS))}"
            )
    size = {role: 8 * weights.d_model * weights.d_head(role) for role in plan.roles}
    per_layer = {r: max(len(weights.heads_in(r, layer)) for layer in weights.places) * size[r] for r in plan.roles}
    # While the factors of a layer are made, memory holds its weights, those of its partners, and their folded copies.
    # One layer more than there are workers is in progress; float64 copies are made for a few heads at a time.
    making = 3 * max(per_layer.values())
    held = _BASE_BYTES + result_bytes(weights.ports, metrics, pairings) + sum(per_layer.values()) + weights.held_bytes
    plan.workers = max(1, min(cores(), (memory - held) // 4 // making - 1))
    spare = memory - held - (plan.workers + 1) * making
    plan.work_bytes = max(0, min(_MOST_WORK, spare // 3))
    for metric in metrics:
        smallest = _even_blocks(weights.places, 1)
        least = max(_tile_bytes(weights, plan, plan.metric(metric), smallest, "blocks"), default=0) + 4 * 2**20
        if spare - plan.work_bytes < least:
            needed = memory - spare + least * 3 // 2
            raise HeadspanError(
                f"{memory / 1e9:.2f} GB is too little memory for this model: the scores and two layers need about "
                f"{needed / 1e9:.2f} GB. Allow more with `memory`, or choose fewer similarities or pairings"
            )
        plan.blocks[metric], plan.groupings[metric] = _cut(weights, plan, plan.metric(metric), spare - plan.work_bytes)
    for metric in metrics:
        made = _tile_pairs(plan, metric, plan.blocks[metric], plan.groupings[metric])
        tiles = [Tile(metric, i, pairs) for i, pairs in enumerate(made)]
        if plan.metric(metric).kernel:
            costs = _costs(weights, plan, tiles)
            plan.routes[metric] = route or min(costs, key=lambda r: costs[r])
            plan.operations += costs[plan.routes[metric]]
        else:
            plan.operations += _ALL_PAIRS_COST * _pair_count(plan, tiles) * weights.d_head(plan.roles[0]) ** 3
        plan.tiles += tiles
    factors = {(tile.metric, panel) for tile in plan.tiles for panel in tile.panels}
    everything = sum(_factor_bytes(weights, plan.metric(m), panel.role, plan.rows(m, panel)) for m, panel in factors)
    largest = max((_value_bytes(plan.ports, plan.blocks[t.metric], t.pairs) for t in plan.tiles), default=0)
    plan.together = everything + largest <= spare - plan.work_bytes
    return plan


def result_bytes(ports: PortTable, metrics: Sequence[str], pairings: Sequence[Pairing]) -> int:
    """Bytes of the finished matrices."""
    return 4 * len(metrics) * sum(len(ports.of(p.source)) * len(ports.of(p.target)) for p in pairings)


def _rows(ports: PortTable, role: Role, layers: Sequence[int]) -> slice:
    spans = [span for layer in layers if (span := ports.span(role, layer)).stop]
    return slice(spans[0].start, spans[-1].stop) if spans else slice(0, 0)


def _cut(weights: AttentionWeights, plan: Plan, metric: Metric, spare: int) -> tuple[list[tuple[int, ...]], str]:
    """Blocks of layers, and the grouping of their panels into tiles that fit and repeat the least work."""
    if not metric.kernel:
        most = min(_SMALL_TILE, len(weights.places))
        return _blocks(weights, plan, metric, spare, "blocks", most) or _even_blocks(weights.places, 1), "blocks"
    found = {}
    for grouping in _GROUPINGS:
        blocks = _blocks(weights, plan, metric, spare, grouping, len(weights.places))
        if blocks is not None:
            found[grouping] = _making_cost(weights, plan, metric, blocks, grouping), blocks
    best = min(found, key=lambda grouping: found[grouping][0])
    return found[best][1], best


def _blocks(
    weights: AttentionWeights, plan: Plan, metric: Metric, spare: int, grouping: str, most: int
) -> list[tuple[int, ...]] | None:
    """The largest blocks of layers whose tiles fit, found by bisection."""
    fits, too_large, size = 0, most + 1, most
    while too_large - fits > 1:
        blocks = _even_blocks(weights.places, size)
        if max(_tile_bytes(weights, plan, metric, blocks, grouping), default=0) <= spare:
            fits = size
        else:
            too_large = size
        size = max(1, (fits + too_large) // 2)
    return _even_blocks(weights.places, fits) if fits else None


def _making_cost(
    weights: AttentionWeights, plan: Plan, metric: Metric, blocks: Sequence[tuple[int, ...]], grouping: str
) -> float:
    """Operations for the Gram matrices of all tiles, and for factors that the previous tile did not have."""
    cost, before = 0.0, set()
    for pairs in _tile_pairs(plan, metric.key, blocks, grouping):
        panels = {panel for pair in pairs for panel in pair}
        for panel in panels:
            rows = _rows(plan.ports, panel.role, blocks[panel.block])
            p, q = metric.factor_shape(weights.d_model, weights.d_head(panel.role))
            cost += (rows.stop - rows.start) * (q * p**2 + (panel not in before) * _FACTOR_COST * p * q**2)
        before = panels
    return cost


def _even_blocks(layers: Sequence[int], largest: int) -> list[tuple[int, ...]]:
    count = -(-len(layers) // largest)
    return [tuple(int(x) for x in part) for part in np.array_split(np.array(layers), count)]


def _tile_bytes(
    weights: AttentionWeights, plan: Plan, metric: Metric, blocks: Sequence[tuple[int, ...]], grouping: str
) -> Iterator[int]:
    """Bytes of each tile with these blocks: the factors of its panels, and its values."""
    for pairs in _tile_pairs(plan, metric.key, blocks, grouping):
        panels = dict.fromkeys(panel for pair in pairs for panel in pair)
        rows = {panel: _rows(plan.ports, panel.role, blocks[panel.block]) for panel in panels}
        factors = sum(_factor_bytes(weights, metric, panel.role, rows[panel]) for panel in panels)
        yield factors + _value_bytes(plan.ports, blocks, pairs)


def _factor_bytes(weights: AttentionWeights, metric: Metric, role: Role, rows: slice) -> int:
    p, q = metric.factor_shape(weights.d_model, weights.d_head(role))
    return (rows.stop - rows.start) * p * q * np.dtype(metric.dtype).itemsize


def _value_bytes(ports: PortTable, blocks: Sequence[tuple[int, ...]], pairs: Sequence[tuple[Panel, Panel]]) -> int:
    """Kernel values in float64, a mask of the needed pairs, and a copy while they are saved."""
    rows = [[_rows(ports, panel.role, blocks[panel.block]) for panel in pair] for pair in pairs]
    return sum(17 * (a.stop - a.start) * (b.stop - b.start) for a, b in rows)


def _tile_pairs(
    plan: Plan, metric: str, blocks: Sequence[tuple[int, ...]], grouping: str
) -> list[tuple[tuple[Panel, Panel], ...]]:
    """The pairs of panels between which some pairing has a pair, grouped by tile."""
    kernels = [(first, second) for i, first in enumerate(plan.roles) for second in plan.roles[i:]]
    pairings = plan.pairings_of(metric)
    asked = {kernel: [p for p in pairings if set(p) == set(kernel)] for kernel in kernels}
    rows = {(role, b): _rows(plan.ports, role, layers) for role in plan.roles for b, layers in enumerate(blocks)}
    tiles: dict[Any, list[tuple[Panel, Panel]]] = {}
    for (first, second), pairings in asked.items():
        for x in range(len(blocks)):
            for y in range(x if first is second else 0, len(blocks)):
                if any(_has_pairs(plan, pairing, rows, (first, x), (second, y)) for pairing in pairings):
                    pair = Panel(first, x), Panel(second, y)
                    tiles.setdefault(_GROUPINGS[grouping](*pair), []).append(pair)
    return [tuple(sorted(tiles[key])) for key in sorted(tiles)]


def _has_pairs(
    plan: Plan, pairing: Pairing, rows: dict[tuple[Role, int], slice], first: tuple[Role, int], second: tuple[Role, int]
) -> bool:
    """Whether a pairing has a pair between two panels, in either direction if both have the same role."""
    directions = [(first, second)] if pairing.source is first[0] else []
    directions += [(second, first)] if pairing.source is second[0] else []
    for source, target in directions:
        r, c = rows[source], rows[target]
        if r.start == r.stop or c.start == c.stop:
            continue
        if plan.pairs == "forward" or (plan.pairs == "default" and not pairing.same_type):
            if plan._positions[source[0]][r.start] < plan._positions[target[0]][c.stop - 1]:
                return True
        elif plan.pairs == "all":
            if not pairing.same_type or r != c or r.stop - r.start > 1:
                return True
        elif pairing.same_type and r.start < c.stop - 1:
            return True
    return False


def _costs(weights: AttentionWeights, plan: Plan, tiles: Sequence[Tile]) -> dict[Route, float]:
    shapes: dict[Any, tuple[int, int, int]] = {}
    for tile in tiles:
        for panel in tile.panels:
            rows = plan.rows(tile.metric, panel)
            p, q = plan.metric(tile.metric).factor_shape(weights.d_model, weights.d_head(panel.role))
            shapes[panel] = (rows.stop - rows.start, p, q)
    return route_cost(shapes, (job for tile in tiles for job in plan.jobs(tile)))


def _pair_count(plan: Plan, tiles: Sequence[Tile]) -> int:
    return sum(int(np.count_nonzero(job.needed)) for tile in tiles for job in plan.jobs(tile))
