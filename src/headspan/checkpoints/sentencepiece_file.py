"""The pieces of a SentencePiece ``tokenizer.model``, read from its protobuf bytes without any package.

The file is a ``ModelProto``; its field 1, repeated, is a ``SentencePiece`` of text (1), score (2) and type (3).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headspan.checkpoints.untrusted import open_regular, reason
from headspan.vocabulary.errors import HeadspanError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LIMIT = 100_000_000  # bytes; real files have a few megabytes


class Piece(NamedTuple):
    text: str
    type: int


def read_pieces(path: Path) -> list[Piece]:
    """All pieces in the order of their ids."""
    size = open_regular(path).size
    if size > _LIMIT:
        raise HeadspanError(f"{path} has {size} bytes, more than any real SentencePiece file")
    try:
        pieces = [_piece(value) for field, value in _fields(path.read_bytes()) if field == 1]
    except OSError as error:
        raise HeadspanError(f"{path} cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise HeadspanError(f"{path} is not a SentencePiece model: {reason(error)}") from None
    if not pieces:
        raise HeadspanError(f"{path} is not a SentencePiece model: it has no pieces")
    return pieces


def _piece(message: bytes | int) -> Piece:
    if isinstance(message, int):
        raise ValueError("a piece is a number")
    text, kind = "", 1  # 1: a normal token, the default, which is not stored
    for field, value in _fields(message):
        if field == 1 and isinstance(value, bytes):
            text = value.decode("utf-8", "backslashreplace")
        elif field == 3 and isinstance(value, int):
            kind = value
    return Piece(text, kind)


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(field number, value) of one protobuf message; ValueError if it is invalid."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield field, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + length > len(data):
            raise ValueError(f"a field at byte {at} goes beyond the end")
        yield field, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")
