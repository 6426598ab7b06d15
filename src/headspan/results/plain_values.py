"""Results as plain JSON values and arrays, and back: the annotations of a class say how its fields are read.

A result is a dataclass, a NamedTuple, or a list or dictionary with a few annotated attributes. `decode` makes only what
the annotations say and refuses any other value, so that a file cannot choose what is made of it. A class with a file
format of its own has ``_to_parts`` and ``_from_parts``; one with more to check than types has ``_check``.

Numbers that JSON lacks are written as "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np

from headspan.results.checks import check_ports, damaged
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Head, Node, Pairing, Role, check_node_name
from headspan.vocabulary.ports import PortTable

Arrays = dict[str, np.ndarray]
_SHOWN = 60  # characters of a wrong value in a message
_ITEMS = "items"  # the elements of a list or dictionary that has attributes
_ARRAY = "array"  # in a file: the name of an array
_DTYPE, _VALUES = "dtype", "values"  # of an array as lists
_PLAIN_TYPES = (np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.bool_))
_OTHER_TYPES = ("float32", "float16", "int32", "int16", "int8", "uint8")
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NAMED = (Role, Pairing, Head)  # written as their names


class Misfit(Exception):
    """A value that is not what its annotation says."""

    def __init__(self, place: str, value: Any, says: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
        super().__init__(f"its {place.strip('/')[:80] or 'content'} is {shown}, not {says}")


class Member(NamedTuple):
    """A field of a class: its type, whether it may be missing, and its name in a file."""

    kind: Any
    optional: bool
    written: str


@cache
def members(cls: type) -> dict[str, Member]:
    """The fields of a class that are written."""
    hints = get_type_hints(cls)
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        return {
            field.name: Member(
                hints[field.name],
                not (field.default is field.default_factory is missing),
                field.metadata.get("written", field.name),
            )
            for field in dataclasses.fields(cls)
        }
    if is_typeddict(cls):
        return {name: Member(hint, name not in cls.__required_keys__, name) for name, hint in hints.items()}
    if issubclass(cls, tuple):
        return {name: Member(hints[name], name in cls._field_defaults, name) for name in cls._fields}  # type: ignore[attr-defined]
    base = next(base for base in cls.__orig_bases__ if get_origin(base) in (list, dict))  # type: ignore[attr-defined]
    return {_ITEMS: Member(base, False, _ITEMS)} | {name: Member(hint, True, name) for name, hint in hints.items()}


# -- to plain values -------------------------------------------------------------------------------------------


def encode(value: Any, put: Callable[[str, np.ndarray], Any], place: str = "") -> Any:
    """A value as JSON; ``put(place, array)`` gives what represents an array."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _word(value)
    if isinstance(value, (str, *_NAMED)):
        return str(value)
    if isinstance(value, np.ndarray):
        return put(place, value)
    if isinstance(value, Node):
        return [value.name, value.kind, value.layer, value.position, value.reads, value.writes]
    if hasattr(value, "_to_parts"):
        head, arrays = value._to_parts()
        found = {name: put(f"{place}/{name}", array) for name, array in arrays.items()}
        return {**head, "arrays": found} if found else head
    inner = _inner(value)
    if inner is not None:
        return {name: encode(part, put, f"{place}/{name}") for name, part in inner.items()}
    if isinstance(value, Mapping):
        return {_key(key): encode(part, put, f"{place}/{_key(key)}") for key, part in value.items()}
    if isinstance(value, Sequence):
        return [encode(part, put, f"{place}/{i}") for i, part in enumerate(value)]
    raise TypeError(f"{type(value).__name__} cannot be written as plain values")


def _inner(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass, a NamedTuple, or a list or dictionary with attributes; None for other values."""
    cls = type(value)
    if dataclasses.is_dataclass(value) or hasattr(cls, "_fields"):
        return {member.written: getattr(value, name) for name, member in members(cls).items()}
    if cls in (list, dict) or not isinstance(value, (list, dict)):
        return None
    plain = dict(value) if isinstance(value, dict) else list(value)
    return {name: plain if name == _ITEMS else getattr(value, name) for name in members(cls)}


def _key(key: Any) -> str:
    return "/".join(map(str, key)) if isinstance(key, tuple) and not isinstance(key, Pairing) else str(key)


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def as_lists(place: str, array: np.ndarray) -> Any:
    """An array as nested lists, for `encode`; one of another type than JSON's numbers comes with its type."""
    listed = array.astype(object)
    if array.dtype.kind == "f":
        for at in np.argwhere(~np.isfinite(array)):
            listed[tuple(at)] = _word(float(array[tuple(at)]))
    values = listed.tolist()
    return values if array.dtype in _PLAIN_TYPES else {_DTYPE: array.dtype.name, _VALUES: values}


# -- from plain values -----------------------------------------------------------------------------------------


class Source(NamedTuple):
    """What is being read: its arrays, and its path for messages."""

    arrays: Mapping[str, np.ndarray]
    path: Path


def decode(kind: Any, value: Any, source: Source, place: str = "") -> Any:
    """The value of a type that JSON and arrays represent; raises `Misfit` for anything else."""
    if kind is Any or kind is object:
        return value
    if kind in _SIMPLE:
        return _SIMPLE[kind](value, place)
    if kind is np.ndarray:
        return _array(value, source, place)
    if kind in _NAMED:
        return _parsed(kind.parse, value, place, f"a {kind.__name__.lower()}")
    if kind is Node:
        return _node(value, place)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, source, place)
    if origin is Literal:
        return _checked(value in inner, value, place, f"one of {', '.join(map(str, inner))}")
    if origin is tuple and len(inner) == 2 and inner[1] is ...:
        return tuple(_elements(inner[0], value, source, place))
    if origin is tuple:
        _checked(isinstance(value, list) and len(value) == len(inner), value, place, f"a list of {len(inner)}")
        parts = enumerate(zip(inner, value, strict=True))
        return tuple(decode(one, part, source, f"{place}/{i}") for i, (one, part) in parts)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(inner[0], inner[1], value, source, place)
    if origin is not None and issubclass(origin, Sequence):
        return _elements(inner[0], value, source, place)
    return _instance(kind, value, source, place)


