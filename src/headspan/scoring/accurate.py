"""Matrix products that keep their digits where almost everything cancels.

A product of float64 matrices is off by 1e-16 of the size of its factors, which is all of it where the weak directions
of a head are 1e-15 of the strong ones. Here the factors are cut into slices of so few bits that the products of two
slices are exact, whatever the order of their sums (Ozaki et al. 2012), and the slices of the product are added up
without loss.
"""

from __future__ import annotations

import numpy as np

_SLICES = 4  # of 18 bits or more each, for inner products of up to 2**17 terms


def accurate_product(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product of (p, k) and (k, q) as high + low, right to 1e-20 of the sizes of a row and a column.

    The entries should be of ordinary size: of at most 1, say.

    >>> high, low = accurate_product(np.array([[1.0, 1.0, -1.0]]), np.array([[1.0], [2.0**-70], [1.0]]))
    >>> float(high[0, 0]) == 2.0**-70
    True
    """
    bits = (53 - int(np.ceil(np.log2(max(2, first.shape[1]))))) // 2
    rows, columns = _slices(first, bits, axis=1), _slices(second, bits, axis=0)
    high = np.zeros((first.shape[0], second.shape[1]))
    low = np.zeros_like(high)
    for depth in range(2 * _SLICES - 1):  # the largest terms first
        for i in range(max(0, depth - _SLICES + 1), min(depth, _SLICES - 1) + 1):
            high, lost = _sum(high, rows[i] @ columns[depth - i])
            low += lost
    return _sum(high, low)


def _slices(matrix: np.ndarray, bits: int, axis: int) -> list[np.ndarray]:
    """Matrices that add up to this one, each of whole multiples of one number a row (or column), 2**bits at most."""
    left, found = np.array(matrix, dtype=np.float64), []
    for _ in range(_SLICES):
        exponent = np.frexp(np.abs(left).max(axis=axis, keepdims=True))[1]
        step = np.ldexp(1.0, np.maximum(exponent - bits, -1000))
        found.append(np.rint(left / step) * step)
        left -= found[-1]
    return found


def _sum(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A sum of two float64 arrays, and what rounding took from it (Knuth)."""
    total = first + second
    part = total - first
    return total, (first - (total - part)) + (second - part)
