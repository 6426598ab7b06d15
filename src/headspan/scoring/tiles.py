"""Finished tiles on disk, so that an interrupted run can continue.

They are in the user's cache folder, ``unfinished/OUTPUT-PLAN``: hashes of the output's path and of the plan, so that
runs of different plans to one file never conflict, and no other folder is touched. Such a folder is created with its
marker inside and removed with it; a folder without a marker is neither used nor removed. A run holds a
shared lock on the marker; an unlocked folder may be removed by the run that finished it, or after a month by any run.

Every tile is a safetensors file that names its plan and itself and contains a hash of all its bytes. A tile that was
damaged, moved or written by something else is computed again. Two runs of one plan can share a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from headspan.system.atomic import atomic_path, fcntl, try_lock
from headspan.system.cache_folder import cache_folder
from headspan.vocabulary.errors import HeadspanError, warn

_MARKER = "headspan-unfinished-run"
_MAGIC = "An unfinished run of headspan: removed when the run is finished, or when it is a month old.\n"
_TILE = re.compile(r"[a-z0-9_]+-\d+\.safetensors|\.headspan-[0-9a-f-]+\.tmp")
_FOLDER = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}|\.(new|old)-[0-9a-f]{16}")
_STALE = 30 * 24 * 3600.0  # seconds after which an unfinished run is considered abandoned
_TRIES = 100  # of 0.02 s
_DIGEST = "0" * 64
_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class TileStore:
    """The finished tiles of one plan for one output file; used in a ``with`` block.

    If the cache folder cannot be used, nothing is saved, with a warning that gives the reason.
    """

    def __init__(self, output: str | os.PathLike[str], key: str) -> None:
        place = hashlib.sha256(os.fsencode(os.path.realpath(output))).hexdigest()[:16]
        self._root = cache_folder() / "unfinished"
        self._key, self._place = key, place
        self.folder = self._root / f"{place}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        self._lock: int | None = None
        self._takes_tiles = True

    def __enter__(self) -> TileStore:
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = self._join()
        except (OSError, HeadspanError) as error:
            self._give_up(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is None:
            return
        os.close(self._lock)
        self._lock = None
        # A run that failed before its first tile leaves nothing.
        if kind is None or not any(self.folder.glob("*.safetensors")):
            _remove(self.folder)
        for folder in self._folders():
            with suppress(OSError):
                if time.time() - os.lstat(folder).st_mtime > _STALE:
                    _remove(folder)
                    if folder.name.startswith(".new-"):
                        folder.rmdir()  # killed before its marker was written: removed only if empty

    def other_runs(self) -> list[str]:
        """Names of unfinished runs to the same output whose plan or model differs."""
        mine = [f.name for f in self._folders() if f.name.startswith(self._place) and f.name != self.folder.name]
        return sorted(name for name in mine if _open_marker(self._root / name, close=True) is not None)

    def save(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Save a finished tile, if there is room."""
        path = self.folder / f"{name}.safetensors"
        if self._lock is None or not self._takes_tiles or path.is_dir():
            return
        try:
            with atomic_path(path, sweep=False) as temporary:
                temporary.write_bytes(_sealed(arrays, self._key, name))
        except HeadspanError as error:
            self._give_up(error.__cause__ or error)

    def load(self, name: str, most: int = 2**40) -> dict[str, np.ndarray] | None:
        """A finished tile, or None if there is no valid one; an invalid one is reported by a warning.

        most: largest size of its arrays in bytes; a much larger file is not read.
        """
        if self._lock is None:
            return None
        path = self.folder / f"{name}.safetensors"
        try:
            return _opened(_read(path, most + 10**6), self._key, name)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self.reject(name, getattr(error, "strerror", None) or str(error))
            return None

    def reject(self, name: str, why: str) -> None:
        """Report that a saved tile is not used."""
        warn(f"the saved tile {name} is not valid ({why}), so it is computed again")

    def _give_up(self, error: BaseException) -> None:
        """Continue without saving more tiles; those already saved stay."""
        reason = str(getattr(error, "strerror", None) or error)
        warn(f"unfinished work cannot be saved in {self._root} ({reason}): an interrupted run will start again")
        self._takes_tiles = False

    def _folders(self) -> list[Path]:
        """Folders with our kind of name; the marker is checked before anything is done to one."""
        with suppress(OSError):
            return [path for path in self._root.iterdir() if _FOLDER.fullmatch(path.name)]
        return []

    def _join(self) -> int:
        """The marker of this run's folder, open and locked against removal; the folder is made if there is none."""
        for _ in range(_TRIES):
            marker = _open_marker(self.folder)
            if marker is None:
                if os.path.lexists(self.folder):
                    time.sleep(0.02)  # another run has just made it, or headspan did not make it
                else:
                    self._make()
                continue
            if fcntl is None:
                return marker
            with suppress(OSError):
                fcntl.flock(marker, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.stat(self.folder / _MARKER).st_ino == os.fstat(marker).st_ino:
                    return marker
            os.close(marker)  # the run that finished is removing it
            time.sleep(0.02)
        raise OSError(0, f"{self.folder.name} was not made by headspan")

    def _make(self) -> None:
        """A folder that appears with its marker inside."""
        new = self._root / f".new-{secrets.token_hex(8)}"
        new.mkdir(mode=0o700)
        try:
            handle = os.open(new / _MARKER, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _CAREFUL, 0o600)
            with open(handle, "w", encoding="utf-8") as file:
                file.write(_MAGIC)
            new.rename(self.folder)  # fails if another run of this plan was faster
        except OSError:
            with suppress(OSError):
                (new / _MARKER).unlink()
            new.rmdir()
            if not os.path.lexists(self.folder):
                raise


def _open_marker(folder: Path, *, close: bool = False) -> int | None:
    """The open marker of a folder made by headspan; None if there is no genuine marker."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return None
        handle = os.open(folder / _MARKER, os.O_RDWR | _CAREFUL)
    except OSError:
        return None
    found = os.fstat(handle)
    mine = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
    if stat.S_ISREG(found.st_mode) and mine and os.read(handle, 200) == _MAGIC.encode():
        if close:
            os.close(handle)
        return handle
    os.close(handle)
    return None


def _remove(folder: Path) -> None:
    """Remove an unlocked folder made by headspan: only the files that headspan wrote; others stay."""
    marker = _open_marker(folder)
    if marker is None:
        return
    try:
        if not try_lock(marker) or os.stat(folder / _MARKER).st_ino != os.fstat(marker).st_ino:
            return
        if all(path.name == _MARKER or _is_tile(path) for path in folder.iterdir()):
            folder = folder.rename(folder.with_name(f".old-{secrets.token_hex(8)}"))  # a new run makes its own
        for path in filter(_is_tile, list(folder.iterdir())):
            path.unlink()
        if [path.name for path in folder.iterdir()] == [_MARKER]:
            (folder / _MARKER).unlink()
            folder.rmdir()
    except OSError:
        return  # another run is removing it
    finally:
        os.close(marker)


def _is_tile(path: Path) -> bool:
    return _TILE.fullmatch(path.name) is not None and stat.S_ISREG(os.lstat(path).st_mode)


def _read(path: Path, most: int) -> bytes:
    """The bytes of a regular file; anything else is refused, and a pipe does not block."""
    handle = os.open(path, os.O_RDONLY | _CAREFUL)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is not a regular file")
        if os.fstat(handle).st_size > most:
            raise ValueError("it is too large")
        return file.read()


def _sealed(arrays: dict[str, np.ndarray], key: str, name: str) -> bytes:
    """A safetensors file with the plan, its own name and a hash of everything else in it."""
    from safetensors.numpy import save

    about = {"plan": key, "tile": name, "digest": _DIGEST}
    content = save({n: np.ascontiguousarray(array) for n, array in arrays.items()}, {"tile": json.dumps(about)})
    return content.replace(_DIGEST.encode(), _digest(content).encode(), 1)


def _opened(content: bytes, key: str, name: str) -> dict[str, np.ndarray]:
    """The arrays of a sealed tile, if it is the requested tile and unchanged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        about = json.loads(header["__metadata__"]["tile"])
        digest = about["digest"].encode("ascii")
        blank = content.replace(digest, _DIGEST.encode(), 1) if len(digest) == len(_DIGEST) else b""
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError):
        raise ValueError("it is damaged") from None
    if _digest(blank).encode() != digest:
        raise ValueError("its content has changed")
    if about != {"plan": key, "tile": name, "digest": about["digest"]}:
        raise ValueError("it is another tile")
    try:
        return load(content)
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def is_sound(values: np.ndarray, needed: np.ndarray, largest: float) -> bool:
    """Whether scores are between 0 and the largest possible value where they are needed, and NaN elsewhere.

    >>> is_sound(np.array([[0.5, np.nan]]), np.array([[True, False]]), 1.0)
    True
    """
    if values.shape != needed.shape or values.dtype.kind != "f":
        return False
    wanted = values[needed]
    slack = 1e-3 * (1 + largest)
    inside = (wanted >= -slack) & (wanted <= largest + slack)  # False for NaN
    return bool(inside.all() and np.isnan(values[~needed]).all())
