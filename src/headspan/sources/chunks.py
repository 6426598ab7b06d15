"""Parts of remote files on disk, by content: ``ranges/CONTENT/NUMBER`` in the user's cache folder.

CONTENT is a hash of the size and of what the hub says identifies the content (its etag); every part has a mebibyte, the
last one less. A part carries a hash of its place and its bytes, so that one that was damaged or put there by somebody
else is fetched again. Parts are never changed, only added and removed: processes share them without locks, and what one
removes another fetches again.

The folder stays under a limit (``HEADSPAN_CACHE_LIMIT``, 50GB by default): contents that were not used for longest go
first. Only files with names of ours in a folder with our marker are ever removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from headspan.errors import HeadspanError
from headspan.system.cache import cache_folder
from headspan.system.memory import parse_memory

CHUNK = 1 << 20
_LIMIT = "50GB"
_MARKER = "headspan-ranges.json"
_DIGEST = 16
_FOLDER = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(r"[0-9a-f]{8}|\.[0-9a-f]{16}\.tmp")


class Content(NamedTuple):
    """One content in the cache, as ``headspan cache`` lists it."""

    file: str
    bytes: int
    of: int
    used: float  # seconds since 1970
    folder: Path


class ChunkStore:
    """The parts of one remote file.

    etag, size: what identifies its content. label: which file that is, for people.
    """

    def __init__(self, etag: str, size: int, label: str) -> None:
        self.size = size
        self._key = hashlib.sha256(f"{etag}\n{size}".encode()).hexdigest()[:32]
        self.folder = _root() / self._key
        self._about = {"file": label, "etag": etag, "size": size}

    @property
    def count(self) -> int:
        return -(-self.size // CHUNK)

    def length(self, number: int) -> int:
        """Bytes of a part."""
        return min(CHUNK, self.size - number * CHUNK)

    def has(self, number: int) -> bool:
        """Whether a part of the right size is there; its content is checked when it is read."""
        with suppress(OSError):
            return os.stat(self._path(number)).st_size == self.length(number) + _DIGEST
        return False

    def read(self, number: int) -> bytes | None:
        """The bytes of a part, or None if it is not there or not what was written."""
        try:
            content = self._path(number).read_bytes()
        except OSError:
            return None
        data, digest = content[:-_DIGEST], content[-_DIGEST:]
        if len(data) != self.length(number) or self._digest(number, data) != digest:
            with suppress(OSError):
                self._path(number).unlink()
            return None
        return data

    def write(self, number: int, data: bytes) -> None:
        """Keep a part; it appears whole or not at all."""
        try:
            self._mark()
            temporary = self.folder / f".{secrets.token_hex(8)}.tmp"
            temporary.write_bytes(data + self._digest(number, data))
            os.replace(temporary, self._path(number))
        except OSError as error:
            raise HeadspanError(
                f"a part of {self._about['file']} cannot be kept in {self.folder.parent}: {error.strerror or error}; "
                "free some room there, or choose another place with HEADSPAN_CACHE_DIR"
            ) from None

    def touch(self) -> None:
        """Remember that the content was used just now."""
        with suppress(OSError):
            os.utime(self.folder / _MARKER)

    def _mark(self) -> None:
        marker = self.folder / _MARKER
        if not marker.exists():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = self.folder / f".{secrets.token_hex(8)}.tmp"
            temporary.write_text(json.dumps(self._about), encoding="utf-8")
            os.replace(temporary, marker)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08x}"

    def _digest(self, number: int, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_DIGEST, key=f"{self._key}{number:08x}".encode()).digest()


def remember(repo: str, commit: str, name: str, etag: str, size: int) -> None:
    """Keep what identifies the content of a file of a commit, so that it is found again without a network."""
    known = remembered(repo, commit)
    if known.get(name) != (etag, size):
        with suppress(OSError):
            path = _commit_file(repo, commit)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
            temporary.write_text(json.dumps({**known, name: (etag, size)}), encoding="utf-8")
            os.replace(temporary, path)


def remembered(repo: str, commit: str) -> dict[str, tuple[str, int]]:
    """Etag and size of the files of a commit that were read by ranges."""
    try:
        known = json.loads(_commit_file(repo, commit).read_bytes()[:10_000_000])
        return {str(name): (str(etag), int(size)) for name, (etag, size) in known.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _commit_file(repo: str, commit: str) -> Path:
    return _root() / f"{hashlib.sha256(f'{repo}@{commit}'.encode()).hexdigest()[:32]}.json"


def contents() -> list[Content]:
    """What is in the cache, the latest used first."""
    found = []
    for folder in _folders():
        about = _about(folder)
        if about is not None:
            parts = [path for path in _files(folder) if len(path.name) == 8]
            size = sum(path.stat().st_size - _DIGEST for path in parts)
            used = (folder / _MARKER).stat().st_mtime
            found.append(Content(about["file"], size, about["size"], used, folder))
    return sorted(found, key=lambda content: -content.used)


def remove(content: Content) -> int:
    """Remove a content; the bytes that it took. What is not ours in its folder stays, and so does the folder then."""
    for path in _files(content.folder):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        if [path.name for path in content.folder.iterdir()] == [_MARKER]:
            (content.folder / _MARKER).unlink()
            content.folder.rmdir()
    return content.bytes


def cache_limit() -> int:
    """Bytes that the parts may take on disk."""
    given = os.environ.get("HEADSPAN_CACHE_LIMIT", _LIMIT)
    try:
        return parse_memory(given)
    except HeadspanError:
        raise HeadspanError(f"HEADSPAN_CACHE_LIMIT is {given[:40]!r}, not a size like 50GB") from None


def make_room(needed: int, keep: set[Path]) -> None:
    """Remove what was not used for longest, so that ``needed`` more bytes stay under the limit; never ``keep``."""
    limit, here = cache_limit(), contents()
    used = sum(content.bytes for content in here)
    kept = sum(content.bytes for content in here if content.folder in keep)
    if kept + needed > limit:
        raise HeadspanError(
            f"the parts of this model take {(kept + needed) / 1e9:.1f} GB, and the cache may have {limit / 1e9:.1f} GB:"
            " set HEADSPAN_CACHE_LIMIT to more, or download whole files with --download"
        )
    for content in reversed(here):
        if used + needed <= limit:
            break
        if content.folder not in keep:
            used -= remove(content)
    place = _root()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise HeadspanError(
            f"the parts of this model take {needed / 1e9:.1f} GB more, and {place} has room for {free / 1e9:.1f} GB: "
            "free some, or choose another place with HEADSPAN_CACHE_DIR"
        )


def age(content: Content) -> float:
    """Days since a content was used."""
    return max(0.0, time.time() - content.used) / 86400


def _root() -> Path:
    return cache_folder() / "ranges"


def _folders() -> Iterator[Path]:
    with suppress(OSError):
        yield from (path for path in _root().iterdir() if _FOLDER.fullmatch(path.name) and not path.is_symlink())


def _files(folder: Path) -> list[Path]:
    """The files in a folder that are ours by name."""
    with suppress(OSError):
        return [path for path in folder.iterdir() if _OURS.fullmatch(path.name) and not path.is_symlink()]
    return []


def _about(folder: Path) -> dict[str, Any] | None:
    """What the marker of a folder says, or None where there is none of ours."""
    try:
        about = json.loads((folder / _MARKER).read_bytes()[:10_000])
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(about, dict) and isinstance(about.get("file"), str) and type(about.get("size")) is int
    return about if sound else None
