"""Orders of many numbers, faster than numpy's stable sorts of them."""

from __future__ import annotations

import numpy as np

_INDEX_BITS = 32


def descending(values: np.ndarray) -> np.ndarray:
    """The order from the largest to the smallest, equal ones as they came, NaN last: ``argsort(-values)``, stable.

    numpy sorts whole numbers of 64 bits ten times as fast as it finds a stable order, so a float32 and its place are
    sorted as one such number.

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
