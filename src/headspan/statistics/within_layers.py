"""Residuals of scores after removing the effects of the two heads and the two layers, and a test of layer direction.

A block is all pairs of one source layer with one target layer. Where heads are exchangeable within a layer, a block has
a level, its sources and its targets differ in how much they score with everything, and the rest is pair by pair.
``residual_z`` is this rest in robust standard deviations:

* Centre: median polish (Tukey 1977) takes away the level, the sources and the targets of every block. A few wired heads
  do not move a median, where they would hide each other behind a mean. A side of fewer than four heads is centred by
  its mean: the median of three is always one of them.
* Spread: the median absolute residual of the block, drawn towards that of blocks of similar level (``_NEIGHBOURS``
  residuals' worth: a block of few heads knows its own spread badly), and never less than that of its source or
  target. Heads that follow the directions common to all heads more closely than others make large residuals with
  each other, in all their pairs.
* Scale: Student's t with the residual degrees of freedom, turned into a normal deviate, so that blocks of different
  sizes compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import factorial
from typing import NamedTuple

import numpy as np

from headspan.vocabulary.heads import HeadOrNode, positions_of

LEAST_FREE = 3  # residual degrees of freedom of a block: in 2×2 and 2×3 heads one large pair makes others look large
LEAST_LAYERS = 4  # with three, the order of the layers is one of six and can never be surprising
DIRECTED = 0.05  # the p from which the two directions of whole layers count as different
_ROBUST = 4  # from so many values on, their median resists one of them
_POLISHES = 4
_NEIGHBOURS = 16
_SIDE = 4  # what draws the spread of a source or target towards that of its block, as so many heads would
_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_ROUNDING = 1e-6  # of the largest score: residuals below this are float32 rounding
_DRAWS = 999
_SEED = 0  # makes p-values reproducible


def residual_z(values: np.ndarray, sources: Sequence[HeadOrNode], targets: Sequence[HeadOrNode]) -> np.ndarray:
    """Residual of every pair within its two layers as a normal deviate; NaN where a layer has too few heads.

    ``values`` has the scores of both directions. Heads of another kind, such as the shared rotary key of latent
    attention, count as a layer of their own.
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
    """Indices of the ports, layers of equal size together: one array (layers, heads) per size."""
    keys: dict[tuple[int, str], list[int]] = {}
    for i, port in enumerate(ports):
        keys.setdefault((port.position, port.kind), []).append(i)
    sizes = sorted({len(found) for found in keys.values()})
    return [np.array([found for found in keys.values() if len(found) == size]) for size in sizes]


class _Blocks:
    """Blocks of one size, polished: arrays of shape (source layers, target layers, sources, targets)."""

    def __init__(self, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, least: float) -> None:
        shape = (*rows.shape, *columns.shape)
        rest = values[np.ix_(rows.ravel(), columns.ravel())].reshape(shape).transpose(0, 2, 1, 3).astype(np.float64)
        self.level = np.median(rest, axis=(2, 3))
        n, m = rest.shape[2:]
        for _ in range(_POLISHES):
            rest -= _centre(rest, 3)
            rest -= _centre(rest, 2)
        self.free = (n - 1) * (m - 1)
        # Centring takes spread away from residuals, more of it in small blocks.
        self.rest = rest / np.sqrt((1 - 1 / n) * (1 - 1 / m))
        self.spread = np.maximum(np.median(np.abs(self.rest), axis=(2, 3)), least)

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        return self.level.ravel(), np.log(self.spread.ravel())

    def z(self, similar: np.ndarray, least: float) -> np.ndarray:
        """Residuals over their spread, as normal deviates, laid out as the scores are."""
        free = self.free + _NEIGHBOURS
        spread = np.exp((self.free * np.log(self.spread) + _NEIGHBOURS * similar) / free)[..., None, None]
        widest = spread
        for axis in (2, 3):
            heads = self.rest.shape[axis]
            if heads >= _ROBUST:
                own = np.median(np.abs(self.rest), axis=axis, keepdims=True)
                widest = np.maximum(widest, (heads * own + _SIDE * spread) / (heads + _SIDE))
        t = self.rest / (_MAD * np.maximum(widest, least))
        # Wallace's normal deviate of Student's t: closed, monotone, and finite however large t is.
        z = np.sign(t) * (8 * free + 1) / (8 * free + 3) * np.sqrt(free * np.log1p(t**2 / free))
        layers, layers2, n, m = z.shape
        return z.transpose(0, 2, 1, 3).reshape(layers * n, layers2 * m)


