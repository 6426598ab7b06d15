"""Opening untrusted files: only ordinary files, never pipes or devices."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# Opening a pipe does not wait for its other end.
CAREFUL = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of an ordinary file of at most ``most`` bytes; OSError for pipes, sockets, devices and folders."""
    handle = os.open(path, os.O_RDONLY | CAREFUL)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not an ordinary file")
        if found.st_size > most:
            raise OSError(f"{path} has {found.st_size} bytes, more than the {most} allowed")
        return file.read(found.st_size)  # reading `most` would allocate a buffer of that size
