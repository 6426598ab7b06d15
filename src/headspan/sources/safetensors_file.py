"""One safetensors file: its header is checked as a whole, its tensors are read one by one.

The format is 8 bytes with the length of a JSON header, the header (name → dtype, shape, byte range), then the
bytes of the tensors without gaps. Reading it here, and not through the safetensors package, is what lets a read
take only some rows, keeps every bad file a one-sentence error, and lets tensors nobody asks for be broken.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from headspan.errors import HeadspanError
from headspan.sources.dtypes import SAFETENSORS_DTYPES, row_range, widen
from headspan.sources.untrusted import check_allocation, check_parts, open_regular, reason, update_with_range

HEADER_LIMIT = 100_000_000  # the limit of the safetensors package


class Entry(NamedTuple):
    """Where one tensor is, as its header says; dtype and shape are only checked when it is used."""

    dtype: object
    shape: object
    begin: int
    end: int


class SafetensorsFile:
    """The tensors of one file by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp = open_regular(path)
        self.metadata: dict[str, Any] = {}
        raw = _read_header(path, self.stamp.size)
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

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        dtype, shape = self._checked(name)
        start, stop = row_range(rows, shape, name)
        count = math.prod(shape[1:])
        check_allocation(f"tensor {name} of {self.path}", (stop - start) * count * 4)
        raw = np.empty((stop - start) * count, dtype)
        offset = self._data + self._entries[name].begin + start * count * dtype.itemsize
        try:
            with self.path.open("rb", buffering=0) as file:
                self.stamp.check_open(self.path, file.fileno())
                file.seek(offset)
                _fill(file, raw.view(np.uint8).data)
                self.stamp.check_open(self.path, file.fileno())
        except OSError as error:
            raise HeadspanError(f"tensor {name} of {self.path} cannot be read: {reason(error)}") from None
        return widen(raw, name).reshape((stop - start, *shape[1:]) if shape else ())

    def hash(self, name: str) -> bytes:
        dtype, shape = self._checked(name)
        digest = hashlib.sha256(f"{dtype.name}:{shape}:".encode())
        entry = self._entries[name]
        update_with_range(digest, self.path, self.stamp, self._data + entry.begin, self._data + entry.end)
        return digest.digest()

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
                f"{self.path} is truncated: its header promises {position} bytes of tensors,"
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
            raise self._bad(f"tensor {name[:80]!r} has the shape {str(entry.shape)[:80]}, which is none")
        shape = tuple(entry.shape)
        if math.prod(shape) * dtype.itemsize != entry.end - entry.begin:
            raise self._bad(
                f"tensor {name[:80]!r} has the shape {list(shape)[:8]} of {dtype} but {entry.end - entry.begin} bytes"
            )
        return dtype, shape

    def _bad(self, what: str) -> HeadspanError:
        return _invalid(self.path, what)


def _read_header(path: Path, size: int) -> bytes:
    """The bytes of the header, after checking that its length is possible."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size == 0:
                raise _invalid(path, "it is empty")
            if size < 8 or length > size - 8:
                raise _invalid(path, f"its header should have {length} bytes, but the file has {size}")
            if length > HEADER_LIMIT:
                raise _invalid(path, f"its header of {length} bytes is larger than the format allows")
            return file.read(length)
    except OSError as error:
        raise HeadspanError(f"{path} cannot be read: {reason(error)}") from None


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
        raise ValueError("a key stands twice")
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
