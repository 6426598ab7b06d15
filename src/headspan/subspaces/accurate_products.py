"""Matrix products that stay accurate under strong cancellation.

A product of float64 matrices has an error of 1e-16 relative to the size of its factors. That is too much where the
product itself is that small, for example along the weak directions of an ill-conditioned head. Here both factors are
split into slices of so few bits that the product of two slices is exact in any order of summation (Ozaki et al. 2012),
and the products of slices are added with compensation.
"""

from __future__ import annotations

import numpy as np

_SLICES = 4  # slices of at least 18 bits, for inner products of up to 2**17 terms


def accurate_product(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product of (p, k) and (k, q) as high + low, with an error of 1e-20 relative to the row and the column.

    Entries should be of ordinary size, for example at most 1.

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
    """Matrices that sum to this one. In each, a row (or column) holds multiples of one step, up to 2**bits."""
    left, found = np.array(matrix, dtype=np.float64), []
    for _ in range(_SLICES):
        exponent = np.frexp(np.abs(left).max(axis=axis, keepdims=True))[1]
        step = np.ldexp(1.0, np.maximum(exponent - bits, -1000))
        found.append(np.rint(left / step) * step)
        left -= found[-1]
    return found


def _sum(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum of two float64 arrays and its rounding error (Knuth's two-sum)."""
    total = first + second
    part = total - first
    return total, (first - (total - part)) + (second - part)