def _centre(values: np.ndarray, axis: int) -> np.ndarray:
    middle = np.median if values.shape[axis] >= _ROBUST else np.mean
    return middle(values, axis=axis, keepdims=True)


def _of_similar_level(level: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """The running median of the spread over blocks in order of their level; NaN where a block has no level.

    Larger scores spread more widely, so where layers have trends, blocks of another level would be a bad guide.
    """
    found = np.full(level.shape, np.nan)
    present = np.flatnonzero(~np.isnan(level))
    order = present[np.argsort(level[present], kind="stable")]
    reach = min(max(2, len(order) // 8), len(order) - 1)
    if reach > 0:
        padded = np.pad(spread[order], reach, mode="reflect")
        found[order] = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1), axis=-1)
    else:
        found[order] = spread[order]
    return found


class Direction(NamedTuple):
    """Forward against reversed pairs, layer pair by layer pair: the assumption of the reversed null.

    difference: mean over pairs of layers of (mean forward score − mean reversed score).
    forward, backward: chance of a difference at least this large, or this small, if the layers came in any order;
    NaN with fewer than ``LEAST_LAYERS`` layers.
    """

    difference: float
    forward: float
    backward: float

    @property
    def favours_forward(self) -> bool:
        """Whether whole layers score more forwards, so that pairs do without being wired."""
        return self.forward <= DIRECTED

    @property
    def sentence(self) -> str:
        if np.isnan(self.forward):
            return "too few layers to test whether whole layers score alike in both directions"
        if self.favours_forward:
            return (
                f"whole layers score {self.difference:.3g} more forwards than reversed on average (permuted layers: "
                f"p = {self.forward:.2g}), so pairs may stand above the reversed ones without being wired: compare "
                "the null within layers"
            )
        if self.backward <= DIRECTED:
            return (
                f"whole layers score {-self.difference:.3g} less forwards than reversed on average (permuted layers: "
                f"p = {self.backward:.2g}), so on average the reversed null errs towards caution"
            )
        p = min(1.0, 2 * min(self.forward, self.backward))
        return f"whole layers score about alike in both directions (permuted layers: p = {p:.2g})"


def direction_of(values: np.ndarray, sources: Sequence[HeadOrNode], targets: Sequence[HeadOrNode]) -> Direction:
    """Test whether whole layers score differently in the two directions, by permuting the order of the layers.

    What is symmetric between two layers, such as a frame that drifts with depth, is the same in both directions and
    drops out.
    """
    before, after = positions_of(sources), positions_of(targets)
    layers = np.intersect1d(before, after)
    into, onto = ((layers[:, None] == at).astype(np.float64) for at in (before, after))
    known = ~np.isnan(values)
    count = into @ known @ onto.T
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (into @ np.where(known, values, 0.0) @ onto.T) / count
    gap = mean - mean.T  # positive where the pairs from the row's layer to the column's score more than those back
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
    """Orders of n layers, their own first: all of them, or as many at random where there are too many."""
    if factorial(n) <= _DRAWS:
        return [np.array(order) for order in permutations(range(n))]
    rng = np.random.default_rng(_SEED)
    return [np.arange(n), *(rng.permutation(n) for _ in range(_DRAWS))]
