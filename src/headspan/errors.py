"""The exceptions and warnings that users are meant to read, and how text of strangers is shown to them."""

from __future__ import annotations

import sys
import warnings


class _Escapes(dict[int, str]):
    """How every character is shown; found once."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        shown = character if character.isprintable() else character.encode("unicode_escape").decode()
        self[code] = shown
        return shown


_ESCAPES = _Escapes()


def visible(text: str) -> str:
    r"""Text on one line, with what would move the cursor, change colours or the direction of writing spelled out.

    Names of files, tensors, tokens and labels come from strangers, and a terminal obeys what is printed on it.

    >>> visible("red\x1b[31m, bell\x07, reversed\u202e")
    'red\\x1b[31m, bell\\x07, reversed\\u202e'
    """
    return text.translate(_ESCAPES)


class HeadspanError(Exception):
    """Bad input or an impossible request, told in one plain sentence.

    The sentence says what was wrong, what was seen (shape, key, file) and what to do.
    The command line prints it and exits with code 2; it never shows a traceback for it.

    >>> str(HeadspanError("no tensor named 'a\\nb'"))
    "no tensor named 'a\\\\nb'"
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(visible(sentence))


class HeadspanWarning(UserWarning):
    """Something that a reader should know before they rely on an answer: a result that was edited, for example.

    The command line prints it as one line on stderr and goes on.
    """


def warn(sentence: str) -> None:
    """Warn whoever called the package, at the line of theirs that did."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "headspan":
        level, frame = level + 1, frame.f_back
    warnings.warn(HeadspanWarning(visible(sentence)), stacklevel=level)


class WrongArgument(HeadspanError, TypeError):
    """A value of the wrong kind; also a TypeError, as Python code expects."""


def missing_extra(package: str, extra: str, what: str) -> HeadspanError:
    """The error for an optional dependency that is not installed.

    >>> str(missing_extra("gguf", "gguf", "reading GGUF files"))
    "reading GGUF files needs the package gguf, which is not installed: run pip install 'headspan[gguf]'"
    """
    return HeadspanError(
        f"{what} needs the package {package}, which is not installed: run pip install 'headspan[{extra}]'"
    )
