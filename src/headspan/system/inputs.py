"""Paths of input files: checked before reading, with one message if a file cannot be read.

Every reader of a file that a user names comes through here, so that no error of the operating system (a name that is
too long, links in a circle, a file in place of a folder, no permission) leaves the package unchanged.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from headspan.system.outputs import remember_input, special_file
from headspan.vocabulary.errors import HeadspanError

PathLike = str | os.PathLike[str]
_SHOWN = 200  # characters of a path in a message
_NOTHING = (errno.ENOENT, errno.ENOTDIR)


def reason(error: BaseException) -> str:
    """An exception's message on one line, for the end of another message.

    >>> reason(FileNotFoundError(2, "No such file or directory", "x"))
    'no such file or directory'
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".:") if lines else type(error).__name__


def unreadable(path: PathLike, error: BaseException) -> HeadspanError:
    """The error for a path that the operating system rejects."""
    return HeadspanError(f"{_shown(path)} cannot be read: {reason(error)}")


def mode_of(path: PathLike) -> int | None:
    """The mode of the file at a path, links followed, or None if there is none.

    >>> mode_of("/no/such/file") is None
    True
    """
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in _NOTHING:
            return None
        raise unreadable(path, error) from None
    except ValueError as error:  # a zero byte, or characters that no file system allows
        raise unreadable(path, error) from None


def is_directory(path: PathLike) -> bool:
    """Whether a path is a directory; raises if the path cannot be examined."""
    mode = mode_of(path)
    return mode is not None and stat.S_ISDIR(mode)


def input_file(path: PathLike, missing: str) -> Path:
    """The path of an ordinary file that can be read, recorded as an input; ``missing`` is the error otherwise."""
    mode = mode_of(path)
    if mode is None:
        raise HeadspanError(missing)
    if not stat.S_ISREG(mode):
        raise HeadspanError(f"{_shown(path)} is {special_file(mode)}, not an ordinary file: give the name of a file")
    if not os.access(path, os.R_OK):
        raise HeadspanError(f"{_shown(path)} cannot be read: permission denied")
    remember_input(path)
    return Path(path)


def read_text(path: PathLike, missing: str, what: str, *, most: int = 2**30, encoding: str = "utf-8") -> str:
    """The text of an ordinary file of limited size; ``what`` names the kind of file in the error."""
    found = input_file(path, missing)
    try:
        size = found.stat().st_size
        if size > most:
            raise HeadspanError(f"{_shown(path)} has {size:,} bytes, too many for a {what}: give another file")
        return found.read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise HeadspanError(f"{_shown(path)} cannot be read as a {what}: {reason(error)}") from None


def _shown(path: PathLike) -> str:
    text = os.fspath(path)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
