"""Files that anybody may have put there are opened only if they are ordinary ones."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# A pipe is opened without waiting for somebody at its other end.
CAREFUL = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of an ordinary file of at most so many; OSError for anything else: pipes, sockets, devices, folders."""
    handle = os.open(path, os.O_RDONLY | CAREFUL)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not an ordinary file")
        if found.st_size > most:
            raise OSError(f"{path} has {found.st_size} bytes, more than the {most} allowed")
        return file.read(found.st_size)  # reading `most` would allocate a buffer of that size
