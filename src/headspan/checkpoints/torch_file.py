"""One PyTorch weight file (``.bin``, ``.pth``, ``.pt``), read only by torch's weights-only loader."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headspan.checkpoints.dtypes import exact_array, row_range
from headspan.checkpoints.mapping import hash_tensor, widen_tensor
from headspan.checkpoints.untrusted import check_allocation, open_regular
from headspan.system.torch_pickle import load_plain
from headspan.vocabulary.errors import HeadspanError

# Where trainers put the state dict when they save more than that.
_NESTED = ("state_dict", "model_state_dict", "model")


class TorchFile:
    """The tensors of one file by name; a file in the usual zip format is memory-mapped, not read."""

    def __init__(self, path: Path, bare: str | None = None) -> None:
        """bare: the name for a tensor that was saved alone in a file of vectors, where integers are numbers. Without
        it, such a file is refused because it is not a state dict."""
        self.path, self._vectors = path, bare is not None
        self.stamp = open_regular(path)
        content = load_plain(path, "PyTorch weight file", "give a safetensors file or a plain state dict")
        self._tensors = _tensors_of(content if bare is None else _named(content, bare), path)
        self.stamp.check(path)  # a file without mmap has just been read as a whole

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def nbytes(self, name: str) -> int:
        tensor = self._tensors[name]
        return math.prod(tensor.shape) * tensor.element_size()

    def hash(self, name: str) -> bytes:
        found = hash_tensor(self._checked(name), name)
        self.stamp.check(self.path)
        return found

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray:
        tensor = self._checked(name)
        if rows is not None:
            start, stop = row_range(rows, self.shape(name), name)
            tensor = tensor[start:stop]
        if columns is not None:
            tensor = tensor[:, columns]
        check_allocation(f"tensor {name} of {self.path}", tensor.numel() * 4)
        whole = self._vectors and not tensor.is_floating_point()
        found = exact_array(tensor, f"{name or 'the tensor'} of {self.path}") if whole else widen_tensor(tensor, name)
        self.stamp.check(self.path)
        return found

    def _checked(self, name: str) -> Any:
        """A tensor of the file, after checking that the file is unchanged."""
        self.stamp.check(self.path)
        tensor = self._tensors[name]
        # Strides of zero can make a small file look like an enormous tensor.
        if self.nbytes(name) > self.stamp.size:
            raise HeadspanError(
                f"tensor {name} of {self.path} claims the shape {list(tensor.shape)}, more than the file can hold"
            )
        return tensor


def _named(content: Any, bare: str) -> Any:
    """Name the vectors of a file: one tensor, a list of tensors, or a dict by layer number."""
    import torch

    if isinstance(content, torch.Tensor):
        return {bare: content}
    if isinstance(content, (list, tuple)):
        return {str(i): value for i, value in enumerate(content)}
    if isinstance(content, Mapping):
        return {str(key) if type(key) is int else key: value for key, value in content.items()}
    return content


def _tensors_of(content: Any, path: Path) -> dict[str, Any]:
    import torch

    for key in (None, *_NESTED):
        inner = content if key is None else content.get(key) if isinstance(content, Mapping) else None
        if isinstance(inner, Mapping):
            tensors = {
                name: value
                for name, value in inner.items()
                if isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided
            }
            if tensors:
                return tensors
    raise HeadspanError(f"{path} holds no named tensors: expected a state dict")