def _checked(fits: bool, value: Any, place: str, says: str) -> Any:
    if not fits:
        raise Misfit(place, value, says)
    return value


def _float(value: Any, place: str) -> float:
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    try:
        return float(_checked(type(value) in (int, float), value, place, "a number"))
    except OverflowError:
        raise Misfit(place, value, "a number") from None


_SIMPLE: dict[Any, Callable[[Any, str], Any]] = {
    str: lambda value, place: _checked(isinstance(value, str), value, place, "text"),
    int: lambda value, place: _checked(type(value) is int, value, place, "a whole number"),
    bool: lambda value, place: _checked(type(value) is bool, value, place, "true or false"),
    type(None): lambda value, place: _checked(value is None, value, place, "null"),
    float: _float,
}


def _parsed(parse: Callable[[Any], Any], value: Any, place: str, says: str) -> Any:
    try:
        return parse(_checked(isinstance(value, str), value, place, says))
    except HeadspanError:
        raise Misfit(place, value, says) from None


def _node(value: Any, place: str) -> Node:
    says = "a node"
    _checked(isinstance(value, list) and len(value) == 6, value, place, says)
    for part, one in zip(value, (str, str, int, int, bool, bool), strict=True):
        _checked(type(part) is one, value, place, says)
    name, kind, layer, position, reads, writes = value
    return Node.at(position, layer, _parsed(check_node_name, name, place, says), kind, reads, writes)


def _array(value: Any, source: Source, place: str) -> np.ndarray:
    says = "an array of numbers"
    if isinstance(value, dict) and _ARRAY in value:
        found = source.arrays.get(str(value[_ARRAY]))
        if found is None or found.dtype.kind not in "fiub":
            raise Misfit(place, value, says)
        return found
    dtype = value.get(_DTYPE) if isinstance(value, dict) else None
    if dtype is not None:
        _checked(dtype in _OTHER_TYPES, dtype, f"{place}/{_DTYPE}", f"one of {', '.join(_OTHER_TYPES)}")
        value = value.get(_VALUES)
    try:
        listed = np.array(_checked(isinstance(value, list), value, place, says), dtype=object)
        kinds = {type(part) for part in listed.ravel()}
        if not kinds <= {int, float, str} and kinds != {bool}:
            raise Misfit(place, value, says)
        return listed.astype(dtype or (kinds.pop() if kinds in ({int}, {bool}) else float))
    except (ValueError, TypeError, OverflowError):
        raise Misfit(place, value, says) from None


def _one_of(kinds: Sequence[Any], value: Any, source: Source, place: str) -> Any:
    failures = []
    for kind in kinds:
        try:
            return decode(kind, value, source, place)
        except Misfit as misfit:
            failures.append(misfit)
    raise failures[0]


def _elements(kind: Any, value: Any, source: Source, place: str) -> list[Any]:
    _checked(isinstance(value, list), value, place, "a list")
    return [decode(kind, part, source, f"{place}/{i}") for i, part in enumerate(value)]


def _mapping(key: Any, kind: Any, value: Any, source: Source, place: str) -> dict[Any, Any]:
    _checked(isinstance(value, dict), value, place, "a mapping")
    return {
        _decoded_key(key, name, source, place): decode(kind, part, source, f"{place}/{name}")
        for name, part in value.items()
    }


def _decoded_key(kind: Any, name: str, source: Source, place: str) -> Any:
    if get_origin(kind) is not tuple:
        return decode(kind, name, source, place)
    inner = get_args(kind)
    return decode(kind, name.rsplit("/", len(inner) - 1), source, place)


def _instance(cls: type, value: Any, source: Source, place: str) -> Any:
    """An object of one of our classes."""
    _checked(isinstance(value, dict), value, place, "a mapping")
    if hasattr(cls, "_from_parts"):
        head = {name: part for name, part in value.items() if name != "arrays"}
        arrays = _mapping(str, np.ndarray, value.get("arrays", {}), source, place)
        return cls._from_parts(head, arrays, source.path)  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for name, member in members(cls).items():
        if member.written in value:
            found[name] = decode(member.kind, value[member.written], source, f"{place}/{member.written}")
        elif not member.optional:
            raise Misfit(f"{place}/{name}", None, "present")
    if is_typeddict(cls):
        return found
    if issubclass(cls, (list, dict)):
        made = cls(found.pop(_ITEMS))
        vars(made).update(found)
    else:
        made = cls(**found)
    if isinstance(made, PortTable):
        check_ports(made.ports, made.served_by, source.path)
    elif hasattr(made, "_check"):
        made._check(source.path)  # type: ignore[attr-defined]
    return made


def read_parts(cls: type, value: Any, arrays: Mapping[str, np.ndarray], path: Path) -> Any:
    """An object of a class from what its file holds; a file that does not fit is refused."""
    try:
        return decode(cls, value, Source(arrays, path))
    except Misfit as misfit:
        raise damaged(path, str(misfit)) from None
