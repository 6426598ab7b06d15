"""Safe access to untrusted files: JSON, paths, sizes, content hashes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from headspan.system.inputs import input_file, reason, unreadable
from headspan.system.memory import total_memory
from headspan.system.outputs import remember_input
from headspan.system.regular import read_regular
from headspan.vocabulary.errors import HeadspanError

# Bytes of a JSON file; the largest real ones have a few kilobytes (config), 15 MB (index) and 33 MB (tokenizer).
CONFIG_LIMIT, INDEX_LIMIT, JSON_LIMIT = 4_000_000, 50_000_000, 100_000_000
PARTS_LIMIT = 6_000_000  # values in a JSON file, about 100 bytes of memory each; a real tokenizer has 2 million
HASH_BYTES = 1 << 20  # bytes read and hashed at a time


@dataclass(frozen=True)
class Stamp:
    """Size, times and inode of a file; if they are unchanged, so is the file.

    The change time of the inode (ctime) is included because the modification time can be set back.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    taken_ns: int = field(default=0, compare=False)

    @classmethod
    def of(cls, path: Path | int) -> Stamp:
        found = os.stat(path)
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, time.time_ns())

    @property
    def young(self) -> bool:
        """True if a change right after the stamp could have the same time, since file times are coarse."""
        seconds_only = self.ctime_ns % 10**9 == 0
        return self.taken_ns - self.ctime_ns < (21 * 10**8 if seconds_only else 5 * 10**7)

    def check(self, path: Path) -> None:
        try:
            now = Stamp.of(path)
        except OSError as error:
            raise HeadspanError(f"{path} disappeared while it was in use: {reason(error)}") from None
        if now != self:
            raise changed(path)

    def check_open(self, path: Path, descriptor: int) -> None:
        """The same check for the file of an open descriptor."""
        if Stamp.of(descriptor) != self:
            raise changed(path)


def changed(what: Path | str) -> HeadspanError:
    """The error for weights that changed during a run."""
    return HeadspanError(f"{what} changed while it was in use: run again when no other program writes to it")


def open_regular(path: Path) -> Stamp:
    """The stamp of a readable regular file; pipes, devices and directories are refused without opening them."""
    input_file(path, f"{path} cannot be read: no such file or directory")
    remember_input(path, model=True)
    try:
        return Stamp.of(path)
    except OSError as error:
        raise unreadable(path, error) from None


def check_parts(raw: bytes, path: Path | str) -> None:
    """Refuse JSON that would need far more memory than its size; a list of empty lists needs twenty times as much."""
    parts = sum(raw.count(mark) for mark in (b",", b"[", b"{"))
    if parts > PARTS_LIMIT:
        raise HeadspanError(f"{path} has {parts} values in its JSON, more than any real file of a model")


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A JSON object from a file of reasonable size."""
    size = open_regular(path).size
    if size > limit:
        raise HeadspanError(f"{path} has {size} bytes, more than any real JSON file of its kind")
    try:
        raw = read_regular(path, limit)
        check_parts(raw, path)
        value = json.loads(raw)
    except OSError as error:
        raise HeadspanError(f"{path} cannot be read: {reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise HeadspanError(f"{path} is not valid JSON: {reason(error)}") from None
    if not isinstance(value, dict):
        raise HeadspanError(f"{path} should hold a JSON object, but holds a {type(value).__name__}")
    return value


def check_name(where: Path | str, name: object) -> str:
    """A checked file name inside a checkpoint; refused if it is invalid or leads out of its directory."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise HeadspanError(f"{where} names a weight file {str(name)[:80]!r}, which is not a file name")
    if name.startswith(("/", "\\")) or ":" in name or ".." in name.replace("\\", "/").split("/"):
        raise HeadspanError(f"{where} names a weight file {name[:80]!r}, which is outside the directory: refused")
    return name


def config_part(config: Any, key: str) -> Mapping[str, Any]:
    """A mapping inside a config; empty if it is missing or not a mapping.

    >>> config_part({"rope": {"theta": 1}}, "rope"), config_part({"rope": [1]}, "rope")
    ({'theta': 1}, {})
    """
    found = config.get(key) if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def member(directory: Path, name: object) -> Path:
    """The path of a file in a checkpoint directory; refused if it leads out of the directory.

    The hub cache stores ``models--x/snapshots/<commit>/file`` as links to ``models--x/blobs/<hash>``, so links within
    the same cached repository are followed.
    """
    path = directory / check_name(directory, name)
    try:
        home, target = directory.resolve(), path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a name that no file system can hold
        raise HeadspanError(f"{path} cannot be read: {reason(error)}") from None
    if target.is_relative_to(home):
        return path
    in_cache = home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--")
    if in_cache and target.is_relative_to(home.parent.parent / "blobs"):
        return path
    raise HeadspanError(
        f"{path} is a link to {target}, outside its directory: refused; copy the file or give the real directory"
    )


@contextmanager
def open_stamped(path: Path, stamp: Stamp, what: str | None = None) -> Iterator[BinaryIO]:
    """The stamped file, open for reading; raises if it changes. ``what`` names what is read, for errors."""
    try:
        with path.open("rb", buffering=0) as file:
            stamp.check_open(path, file.fileno())
            yield file  # type: ignore[misc]
            stamp.check_open(path, file.fileno())
    except OSError as error:
        raise HeadspanError(f"{what or path} cannot be read: {reason(error)}") from None


def update_with_range(digest: hashlib._Hash, file: Any, begin: int, end: int, path: Path) -> None:
    """Add a byte range of an open file to a digest, a megabyte at a time."""
    buffer = memoryview(bytearray(min(HASH_BYTES, end - begin)))
    file.seek(begin)
    left = end - begin
    while left:
        got = file.readinto(buffer[: min(left, HASH_BYTES)])
        if not got:
            raise changed(path)
        digest.update(buffer[:got])
        left -= got


_FITS_ANYWHERE = 2**25  # bytes


def check_allocation(what: str, nbytes: int) -> None:
    """Refuse an array larger than the memory of this machine before allocating it."""
    if nbytes <= _FITS_ANYWHERE:  # querying the memory limit takes longer than reading a small tensor
        return
    limit = total_memory() or 64 << 30
    if nbytes > limit:
        raise HeadspanError(
            f"{what} would need {nbytes / 2**30:.0f} GiB, more than the {limit / 2**30:.0f} GiB of this machine"
        )
