"""One file of the hub read by byte ranges: what is asked for, and no more, through the cache of :mod:`chunks`.

Requests are of up to sixteen mebibytes, eight at a time, tried again when a connection drops, a server is busy or an
answer ends early. An answer from another content than the first (another etag or size) is an error: nothing of two
versions is ever mixed. Without a network the cache alone is read.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headspan.errors import HeadspanError
from headspan.sources.chunks import CHUNK, ChunkStore, make_room
from headspan.sources.untrusted import Stamp, reason
from headspan.system.progress import progress_bar

_RUN = 16  # parts of one request
_AT_ONCE = 8  # requests
_TRIES = 6
_WAIT = 0.5  # seconds before the second try, doubled for every further one
_LONGEST_WAIT = 30.0
_TIMEOUT = 30.0
_BUSY = (408, 425, 429, 500, 502, 503, 504)


class NoRanges(Exception):
    """The server sends whole files only."""


@dataclass(frozen=True)
class RemoteStamp(Stamp):
    """The place of a stamp for a file whose content its etag fixes: there is nothing on this disk that could change."""

    @property
    def young(self) -> bool:
        return False

    def check(self, path: Path) -> None:
        """The etag of every answer is checked where it arrives."""

    def check_open(self, path: Path, descriptor: int) -> None:
        """As above."""


class Remote:
    """Asks a server for parts of one file."""

    def __init__(self, url: str, etag: str, size: int, label: str) -> None:
        self._url, self._etag, self._size, self._label = url, etag, size, label
        self._location: str | None = None
        self._seen: str | None = None  # the etag of whoever serves the bytes, which may be another server
        self._lock = threading.Lock()

    def get(self, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` to ``end``, in as many tries as it takes within reason."""
        wait, told = _WAIT, "no answer"
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(min(wait, _LONGEST_WAIT))
                wait *= 2
            try:
                answer = self._ask(begin, end)
            except HeadspanError:
                raise
            except Exception as error:  # whatever the network does; the package for it changed between versions
                told = reason(error)
                code = getattr(getattr(error, "response", None), "status_code", None)
                if code is not None and code not in _BUSY:
                    break
                continue
            code = answer.status_code
            if code == 206 and (content := self._checked(answer, begin, end)) is not None:
                return content
            told = f"an answer that ended early ({len(answer.content)} bytes)" if code == 206 else f"answer {code}"
            if code in (200, 416):
                raise NoRanges
            if code in (401, 403, 404, 410):
                with self._lock:
                    if self._location is None and code != 403:
                        break
                    self._location = None  # an address that is good for some time only: ask for another
            elif code in _BUSY:
                with suppress(ValueError, TypeError):
                    wait = max(wait, float(answer.headers.get("Retry-After", 0)))
            elif code != 206:
                break
        raise HeadspanError(
            f"{self._label} cannot be read from the hub: {told}, {_TRIES} times at most; what came is kept: run again"
        )

    def _ask(self, begin: int, end: int) -> Any:
        from huggingface_hub.utils import build_hf_headers, get_session

        address = self._resolved()
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        if urlsplit(address).netloc == urlsplit(self._url).netloc:  # nobody else needs to know who we are
            headers = build_hf_headers() | headers
        return get_session().get(address, headers=headers, timeout=_TIMEOUT)

    def _resolved(self) -> str:
        """Where the bytes are: the hub sends on to a store of large files, for some time."""
        with self._lock:
            if self._location is None:
                from huggingface_hub import get_hf_file_metadata

                about = get_hf_file_metadata(self._url, timeout=_TIMEOUT)
                if about.etag != self._etag or (about.size is not None and about.size != self._size):
                    raise self._changed()
                self._location = about.location
            return self._location

    def _checked(self, answer: Any, begin: int, end: int) -> bytes | None:
        """The bytes of an answer if they are all there and of the one content; None if it ended early."""
        place = str(answer.headers.get("Content-Range", ""))
        if place != f"bytes {begin}-{end - 1}/{self._size}":
            raise self._changed()
        etag = answer.headers.get("ETag")
        with self._lock:
            self._seen = self._seen or etag
            if etag != self._seen:
                raise self._changed()
        return answer.content if len(answer.content) == end - begin else None

    def _changed(self) -> HeadspanError:
        return HeadspanError(f"{self._label} changed on the hub while it was being read: run again")


class RangeFile:
    """The bytes of a remote file, fetched as they are needed.

    remote: who is asked for what is not in the cache; None without a network.
    """

    def __init__(self, store: ChunkStore, remote: Remote | None, label: str) -> None:
        self.store, self._remote, self._label = store, remote, label
        self.stamp = RemoteStamp(store.size, 0, 0, 0)
        store.touch()

    def missing(self, begin: int, end: int) -> list[int]:
        """The parts of a range that are not in the cache."""
        return [n for n in range(begin // CHUNK, -(-end // CHUNK)) if not self.store.has(n)]

    def fetch(self, numbers: Iterable[int], tick: Callable[[int], None] = lambda count: None) -> None:
        """Bring parts into the cache, neighbours in one request."""
        runs: list[list[int]] = []
        for number in sorted(set(numbers)):
            if runs and runs[-1][-1] == number - 1 and len(runs[-1]) < _RUN:
                runs[-1].append(number)
            else:
                runs.append([number])
        if not runs:
            return
        if self._remote is None:
            raise HeadspanError(
                f"parts of {self._label} are not in the local cache and the hub cannot be reached: connect once, or "
                "give the path of a local copy"
            )
        with ThreadPoolExecutor(min(_AT_ONCE, len(runs))) as pool:
            try:
                for run in pool.map(self._fetch_run, runs):
                    tick(run)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _fetch_run(self, numbers: list[int]) -> int:
        assert self._remote is not None
        begin, end = numbers[0] * CHUNK, min((numbers[-1] + 1) * CHUNK, self.store.size)
        content = self._remote.get(begin, end)
        for i, number in enumerate(numbers):
            self.store.write(number, content[i * CHUNK : (i + 1) * CHUNK])
        return len(numbers)

    def part(self, number: int) -> bytes:
        """One part, from the cache or the hub."""
        for _ in range(2):
            content = self.store.read(number)
            if content is not None:
                return content
            self.fetch([number])
        raise HeadspanError(
            f"a part of {self._label} cannot be read back from the cache: clear it with headspan cache --clear"
        )

    def open(self) -> RangeReader:
        return RangeReader(self)


def fetch_all(wanted: Sequence[tuple[RangeFile, tuple[int, int]]]) -> None:
    """Bring ranges of several files into the cache, with a bar, after making room for them."""
    files = {id(file): file for file, _ in wanted}
    parts: dict[int, set[int]] = {}
    for file, (begin, end) in wanted:
        parts.setdefault(id(file), set()).update(file.missing(begin, end))
    total = sum(map(len, parts.values()))
    if not total:
        return
    needed = sum(files[i].store.length(number) for i, numbers in parts.items() for number in numbers)
    make_room(needed, {file.store.folder for file in files.values()})
    done = 0
    with progress_bar("reading from the hub") as update:
        for i, numbers in parts.items():

            def tick(count: int) -> None:
                nonlocal done
                done += count
                update(done, total)

            files[i].fetch(numbers, tick)


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
        self._file.fetch(self._file.missing(self._position, end))
        done = 0
        while self._position < end:
            number, offset = divmod(self._position, CHUNK)
            content = self._file.part(number)[offset : offset + end - self._position]
            view[done : done + len(content)] = content
            done += len(content)
            self._position += len(content)
        return done
