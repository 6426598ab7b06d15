"""One safetensors file. The whole header is checked first; tensors are read one by one.

The format is 8 bytes with the length of a JSON header, the header (name → dtype, shape, byte range), then the
bytes of the tensors without gaps. headspan reads it itself, not through the safetensors package, so that it can
read only some rows, report every bad file in one message, and ignore damage in tensors that are not needed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from headspan.checkpoints.dtypes import SAFETENSORS_DTYPES, exact_array, row_range, widen
from headspan.checkpoints.untrusted import (
    check_allocation,
    check_parts,
    open_regular,
    open_stamped,
    reason,
    update_with_range,
)
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    from headspan.checkpoints.hub.ranges import RangeFile

HEADER_LIMIT = 100_000_000  # the limit of the safetensors package
_PIECE = 2**20  # numbers converted at once


class Entry(NamedTuple):
    """The location of one tensor according to the header; dtype and shape are checked on use."""

    dtype: object
    shape: object
    begin: int
    end: int


class SafetensorsFile:
    """The tensors of one file by name.

    remote: reads the bytes if they are not in a local file. integers: read integers as numbers; in a checkpoint they
    are quantised weights and are refused.
    """

    def __init__(self, path: Path, remote: RangeFile | None = None, integers: bool = False) -> None:
        self.path = path
        self.remote, self._integers = remote, integers
        self.stamp = open_regular(path) if remote is None else remote.stamp
        self.metadata: dict[str, Any] = {}
        raw = self._read_header()
        self._data = 8 + len(raw)
        self._entries = self._parse(_parse_header(path, raw))
        self._check_layout()

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checked(name)[1]

    def dtype(self, name: str) -> str:
        return self._checked(name)[0].name

    def nbytes(self, name: str) -> int:
        entry = self._entries[name]
        return entry.end - entry.begin

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray:
        dtype, shape = self._checked(name)
        start, stop = row_range(rows, shape, name)
        if columns is not None:
            return self._read_columns(name, slice(start, stop), columns)
        count = math.prod(shape[1:])
        check_allocation(f"tensor {name} of {self.path}", (stop - start) * count * 4)
        found = np.empty((stop - start) * count, self._floats(np.empty(0, dtype), name).dtype)
        with self._opened(f"tensor {name} of {self.path}") as file:
            file.seek(self._data + self._entries[name].begin + start * count * dtype.itemsize)
            if found.dtype == dtype:
                _fill(file, found.view(np.uint8).data)
            else:  # in pieces, to avoid a second array of the size of the tensor
                raw = np.empty(min(found.size, _PIECE), dtype)
                for first in range(0, found.size, _PIECE):
                    part = raw[: found.size - first]
                    _fill(file, part.view(np.uint8).data)
                    found[first : first + part.size] = self._floats(part, name)
        return found.reshape((stop - start, *shape[1:]) if shape else ())

    def _read_columns(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        """Some columns of a matrix, reading no more than needed."""
        dtype, shape = self._checked(name)
        if len(shape) != 2:
            raise HeadspanError(f"tensor {name} of {self.path} has shape {list(shape)}: only a matrix has columns")
        first, last, _ = columns.indices(shape[1])
        raw = np.empty((rows.stop - rows.start, max(0, last - first)), dtype)
        check_allocation(f"tensor {name} of {self.path}", raw.size * 4)
        begin = self._data + self._entries[name].begin
        with self._opened(f"tensor {name} of {self.path}") as file:
            for i, row in enumerate(range(rows.start, rows.stop) if raw.size else ()):
                file.seek(begin + (row * shape[1] + first) * dtype.itemsize)
                _fill(file, raw[i].view(np.uint8).data)
        return self._floats(raw, name)

    def _floats(self, raw: np.ndarray, name: str) -> np.ndarray:
        whole = self._integers and raw.dtype.kind in "biu"
        return exact_array(raw, f"{name} of {self.path}") if whole else widen(raw, name)

    def hash(self, name: str) -> bytes:
        dtype, shape = self._checked(name)
        digest = hashlib.sha256(f"{dtype.name}:{shape}:".encode())
        with self._opened(str(self.path)) as file:
            update_with_range(digest, file, *self.byte_range(name), self.path)
        return digest.digest()

    def byte_range(self, name: str) -> tuple[int, int]:
        """The start and end of a tensor in the file."""
        entry = self._entries[name]
        return self._data + entry.begin, self._data + entry.end

    def _opened(self, what: str) -> AbstractContextManager[Any]:
        """The file, open for reading; ``what`` names what is read, for errors."""
        return open_stamped(self.path, self.stamp, what) if self.remote is None else self.remote.open()

    def _read_header(self) -> bytes:
        """The bytes of the header, after checking its length."""
        size = self.stamp.size
        with self._opened(str(self.path)) as file:
            start = bytearray(min(8, size))
            _fill(file, memoryview(start))
            length = int.from_bytes(start, "little")
            if size == 0:
                raise self._bad("it is empty")
            if size < 8 or length > size - 8:
                raise self._bad(f"its header should have {length} bytes, but the file has only {size}")
            if length > HEADER_LIMIT:
                raise self._bad(f"its header of {length} bytes is larger than the format allows")
            raw = bytearray(length)
            _fill(file, memoryview(raw))
            return bytes(raw)

    def _parse(self, header: dict[str, Any]) -> dict[str, Entry]:
        metadata = header.pop("__metadata__", {})
        self.metadata = metadata if isinstance(metadata, dict) else {}
        entries = {}
        for name, info in header.items():
            offsets = info.get("data_offsets") if isinstance(info, dict) else None
            if not _is_index_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
                raise self._bad(f"its entry for {name[:80]!r} has no valid data_offsets")
            entries[name] = Entry(info.get("dtype"), info.get("shape"), *offsets)
        return entries

    def _check_layout(self) -> None:
        """Tensors must follow one another without gap or overlap and end with the file."""
        position = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1][2:]):
            if entry.begin != position:
                raise self._bad(f"tensor {name[:80]!r} starts at byte {entry.begin}, not at {position}")
            position = entry.end
        available = self.stamp.size - self._data
        if position > available:
            raise HeadspanError(
                f"{self.path} is truncated: its header describes {position} bytes of tensors,"
                f" the file has {available}; download it again"
            )
        if position < available:
            raise self._bad(f"its header describes {position} bytes of tensors, the file has {available}")

    def _checked(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        entry = self._entries[name]
        dtype = SAFETENSORS_DTYPES.get(entry.dtype) if isinstance(entry.dtype, str) else None
        if dtype is None:
            raise self._bad(f"tensor {name[:80]!r} has the unknown number type {str(entry.dtype)[:40]!r}")
        if not _is_index_list(entry.shape):
            raise self._bad(f"tensor {name[:80]!r} has an invalid shape: {str(entry.shape)[:80]}")
        shape = tuple(entry.shape)
        if math.prod(shape) * dtype.itemsize != entry.end - entry.begin:
            raise self._bad(
                f"tensor {name[:80]!r} has the shape {list(shape)[:8]} of {dtype} but {entry.end - entry.begin} bytes"
            )
        return dtype, shape

    def _bad(self, what: str) -> HeadspanError:
        return _invalid(self.path, what)


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    check_parts(raw, path)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"its header is not JSON ({reason(error)})") from None
    if not isinstance(header, dict):
        raise _invalid(path, "its header is not a JSON object")
    return header


def _invalid(path: Path, what: str) -> HeadspanError:
    return HeadspanError(f"{path} is not a valid safetensors file: {what}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _is_index_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _fill(file: Any, buffer: memoryview) -> None:
    """Read until the buffer is full (one read call stops at 2 GiB)."""
    done = 0
    while done < len(buffer):
        got = file.readinto(buffer[done:])
        if not got:
            raise OSError(0, "the file ends early")
        done += got
