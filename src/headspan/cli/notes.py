"""What a command prints on stderr: notes, and the warnings and log messages of the library."""

from __future__ import annotations

import ast
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headspan.vocabulary.errors import HeadspanWarning, message

_printed: set[str] = set()  # by the command that runs


def note(text: str) -> None:
    """Print a note to stderr, so that it never mixes with the output; a command prints each text once."""
    _print(text, "")


def _print(text: str, kind: str) -> None:
    if text not in _printed and sys.stderr is not None:
        _printed.add(text)
        print(f"{kind}{message(in_options(text))}", file=sys.stderr)


@contextmanager
def notes_as_lines() -> Iterator[None]:
    """Print every `HeadspanWarning` and log message of the library as one line; leave other warnings alone."""
    logger, handler = logging.getLogger("headspan"), _Lines()
    level = logger.level
    _printed.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("always", HeadspanWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, HeadspanWarning):
                _print(str(message), "warning: ")
            else:
                others(message, category, *place, **more)

        warnings.showwarning = show
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


# ------------------------------------------------------------------------------------------ Python code as options

_CODE = re.compile(r"`([^`]{1,300})`")
_OPTIONS = {"model": "--weights", "from_": "--from", "k": "-k"}  # others: --name
_ARGUMENTS = {"scores": "RESULT"}  # others: NAME


def in_options(text: str) -> str:
    """A message of the library, in which Python code is in backquotes, with that code as a user would type it.

    >>> in_options("leave out `from_`, or add `screen=100`: `hs.score(model, out='r.safetensors')`")
    'leave out --from, or add --screen 100: headspan score MODEL --out r.safetensors'
    """
    return _CODE.sub(lambda found: _typed(found[1]) or found[0], text)


def _typed(code: str) -> str | None:
    """Arguments as options, and calls of public functions as commands; None for other code."""
    try:
        call = ast.parse(f"f({code})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a name of a file, in backquotes by chance
        return None
    if not isinstance(call, ast.Call):
        return None
    if len(call.args) == 1 and not call.keywords:
        (one,) = call.args
        if isinstance(one, ast.Name):
            return _option(one.id)
        if isinstance(one, ast.Call) and ast.unparse(one.func).startswith("hs."):
            words = [ast.unparse(one.func).replace("hs.", "headspan ", 1), *map(_positional, one.args)]
            return " ".join([*words, *map(_keyword, one.keywords)])
    return " ".join(map(_keyword, call.keywords)) if call.keywords and not call.args else None


def _option(name: str) -> str:
    return _OPTIONS.get(name, f"--{name.replace('_', '-')}")


def _positional(value: ast.expr) -> str:
    if isinstance(value, ast.Name):
        return _ARGUMENTS.get(value.id, value.id.upper())
    return str(value.value) if isinstance(value, ast.Constant) else ast.unparse(value)


def _keyword(given: ast.keyword) -> str:
    if isinstance(given.value, ast.Constant) and given.value.value is True:
        return _option(str(given.arg))
    return f"{_option(str(given.arg))} {_positional(given.value)}"
