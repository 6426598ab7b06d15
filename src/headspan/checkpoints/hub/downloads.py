"""Remove the downloads of one checkpoint: only files that arrived during a block, none of other programs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from headspan.checkpoints.hub.chunk_room import Content, contents, remove
from headspan.checkpoints.hub.file_cache import repository
from headspan.checkpoints.hub.repository import HubReference


class Downloads:
    """Removes, at the end of a ``with`` block, the files of one commit that came into the hub's cache during it.

    before: the files present before; given when a killed run is resumed.
    Contents of files read by ranges that arrived meanwhile are removed too.
    A file is removed only if it was linked into this commit's snapshot meanwhile, and its content only if it came
    meanwhile too and no other snapshot uses it.
    """

    def __init__(self, hub: HubReference, commit: str, before: Iterable[str] | None = None) -> None:
        self._repo = hub.repo
        self._folder = repository(hub.repo)
        self._snapshot = self._folder / "snapshots" / commit
        self._ref = self._folder / "refs" / (hub.revision or "main")
        self.before = {str(path) for path in self._entries()} if before is None else set(before)

    def __enter__(self) -> Downloads:
        return self

    def _entries(self) -> list[Path]:
        """Files and links of the commit, all contents, and the name of the revision."""
        links = [path for path in self._snapshot.rglob("*") if not path.is_dir() or path.is_symlink()]
        ref = [self._ref] if self._ref.exists() else []
        return [*links, *(self._folder / "blobs").glob("*"), *ref, *(content.folder for content in self._ranges())]

    def _ranges(self) -> list[Content]:
        return [content for content in contents() if content.file.startswith(f"{self._repo}/")]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove(content for content in self._ranges() if str(content.folder) not in self.before)
        with suppress(OSError):
            new = [path for path in self._entries() if str(path) not in self.before]
            blobs = self._folder / "blobs"
            mine = [path for path in new if path.is_relative_to(self._snapshot)]
            contents = {path.resolve() for path in mine if path.is_symlink()}
            contents |= {path.resolve() for path in new if path.parent == blobs and path.suffix == ".incomplete"}
            for path in [*mine, *(path for path in new if path == self._ref)]:
                path.unlink(missing_ok=True)
            used = {path.resolve() for path in (self._folder / "snapshots").rglob("*") if path.is_symlink()}
            for content in contents - used:
                if str(blobs / content.name) not in self.before and content.parent == blobs.resolve():
                    content.unlink(missing_ok=True)
            for folder in sorted((p for p in self._snapshot.rglob("*") if p.is_dir()), reverse=True):
                with suppress(OSError):  # not empty
                    folder.rmdir()
            with suppress(OSError):
                self._snapshot.rmdir()
