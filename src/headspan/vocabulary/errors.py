"""Exceptions and warnings for users, and how messages show untrusted text."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections import deque
from typing import cast

from headspan.vocabulary.notebook import shown_before

QUOTED = 200  # characters of a name, path or value that a message shows
_LONGEST = 900  # characters of a whole message
_LONG = re.compile(rf"\S{{{QUOTED + 1},}}|'[^']{{{QUOTED + 1},}}'|\"[^\"]{{{QUOTED + 1},}}\"")


class _Escapes(dict[int, str]):
    """How each character is shown, computed once."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        shown = character if character.isprintable() else character.encode("unicode_escape").decode()
        self[code] = shown
        return shown


_ESCAPES = _Escapes()


def visible(text: str) -> str:
    r"""Text on one line, with escapes for control characters: cursor, colours, writing direction.

    Names of files, tensors, tokens and labels are untrusted, and a terminal obeys the control characters it prints.

    >>> visible("red\x1b[31m, bell\x07, reversed\u202e")
    'red\\x1b[31m, bell\\x07, reversed\\u202e'
    """
    return text.translate(_ESCAPES)


def quoted(value: object, most: int = QUOTED) -> str:
    """A value as a message shows it; a long one keeps its beginning and its end, so that a suffix stays visible.

    >>> quoted("a" * 500 + ".npz", 20)
    'aaaaaaaaaaaa…aaa.npz'
    """
    text = str(value)
    if len(text) <= most:
        return text
    end = most * 3 // 8
    return f"{text[: most - end - 1]}…{text[len(text) - end :]}"


def message(text: str) -> str:
    """The text of an error or warning: on one line, escaped, with at most 200 characters of any one name or value.

    Long words, quotations and texts noted by `remember_text` are shortened, then the message as a whole.

    >>> len(message("no tensor named " + "x" * 5000))
    216
    """
    shown = _LONG.sub(lambda match: quoted(match[0]), visible(text[: 20 * _LONGEST]))
    return quoted(_cut_given(shown) if len(shown) > QUOTED else shown, _LONGEST)


_given: deque[str] = deque(maxlen=16)


def remember_text(*texts: object) -> None:
    """Record long texts that a caller passed, so that no message repeats more than 200 characters of one."""
    for text in texts:
        found: object = os.fspath(cast("os.PathLike[str]", text)) if isinstance(text, os.PathLike) else text
        if isinstance(found, str) and len(found) > QUOTED and found not in _given:
            _given.append(found[: 4 * _LONGEST])


def _cut_given(shown: str) -> str:
    """A message with every run of more than 200 characters of a recorded text shortened in the middle."""
    size = QUOTED + 1
    windows: dict[str, list[int]] = {}
    for i in range(len(shown) - size + 1):
        windows.setdefault(shown[i : i + size], []).append(i)
    runs: list[list[int]] = []
    theirs = {one[i : i + size] for text in _given for one in [visible(text)] for i in range(len(one) - size + 1)}
    for start in sorted(i for window in windows.keys() & theirs for i in windows[window]):
        if runs and start <= runs[-1][1]:
            runs[-1][1] = start + size
        else:
            runs.append([start, start + size])
    for start, stop in reversed(runs):
        shown = shown[:start] + quoted(shown[start:stop]) + shown[stop:]
    return shown


class HeadspanError(Exception):
    """Bad input or an impossible request, reported in one short message.

    The message says what was wrong, what was seen (shape, key, file) and what to do.
    The command line prints it without a traceback and exits with code 2.

    >>> str(HeadspanError("no tensor named 'a\\nb'"))
    "no tensor named 'a\\\\nb'"
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(message(sentence))


class HeadspanWarning(UserWarning):
    """Something to know before relying on a result, for example that its file was edited.

    The command line prints it as one line on stderr and continues.
    """


def warn(sentence: str) -> None:
    """Issue a `HeadspanWarning` at the line of the caller outside this package; in a notebook, each only once."""
    if not shown_before(sentence):
        warn_outside(HeadspanWarning(message(sentence)))


def warn_outside(warning: Warning) -> None:
    """Issue a warning at the line outside this package that called it."""
    level, frame = 2, inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "headspan":
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)


def inform(sentence: str) -> None:
    """Log what happens to a run (logger ``headspan``, level INFO); the command line prints it."""
    import logging  # most runs have nothing to log

    logging.getLogger("headspan").info("%s", message(sentence))


def refuse_ignored(where: str, **given: object) -> None:
    """Refuse arguments that would do nothing: those given here that are neither None nor False.

    >>> refuse_ignored("without screening", delta=0.1, seed=None)
    Traceback (most recent call last):
        ...
    headspan.vocabulary.errors.HeadspanError: `delta` has no effect without screening. Leave it out
    """
    names = [f"`{name}`" for name, value in given.items() if value is not None and value is not False]
    if names:
        has, it = ("has", "it") if len(names) == 1 else ("have", "them")
        raise HeadspanError(f"{' and '.join(names)} {has} no effect {where}. Leave {it} out")


class WrongArgument(HeadspanError, TypeError):
    """A value of the wrong type; also a TypeError."""


def missing_extra(package: str, extra: str, what: str) -> HeadspanError:
    """The error for an optional dependency that is not installed.

    >>> str(missing_extra("gguf", "gguf", "reading GGUF files"))
    "reading GGUF files needs the package gguf, which is not installed: run pip install 'headspan[gguf]'"
    """
    return HeadspanError(
        f"{what} needs the package {package}, which is not installed: run pip install 'headspan[{extra}]'"
    )
