"""Arguments of public functions checked against their annotations, with the message that a command would give.

>>> @checked
... def double(k: int = 1) -> int:
...     return 2 * k
>>> double("many")
Traceback (most recent call last):
    ...
headspan.vocabulary.errors.WrongArgument: k must be a whole number, not 'many'
"""

from __future__ import annotations

import builtins
import collections.abc
import functools
import inspect
import itertools
import math
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import numpy as np

from headspan.vocabulary.errors import WrongArgument, remember_text

P = ParamSpec("P")
T = TypeVar("T")

_LARGEST = 2**63 - 1  # larger integers do not fit in an array
_MOST = 100_000  # items allowed from a generator
_LISTED = 100  # items of a list whose texts are remembered
_OPENED = (
    "ModelLike",
    "ScoresLike",
    "NodesLike",
    "OneNode",
    "OnePath",
    "EndsLike",
)  # not checked here but where they are opened
_WORDS = {
    "Scores": "scores (hs.score or hs.load gives them)",
    "AttentionWeights": "weights (hs.open gives them)",
    "Labels": "labels (hs.Labels.load gives them)",
    "Head": "a head such as L4H7",
    "Node": "a node",
    "Port": "a head with its role such as L4H11.O",
    "Pairing": "a pairing such as OK",
    "PortTable": "a table of ports",
    "Role": "a role (Q, K, V or O)",
    "PathLike": "a path",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "NoneType": "None",
    "Callable": "a function",
    "Mapping": "a mapping",
    "dict": "a mapping",
}


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse arguments whose types do not match the annotations, before the function runs.

    Plain types, unions, literals, paths, lists and functions are checked; other annotations are left to the function
    itself. A generator is passed on as a list.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)
        hints = _hints(function)
        for name, value in bound.arguments.items():
            remember_text(*(value if isinstance(value, (list, tuple)) and len(value) < _LISTED else [value]))
            if name in hints:
                bound.arguments[name] = expect(value, hints[name], name)
        return function(*bound.args, **bound.kwargs)

    return call


def expect(value: Any, kind: Any, name: str) -> Any:
    """The value, if it matches ``kind`` (a type annotation); raises with what the argument must be otherwise."""
    if isinstance(value, Iterator) and not _fits(value, kind, deep=False):
        raise WrongArgument(f"{name} must be {_described(kind)}, not {_shown(value)}")
    if isinstance(value, Iterator) and _is_list(kind):
        value = list(itertools.islice(value, _MOST + 1))
    if not _fits(value, kind) or (isinstance(value, list) and len(value) > _MOST):
        raise WrongArgument(f"{name} must be {_described(kind)}, not {_shown(value)}")
    return value


class _Names(dict[str, Any]):
    """What the names in an annotation mean; a class that only the type checker imports is known by its name."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        if name in _WORDS:
            return type(name, (), {"by_name": True, "__class_getitem__": classmethod(lambda cls, item: cls)})
        raise KeyError(name)


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function as types, without those that cannot be resolved."""
    found: dict[str, Any] = {}
    space = _Names(getattr(function, "__globals__", {}) | dict.fromkeys(_OPENED, Any))
    for name, hint in getattr(function, "__annotations__", {}).items():
        try:
            kind = eval(hint, {}, space) if isinstance(hint, str) else hint  # headspan's own source only
        except (NameError, KeyError, TypeError, AttributeError):
            continue
        if name != "return":
            found[name] = kind
    return found


def _options(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the kind itself."""
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(option for member in get_args(kind) for option in _options(member))
    return (kind,)


def _is_list(kind: Any) -> bool:
    return any(get_origin(option) in _LISTS for option in _options(kind))


_LISTS = (list, tuple, set, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


def _fits(value: Any, kind: Any, deep: bool = True) -> bool:
    options = _options(kind)
    path = any(option is os.PathLike or get_origin(option) is os.PathLike for option in options)
    if path and isinstance(value, str) and "\0" in value:
        return False
    return any(_fits_one(value, option, deep) for option in options)


def _fits_one(value: Any, kind: Any, deep: bool) -> bool:
    origin = get_origin(kind)
    if kind is Any:
        return True
    if kind is None or kind is type(None):
        return value is None
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if origin in _LISTS:
        return _fits_list(value, kind, deep)
    if kind is os.PathLike or origin is os.PathLike:
        return isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)
    if origin is collections.abc.Callable or kind is Callable:
        return callable(value)
    if kind is bool:
        return isinstance(value, (bool, np.bool_))
    if kind in (int, float) and isinstance(value, (bool, np.bool_)):
        return False
    if kind is int:
        return isinstance(value, (int, np.integer)) and abs(int(value)) <= _LARGEST
    if kind is float:
        return isinstance(value, (int, float, np.integer, np.floating)) and _finite(value)
    plain = origin or kind
    if getattr(plain, "by_name", False):
        return any(base.__name__ == plain.__name__ for base in type(value).__mro__)
    return isinstance(value, plain) if isinstance(plain, type) else True


def _fits_list(value: Any, kind: Any, deep: bool) -> bool:
    if isinstance(value, (str, bytes, bytearray, Mapping, np.ndarray)) or not isinstance(value, Iterable):
        return False
    if get_origin(kind) is not collections.abc.Iterable and isinstance(value, Iterator):
        return False
    if not deep or isinstance(value, Iterator):
        return True
    members = [member for member in get_args(kind) if member is not Ellipsis]
    return not members or all(_fits(item, members[0]) for item in value)


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _described(kind: Any) -> str:
    """An annotation in words."""
    words = list(dict.fromkeys(map(_word, _options(kind))))
    if "None" in words and len(words) > 1:
        words.remove("None")
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _word(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if origin in _LISTS:
        members = [member for member in get_args(kind) if member is not Ellipsis]
        return f"a list of {_described(members[0]).removeprefix('a ')}" if members else "a list"
    name = getattr(origin or kind, "__name__", str(kind))
    return _WORDS.get(name, name)


def _shown(value: Any) -> str:
    """A value as a short text."""
    if isinstance(value, (str, bytes, bool, float, type(None))) or (isinstance(value, int) and abs(value) <= _LARGEST):
        text = repr(value)
        return text if len(text) <= 60 else text[:60] + "…"
    if isinstance(value, int):
        return "a number this large"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, (list, tuple)):
        return (
            f"a {type(value).__name__} of {', '.join(dict.fromkeys(type(v).__name__ for v in value[:9])) or 'nothing'}"
        )
    return f"a {type(value).__name__}"
