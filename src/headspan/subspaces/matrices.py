"""Subspaces of arbitrary matrices, for use outside of models.

The span of a d×m matrix is the subspace of R^d spanned by its columns. All arithmetic is float64, whatever the dtype of
the input. That dtype determines how much of a matrix may be rounding noise, which does not count as a direction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from headspan.subspaces import bases as subspaces
from headspan.vocabulary.errors import HeadspanError, WrongArgument

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Matrix: TypeAlias = "ArrayLike"  # anything that numpy can convert to a d×m array


def subspace(matrix: Matrix, rank: int | None = None) -> np.ndarray:
    """An orthonormal basis of the column span of a (d, m) matrix: (d, r), the strongest directions first.

    Parameters
    ----------
    matrix : (d, m) array of finite real numbers.
    rank : how many leading left singular vectors to keep. By default r is the numerical rank: the singular values
        that are above the rounding noise of the matrix's dtype.

    >>> subspace([[1.0, 2.0], [0.0, 0.0], [2.0, 4.0]]).shape
    (3, 1)
    >>> subspace(np.diag([3.0, 2.0, 1.0]), rank=2).round(6) + 0.0
    array([[1., 0.],
           [0., 1.],
           [0., 0.]])
    """
    return _basis(matrix, rank, "matrix")


def principal_angles(first: Matrix, second: Matrix, rank: int | None = None) -> np.ndarray:
    """Principal angles between the column spans of (d, m) and (d, n) matrices: radians, ascending, min(r, r') of them.

    Small angles keep their digits (Björck & Golub 1973, as in ``scipy.linalg.subspace_angles``, which lists them in
    descending order and counts rounding noise as directions). ``rank`` is as in :func:`subspace`, for both.

    >>> principal_angles(np.eye(3)[:, :2], np.eye(3)[:, 1:]).round(6)
    array([0.      , 1.570796])
    """
    return subspaces.principal_angles(*_bases(first, second, rank))


def projection_kernel(first: Matrix, second: Matrix, rank: int | None = None) -> float:
    """PK = Σ cos²θ over the principal angles θ between the column spans of (d, m) and (d, n) matrices.

    0 for orthogonal spans, min(r, r') when one contains the other; r·r'/d on average for random ones. ``rank`` is as in
    :func:`subspace`, for both.

    >>> projection_kernel(2 * np.eye(4)[:, :3], np.eye(4)[:, 2:])
    1.0
    """
    return subspaces.projection_kernel(*_bases(first, second, rank))


def _bases(first: Matrix, second: Matrix, rank: int | None) -> tuple[np.ndarray, np.ndarray]:
    one, other = _basis(first, rank, "first"), _basis(second, rank, "second")
    if len(one) != len(other):
        shapes = " and ".join(str(np.shape(matrix)) for matrix in (first, second))
        raise HeadspanError(
            f"two subspaces must be in the same space, but these matrices have different d: shapes {shapes}"
        )
    return one, other


def _basis(matrix: Matrix, rank: int | None, name: str) -> np.ndarray:
    array, dtype = _array(matrix, name)
    if rank is None:
        basis = subspaces.orthonormal_basis(array, dtype)
        if basis.rank == 0:
            raise HeadspanError(f"{name} of shape {array.shape} is zero, so it spans nothing")
        return basis.vectors
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise WrongArgument(f"rank must be a whole number, not {rank!r:.80}")
    largest = min(array.shape)
    if not 1 <= rank <= largest:
        raise HeadspanError(f"{name} of shape {array.shape} has 1 to {largest} directions, so rank cannot be {rank}")
    scale = np.abs(array).max()
    return np.linalg.svd(array / scale if scale else array, full_matrices=False)[0][:, :rank]


def _array(matrix: Matrix, name: str) -> tuple[np.ndarray, str]:
    """A finite (d, m) float64 array and the name of the dtype that it came in."""
    wanted = f"{name} must be a (d, m) array of real numbers"
    try:
        given = np.asarray(matrix)
        if given.dtype.kind not in "fiubV" or (given.dtype.kind == "V" and given.dtype.names):
            raise TypeError(f"it holds {given.dtype}")
        array = given.astype(np.float64)
    except Exception as error:  # arrays of other libraries may raise any exception
        raise WrongArgument(f"{wanted}, not {type(matrix).__name__}: {str(error)[:120]}") from None
    if array.ndim != 2 or 0 in array.shape:
        raise HeadspanError(f"{wanted} with d, m ≥ 1, but this one has shape {array.shape}")
    if not np.isfinite(array).all():
        raise HeadspanError(f"{wanted}, but this one of shape {array.shape} contains NaN or infinity")
    return array, given.dtype.name if given.dtype.kind in "fV" else "float64"
