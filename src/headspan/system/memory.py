"""How much memory there is, and how much a run may take."""

from __future__ import annotations

import os
import re

from headspan.errors import HeadspanError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_memory(text: str | int) -> int:
    """Bytes from ``2GB``, ``512MiB`` or a plain number.

    >>> parse_memory("2GB"), parse_memory("1 GiB")
    (2000000000, 1073741824)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(text).strip().lower())
    if match is None:
        raise HeadspanError(f"{text!r} is not an amount of memory: write for example 2GB or 512MB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def total_memory() -> int | None:
    """Bytes of memory that this machine has, or None where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def available_memory() -> int:
    """Bytes that can be taken now without swapping; the container's limit counts where there is one."""
    free = total_memory() or 4 * 2**30
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            free = min(free, int(limit.read()))
    except (OSError, ValueError):
        pass
    return free


def default_memory() -> int:
    """The share of free memory that a run takes unless told otherwise: half of it, rounded down to a power of two.

    Rounded, so that the same command makes the same tiles again and can go on with them, though free memory changes.

    >>> default_memory().bit_count() == 1
    True
    """
    return 1 << (available_memory() // 2).bit_length() - 1
