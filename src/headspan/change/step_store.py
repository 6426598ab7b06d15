"""Storage for the measurements of a run over many checkpoints."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from headspan.scoring.tiles import TileStore

Arrays = dict[str, np.ndarray]


class Shelf:
    """Data kept between the steps of a run: on disk with the unfinished work, or in memory if that fails."""

    def __init__(self, store: TileStore | None) -> None:
        self._store = store
        self._memory: dict[str, Arrays] = {}

    def _path(self, name: str) -> Path | None:
        return None if self._store is None else self._store.folder / f"{name}.safetensors"

    def save(self, name: str, arrays: Arrays) -> None:
        if self._store is not None:
            self._store.save(name, arrays)
        path = self._path(name)
        if path is None or not path.exists():
            self._memory[name] = arrays

    def load(self, name: str) -> Arrays | None:
        if name in self._memory:
            return dict(self._memory[name])
        return None if self._store is None else self._store.load(name)

    def drop(self, name: str) -> None:
        self._memory.pop(name, None)
        path = self._path(name)
        if path is not None:
            with suppress(OSError):
                path.unlink()
