"""The header of a GGUF file: metadata as plain values and the list of tensors, checked against the file's size.

The reader of the gguf package creates one array per metadata value, and a wrong length in a bad file makes it loop
forever. This reader takes milliseconds and stops at the first impossible number.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from headspan.checkpoints.untrusted import reason
from headspan.vocabulary.errors import HeadspanError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4


class GgufTensor(NamedTuple):
    """The location of one tensor; ``shape`` has rows first (GGUF stores it in reverse)."""

    shape: tuple[int, ...]
    type: int
    offset: int  # from the start of the file


class GgufHeader(NamedTuple):
    """The metadata and the tensors of a GGUF file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    size: int  # bytes before the first tensor


def read_header(path: Path) -> GgufHeader:
    """Read and check the header; tensor sizes are checked later, when the types are known."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        raise HeadspanError(f"{path} cannot be read as a GGUF file: {reason(error)}") from None


class _Reader:
    """A cursor over the bytes of the header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def header(self) -> GgufHeader:
        if self.take(4) != b"GGUF":
            raise self.bad("it does not start with GGUF")
        version = self.number("I")
        if version & 0xFFFF == 0:  # written in the other byte order
            raise self.bad("it is big-endian, which is not supported")
        if version not in (2, 3):
            raise self.bad(f"its version {version} is not known (2 and 3 are)")
        n_tensors, n_values = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = self.text()
            if key in metadata:
                raise self.bad(f"the metadata key {key[:80]!r} occurs twice")
            metadata[key] = self.value(self.number("I"))
        listed = [self.tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise self.bad(f"its alignment is {str(alignment)[:40]}")
        start = -(-self.position // alignment) * alignment
        tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in listed}
        if len(tensors) != len(listed):
            raise self.bad("two of its tensors have the same name")
        return GgufHeader(metadata, tensors, start)

    def tensor(self) -> tuple[str, GgufTensor]:
        name, dimensions = self.text(), self.number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise self.bad(f"tensor {name[:80]!r} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        if not 0 < math.prod(shape) < 2**62:
            raise self.bad(f"tensor {name[:80]!r} has the impossible shape {list(shape)}")
        return name, GgufTensor(shape, self.number("I"), self.number("Q"))

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY or nesting > _MAX_NESTING:
            raise self.bad(f"a metadata value has the unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            letter = _SCALARS[kind]
            raw = self.take(count * struct.calcsize("=" + letter))
            return list(struct.unpack(f"<{count}{letter}", raw))
        if count > len(self.data) - self.position:  # an element takes at least one byte
            raise self.bad(f"a metadata array claims {count} elements")
        return [self.value(kind, nesting + 1) for _ in range(count)]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "backslashreplace")

    def number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("=" + letter)))[0]

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise self.bad(f"it ends at byte {len(self.data)} in the middle of its header")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def bad(self, what: str) -> HeadspanError:
        return HeadspanError(f"{self.path} is not a valid GGUF file: {what}")
