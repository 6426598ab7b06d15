"""Files that are written atomically: complete or absent.

While a file is written it is a locked temporary file in the same folder, ``.headspan-…tmp``. If a run is killed, the
next run that writes the same file removes what it left.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from headspan.vocabulary.errors import HeadspanError

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be deleted, which serves as a lock
    fcntl = None


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, sweep: bool = True) -> Iterator[Path]:
    """A temporary path next to ``path`` that replaces it when the block ends without an error.

    A reader sees the old file or the new one, never a part. After an error nothing is left, not even a new folder.
    It does not check what it replaces: paths from users go through `headspan.system.outputs.writing`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_path(folder / "note.txt") as temporary:
    ...     _ = temporary.write_text("whole")
    >>> (folder / "note.txt").read_text(), len(list(folder.iterdir()))
    ('whole', 1)
    """
    path = Path(path)
    made: list[Path] = []
    handle, temporary, done = -1, None, False
    try:
        try:
            _make_folders(path.parent, made)
            if sweep:
                _remove_orphans(path)
            handle, temporary = _create(path)
            yield temporary
            os.fsync(handle)
            if temporary.stat().st_ino != os.fstat(handle).st_ino:  # the writer put another file there
                with open(temporary, "rb") as written:
                    os.fsync(written.fileno())
            if fcntl is None:
                os.close(handle)
                handle = -1
            os.replace(temporary, path)
            done = True
        except OSError as error:
            reason = error.strerror or str(error)
            raise HeadspanError(
                f"cannot write {path}: {reason}; nothing was changed. Choose another path, or make this one writable"
            ) from error
    finally:
        if handle >= 0:
            os.close(handle)
        if not done:
            with suppress(OSError):
                if temporary is not None:
                    temporary.unlink()
            for folder in reversed(made):
                with suppress(OSError):
                    folder.rmdir()


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Arrays as one safetensors file, atomically.

    Arrays are written one at a time, because the library builds the whole file in memory first.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    order, end = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)), 0
    for name in order:
        array, start = tensors[name], end
        end += array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # arrays begin at a multiple of 8
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            array = np.ascontiguousarray(tensors[name])
            file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data)


_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
}  # fmt: skip


def try_lock(handle: int) -> bool:
    """Take the exclusive lock of an open file; False when another process holds a lock on it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held; or a file system without locks, which cannot tell: then nothing is taken for abandoned
        return False
    return True


def is_temporary(name: str) -> bool:
    """Whether a file name is that of a temporary file of headspan."""
    return name.startswith(".headspan-") and name.endswith(".tmp")


def _make_folders(folder: Path, made: list[Path]) -> None:
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        with suppress(FileExistsError):  # another run is creating it
            new.mkdir()
            made.append(new)


def _prefix(path: Path) -> str:
    """The prefix of a file's temporary files; a hash, because the name may already have the maximum length."""
    return f".headspan-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}-"


def _create(path: Path) -> tuple[int, Path]:
    """An empty temporary file, locked."""
    while True:
        temporary = path.parent / f"{_prefix(path)}{os.getpid()}-{secrets.token_hex(4)}.tmp"
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0), 0o666)
        try_lock(handle)
        with suppress(OSError):
            if os.stat(temporary).st_ino == os.fstat(handle).st_ino:
                return handle, temporary
        os.close(handle)  # another run removed it as an orphan before it was locked


def _remove_orphans(path: Path) -> None:
    """Remove what killed runs left: ordinary files with our name and owner that no process has locked."""
    if fcntl is None:
        return
    prefix = _prefix(path)
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in [e for e in entries if e.name.startswith(prefix) and e.name.endswith(".tmp")]:
            with suppress(OSError):
                handle = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    found = os.fstat(handle)
                    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and try_lock(handle):
                        os.unlink(entry.path)
                finally:
                    os.close(handle)
