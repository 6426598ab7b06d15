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

    def _update_fingerprint(self, digest: hashlib._Hash) -> None:
        for name in sorted(self._tensors):
            digest.update(f"{name}:{self.shape(name)}:{self.dtype(name)}:".encode("utf-8", "surrogatepass"))
            count = self.shape(name)[0] if self.shape(name) else 0
            step = max(1, count // 8)  # a few rows of each tensor tell two models apart
            for row in range(0, count, step):
                digest.update(raw_bytes(self._get(name)[row : row + 1]))


def widen_tensor(tensor: Any, name: str) -> np.ndarray:
    """A numpy array or torch tensor (on any device) as a fresh float32 array, float64 staying float64."""
    if isinstance(tensor, np.ndarray):
        return np.array(widen(tensor, name))
    if not tensor.is_floating_point():
        return widen(np.empty(0, np.dtype(str(tensor.dtype).removeprefix("torch."))), name)
    if tensor.is_meta:
        raise HeadspanError(f"tensor {name} is on the meta device: load the model's weights first")
    double = str(tensor.dtype) == "torch.float64"
    plain = tensor.detach().to("cpu")
    return np.array((plain if double else plain.float()).numpy())


def raw_bytes(tensor: Any) -> bytes:
    """The content of an array or tensor as bytes."""
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    import torch

    return tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes()
