"""Parts of remote files on disk, by content: ``ranges/CONTENT/NUMBER`` in the user's cache folder.

CONTENT is a hash of the size, of the etags (from the hub and from the server that sends the bytes) and of their origin
(endpoint and repository). A part cannot be checked against the hash of the whole file, so an etag is only a name, and
bytes from one hub must not be used for another. Every part has one mebibyte, except the last. A part carries a hash of
its position and its bytes, so that a part that was damaged or planted is fetched again. Parts are never changed, only
added and removed: a part that one process removes is fetched again by the next that needs it.

``ranges/COMMIT.json`` records the content of each file of a commit, so that it is found without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from headspan.system.cache_folder import cache_folder
from headspan.system.regular import read_regular
from headspan.vocabulary.errors import HeadspanError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

CHUNK = 1 << 20
MARKER = "headspan-ranges.json"
_DIGEST = 16
_RECORD = re.compile(r"[0-9a-f]{32}\.json")


def root() -> Path:
    """The cache folder of remote files."""
    return cache_folder() / "ranges"


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock of the cache, against this and other processes; no lock on systems without locks."""
    handle = -1
    with suppress(OSError):  # the next write reports what is wrong with the folder
        root().mkdir(parents=True, exist_ok=True, mode=0o700)
        if fcntl is not None:
            handle = os.open(root(), os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle >= 0:
            os.close(handle)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def disk_bytes(number: int, size: int) -> int:
    """The disk space of a part of that size."""
    return max(0, min(CHUNK, size - number * CHUNK)) + _DIGEST


class ChunkStore:
    """The parts of one remote file.

    etag, size, served: what identifies its content; ``served`` is the etag of the server that sends the bytes.
    origin: endpoint and repository. label: the file's name in messages.
    """

    def __init__(self, etag: str, size: int, served: str, origin: str, label: str) -> None:
        self.size, self.label = size, label
        self._key = hashlib.sha256(json.dumps([origin, etag, size, served]).encode()).hexdigest()[:32]
        self.folder = root() / self._key

    def length(self, number: int) -> int:
        """Bytes of a part."""
        return min(CHUNK, self.size - number * CHUNK)

    def has(self, number: int) -> bool:
        """Whether a part of the right size is there; its content is checked when it is read."""
        with suppress(OSError):
            found = os.stat(self._path(number))
            return stat.S_ISREG(found.st_mode) and found.st_size == disk_bytes(number, self.size)
        return False

    def missing(self, begin: int, end: int) -> list[int]:
        """The parts of a range that are not there."""
        return [n for n in range(begin // CHUNK, -(-end // CHUNK)) if not self.has(n)]

    def read(self, number: int) -> bytes | None:
        """The bytes of a part, or None if it is not there or not what was written."""
        try:
            content = read_regular(self._path(number), disk_bytes(number, self.size))
        except OSError:
            return None
        data, digest = content[:-_DIGEST], content[-_DIGEST:]
        if len(data) != self.length(number) or self._digest(number, data) != digest:
            with suppress(OSError):
                self._path(number).unlink()
            return None
        return data

    def write(self, number: int, data: bytes) -> None:
        """Store a part, atomically."""
        try:
            self._mark()
            write_whole(self._path(number), data + self._digest(number, data))
        except OSError as error:
            raise HeadspanError(
                f"a part of {self.label} cannot be stored in {self.folder.parent}: {error.strerror or error}; "
                "free some space there, or choose another folder with HEADSPAN_CACHE_DIR"
            ) from None

    def touch(self) -> None:
        """Record that the content was used now."""
        with suppress(OSError):
            os.utime(self.folder / MARKER)

    def _mark(self) -> None:
        marker = self.folder / MARKER
        if not marker.is_file() or marker.is_symlink():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(marker, json.dumps({"file": self.label, "size": self.size}).encode())

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08x}"

    def _digest(self, number: int, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_DIGEST, key=f"{self._key}{number:08x}".encode()).digest()


class Known(NamedTuple):
    """What identifies a content: etag and size as the hub says them, the etag of who served its bytes, which hub."""

    etag: str
    size: int
    served: str
    origin: str

    def store(self, label: str) -> ChunkStore:
        return ChunkStore(self.etag, self.size, self.served, self.origin, label)


class Records:
    """The files of one commit that were read by ranges. origin: endpoint and repository."""

    def __init__(self, origin: str, commit: str) -> None:
        self.origin = origin
        self._path = root() / f"{hashlib.sha256(f'{origin}@{commit}'.encode()).hexdigest()[:32]}.json"

    def known(self) -> dict[str, Known]:
        """By the names of the files."""
        return {name: known for name, known in _read(self._path).items() if known.origin == self.origin}

    def remember(self, name: str, known: Known) -> None:
        self._change(name, known)

    def forget(self, name: str) -> None:
        self._change(name, None)

    def _change(self, name: str, known: Known | None) -> None:
        if self.known().get(name) == known:
            return
        with locked(), suppress(OSError):  # several files are opened at once
            everything = {**self.known(), name: known}
            _write(self._path, {name: entry for name, entry in everything.items() if entry is not None})


def forget_lost() -> None:
    """Forget the contents that were removed; for use under the lock."""
    with suppress(OSError):
        for path in root().iterdir():
            if _RECORD.fullmatch(path.name) and not path.is_symlink():
                before = _read(path)
                after = {name: known for name, known in before.items() if known.store(name).folder.exists()}
                if after != before or not after:
                    _write(path, after)


def _read(path: Path) -> dict[str, Known]:
    try:
        stored = json.loads(read_regular(path, 10_000_000))
        return {str(name): Known(str(e), int(size), str(s), str(o)) for name, (e, size, s, o) in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # or a record of an earlier version
        return {}


def _write(path: Path, known: dict[str, Known]) -> None:
    if known:
        write_whole(path, json.dumps(known).encode())
    else:
        path.unlink(missing_ok=True)
