"""Convert stored numbers to float32 without rounding.

>>> import numpy as np
>>> widen(np.array([1.5], np.float16), "x").dtype
dtype('float32')
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from headspan.checkpoints.untrusted import reason
from headspan.vocabulary.errors import HeadspanError

# safetensors' names of the floating point types (integer types never hold usable weights).
SAFETENSORS_FLOATS: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
SAFETENSORS_INTEGERS: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
}
SAFETENSORS_DTYPES = {**SAFETENSORS_FLOATS, **SAFETENSORS_INTEGERS}
_FLOATS = frozenset(SAFETENSORS_FLOATS.values())


def native(dtype: np.dtype) -> np.dtype:
    """The same number type in the byte order of this machine.

    >>> native(np.dtype(">f8")).name
    'float64'
    """
    return dtype.newbyteorder("=") if dtype.isbuiltin == 0 else dtype


def widen(array: np.ndarray, name: str) -> np.ndarray:
    """The same numbers as float32 (float64 stays), or an error for integers, which have no meaning without scales."""
    kind = native(array.dtype)
    if kind not in _FLOATS:
        what = "integer-quantised checkpoints are not read" if kind.kind in "biu" else "such numbers are not read"
        raise HeadspanError(
            f"tensor {name} holds {array.dtype} numbers: {what}, give the original checkpoint or a GGUF file"
        )
    _check_unmasked(array, name)
    if kind == np.float64:
        return np.ascontiguousarray(array, dtype=np.float64)
    return np.ascontiguousarray(array, dtype=np.float32)


def exact_array(value: Any, name: str) -> np.ndarray:
    """Numbers of any kind as an array of a float type that holds each of them exactly; raises if there is none.

    Floating point numbers keep their type, in the byte order of this machine; integers and booleans become
    float64. Values that float64 cannot hold exactly (wide integers, long doubles) and complex numbers are refused.

    >>> exact_array([[1, 2**40]], "x").dtype, exact_array(np.ones(2, ">f4"), "x").dtype
    (dtype('float64'), dtype('float32'))
    """
    array = _as_array(value, name)
    _check_unmasked(array, name)
    kind = native(array.dtype)
    if kind in _FLOATS:
        return np.asarray(array, dtype=kind)
    if kind.kind not in "biufV" or kind.names is not None or kind.hasobject:
        raise HeadspanError(f"{name} holds {array.dtype}, not real numbers: give floating point numbers")
    plain = np.asarray(array)
    try:
        with np.errstate(all="ignore"):
            wide = plain.astype(np.float64)
            # Beyond 2**53 a round trip of an integer can hide a rounding.
            same = (np.abs(wide) <= 2.0**53) if kind.kind in "iu" else (wide.astype(kind) == plain) | np.isnan(wide)
            exact = bool(same.all())
    except (TypeError, ValueError, OverflowError):
        wide, exact = np.empty(0), False
    if not exact:
        raise HeadspanError(f"{name} holds {array.dtype} numbers that float64 cannot hold exactly: convert them first")
    return wide


def _as_array(value: Any, name: str) -> np.ndarray:
    """Anything like an array, including torch tensors (on any device, with or without gradients)."""
    try:
        if hasattr(value, "detach") and hasattr(value, "numpy"):
            tensor = value.detach().to("cpu")
            if str(tensor.dtype) == "torch.bfloat16":  # numpy has no bfloat16
                import torch

                return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
            return tensor.numpy()
        return np.asanyarray(value)
    except Exception as error:  # foreign objects may raise any exception
        raise HeadspanError(f"{name} cannot be read as an array ({type(value).__name__}): {reason(error)}") from None


def _check_unmasked(array: np.ndarray, name: str) -> None:
    if type(array) is np.ndarray:  # avoid importing numpy.ma, which is slow to load
        return
    if isinstance(array, np.ma.MaskedArray) and np.ma.getmaskarray(array).any():
        raise HeadspanError(f"{name} is a masked array with numbers missing: fill them first")


def row_range(rows: slice | None, shape: tuple[int, ...], name: str) -> tuple[int, int]:
    """Start and stop of a slice of rows without steps.

    >>> row_range(slice(2, None), (5, 3), "x")
    (2, 5)
    """
    count = shape[0] if shape else 1
    if rows is None:
        return 0, count
    start, stop, step = rows.indices(count)
    if step != 1 or not shape:
        raise HeadspanError(f"rows of tensor {name} can only be read as one run, not {rows}")
    return start, max(start, stop)


def apply_scale(array: np.ndarray, scale: np.ndarray, block: tuple[int, int], first_row: int, name: str) -> np.ndarray:
    """Multiply float8 numbers (rows from ``first_row`` on) by their scale: one number, one per row, or one per block.

    >>> apply_scale(np.ones((2, 4), np.float32), np.array([[1.0, 2.0]], np.float32), (2, 2), 0, "x").tolist()
    [[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]]
    """
    if scale.size == 1:
        return array * scale.reshape(())
    rows = first_row + np.arange(len(array))
    if array.ndim == 2 and scale.shape[0] > rows[-1] and scale.size == scale.shape[0]:
        return array * scale.reshape(-1, 1)[rows]
    if array.ndim == 2 and scale.ndim == 2 and scale.shape[1] == -(-array.shape[1] // block[1]):
        columns = np.arange(array.shape[1]) // block[1]
        if rows[-1] // block[0] < scale.shape[0]:
            return array * scale[rows // block[0]][:, columns]
    raise HeadspanError(f"the scale of tensor {name} has the shape {list(scale.shape)}, which does not fit its blocks")
