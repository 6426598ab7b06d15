"""The cache of remote files and its size limit.

Parts stay under a limit (``HEADSPAN_CACHE_LIMIT``, 50GB by default), however many processes add to them: each makes
room for what it adds, under a lock. The least recently used contents are removed first. Only files that
headspan named, in a folder that it made, are ever removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from headspan.checkpoints.hub.chunks import MARKER, disk_bytes, forget_lost, locked, root
from headspan.results.metadata import is_object
from headspan.results.tabular import Tabular
from headspan.system.arguments import checked
from headspan.system.memory import parse_memory
from headspan.system.regular import read_regular
from headspan.vocabulary.errors import HeadspanError

_LIMIT = "50GB"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"[0-9a-f]{8}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
_ABANDONED = 600  # seconds after which an unfinished file belongs to a killed run


class Content(NamedTuple):
    """One content in the cache and its folder."""

    file: str
    bytes: int  # on disk
    of: int
    used: float  # seconds since 1970
    folder: Path


def contents() -> list[Content]:
    """What is in the cache, the latest used first."""
    found: list[Content] = []
    for folder in _folders():
        about = _about(folder)
        if about is not None:
            with suppress(OSError):  # another process is removing it
                # Sizes are computed from names: reading fifty thousand file sizes before every write takes too long.
                size = sum(disk_bytes(int(name, 16), about["size"]) for name in _ours(folder, _PART))
                size += sum((folder / name).stat().st_size for name in _ours(folder, _TEMPORARY))
                used = (folder / MARKER).stat().st_mtime
                found.append(Content(about["file"], size, about["size"], used, folder))
    return sorted(found, key=lambda content: -content.used)


class CachedFile(NamedTuple):
    """A file of the cache: megabytes on disk, megabytes of the whole file, days since it was used."""

    file: str
    mb: float
    of_mb: float
    days_unused: float


class CachedFiles(Tabular, list[CachedFile]):
    """Files of the cache, the latest used first."""

    def rows(self) -> list[dict[str, Any]]:
        """file, mb, of_mb, days_unused."""
        return [file._asdict() for file in self]

    def _headline(self) -> str:
        files = "1 file" if len(self) == 1 else f"{len(self)} files"
        total = size_text(sum(file.mb for file in self) * 1e6)
        return f"partial hub files: {files}, {total}; the limit is {size_text(cache_limit())}"


@checked
def cache(name: str | None = None, clear: bool = False) -> CachedFiles:
    """The cached parts of hub models whose file name contains ``name``; ``clear`` deletes them.

    The cache is in HEADSPAN_CACHE_DIR, or in the system's cache folder. It holds at most HEADSPAN_CACHE_LIMIT (50GB by
    default) and drops the least recently used files first. Files downloaded whole are in the hub's own cache.
    """
    found = [content for content in contents() if name is None or name.lower() in content.file.lower()]
    if clear:
        remove(found)
    now = time.time()
    return CachedFiles(CachedFile(c.file, c.bytes / 1e6, c.of / 1e6, max(0.0, now - c.used) / 86400) for c in found)


def remove(found: Iterable[Content]) -> None:
    """Remove contents. Other files in a folder stay, and so does the folder then."""
    with locked():
        for content in found:
            _remove(content.folder)
        forget_lost()


def cache_limit() -> int:
    """Bytes that the parts may take on disk."""
    given = os.environ.get("HEADSPAN_CACHE_LIMIT") or _LIMIT
    try:
        return parse_memory(given)
    except HeadspanError:
        raise HeadspanError(f"HEADSPAN_CACHE_LIMIT is {given[:40]!r}, not a size like 50GB") from None


def sweep() -> None:
    """Remove unfinished files of killed runs."""
    for folder in (root(), *_folders()):
        for name in _ours(folder, _TEMPORARY):
            with suppress(OSError):
                if time.time() - (folder / name).stat().st_mtime > _ABANDONED:
                    (folder / name).unlink()


@contextmanager
def room(needed: int, keep: Collection[Path]) -> Iterator[None]:
    """Reserve ``needed`` bytes until the block ends, by removing the least recently used contents.

    keep: folders that must stay.
    """
    with locked():
        _make_room(needed, keep)
        yield


def size_text(count: float) -> str:
    """A number of bytes as readable text.

    >>> size_text(24.04e9), size_text(1_500_000), size_text(80)
    ('24.04 GB', '1.5 MB', '0.08 kB')
    """
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if count >= unit), (1e3, "kB"))
    return f"{count / unit:.4g} {name}"


def _make_room(needed: int, keep: Collection[Path]) -> None:
    limit, here = cache_limit(), contents()
    kept = sum(content.bytes for content in here if content.folder in keep)
    fits = kept + needed <= limit
    over = sum(content.bytes for content in here) + (needed if fits else 0) - limit  # the limit may have been lowered
    for content in reversed(here):
        if over > 0 and content.folder not in keep:
            _remove(content.folder)
            over -= content.bytes
            forget_lost()
    if not fits:
        raise HeadspanError(
            f"the parts of this model take {size_text(kept + needed)}, but the cache is limited to {size_text(limit)}:"
            " set HEADSPAN_CACHE_LIMIT to more, or download whole files with `download=True`"
        )
    with suppress(OSError):  # the next write reports what is wrong with the folder
        free = shutil.disk_usage(root()).free
        if needed > free:
            raise HeadspanError(
                f"the parts of this model take {size_text(needed)} more, but {root()} has room for {size_text(free)}: "
                "free some space, or choose another place with HEADSPAN_CACHE_DIR"
            )


def _remove(folder: Path) -> None:
    for name in (*_ours(folder, _PART), *_ours(folder, _TEMPORARY)):
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [MARKER]:
            (folder / MARKER).unlink()
            folder.rmdir()


def _folders() -> list[Path]:
    folders = [root() / name for name in _ours(root(), _FOLDER)]
    return [folder for folder in folders if not folder.is_symlink()]


def _ours(folder: Path, names: re.Pattern[str]) -> list[str]:
    """The names in a folder that headspan gave."""
    with suppress(OSError):
        return list(filter(names.fullmatch, os.listdir(folder)))
    return []


def _about(folder: Path) -> dict[str, Any] | None:
    """The content of a folder's marker, or None if headspan did not make it."""
    try:
        about = json.loads(read_regular(folder / MARKER, 10_000))
    except (OSError, ValueError, RecursionError):
        return None
    sound = is_object(about) and isinstance(about.get("file"), str) and type(about.get("size")) is int
    return about if sound and 0 <= about["size"] < 2**62 else None
