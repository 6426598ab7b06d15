"""Tensors that are already in memory: plain dicts of arrays, live models, the random demo model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from headspan.errors import HeadspanError
from headspan.sources.base import TensorSource
from headspan.sources.dtypes import row_range, widen


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

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in self._get(name).shape)

    def dtype(self, name: str) -> str:
        return str(self._get(name).dtype).removeprefix("torch.")

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
    """A numpy array or torch tensor (on any device) as a fresh float32 array, float64 staying float64."""
    if isinstance(tensor, np.ndarray):
        return np.array(widen(tensor, name))
    if not tensor.is_floating_point():
        return widen(np.empty(0, np.dtype(str(tensor.dtype).removeprefix("torch."))), name)
    check_not_meta(tensor, name)
    double = str(tensor.dtype) == "torch.float64"
    plain = tensor.detach().to("cpu")
    return np.array((plain if double else plain.float()).numpy())


def check_not_meta(tensor: Any, name: str) -> None:
    if tensor.is_meta:
        raise HeadspanError(f"tensor {name} is on the meta device: load the model's weights first")


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
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
