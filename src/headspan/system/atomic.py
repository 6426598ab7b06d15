"""Files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from headspan.errors import HeadspanError


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends without an error.

    A reader sees the old file or the new one, never a part; on any error nothing is left behind.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_path(folder / "note.txt") as temporary:
    ...     _ = temporary.write_text("whole")
    >>> (folder / "note.txt").read_text(), len(list(folder.iterdir()))
    ('whole', 1)
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{path.name[:80]}-", suffix=path.suffix, dir=path.parent)
            os.close(handle)
            temporary = Path(name)
            yield temporary
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)  # mkstemp makes private files; a result is an ordinary one
            os.replace(temporary, path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise HeadspanError(
                f"cannot write {path}: {reason}; nothing was changed there, choose another place or free it"
            ) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Arrays as one safetensors file, atomically."""
    from safetensors.numpy import save

    # Made in memory and written by us, so that a full disk is an OSError like any other.
    content = save({name: np.ascontiguousarray(array) for name, array in tensors.items()}, metadata)
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)
