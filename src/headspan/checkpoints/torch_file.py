"""One PyTorch weight file (``.bin``, ``.pth``, ``.pt``), read only by torch's weights-only loader.

Such a file is a pickle, and a pickle can run any code. The weights-only loader builds tensors and plain
containers and refuses everything else.
"""

from __future__ import annotations

import math
import re
import warnings
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headspan.checkpoints.dtypes import exact_array, row_range
from headspan.checkpoints.mapping import hash_tensor, widen_tensor
from headspan.checkpoints.untrusted import check_allocation, open_regular, reason
from headspan.vocabulary.errors import HeadspanError, missing_extra

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
# Where trainers put the state dict when they save more than that.
_NESTED = ("state_dict", "model_state_dict", "model")


class TorchFile:
    """The tensors of one file by name; a file in the usual zip format is memory-mapped, not read."""

    def __init__(self, path: Path, bare: str | None = None) -> None:
        """bare: the name for a tensor that was saved alone in a file of vectors, where integers are numbers. Without
        it, such a file is refused because it is not a state dict."""
        self.path, self._vectors = path, bare is not None
        self.stamp = open_regular(path)
        zipped = check_zip(path, self.stamp.size)
        content = _load(path, mmap=zipped)
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


def check_zip(path: Path, size: int) -> bool:
    """True for torch's zip format, False for the older plain pickle; a zip bomb is refused.

    torch stores its entries uncompressed, so their declared sizes cannot exceed the size of the file.
    """
    if not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, NotImplementedError) as error:
        raise HeadspanError(f"{path} is a damaged zip file: {reason(error)}") from None
    declared = sum(entry.file_size for entry in entries)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or declared > size:
        raise HeadspanError(
            f"{path} holds compressed or overlapping entries ({declared} bytes declared in a file of {size}),"
            " which torch never writes: refused"
        )
    return True


def _load(path: Path, mmap: bool) -> Any:
    try:
        import torch
    except ImportError:
        raise missing_extra("torch", "torch", f"reading {path.name}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles, which are read or refused anyway
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        found = _GLOBAL.search(str(error))
        if found or "weights_only" in str(error).lower() or "Weights only" in str(error):
            what = f" ({found[1]})" if found else ""
            raise HeadspanError(
                f"{path} holds Python objects other than tensors{what} and was not loaded,"
                " because a pickle can run any code: give a safetensors file or a plain state dict"
            ) from None
        raise HeadspanError(f"{path} cannot be read as a PyTorch weight file: {reason(error)}") from None


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
