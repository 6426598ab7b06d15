"""What the metadata of our files may hold: one table of fields, checked once when a file is read.

Every field that headspan uses is in one of the tables below with its allowed values. Other fields are kept unchanged
and only shown as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, get_args

from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import PairSet, Role, is_head_name

MODEL = "_model"  # in head scores: their model
LARGEST_MODEL = 2**20  # dimensions of a stream: twenty times what the widest models have
_HEAD_SCORE_SLACK = 0.01  # precision of sums of attention in half precision
_SHOWN = 60  # characters of a wrong value in a message


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value of JSON is an object."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether a value of JSON is a list."""
    return isinstance(value, list)


class Field(NamedTuple):
    """The allowed values of a field, in words and as a test."""

    says: str
    fits: Callable[[Any], bool]


def text(longest: int = 10**6) -> Field:
    return Field("text", lambda value: isinstance(value, str) and len(value) <= longest)


def whole(least: int, most: int) -> Field:
    return Field(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def number(least: float = -math.inf, most: float = math.inf) -> Field:
    """A finite number."""
    span = "" if math.isinf(least) else f" from {least:g} on" if math.isinf(most) else f" from {least:g} to {most:g}"
    return Field(
        f"a number{span}",
        lambda value: type(value) in (int, float) and _finite(value) and least <= value <= most,
    )


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def one_of(words: tuple[str, ...]) -> Field:
    return Field(f"one of {', '.join(words)}", lambda value: value in words)


def optional(field: Field) -> Field:
    return Field(f"{field.says} or null", lambda value: value is None or field.fits(value))


def list_of(field: Field) -> Field:
    return Field(
        f"a list, each {field.says}", lambda value: isinstance(value, list) and all(field.fits(v) for v in value)
    )


def row_of(*fields: Field) -> Field:
    """A list of fixed length."""
    return Field(
        f"a list of {len(fields)}: {', '.join(field.says for field in fields)}",
        lambda value: (
            isinstance(value, list)
            and len(value) == len(fields)
            and all(field.fits(v) for field, v in zip(fields, value, strict=True))
        ),
    )


def mapping_of(
    field: Field, key: Callable[[str], bool] = lambda key: True, known: Mapping[str, Field] | None = None
) -> Field:
    """A JSON object; ``known`` fields have their own rule."""
    own = known or {}
    return Field(
        f"a mapping, each value {field.says}",
        lambda value: (
            isinstance(value, dict)
            and all(own[k].fits(v) if k in own else key(k) and field.fits(v) for k, v in value.items())
        ),
    )


def fields(known: Mapping[str, Field], needed: tuple[str, ...] = ()) -> Field:
    """A JSON object with some fields that have a rule; other fields are ignored."""
    return Field(
        f"a mapping with {', '.join(needed or known)}",
        lambda value: (
            isinstance(value, dict)
            and all(key in value for key in needed)
            and all(field.fits(value[key]) for key, field in known.items() if key in value)
        ),
    )


def check_fields(content: Mapping[str, Any], table: Mapping[str, Field], where: str, path: Path) -> None:
    """Refuse a file with a wrong value in a field of the table, and name the field."""
    for key, field in table.items():
        if key in content and not field.fits(content[key]):
            shown = repr(content[key])
            shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
            raise HeadspanError(f"{path} is damaged: its {where} {key} is {shown}, not {field.says}; make it again")


def _is_role(word: str) -> bool:
    return word in Role.__members__


def _is_pairing(word: str) -> bool:
    return len(word) == 2 and all(map(_is_role, word))


def _is_layer(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 6


ANYTHING = Field("anything", lambda value: True)
BOOLEAN = Field("true or false", lambda value: type(value) is bool)
MAPPING = fields({})
TEXTS = list_of(text())
# The identity of a model. Files of version 0.1 have fewer of these fields.
IDENTITY: dict[str, Field] = {
    "fingerprint": optional(text(200)),
    "attention_hash": optional(text(200)),
    "architecture": optional(text()),
    "folding": text(),
}
_CHANCE = row_of(number(0), number(0))  # mean and standard deviation
_SCREEN = mapping_of(ANYTHING, known={"k": whole(1, 2**53), "delta": number(0, 1)})
PROVENANCE: dict[str, Field] = {
    **IDENTITY,
    "reference": optional(text()),
    "headspan": text(200),
    "pairs": one_of(get_args(PairSet)),
    "d_head": mapping_of(whole(0, LARGEST_MODEL), _is_role),
    "nodes_hash": optional(text(200)),
    "products": text(200),
    "rank_deficient": TEXTS,
    "centred": optional(TEXTS),
    "not_centred": optional(TEXTS),
    "folded_norms": TEXTS,
    "notes": TEXTS,
    "same_layer_chance": optional(mapping_of(mapping_of(_CHANCE, _is_layer), _is_pairing)),
    "screen": Field(
        "a mapping with the number k of pairs that were kept",
        lambda value: _SCREEN.fits(value) and "k" in value and all(
            MAPPING.fits(v) for k, v in value.items() if _is_pairing(k)
        ),
    ),
}  # fmt: skip
HEAD_SCORES = mapping_of(
    mapping_of(optional(number(-_HEAD_SCORE_SLACK, 1 + _HEAD_SCORE_SLACK)), is_head_name),
    known={MODEL: fields(IDENTITY)},
)
ANNOTATIONS: dict[str, Field] = {
    "behaviour": HEAD_SCORES,
    "behaviour_protocol": MAPPING,
    "effects": fields(
        {
            "model": fields(IDENTITY),
            "interrupted": BOOLEAN,
            "floors": mapping_of(number(0)),
            "least_ratio": number(0),
            "tokens": mapping_of(list_of(number(0))),
            "examples": MAPPING,
        }
    ),
    "drift": mapping_of(optional(number())),
}
_NAMES = list_of(text(400))
RESULT: dict[str, Field] = {
    "d_model": whole(1, LARGEST_MODEL),
    "order": TEXTS,
    "extra": TEXTS,
    "provenance": MAPPING,
    "annotations": MAPPING,
    "hash": text(200),
}
SERIES: dict[str, Field] = {
    "k": whole(1, 2**53),
    "folding": text(),
    "steps": list_of(row_of(whole(-(2**62), 2**62), text(), text(200))),
    "edges": list_of(row_of(text(2), text(40), text(40))),
    "heads": mapping_of(_NAMES, _is_role),
    "notes": TEXTS,
    "order": TEXTS,
    "provenance": MAPPING,
    "hash": text(200),
}
SERIES_PROVENANCE: dict[str, Field] = {
    "architecture": optional(text()),
    "fingerprints": list_of(optional(text(200))),
    "d_model": whole(1, LARGEST_MODEL),
    "dimensions": mapping_of(whole(0, LARGEST_MODEL), _is_role),
    "served_by": optional(mapping_of(text(40))),
    "centred": optional(TEXTS),
    "not_centred": optional(TEXTS),
}
