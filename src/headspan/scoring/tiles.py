"""Finished tiles on disk, so that a stopped run goes on where it was.

Beside the output ``R.safetensors`` stands a folder ``R.safetensors.partial/KEY``, KEY being the hash of the plan, with
one safetensors file per finished tile, each written atomically. Two runs of one plan share it without harm, since they
write the same bytes. A run holds a lock on its folder; the run that finishes removes every folder that nobody holds.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from headspan.errors import HeadspanError
from headspan.system.atomic import write_safetensors

try:
    import fcntl
except ImportError:  # Windows: an open file cannot be deleted there, which does as a lock
    fcntl = None


class TileStore:
    """The finished tiles of one plan beside one output file; used in a ``with`` block."""

    def __init__(self, output: str | os.PathLike[str], key: str) -> None:
        self._parent = Path(f"{os.fspath(output)}.partial")
        self.folder = self._parent / key
        self._lock: int | None = None

    def __enter__(self) -> TileStore:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR)
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_SH)
        except OSError as error:
            raise HeadspanError(
                f"cannot write beside {self._parent.with_suffix('')}: {error.strerror}; choose another place"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
        if kind is None:
            self._remove_without_owner(*self._parent.glob("*"))
        elif not any(self.folder.glob("*.safetensors")):  # it failed before there was anything to keep
            self._remove_without_owner(self.folder)

    def other_runs(self) -> list[str]:
        """Keys of unfinished runs to the same output whose plan or model differs."""
        return sorted(entry.name for entry in self._parent.iterdir() if entry.name != self.folder.name)

    def save(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        write_safetensors(self.folder / f"{name}.safetensors", arrays)

    def load(self, name: str) -> dict[str, np.ndarray] | None:
        """A finished tile, or None when there is none that can be read."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(self.folder / f"{name}.safetensors")
        except (OSError, SafetensorError):
            return None

    def _remove_without_owner(self, *folders: Path) -> None:
        for folder in folders:
            try:
                lock = os.open(folder / "lock", os.O_RDWR)
            except OSError:
                lock = None
            try:
                if lock is not None and fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # another run is at work there
            else:
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                if lock is not None:
                    os.close(lock)
        with suppress(OSError):  # not empty: another run is at work
            self._parent.rmdir()
