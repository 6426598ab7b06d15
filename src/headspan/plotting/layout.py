"""Positions of heads in the ellipse diagram: labelled heads inside, the rest around, layers from left to right.

First a set of evenly spread places is fixed, and heads take them in layer order. Then pairs of heads swap places as
long as this lowers a cost made of crossings, edges that run over heads, edge length and disorder of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headspan.graphs.graph import Wiring
from headspan.vocabulary.heads import HeadOrNode, positions_of

ASPECT = 1.5  # width over height of the ellipse
_TRIALS = 6000  # most swaps tried
_MOST_EDGES = 400  # no swaps beyond this, so that drawing hundreds of heads takes seconds
_PER_RING = 36  # boxes around the ellipse before a second ring begins
_CROSSING, _OVERRUN, _LENGTH, _DISORDER = 1.0, 3.0, 0.45, 0.35


@dataclass(frozen=True)
class EllipseLayout:
    """Centre of every head, and the half axes of the ellipse (0 without labels), in units of the box width."""

    places: dict[HeadOrNode, tuple[float, float]]
    half_axes: tuple[float, float]

    @property
    def extent(self) -> tuple[float, float]:
        """Half width and half height of the whole drawing, boxes included."""
        points = np.array(list(self.places.values()) or [(0.0, 0.0)])
        reach = np.abs(points).max(axis=0)
        return max(float(reach[0]) + 0.62, self.half_axes[0]), max(float(reach[1]) + 0.4, self.half_axes[1])


def ellipse_layout(wiring: Wiring) -> EllipseLayout:
    """Positions of all heads of a wiring."""
    labelled = [node.head for node in wiring.nodes if node.labels]
    inside = labelled or [node.head for node in wiring.nodes]  # without labels there is no outside
    outside = [node.head for node in wiring.nodes if not node.labels] if labelled else []
    half = _half_axes(len(inside), len(outside))
    inner, outer = _fill(len(inside), half), _ring(len(outside), half)
    heads = inside + outside
    places = np.concatenate([inner, outer]) if heads else np.zeros((0, 2))
    index = {head: i for i, head in enumerate(heads)}
    ends = np.array([(index[e.source], index[e.target]) for e in wiring.edges], dtype=int).reshape(-1, 2)
    taken = _trade(places, ends, positions_of(heads), len(inside))
    return EllipseLayout(
        {head: (float(places[taken[i], 0]), float(places[taken[i], 1])) for head, i in index.items()},
        half if labelled else (0.0, 0.0),
    )


def _half_axes(inside: int, outside: int) -> tuple[float, float]:
    """Half axes of an ellipse with room for the boxes inside and for those on the rings around it."""
    height = max(2.0, np.sqrt(inside * 1.75 / (np.pi * ASPECT)))
    while sum(room[-1] for _, room in _rings(outside, (height * ASPECT, height))) < outside:
        height *= 1.03
    return float(height * ASPECT), float(height)


def _fill(count: int, half: tuple[float, float]) -> np.ndarray:
    """Places spread evenly over the ellipse, in columns from left to right."""
    if count == 0:
        return np.zeros((0, 2))
    x = np.linspace(-1, 1, 2001)
    area = np.cumsum(np.sqrt(1 - x**2))
    area /= area[-1]
    columns = max(1, round(np.sqrt(count * ASPECT)))
    bounds = np.linspace(0, count, columns + 1).round().astype(int)
    places = []
    for first, last in pairwise(bounds):
        here = float(np.interp((first + last) / 2 / count, area, x)) * 0.92
        reach = np.sqrt(1 - here**2) * 0.9
        heights = (np.arange(last - first) + 0.5) / (last - first) * 2 - 1 if last > first + 1 else np.zeros(1)
        shift = 0.1 * (-1) ** len(places)  # keeps heads of neighbouring columns from lining up
        places += [(here * half[0], float(h * reach * half[1]) + shift) for h in heights[: last - first]]
    return np.array(places)


def _rings(count: int, half: tuple[float, float]) -> list[tuple[np.ndarray, np.ndarray]]:
    """One or more rings around the ellipse: their points, and how many boxes fit up to each point."""
    angle = np.linspace(0, 2 * np.pi, 2001)
    rings = []
    for i in range(-(-count // _PER_RING)):
        path = np.column_stack([(half[0] + 0.85 + 1.5 * i) * np.cos(angle), (half[1] + 0.62 + i) * np.sin(angle)])
        # A box is wider than high, so neighbours side by side need more room, with an arrow between them.
        steps = np.hypot(*(np.diff(path, axis=0) / (1.45, 1.05)).T)
        rings.append((path, np.concatenate([[0], np.cumsum(steps)])))
    return rings


def _ring(count: int, half: tuple[float, float]) -> np.ndarray:
    """Places around the ellipse with even gaps, from left to right."""
    rings = _rings(count, half)
    total = sum(room[-1] for _, room in rings)
    bounds = np.round(np.cumsum([0.0, *(room[-1] for _, room in rings)]) / max(total, 1) * count).astype(int)
    places = [np.zeros((0, 2))]
    for (path, room), n in zip(rings, np.diff(bounds), strict=True):
        at = (np.arange(n) + 0.25) / max(n, 1) * room[-1]
        places.append(np.column_stack([np.interp(at, room, path[:, 0]), np.interp(at, room, path[:, 1])]))
    found = np.concatenate(places)
    return found[np.argsort(found[:, 0], kind="stable")]


def _trade(places: np.ndarray, ends: np.ndarray, layers: np.ndarray, inside: int) -> np.ndarray:
    """The place of every head after swaps within each of the two groups."""
    count = len(places)
    taken = np.arange(count)
    if count < 2 or len(ends) == 0 or len(ends) > _MOST_EDGES:
        return taken
    wanted = _layer_columns(places, layers)
    pairs = [(i, j) for group in (range(inside), range(inside, count)) for i in group for j in group if i < j]
    touching = (ends[None] == np.arange(count)[:, None, None]).any(axis=2)
    random = np.random.default_rng(0)
    trials, improved = 0, True
    while improved and trials < _TRIALS:
        improved = False
        for p in random.permutation(len(pairs))[: _TRIALS - trials]:
            pair = np.array(pairs[p])
            touched = touching[pair[0]] | touching[pair[1]]
            before = _cost(places[taken], ends, wanted, pair, touched)
            taken[pair] = taken[pair[::-1]]
            if _cost(places[taken], ends, wanted, pair, touched) < before - 1e-9:
                improved = True
            else:
                taken[pair] = taken[pair[::-1]]
        trials += len(pairs)
    return taken


def _layer_columns(places: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """The x that each head would have if only layers mattered."""
    reach = np.abs(places[:, 0]).max()
    order = np.sort(layers)
    below, upto = np.searchsorted(order, layers, side="left"), np.searchsorted(order, layers, side="right")
    return ((below + upto) / len(layers) - 1) * reach


def _cost(points: np.ndarray, ends: np.ndarray, wanted: np.ndarray, heads: np.ndarray, touched: np.ndarray) -> float:
    """The part of the cost that depends on the positions of some heads and their edges (``touched``)."""
    start, stop = points[ends[:, 0]], points[ends[:, 1]]
    cross = _cross(start[touched], stop[touched], start, stop)
    over = _overruns(points, ends[touched], np.arange(len(points))) + _overruns(points, ends[~touched], heads)
    return (
        _CROSSING * float(cross.sum() - cross[:, touched].sum() / 2)  # pairs of touched edges are counted twice
        + _OVERRUN * over
        + _LENGTH * float(np.hypot(*(stop - start)[touched].T).sum())
        + _DISORDER * float(np.abs(points[heads, 0] - wanted[heads]).sum())
    )


def crossings(points: np.ndarray, ends: np.ndarray) -> int:
    """How many pairs of straight edges cross (edges that share a head do not)."""
    start, stop = points[ends[:, 0]], points[ends[:, 1]]
    return int(_cross(start, stop, start, stop).sum()) // 2


def _cross(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Whether each segment from a to b crosses each segment from c to d."""
    a, b, c, d = a[:, None], b[:, None], c[None], d[None]
    return (_side(a, b, c) * _side(a, b, d) < 0) & (_side(c, d, a) * _side(c, d, b) < 0)


def _side(p: np.ndarray, q: np.ndarray, r: np.ndarray) -> np.ndarray:
    return (q[..., 0] - p[..., 0]) * (r[..., 1] - p[..., 1]) - (q[..., 1] - p[..., 1]) * (r[..., 0] - p[..., 0])


def _overruns(points: np.ndarray, ends: np.ndarray, heads: np.ndarray) -> int:
    """How often an edge runs over the box of one of these heads that is not one of its ends."""
    start, stop = points[ends[:, 0]], points[ends[:, 1]]
    along = stop - start
    offset = points[heads][None] - start[:, None]
    share = np.clip((offset * along[:, None]).sum(-1) / np.maximum((along**2).sum(-1), 1e-12)[:, None], 0, 1)
    gap = (offset - share[..., None] * along[:, None]) / (0.5, 0.3)
    own = (heads[None] == ends[:, :1]) | (heads[None] == ends[:, 1:])
    return int((((gap**2).sum(-1) < 1) & ~own).sum())
