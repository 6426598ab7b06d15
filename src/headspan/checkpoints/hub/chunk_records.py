"""The content of each file of a commit, so that it is found without a network: ``ranges/COMMIT.json``."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from headspan.checkpoints.hub.chunks import ChunkStore, locked, root, write_whole
from headspan.system.regular import read_regular

_NAME = re.compile(r"[0-9a-f]{32}\.json")


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
            if _NAME.fullmatch(path.name) and not path.is_symlink():
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
