"""How much memory there is, and how much a run may take."""

from __future__ import annotations

import re
from pathlib import Path

from headspan.vocabulary.errors import HeadspanError

FEWER_SCORES = "Score fewer similarities or pairings, or use a machine with more"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_memory(text: str | int) -> int:
    """Bytes from ``2GB``, ``512MiB`` or a plain number.

    >>> parse_memory("2GB"), parse_memory("1 GiB")
    (2000000000, 1073741824)
    """
    match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]i?)?b?", str(text).strip().lower())
    if match is None or isinstance(text, bool):
        raise HeadspanError(f"{str(text)[:50]!r} is not an amount of memory: write for example 2GB or 512MB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def total_memory() -> int:
    """Bytes of memory that this machine has, or that the container may use."""
    import psutil

    return min([psutil.virtual_memory().total, *(limit for limit, _ in _container_limits())])


def available_memory() -> int:
    """Bytes available without swapping, within the limits of a container."""
    import psutil

    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in _container_limits())]))


def check_room(what: str, needed: int, advice: str = "Use a machine with more") -> None:
    """Raise before work that needs more memory than is free."""
    free = available_memory()
    if needed > free:
        raise HeadspanError(
            f"{what} needs about {needed / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB are free. {advice}"
        )


def default_memory() -> int:
    """The memory that a run uses by default: half of what is free, rounded down to a power of two.

    Rounding lets the same command make the same tiles and resume them, although free memory changes.

    >>> default_memory().bit_count() == 1
    True
    """
    return 1 << max(available_memory() // 2, 1).bit_length() - 1


# Files of the two versions of control groups: limit, use, and the key for cached files.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def _container_limits(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """Limit and use of the control group of this process and of all groups around it, Linux only."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    found = []
    for number, controllers, name in (line for line in lines if len(line) == 3):
        if number == "0" and not controllers:
            tops, files = [mount, mount / "unified"], _V2
        elif "memory" in controllers.split(","):
            tops, files = [mount / "memory", mount / controllers], _V1
        else:
            continue
        parts = [part for part in name.split("/") if part not in ("", "..")]
        # In a container its own group is mounted at the root, although its name may be the one on the host.
        for top in dict.fromkeys(tops):
            for depth in range(len(parts), -1, -1):
                limit = _limit(top.joinpath(*parts[:depth]), *files)
                found += [limit] if limit is not None else []
    return found


def _limit(group: Path, limit: str, use: str, cached: str) -> tuple[int, int] | None:
    """Limit and use of one group; None without a limit."""
    try:
        most = int((group / limit).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max"
        return None
    used = 0
    try:
        used = int((group / use).read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        used -= int(statistics.get(cached, 0))
    except (OSError, ValueError):
        pass
    return most, max(0, used)
