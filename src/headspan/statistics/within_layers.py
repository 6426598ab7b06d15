"""Residuals of scores after removing the effects of the two heads and the two layers, and a test of layer direction.

A block is all pairs of one source layer with one target layer. If heads are exchangeable within a layer, the scores of
a block are a common level plus an effect of each source, an effect of each target, and a residual for each pair.
``residual_z`` is this residual in robust standard deviations:

* Centre: median polish (Tukey 1977) removes the level and the source and target effects of every block. A few
  connected heads do not move a median, while they would hide each other with a mean. A side with fewer than four heads
  is centred by its mean, because the median of three is always one of them.
* Spread: the median absolute residual of the block, shrunk towards that of blocks of similar level (with a weight of
  ``_NEIGHBOURS`` residuals, since a block of few heads estimates its own spread poorly), and never less than that of
  its source or target. Heads that follow the common directions of all heads unusually closely have large residuals
  with each other, in all their pairs.
* Scale: Student's t with the residual degrees of freedom, converted to a normal deviate, so that blocks of different
  sizes are comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import factorial
from typing import NamedTuple

import numpy as np

from headspan.system.ordering import median
from headspan.vocabulary.heads import HeadOrNode, positions_of

LEAST_FREE = 3  # residual degrees of freedom of a block; in 2×2 and 2×3 heads one large pair makes others look large
LEAST_LAYERS = 4  # three layers have only six orders, too few for a small p
DIRECTED = 0.05  # the p below which whole layers count as different in the two directions
_ROBUST = 4  # with at least this many values, a median is robust to one outlier
_POLISHES = 4
_NEIGHBOURS = 16
_SIDE = 4  # shrinkage of a source's or target's spread towards its block's, in heads
_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_ROUNDING = 1e-6  # relative to the largest score; smaller residuals are float32 rounding
_DRAWS = 999
_SEED = 0  # makes p-values reproducible


def residual_z(values: np.ndarray, sources: Sequence[HeadOrNode], targets: Sequence[HeadOrNode]) -> np.ndarray:
    """Residual of every pair within its two layers as a normal deviate; NaN if a layer has too few heads.

    ``values`` has the scores of both directions. Heads of another kind, such as the shared rotary key of latent
    attention, count as a separate layer.
    """
    z = np.full(values.shape, np.nan)
    least = _ROUNDING * np.nanmax(np.abs(values), initial=0.0)
    if least == 0:
        return np.where(np.isnan(values), np.nan, 0.0)
    rows, columns = _by_size(sources), _by_size(targets)
    blocks = [
        (np.ix_(row.ravel(), column.ravel()), _Blocks(values, row, column, least))
        for row in rows
        for column in columns
        if (row.shape[1] - 1) * (column.shape[1] - 1) >= LEAST_FREE
    ]
    if blocks:
        similar = _of_similar_level(
            *(np.concatenate(parts) for parts in zip(*(b.seen for _, b in blocks), strict=True))
        )
        parts = np.split(similar, np.cumsum([b.level.size for _, b in blocks])[:-1])
        for (place, block), part in zip(blocks, parts, strict=True):
            z[place] = block.z(part.reshape(block.level.shape), least)
    return z


def _by_size(ports: Sequence[HeadOrNode]) -> list[np.ndarray]:
    """Indices of the ports, grouped by layer size: one array (layers, heads) per size."""
    keys: dict[tuple[int, str], list[int]] = {}
    for i, port in enumerate(ports):
        keys.setdefault((port.position, port.kind), []).append(i)
    sizes = sorted({len(found) for found in keys.values()})
    return [np.array([found for found in keys.values() if len(found) == size]) for size in sizes]


class _Blocks:
    """Blocks of one size after median polish: arrays (source layers, target layers, sources, targets)."""

    def __init__(self, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, least: float) -> None:
        shape = (*rows.shape, *columns.shape)
        rest = values[np.ix_(rows.ravel(), columns.ravel())].reshape(shape).transpose(0, 2, 1, 3).astype(np.float64)
        self.level = _of_blocks(rest)
        n, m = rest.shape[2:]
        for _ in range(_POLISHES):
            rest -= _centre(rest, 3)
            rest -= _centre(rest, 2)
        self.free = (n - 1) * (m - 1)
        # Centring reduces the spread of residuals, more so in small blocks.
        self.rest = rest / np.sqrt((1 - 1 / n) * (1 - 1 / m))
        self.spread = np.maximum(_of_blocks(np.abs(self.rest)), least)

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        return self.level.ravel(), np.log(self.spread.ravel())

    def z(self, similar: np.ndarray, least: float) -> np.ndarray:
        """Residuals over their spread as normal deviates, in the layout of the scores."""
        free = self.free + _NEIGHBOURS
        spread = np.exp((self.free * np.log(self.spread) + _NEIGHBOURS * similar) / free)[..., None, None]
        widest = spread
        for axis in (2, 3):
            heads = self.rest.shape[axis]
            if heads >= _ROBUST:
                own = median(np.abs(self.rest), axis)
                widest = np.maximum(widest, (heads * own + _SIDE * spread) / (heads + _SIDE))
        t = self.rest / (_MAD * np.maximum(widest, least))
        # Wallace's normal deviate of Student's t: closed form, monotone, and finite for any t.
        z = np.sign(t) * (8 * free + 1) / (8 * free + 3) * np.sqrt(free * np.log1p(t**2 / free))
        layers, layers2, n, m = z.shape
        return z.transpose(0, 2, 1, 3).reshape(layers * n, layers2 * m)


def _of_blocks(values: np.ndarray) -> np.ndarray:
    """The median of every block."""
    return median(values.reshape(*values.shape[:2], -1), 2)[..., 0]


def _centre(values: np.ndarray, axis: int) -> np.ndarray:
    if values.shape[axis] < _ROBUST:
        return values.mean(axis=axis, keepdims=True)
    return median(values, axis)


def _of_similar_level(level: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """The running median of the spread over blocks sorted by level; NaN if a block has no level.

    Larger scores spread more widely, so blocks of a different level would be a poor guide.
    """
    found = np.full(level.shape, np.nan)
    present = np.flatnonzero(~np.isnan(level))
    order = present[np.argsort(level[present], kind="stable")]
    reach = min(max(2, len(order) // 8), len(order) - 1)
    if reach > 0:
        padded = np.pad(spread[order], reach, mode="reflect")
        found[order] = median(np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1), 1)[:, 0]
    else:
        found[order] = spread[order]
    return found


class Direction(NamedTuple):
    """Forward against reversed pairs by pairs of layers: a test of the assumption of the reversed null.

    difference: mean over pairs of layers of (mean forward score − mean reversed score).
    forward, backward: probability of a difference at least this large, or this small, under random layer orders;
    NaN with fewer than ``LEAST_LAYERS`` layers.
    """

    difference: float
    forward: float
    backward: float

    @property
    def favours_forward(self) -> bool:
        """Whether whole layers score higher forwards, so that pairs do so without being connected."""
        return self.forward <= DIRECTED

    @property
    def sentence(self) -> str:
        if np.isnan(self.forward):
            return "too few layers to test whether whole layers score the same in both directions"
        if self.favours_forward:
            return (
                f"whole layers score {self.difference:.3g} more forwards than reversed on average (permuted layers: "
                f"p = {self.forward:.2g}), so pairs may exceed the reversed pairs without being connected; compare "
                "the null within layers"
            )
        if self.backward <= DIRECTED:
            return (
                f"whole layers score {-self.difference:.3g} less forwards than reversed on average (permuted layers: "
                f"p = {self.backward:.2g}), so the reversed null is conservative on average"
            )
        p = min(1.0, 2 * min(self.forward, self.backward))
        return f"whole layers score about the same in both directions (permuted layers: p = {p:.2g})"


def direction_of(values: np.ndarray, sources: Sequence[HeadOrNode], targets: Sequence[HeadOrNode]) -> Direction:
    """Test whether whole layers score differently in the two directions, by permuting the order of the layers.

    Whatever is symmetric between two layers, such as a basis that drifts with depth, is the same in both directions and
    drops out.
    """
    before, after = positions_of(sources), positions_of(targets)
    layers = np.intersect1d(before, after)
    into, onto = ((layers[:, None] == at).astype(np.float64) for at in (before, after))
    known = ~np.isnan(values)
    count = into @ known @ onto.T
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (into @ np.where(known, values, 0.0) @ onto.T) / count
    gap = mean - mean.T  # positive where pairs from the row's layer to the column's score more than those back
    upper = np.triu(np.ones_like(gap, dtype=bool), 1) & ~np.isnan(gap)
    if not upper.any():
        return Direction(float("nan"), float("nan"), float("nan"))
    difference = float(gap[upper].mean())
    n = len(layers)
    if n < LEAST_LAYERS:
        return Direction(difference, float("nan"), float("nan"))
    gap = np.where(np.isnan(gap), 0.0, gap)
    sums = np.array([np.triu(gap[np.ix_(order, order)], 1).sum() for order in _orders(n)])
    room = 1e-9 * np.abs(gap).sum()
    return Direction(difference, *(float(np.mean(sign * sums >= sign * sums[0] - room)) for sign in (1.0, -1.0)))


def _orders(n: int) -> list[np.ndarray]:
    """Orders of n layers, the original first: all of them, or a random sample if there are too many."""
    if factorial(n) <= _DRAWS:
        return [np.array(order) for order in permutations(range(n))]
    rng = np.random.default_rng(_SEED)
    return [np.arange(n), *(rng.permutation(n) for _ in range(_DRAWS))]
