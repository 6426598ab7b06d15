"""Tensors that are already in memory: plain dicts of arrays, live models, the random demo model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.checkpoints.base import TensorSource
from headspan.checkpoints.dtypes import native, row_range, widen
from headspan.checkpoints.untrusted import reason
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    from headspan.checkpoints.tokenizer import Vocabulary


class MappingSource(TensorSource):
    """A dict of numpy arrays or torch tensors under Hugging Face names, with a config.

    >>> source = MappingSource({"x": np.ones((2, 3), np.float16)}, {"model_type": "gpt2"})
    >>> source.read("x", slice(0, 1)), source.dtype("x")
    (array([[1., 1., 1.]], dtype=float32), 'float16')
    """

    in_memory = True

    def __init__(
        self, tensors: Mapping[str, Any], config: Mapping[str, Any], reference: str = "tensors in memory"
    ) -> None:
        super().__init__(reference, dict(config))
        self._tensors = dict(tensors)
        self.tokens: Vocabulary | None = None  # of the tokenizer, if there is one

    def vocabulary(self) -> Vocabulary | None:
        return self.tokens

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in self._get(name).shape)

    def dtype(self, name: str) -> str:
        dtype = self._get(name).dtype
        return native(dtype).name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")

    def nbytes(self, name: str) -> int:
        return int(self._get(name).nbytes)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        tensor = self._get(name)
        if rows is not None:
            start, stop = row_range(rows, self.shape(name), name)
            tensor = tensor[start:stop]
        return widen_tensor(tensor, name)

    def close(self) -> None:
        super().close()
        self._tensors.clear()

    def _get(self, name: str) -> Any:
        try:
            return self._tensors[name]
        except KeyError:
            raise self._missing(name) from None

    def _hash(self, name: str) -> bytes:
        return hash_tensor(self._get(name), name)


def widen_tensor(tensor: Any, name: str) -> np.ndarray:
    """A numpy array or torch tensor (on any device) as a new float32 array; float64 stays float64."""
    if isinstance(tensor, np.ndarray):
        return np.array(widen(tensor, name))
    kind = str(getattr(tensor, "dtype", type(tensor))).removeprefix("torch.")
    if not getattr(tensor, "is_floating_point", lambda: False)() or kind.startswith("float4"):
        raise HeadspanError(
            f"tensor {name} holds {kind} numbers: quantised and packed tensors are not read,"
            " give the original checkpoint or a GGUF file"
        )
    check_not_meta(tensor, name)
    try:
        plain = tensor.detach().to("cpu")
        return np.array((plain if kind == "float64" else plain.float()).numpy())
    except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:
        raise HeadspanError(f"tensor {name} ({kind}) cannot be read: {reason(error)}") from None


def check_not_meta(tensor: Any, name: str) -> None:
    if tensor.is_meta:
        raise HeadspanError(
            f"tensor {name} is on the meta device: it is offloaded or was not loaded. Load the whole model into memory"
        )


def hash_tensor(tensor: Any, name: str) -> bytes:
    """sha256 of an array or tensor (on any device): number type, shape and every byte."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(int(size) for size in tensor.shape)
    digest = hashlib.sha256(f"{dtype}:{shape}:".encode())
    digest.update(_bytes_of(tensor, name))
    return digest.digest()


def _bytes_of(tensor: Any, name: str) -> memoryview:
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    import torch

    check_not_meta(tensor, name)
    try:
        return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
    except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:
        raise HeadspanError(f"tensor {name} ({tensor.dtype}) cannot be read: {reason(error)}") from None
