"""Commands that are killed, or whose inputs change while they run.

`Kills`: SIGKILL at a random moment. Every output is whole or absent (or still the whole one from before), no input is
changed, and the same command run again succeeds and leaves no temporary file.

`Edits`: an input is edited, cut, replaced or removed at a random moment. The command ends with one message, or its
answer is that of the file before or after the edit, never a mixture.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from arguments import commands, outputs_of
from commands import environment, judge, run_here
from place import Finding, Place
from safetensors.numpy import load_file
from seeds import write_extras, write_seeds

from headspan.cli import _run

PATIENCE = 120.0  # seconds for one command
KILLED = [
    "site gallery used.safetensors gpt2",
    "figures used.safetensors --only wiring --dpi 20 --format png --format svg --out made",
    "paths gpt2 --to L1H3 --depth 1 --out new.json",
    "report used.safetensors --out new.html",
    "wiring used.safetensors --out new.graphml --out new.csv --out new.json",
    "track gpt2 tuned --out new.safetensors",
    "diff gpt2 tuned --out new.html",
    "effects gpt2 --sequences 2 --length 4 --random --into used.safetensors",
]
EDITED = [
    "effects gpt2 --sequences 2 --length 4 --random --json",
    "effects gpt2 result.safetensors -k 3 --sequences 2 --length 4 --random --json",
    "track gpt2 tuned --out new.safetensors",
    "track tuned gpt2 --pairing OK --fold --out new.safetensors",
]
FILES = ["gpt2/model.safetensors", "gpt2/model.safetensors", "tuned/model.safetensors", "gpt2/config.json"]


class Run(NamedTuple):
    """How a command ended: exit code (a signal's is negative), stdout, stderr and seconds."""

    code: int
    out: str
    err: str
    seconds: float


class Disturbed:
    """Runs commands in copies of this process, which need no second import of torch."""

    cpu_seconds, memory = 120.0, 3 << 30

    def __init__(self, folder: Path) -> None:
        self.work, self.cache, self.streams = folder / "place", folder / "cache", folder / "streams"
        self.streams.mkdir()
        write_seeds(self.work)
        write_extras(self.work)
        self.place = Place(self.work)
        self.options = commands()
        self.known: dict[Any, Any] = {}

    def start(self, words: list[str]) -> int:
        with environment(self.work, HEADSPAN_CACHE_DIR=str(self.cache), HF_HUB_OFFLINE="1", COLUMNS="100"):
            child = os.fork()
            if child:
                return child
            code = 70
            try:
                for number, name in ((1, "out"), (2, "err")):
                    os.dup2(os.open(self.streams / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
                with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
                    code = _run(words)
            finally:
                os._exit(code)

    def finish(self, child: int, began: float) -> Run:
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() - began > PATIENCE:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise Finding("the command does not end")
            time.sleep(0.002)
        read = [(self.streams / name).read_text("utf-8", "replace") for name in ("out", "err")]
        return Run(os.waitstatus_to_exitcode(status), *read, time.monotonic() - began)

    def warm_up(self, words: list[str]) -> None:
        """Load in this process all that the command loads, so that its copies need not."""
        with environment(self.work, HEADSPAN_CACHE_DIR=str(self.cache), HF_HUB_OFFLINE="1", COLUMNS="100"):
            run_here(words)
        self.restore()

    def undisturbed(self, words: list[str]) -> Run:
        began = time.monotonic()
        return self.finish(self.start(words), began)

    def restore(self) -> None:
        self.place.restore()
        if self.cache.exists():
            shutil.rmtree(self.cache)


# ---------------------------------------------------------------------------------------------------------- kills


class Kill(NamedTuple):
    words: list[str]
    share: float  # of the time that the command takes
    again: bool  # whether the outputs are there already


class Kills(Disturbed):
    def case(self, chance: random.Random) -> Kill:
        share = chance.random() if chance.random() < 0.5 else chance.uniform(0.7, 1.05)
        return Kill(chance.choice(KILLED).split(), share, chance.random() < 0.4)

    def run(self, case: Kill) -> list[str]:
        name = " ".join(case.words)
        try:
            if name not in self.known:
                self.warm_up(case.words)
                self.known[name] = self._whole_run(case.words).seconds
                self.restore()
            if case.again:
                self._whole_run(case.words)
            before = self.place.look()
            child, began = self.start(case.words), time.monotonic()
            time.sleep(case.share * self.known[name])
            os.kill(child, signal.SIGKILL)
            self.finish(child, began)
            self._judge(case.words, before, temporary=True)
            self._whole_run(case.words)
            self._judge(case.words, before, temporary=False)
        finally:
            self.restore()
        return []

    def _whole_run(self, words: list[str]) -> Run:
        done = self.undisturbed(words)
        judge(words, done.code, done.out, done.err)
        if done.code:
            raise Finding(f"{words[0]} is refused: {done.err[-300:]}")
        return done

    def _judge(self, words: list[str], before: dict[str, Any], temporary: bool) -> None:
        named = [os.path.normpath(out) for out in outputs_of(words, self.options[words[0]])]
        after = self.place.look()
        for name in before.keys() | after.keys():
            if after.get(name) == before.get(name):
                continue
            if not any(name == out or name.startswith(out + os.sep) for out in named):
                if not (temporary and ".headspan-" in name):
                    raise Finding(f"{name} was changed, made or removed")
            elif name not in after:
                raise Finding(f"{name} is gone")
            elif ".headspan-" in os.path.basename(name):
                if not temporary:
                    raise Finding(f"{name} is left behind by the next run too")
            elif after[name][0] == "file":
                check_whole(self.work / name)


def check_whole(path: Path) -> None:
    """Raise a finding if a file is not one that its program would have closed."""
    raw = path.read_bytes()
    try:
        whole = WHOLE[path.suffix](raw, path)
    except Exception as error:
        raise Finding(f"{path.name} is not whole: {error!r}") from None
    if not whole:
        raise Finding(f"{path.name} is not whole: it ends with {raw[-40:]!r}")


def _page(raw: bytes, path: Path) -> bool:
    """A page to its end; of a gallery also all pages that it leads to."""
    links = re.findall(rb'href="([^":/#]+\.html)"', raw) if path.name == "index.html" else []
    return raw.rstrip().endswith(b"</html>") and all((path.parent / os.fsdecode(link)).exists() for link in links)


WHOLE: dict[str, Callable[[bytes, Path], Any]] = {
    ".html": _page,
    ".png": lambda raw, path: raw.startswith(b"\x89PNG") and raw[-8:-4] == b"IEND",
    ".svg": lambda raw, path: ElementTree.fromstring(raw) is not None,
    ".graphml": lambda raw, path: ElementTree.fromstring(raw) is not None,
    ".json": lambda raw, path: isinstance(json.loads(raw), dict),
    ".csv": lambda raw, path: raw.endswith(b"\n"),
    ".safetensors": lambda raw, path: load_file(path) is not None,
}


# ---------------------------------------------------------------------------------------------------------- edits


class Edit(NamedTuple):
    words: list[str]
    file: str
    change: str
    share: float


class Edits(Disturbed):
    def case(self, chance: random.Random) -> Edit:
        return Edit(
            chance.choice(EDITED).split(), chance.choice(FILES), chance.choice(list(CHANGES)), chance.uniform(0, 1.05)
        )

    def run(self, case: Edit) -> list[str]:
        try:
            before, after = self._answer(case, edited=False), self._answer(case, edited=True)
            child, began = self.start(case.words), time.monotonic()
            time.sleep(case.share * self.known["seconds", " ".join(case.words)])
            CHANGES[case.change](self.work / case.file, self.work)
            found = self.finish(child, began)
            judge(case.words, found.code, found.out, found.err)
            answers = [one for one in (before, after) if one is not None]
            if found.code == 0 and not any(_same(self._content(found), one) for one in answers):
                raise Finding(f"the answer is neither that of {case.file} before its change nor that after it")
        finally:
            self.restore()
        return [found.err.strip().splitlines()[-1]] if found.code else []

    def _answer(self, case: Edit, edited: bool) -> Any:
        """What the command answers without a disturbance, before or after the edit; None if it is refused."""
        name = " ".join(case.words)
        key = (name, case.file, case.change) if edited else name
        if key not in self.known:
            if edited:
                CHANGES[case.change](self.work / case.file, self.work)
            else:
                self.warm_up(case.words)
            done = self.undisturbed(case.words)
            judge(case.words, done.code, done.out, done.err)
            self.known[key] = None if done.code else self._content(done)
            if not edited:
                self.known["seconds", name] = done.seconds
            self.restore()
        return self.known[key]

    def _content(self, done: Run) -> Any:
        made = self.work / "new.safetensors"
        return load_file(made) if made.exists() else json.loads(done.out)


def _same(found: Any, known: Any) -> bool:
    if type(found) is not type(known):
        return False
    if isinstance(found, dict) and all(isinstance(value, np.ndarray) for value in found.values()):
        return found.keys() == known.keys() and all(
            found[name].shape == known[name].shape and np.allclose(found[name], known[name], 1e-4, 1e-6, equal_nan=True)
            for name in found
        )
    if isinstance(found, (dict, list)):
        keys = found.keys() if isinstance(found, dict) else range(len(found))
        return len(found) == len(known) and all(_same(found[key], known[key]) for key in keys)
    return found == known or (isinstance(found, float) and bool(np.isclose(found, known, 1e-4, 1e-6)))


def _in_place(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def edit(path: Path, folder: Path) -> None:
        content = change(path.read_bytes())
        with open(path, "r+b") as file:  # the same inode
            file.write(content)
            file.truncate()

    return edit


def _replaced(path: Path, folder: Path) -> None:
    """Another whole file under the name, put there in one step."""
    other = folder / ("tuned" if path.parent.name == "gpt2" else "gpt2") / path.name
    shutil.copyfile(other, folder / "other.tmp")
    os.replace(folder / "other.tmp", path)


CHANGES: dict[str, Callable[[Path, Path], None]] = {
    "last bytes": _in_place(lambda raw: raw[:-64] + bytes(64)),
    "half": _in_place(lambda raw: raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2)),
    "cut": _in_place(lambda raw: raw[: len(raw) // 2]),
    "emptied": _in_place(lambda raw: b""),
    "longer": _in_place(lambda raw: raw + bytes(64)),
    "replaced": _replaced,
    "removed": lambda path, folder: path.unlink(),
    "touched": lambda path, folder: path.touch(),
}
