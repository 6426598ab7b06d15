"""A folder in which commands are run: what it holds is known before and after, and put back."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

Entry = tuple[str, bytes]  # what it is; the bytes of a file, or where a link leads


class Finding(Exception):
    """Something that may not happen: a wrong answer, a changed input, a leftover, an error from deep inside."""


def entry(path: Path) -> Entry:
    """What is at a path; links are not followed and pipes not opened."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return "link", os.fsencode(os.readlink(path))
    if stat.S_ISREG(mode):
        return "file", path.read_bytes()
    return ("folder" if stat.S_ISDIR(mode) else "pipe" if stat.S_ISFIFO(mode) else "other"), b""


def check_sentence(sentence: str) -> str:
    """A message is one line, and quotes at most 200 letters of anything."""
    if not sentence or "\n" in sentence or len(sentence) > 1000:
        raise Finding(f"not one line: {sentence[:200]!r}")
    if "a b " * 50 + "a" in sentence or "x" * 201 in sentence:
        raise Finding(f"more than 200 letters are quoted: {sentence[:60]!r}")
    return sentence


class Place:
    """A folder that can be put back as it was when this object was made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = self.look()

    def look(self) -> dict[str, Entry]:
        """All that is in the folder, by path."""
        found: dict[str, Entry] = {}
        for here, folders, files in os.walk(self.folder):
            for name in (*folders, *files):
                path = Path(here, name)
                found[str(path.relative_to(self.folder))] = entry(path)
        return found

    def restore(self) -> None:
        now = self.look()
        for name in sorted(now, reverse=True):  # what is inside a folder before the folder
            if now[name] != self.kept.get(name):
                self._remove(self.folder / name)
        for name in sorted(self.kept):
            if not os.path.lexists(self.folder / name):
                self._make(self.folder / name, self.kept[name])

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()

    def _make(self, path: Path, kept: Entry) -> None:
        kind, content = kept
        if kind == "file":
            path.write_bytes(content)
        elif kind == "link":
            path.symlink_to(os.fsdecode(content))
        elif kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            raise AssertionError(f"{path} cannot be made again")


def add_odd_places(folder: Path) -> None:
    """Obstacles for an output: a foreign file, links to inputs, a pipe, folders, a dangling link."""
    (folder / "notes.txt").write_text("of somebody else")
    (folder / "theirs.safetensors").write_bytes(b"of somebody else")
    (folder / "theirs.html").write_text("<html>of somebody else</html>")
    (folder / "folder.safetensors").mkdir()
    (folder / "folder.safetensors" / "inside.txt").write_text("of somebody else")
    (folder / "link.safetensors").symlink_to("gpt2/model.safetensors")
    (folder / "dangling.safetensors").symlink_to("nowhere/x.safetensors")
    os.link(folder / "result.safetensors", folder / "hard.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    os.mkfifo(folder / "pipe.html")
