"""Stable sorting of large arrays, faster than numpy's, and ranks."""

from __future__ import annotations

import numpy as np

_INDEX_BITS = 32


def descending(values: np.ndarray) -> np.ndarray:
    """The order from largest to smallest, ties in their original order, NaN last: ``argsort(-values)``, stable.

    numpy sorts 64-bit integers ten times as fast as it finds a stable order, so each float32 and its index are packed
    into one such integer.

    >>> descending(np.array([1.0, 3.0, np.nan, 3.0], dtype=np.float32)).tolist()
    [1, 3, 0, 2]
    """
    if values.dtype != np.float32 or values.size >= 2**_INDEX_BITS:
        return np.argsort(-values, kind="stable")
    bits = (0.0 - values.ravel()).view(np.uint32)  # never -0.0, which would come before 0.0
    negative = (bits >> 31).astype(bool) & ~np.isnan(values.ravel())
    keys = np.where(negative, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64) << np.uint64(_INDEX_BITS)
    keys |= np.arange(values.size, dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(2**_INDEX_BITS - 1)).astype(np.int64)


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """The rank of every value: 1 for the smallest; equal values have the mean of their ranks.

    >>> mean_ranks(np.array([5.0, 7.0, 5.0])).tolist()
    [1.5, 3.0, 1.5]
    """
    from scipy.stats import rankdata

    return np.asarray(rankdata(values), dtype=np.float64)


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's ρ with mean ranks for ties; NaN for fewer than two values or a constant.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    if x.size < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(mean_ranks(x), mean_ranks(y))[0, 1])


def shared_ranks(ordered: np.ndarray) -> np.ndarray:
    """The ranks of values that are in order (along the last axis): 1 for the first; equal values share the smallest.

    Every rank that headspan prints is one of these: one plus the number of better values.

    >>> shared_ranks(np.array([3.0, 3.0, 1.0])).tolist()
    [1, 1, 3]
    """
    ranks = np.broadcast_to(np.arange(1, ordered.shape[-1] + 1), ordered.shape).copy()
    ranks[..., 1:][ordered[..., 1:] == ordered[..., :-1]] = 0
    return np.maximum.accumulate(ranks, axis=-1)


def places(values: np.ndarray) -> np.ndarray:
    """The rank of every value: 1 for the largest, equal values share a rank, 0 for NaN.

    >>> places(np.array([1.0, 3.0, np.nan, 3.0])).tolist()
    [3, 1, 0, 1]
    """
    flat = values.ravel()
    order = descending(flat)
    ranks = np.empty(flat.size, dtype=np.int64)
    ranks[order] = shared_ranks(flat[order])
    ranks[np.isnan(flat)] = 0
    return ranks.reshape(values.shape)


def median(values: np.ndarray, axis: int) -> np.ndarray:
    """``np.median(values, axis, keepdims=True)``; along a short axis, sorting is several times faster.

    >>> median(np.array([[4.0, 1.0, 2.0, 9.0], [1.0, np.nan, 2.0, 3.0]]), 1).tolist()
    [[3.0], [nan]]
    """
    ordered, middle = np.sort(values, axis=axis), values.shape[axis] // 2
    last = np.take(ordered, [-1], axis)  # NaN is sorted to the end
    both = np.take(ordered, [(values.shape[axis] - 1) // 2], axis) + np.take(ordered, [middle], axis)
    return np.where(np.isnan(last), last, both / 2)


def groups(keys: np.ndarray) -> list[np.ndarray]:
    """The indices of the items of each key, keys in ascending order.

    >>> [members.tolist() for members in groups(np.array([4, 2, 4, 4, 2]))]
    [[1, 4], [0, 2, 3]]
    """
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def occurrence(items: np.ndarray) -> np.ndarray:
    """How often each item has been seen before it.

    >>> occurrence(np.array([4, 2, 4, 4, 2])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = np.argsort(items, kind="stable")
    ordered, places = items[order], np.arange(len(items))
    first = np.zeros(len(items), dtype=np.int64)
    first[1:] = np.where(ordered[1:] != ordered[:-1], places[1:], 0)
    seen = np.empty(len(items), dtype=np.int64)
    seen[order] = places - np.maximum.accumulate(first)
    return seen


class Best:
    """The k largest scores of each of n columns, over blocks of rows; among equal scores the smaller id wins.

    values: a number kept with each of them, the score itself if no other is given.
    """

    def __init__(self, n: int, k: int) -> None:
        self.k = k
        self.ids = np.empty((n, 0), dtype=np.int64)
        self.scores = np.empty((n, 0), dtype=np.float32)
        self.values = self.scores

    def update(self, start: int, scores: np.ndarray, values: np.ndarray | None = None) -> None:
        """Take in a (rows, n) block whose first row has the id ``start``."""
        scores = np.ascontiguousarray(scores.T)
        chosen = self._largest(scores)
        ids = np.concatenate([self.ids, chosen + start], axis=1)
        best = np.concatenate([self.scores, np.take_along_axis(scores, chosen, axis=1)], axis=1)
        order = np.lexsort((ids, -best), axis=1)[:, : self.k]
        if values is not None:
            kept = np.concatenate([self.values, np.take_along_axis(values.T, chosen, axis=1)], axis=1)
            self.values = np.take_along_axis(kept, order, 1)
        self.ids, self.scores = np.take_along_axis(ids, order, 1), np.take_along_axis(best, order, 1)
        self.values = self.scores if values is None else self.values

    def _largest(self, scores: np.ndarray) -> np.ndarray:
        size = scores.shape[1]
        if size <= self.k:
            return np.broadcast_to(np.arange(size), scores.shape)
        chosen = np.argpartition(scores, size - self.k, axis=1)[:, size - self.k :]
        # A partition picks any of several equal scores: choose again in rows with a tie for the last place.
        last = np.take_along_axis(scores, chosen, axis=1).min(axis=1, keepdims=True)
        for row in np.flatnonzero((scores >= last).sum(axis=1) > self.k):
            chosen[row] = np.argsort(-scores[row], kind="stable")[: self.k]
        return chosen
