"""Make transformers read a GGUF file in seconds: it reads every token twice, only to count them.

A file of 262,144 tokens takes it about a minute, of which the weights take a few seconds. headspan reads the tokens
with its own reader (`headspan.checkpoints.gguf`), so they are skipped here.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

_LONG = 4096  # more than the layers of any model: longer arrays belong to the tokenizer
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes per type of number


@contextmanager
def quick_gguf() -> Iterator[None]:
    """Within this context, GGUF files that this thread reads with the gguf package have their long arrays shortened."""
    try:
        import gguf
    except ImportError:
        yield
        return
    before: dict[str, Any] = {"GGUFReader": gguf.GGUFReader, "get_tensor_name_map": gguf.get_tensor_name_map}
    if hasattr(gguf.GGUFReader, "_get_field_parts"):
        gguf.GGUFReader = _quick(gguf.GGUFReader, threading.get_ident())  # pyright: ignore
    # The table of names is read-only and requested once per part of a model.
    gguf.get_tensor_name_map = lru_cache(before["get_tensor_name_map"])  # pyright: ignore
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(gguf, name, value)


def _quick(reader: Any, owner: int) -> Any:
    """A reader that repeats the first string or number of a long array instead of reading all."""

    class QuickReader(reader):
        def _get_field_parts(self, orig_offs: int, raw_type: int, *rest: Any) -> Any:
            if raw_type == _ARRAY and self.byte_order == "I" and threading.get_ident() == owner:
                kind, count = struct.unpack_from("=IQ", self.data, orig_offs)
                if count > _LONG and (kind == _STRING or kind in _SIZES):
                    return self._in_short(orig_offs, kind, count, *rest)
            return super()._get_field_parts(orig_offs, raw_type, *rest)

        def _in_short(self, start: int, kind: int, count: int, *rest: Any) -> Any:
            _, first, places, types = super()._get_field_parts(start + 12, kind, *rest)
            parts = [self._get(start, "u4"), self._get(start + 4, "u8"), *first]
            found, array = [place + 2 for place in places], type(types[0])(_ARRAY)
            if kind != _STRING:
                return 12 + count * _SIZES[kind], parts, found, [array, *types]
            data, end, length = memoryview(self.data), start + 12, struct.Struct("=Q").unpack_from
            for _ in range(count):
                end += 8 + length(data, end)[0]
            return end - start, parts, found * count, [array, *types]

    return QuickReader
