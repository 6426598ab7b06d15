"""Finished tiles on disk, so that a stopped run goes on where it was.

Beside the output ``R.safetensors`` stands a folder ``R.safetensors.partial/KEY``, KEY being the hash of the plan, with
one safetensors file per finished tile, each written atomically. Two runs of one plan share it without harm, since they
write the same bytes; the folder goes when the result is complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from headspan.files import atomic_path


class TileStore:
    """The finished tiles of one plan beside one output file."""

    def __init__(self, output: str | os.PathLike[str], key: str) -> None:
        self._parent = Path(f"{os.fspath(output)}.partial")
        self.folder = self._parent / key

    def other_runs(self) -> list[str]:
        """Keys of unfinished runs to the same output whose plan or model differs."""
        if not self._parent.is_dir():
            return []
        return sorted(entry.name for entry in self._parent.iterdir() if entry.name != self.folder.name)

    def save(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        from safetensors.numpy import save_file

        with atomic_path(self.folder / f"{name}.safetensors") as temporary:
            save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, temporary)

    def load(self, name: str) -> dict[str, np.ndarray] | None:
        """A finished tile, or None when there is none that can be read."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(self.folder / f"{name}.safetensors")
        except (OSError, SafetensorError):
            return None

    def clear(self) -> None:
        """Forget this plan's tiles, and unfinished runs of other plans that nobody has touched since."""
        shutil.rmtree(self._parent, ignore_errors=True)
