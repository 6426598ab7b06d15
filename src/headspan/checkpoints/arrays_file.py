"""Arrays saved by numpy (``.npy``, ``.npz``), read by name and by slices of rows or columns; pickles are never loaded.

A ``.npy`` file is memory-mapped. A member of an ``.npz`` is read as a whole, so one that would take half of
the machine's memory is refused; saved as ``.npy`` it can be read in pieces.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from headspan.checkpoints.dtypes import exact_array, row_range
from headspan.checkpoints.mapping import hash_tensor
from headspan.checkpoints.untrusted import open_regular, reason
from headspan.system.memory import total_memory
from headspan.vocabulary.errors import HeadspanError, quoted

ARRAY_SUFFIXES = (".npy", ".npz")
_SMALL = 2**24  # bytes of an array that fit in memory on any machine
ALONE = ""  # the name of the only array of a .npy file


class ArraysFile:
    """The arrays of one file by name; the array of a ``.npy`` file has the name ``""``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp = open_regular(path)
        if self.stamp.size == 0:
            raise HeadspanError(f"{path} is empty: give a file that holds vectors")
        self._arrays: dict[str, np.ndarray] = {}
        self._kept: tuple[str, np.ndarray] | None = None
        self._archive: zipfile.ZipFile | None = None
        self._members: dict[str, tuple[str, tuple[int, ...], np.dtype]] = {}
        if path.suffix.lower() == ".npz":
            self._members = _members(path)
        else:
            self._arrays[ALONE] = _mapped(path)

    def names(self) -> Collection[str]:
        return self._arrays.keys() or self._members.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._members and self._members[name][2].hasobject:
            raise HeadspanError(f"{name[:80]!r} of {self.path} holds Python objects, not numbers, so it was not read")
        return tuple(self._arrays[name].shape) if name in self._arrays else self._members[name][1]

    def dtype(self, name: str) -> str:
        return (self._arrays[name].dtype if name in self._arrays else self._members[name][2]).name

    def nbytes(self, name: str) -> int:
        dtype = self._arrays[name].dtype if name in self._arrays else self._members[name][2]
        return math.prod(self.shape(name)) * dtype.itemsize

    def hash(self, name: str) -> bytes:
        array = self._array(name)
        digest = hashlib.sha256(f"{array.dtype.name}:{array.shape}:".encode())
        step = max(1, (1 << 24) // max(1, array.nbytes // max(1, len(array)))) if array.ndim else 1
        for start in range(0, len(array) if array.ndim else 1, step):
            digest.update(hash_tensor(array[start : start + step] if array.ndim else array, name))
        self.stamp.check(self.path)
        return digest.digest()

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray:
        """An array, or some of its rows and columns, in a floating point type that holds its numbers exactly."""
        array = self._array(name)
        if rows is not None:
            array = array[slice(*row_range(rows, array.shape, name))]
        if columns is not None:
            array = array[:, columns]
        found = np.array(exact_array(np.array(array), f"{quoted(name) or 'the array'} of {self.path}"))
        self.stamp.check(self.path)
        return found

    def _array(self, name: str) -> np.ndarray:
        self.stamp.check(self.path)
        if name in self._arrays:
            return self._arrays[name]
        if self._kept is None or self._kept[0] != name:
            self._kept = None
            size = self.nbytes(name)
            if size > _SMALL and size > (total_memory() or 64 << 30) // 2:
                raise HeadspanError(
                    f"{quoted(name)} of {self.path} has {size / 2**30:.0f} GiB, but a member of an .npz is read "
                    "as a whole: save it as .npy or .safetensors, which are read in pieces"
                )
            try:
                if self._archive is None:  # keep it open, since opening it reads its directory again
                    self._archive = zipfile.ZipFile(self.path)
                with self._archive.open(self._members[name][0]) as file:
                    self._kept = (name, np.lib.format.read_array(file, allow_pickle=False))
            except Exception as error:  # zipfile, zlib and numpy raise many kinds of errors for a damaged archive
                raise HeadspanError(f"{quoted(name)} of {self.path} cannot be read: {reason(error)}") from None
        return self._kept[1]


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:
        raise _bad(path, error) from None


def _bad(path: Path, error: BaseException) -> HeadspanError:
    text = str(error)
    if "bject arrays" in text or "Python objects" in text or "pickle" in text.lower():
        return HeadspanError(
            f"{path} holds Python objects or is not a numpy file. It was not read, because a pickle can run any code: "
            "save an array of numbers"
        )
    return HeadspanError(f"{path} cannot be read as a numpy file: {reason(error)}")


def _members(path: Path) -> dict[str, tuple[str, tuple[int, ...], np.dtype]]:
    """File name, shape and number type of every array, from their headers."""
    found: dict[str, tuple[str, tuple[int, ...], np.dtype]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                with archive.open(info) as file:
                    shape, dtype = _header(file)
                name = info.filename.removesuffix(".npy")
                if not dtype.hasobject and math.prod(shape) * dtype.itemsize > info.file_size:
                    raise HeadspanError(
                        f"{name[:80]!r} of {path} claims the shape {list(shape)[:8]}, more than the file can hold"
                    )
                if name in found:
                    raise HeadspanError(f"{path} holds two arrays named {name[:80]!r}: rename one")
                found[name] = (info.filename, shape, dtype)
    except HeadspanError:
        raise
    except Exception as error:
        raise _bad(path, error) from None
    return found


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return tuple(shape), dtype
