"""Files of the hub read by byte ranges: only what is needed, through the cache of :mod:`chunks`.

Requests are of up to sixteen mebibytes, several at a time, across files. Two versions of a file are never
mixed: :mod:`remote` refuses answers of another version than the first, and parts of different versions are
kept apart. A server that stops sending ranges is asked for the whole file. Without a network the cache alone is read.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headspan.checkpoints.hub.chunk_room import contents, remove, room, sweep
from headspan.checkpoints.hub.chunks import CHUNK, ChunkStore, disk_bytes
from headspan.checkpoints.hub.file_cache import content_hash
from headspan.checkpoints.hub.network import AT_ONCE
from headspan.checkpoints.hub.remote import NoRanges, Remote
from headspan.checkpoints.untrusted import Stamp, open_regular, open_stamped
from headspan.system.progress import progress_bar
from headspan.vocabulary.errors import HeadspanError

_RUN = 16  # parts of one request


@dataclass(frozen=True)
class RemoteStamp(Stamp):
    """Replaces the stamp of a local file: the etag fixes the content, so nothing on this disk can change."""

    @property
    def young(self) -> bool:
        return False

    def check(self, path: Path) -> None:
        """The etag of every answer is checked where it arrives."""

    def check_open(self, path: Path, descriptor: int) -> None:
        """As above."""


class RangeFile:
    """The bytes of a remote file, fetched as they are needed.

    remote: the server for what is not in the cache; None without a network.
    download: brings the whole file to this machine, for when ``remote`` sends no ranges any more.
    """

    def __init__(
        self, store: ChunkStore, remote: Remote | None = None, download: Callable[[], Path] | None = None
    ) -> None:
        self.store, self._remote, self._download = store, remote, download
        self.stamp = RemoteStamp(store.size, 0, 0, 0)
        self._whole: tuple[Path, Stamp] | None = None
        self._lock = threading.Lock()
        store.touch()

    @classmethod
    def opened(cls, remote: Remote, origin: str, download: Callable[[], Path]) -> RangeFile:
        """The file behind a remote. Its version is requested first, unless an earlier run recorded it."""
        first = None if remote.served else remote.get(0, min(CHUNK, remote.size))
        store = ChunkStore(remote.etag, remote.size, remote.served or "", origin, remote.label)
        file = cls(store, remote, download)
        if first is not None:
            file._keep([0], first, {file.store.folder})
            file.verify()
        return file

    def missing(self, begin: int, end: int) -> list[int]:
        """The parts of a range that are not on this machine."""
        return self.store.missing(begin, end) if self._whole is None else []

    def check_reachable(self) -> None:
        if self._remote is None:
            raise HeadspanError(
                f"parts of {self.store.label} are not in the local cache and the hub cannot be reached: connect once, "
                "or give the path of a local copy"
            )

    def bring(self, numbers: Sequence[int], keep: Collection[Path]) -> bytes | None:
        """Fetch neighbouring parts and keep them; None if the whole file is here instead. ``keep`` is not removed."""
        self.check_reachable()
        assert self._remote is not None
        if self._whole is not None:
            return None
        try:
            content = self._remote.get(numbers[0] * CHUNK, min((numbers[-1] + 1) * CHUNK, self.store.size))
        except NoRanges:
            self._fall_back(self._remote)
            return None
        self._keep(numbers, content, keep)
        return content

    def part(self, number: int) -> bytes:
        """One part, from the cache or the hub."""
        content = self.store.read(number) if self._whole is None else None
        if content is None:  # the bytes as they come: another process may remove them from the cache at once
            content = self.bring([number], {self.store.folder})
        return self._part_of_whole(number) if content is None else content

    def verify(self) -> None:
        """Compare the hash of a file that is here to the last part with the one that the hub says, if it does."""
        remote = self._remote
        digest = None if remote is None else content_hash(remote.etag, self.store.size)
        if remote is None or digest is None or self._whole is not None or self.missing(0, self.store.size):
            return
        for number in range(-(-self.store.size // CHUNK)):
            part = self.store.read(number)
            if part is None:  # another process removed it
                return
            digest.update(part)
        if digest.hexdigest() != remote.etag:
            remove(content for content in contents() if content.folder == self.store.folder)
            raise remote.changed()

    def open(self) -> RangeReader:
        return RangeReader(self)

    def _keep(self, numbers: Sequence[int], content: bytes, keep: Collection[Path]) -> None:
        with room(sum(disk_bytes(number, self.store.size) for number in numbers), keep):
            for i, number in enumerate(numbers):
                self.store.write(number, content[i * CHUNK : (i + 1) * CHUNK])

    def _fall_back(self, remote: Remote) -> None:
        """Read the whole file from now on, if the parts that were read before are parts of it."""
        with self._lock:
            if self._whole is None:
                assert self._download is not None
                path = self._download()
                stamp, target = open_regular(path), path.resolve()
                other = target.parent.name == "blobs" and target.name != remote.etag  # as the cache names it
                if other or stamp.size != self.store.size or not self._holds_parts(path, stamp):
                    raise remote.changed()
                self._whole = path, stamp

    def _holds_parts(self, path: Path, stamp: Stamp) -> bool:
        """Whether every part in the cache is the same in a whole file."""
        numbers = (n for n in range(-(-self.store.size // CHUNK)) if self.store.has(n))
        return all(self.store.read(n) in (None, self._slice(path, stamp, n)) for n in numbers)

    def _part_of_whole(self, number: int) -> bytes:
        assert self._whole is not None
        return self._slice(*self._whole, number)

    def _slice(self, path: Path, stamp: Stamp, number: int) -> bytes:
        with open_stamped(path, stamp) as file:
            file.seek(number * CHUNK)
            return file.read(self.store.length(number))


def fetch(wanted: Iterable[tuple[RangeFile, Iterable[int]]], tick: Callable[[int], None] = lambda count: None) -> None:
    """Bring parts of several files into the cache, neighbours in one request."""
    wanted = list(wanted)
    runs = [(file, run) for file, numbers in wanted for run in _runs(numbers)]
    if not runs:
        return
    keep = {file.store.folder for file, _ in wanted}
    for file, _ in runs:
        file.check_reachable()

    def bring(run: tuple[RangeFile, list[int]]) -> int:
        run[0].bring(run[1], keep)
        return len(run[1])

    with ThreadPoolExecutor(min(AT_ONCE, len(runs))) as pool:
        try:
            for count in pool.map(bring, runs):
                tick(count)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for file in {id(file): file for file, _ in runs}.values():
        file.verify()


def fetch_all(wanted: Sequence[tuple[RangeFile, tuple[int, int]]]) -> None:
    """Bring ranges of several files into the cache, with a bar, after making room for all of them."""
    files = {id(file): file for file, _ in wanted}
    parts: dict[int, set[int]] = {}
    for file, (begin, end) in wanted:
        parts.setdefault(id(file), set()).update(file.missing(begin, end))
    sweep()
    needed = sum(disk_bytes(number, files[i].store.size) for i, numbers in parts.items() for number in numbers)
    with room(needed, {file.store.folder for file in files.values()}):
        pass  # before anything is fetched, and also where nothing is: the limit may be lower than it was
    total, done = sum(map(len, parts.values())), 0
    with progress_bar("reading from the hub") as update:

        def tick(count: int) -> None:
            nonlocal done
            done += count
            update(done, total)

        fetch([(files[i], numbers) for i, numbers in parts.items()], tick)


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers in runs of neighbours, each of one request."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1 and len(runs[-1]) < _RUN:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


class RangeReader(io.RawIOBase):
    """A remote file as an open file."""

    def __init__(self, file: RangeFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._position = offset
        return offset

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer from as many parts as it takes; what is missing is fetched together."""
        view = memoryview(buffer).cast("B")
        end = min(self._position + len(view), self._file.store.size)
        fetch([(self._file, self._file.missing(self._position, end))])
        done = 0
        while self._position < end:
            number, offset = divmod(self._position, CHUNK)
            content = self._file.part(number)[offset : offset + end - self._position]
            view[done : done + len(content)] = content
            done += len(content)
            self._position += len(content)
        return done
