"""Every command in this process, with good and odd arguments, on good and damaged files, to good and odd places.

A finding is: an uncaught exception, an exit code other than 0, 1 (reproduce) and 2, a refusal that is not one line on
stderr with nothing on stdout, exit code 0 without the requested output, invalid JSON, a raw control character on either
stream, a change to an input or a foreign file, or a file that was not requested.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from arguments import MODELS, POSITIONAL, commands, line, outputs_of
from mutations import Case, change_tree, damage, input_case, json_bytes, make_case
from place import Entry, Finding, Place, add_odd_places, check_sentence
from seeds import write_extras, write_seeds

import headspan as hs
from headspan.cli import _run

SELDOM = ("behaviour", "effects", "observe", "task", "reproduce")  # slow, or refused for any model but GPT-2
IN_A_PROCESS = 400  # one of so many cases is run as a process of its own
THEIRS = ("notes.txt", "theirs.safetensors", "theirs.html", "folder.safetensors/inside.txt")


class Line(NamedTuple):
    """One command line, with the file that is damaged first, if any."""

    words: list[str]
    damaged: Case | None
    own_process: bool = False


class Commands:
    """Runs commands in a folder with small files of every kind."""

    cpu_seconds, memory = 60.0, 3 << 30

    def __init__(self, folder: Path) -> None:
        self.work = folder / "place"
        self.cache = folder / "cache"
        write_seeds(self.work)
        write_extras(self.work)
        self.seed = folder / "unchanged"
        shutil.copytree(self.work, self.seed)
        add_odd_places(self.work)
        self.place = Place(self.work)
        self.options = commands()

    def case(self, chance: random.Random) -> Line:
        names = list(POSITIONAL)
        command = chance.choices(names, [0.4 if name in SELDOM else 1.0 for name in names])[0]
        damaged = self._damaged(chance) if chance.random() < 0.35 else None
        given = _given(damaged.target) if damaged else {}
        takers = [name for name in names if {option.name for option in self.options[name]} & set(given)]
        if takers and chance.random() < 0.7:  # otherwise a damaged file would seldom be given
            command = chance.choice(takers)
        words = line(command, self.options[command], chance, given)
        return Line(words, damaged, chance.randrange(IN_A_PROCESS) == 0)

    def _damaged(self, chance: random.Random) -> Case:
        if chance.random() < 0.25:
            return input_case(self.seed, chance)
        target = chance.choice(["behaviour.json", "circuit.json", "text.txt", "labels.csv", "result", "", "", ""])
        if target in ("behaviour.json", "circuit.json"):
            tree = json.loads((self.seed / target).read_bytes())
            return Case(target, json_bytes(change_tree(tree, chance), chance), target.partition(".")[0])
        if target == "text.txt":
            return Case(target, damage((self.seed / target).read_bytes() * chance.choice([1, 0, 40]), chance), "text")
        for _ in range(200):
            found = make_case(self.seed, chance)
            if not target or found.target.startswith(target):
                return found
        raise AssertionError(f"no case changes {target}")

    def run(self, case: Line) -> list[str]:
        """The message of a refusal; a finding is raised."""
        if case.damaged is not None:
            (self.work / case.damaged.target).write_bytes(case.damaged.content)
        before = self.place.look()
        try:
            code, out, err = self._run(case)
            judge(case.words, code, out, err)
            self._judge_files(case.words, code, before, self.place.look())
        finally:
            self.place.restore()
            if self.cache.exists():
                shutil.rmtree(self.cache)
        return [err.strip().splitlines()[-1]] if code == 2 else []

    def _run(self, case: Line) -> tuple[int, str, str]:
        with environment(self.work, HEADSPAN_CACHE_DIR=str(self.cache), HF_HUB_OFFLINE="1", COLUMNS="100"):
            return run_apart(case.words) if case.own_process else run_here(case.words)

    def _judge_files(self, words: list[str], code: int, before: dict[str, Entry], after: dict[str, Entry]) -> None:
        outputs = outputs_of(words, self.options[words[0]])
        with environment(self.work):
            named = {os.path.relpath(os.path.realpath(out), os.path.realpath(".")) for out in outputs if _possible(out)}
        read = inputs_of([word for word in words[1:] if word not in outputs], before)
        for name in before:
            if after.get(name) == before[name]:
                continue
            if name in read and "--into" not in words:
                raise Finding(f"{name}, which is read, was changed or removed")
            if name not in named and not any(name.startswith(out + os.sep) for out in named):
                raise Finding(f"{name}, which was not to be written, was changed or removed")
            if name in THEIRS and "--force" not in words:
                raise Finding(f"{name}, a foreign file, was replaced without --force")
            if code:
                raise Finding(f"{name} was changed, though the exit code is {code}")
        new = [name for name in after if name not in before]
        for name in new:
            inside = any(name == out or name.startswith(out + os.sep) or out.startswith(name + os.sep) for out in named)
            if not inside or ".headspan-" in name:
                raise Finding(f"{name} is left behind, which was not requested")
        if code and len(outputs) < 2 and [name for name in new if after[name][0] == "file"]:
            raise Finding(f"{new[0]} was written, though the exit code is {code}")
        if code == 0 and words[0] not in ("figures", "behaviour"):  # these say what they leave out
            missing = [out for out in named if out not in after]
            if missing:
                raise Finding(f"{missing[0]} was not written, though the exit code is 0")


def _given(target: str) -> dict[str, str]:
    """The argument that makes a command read a damaged file."""
    folder = target.partition("/")[0]
    if folder in MODELS:
        return {"MODEL": folder}
    if folder == "result.safetensors":
        return {"RESULT": folder}
    if folder in ("probe.npy", "probes.npz", "vectors.safetensors"):
        return {"nodes": folder}
    return {{"lora": "adapter"}.get(folder, folder.partition(".")[0]): folder}


def inputs_of(words: list[str], entries: dict[str, Entry]) -> set[str]:
    """The files that these words make a command read: themselves, and all that is in a model's folder."""
    given = {os.path.normpath(word.partition("=")[2] or word) for word in words if word}
    return {name for name in entries if name in given or os.path.dirname(name) in given - {"", "."}}


def _possible(path: str) -> bool:
    return path != "" and "\0" not in path and len(path) < 256


def judge(words: list[str], code: int, out: str, err: str) -> None:
    """Raise what is wrong with the exit code and the two streams."""
    text = f"exit code {code}: {err[-300:]}"
    if code not in ((0, 1, 2) if words[0] == "reproduce" else (0, 2)):
        raise Finding(text)
    if "Traceback (most recent" in err or "internal error" in err:
        raise Finding(text)
    for shown in (*out.split("\n"), *err.split("\n")):
        if not shown.isprintable():
            raise Finding(f"a raw control character is printed: {shown[:200]!r}")
    lines = err.strip().splitlines()
    for sentence in lines:
        check_sentence(sentence)
    said = sum(sentence.startswith("headspan: ") for sentence in lines)
    if code == 2 and (out or said != 1 or not lines[-1].startswith("headspan: ")):
        raise Finding(f"not one sentence, or something on stdout ({out[:80]!r}): {err[-300:]!r}")
    if code == 0 and said:
        raise Finding(f"exit code 0 with an error: {err[-300:]}")
    if code == 0 and "--json" in words and out:
        json.loads(out, parse_constant=_no_number)


def _no_number(word: str) -> Any:
    raise Finding(f"{word} is printed as JSON")


def run_here(words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _run(words)
    return code, out.getvalue(), err.getvalue()


def run_apart(words: list[str]) -> tuple[int, str, str]:
    """The same for a separate process."""
    try:
        raw = [os.fsencode(word) for word in words]
    except UnicodeEncodeError:
        return run_here(words)
    command = [os.fsencode(sys.executable), b"-m", b"headspan", *raw]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=200, check=False)
    return done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8")


@contextlib.contextmanager
def environment(folder: Path, **variables: str):
    """The working folder and environment variables for a while."""
    here, old = os.getcwd(), {name: os.environ.get(name) for name in variables}
    os.chdir(folder)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.chdir(here)
        for name, value in old.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


class OnDask(Commands):
    """`score --dask local`: the numbers of a run without it."""

    def case(self, chance: random.Random) -> Line:
        model = chance.choice(["gpt2", "llama", "llama.gguf"])
        words = ["score", model, "--out", "new.safetensors", "--metric", chance.choice(["pk", "cs", "procrustes"])]
        return Line([*words, "--pairing", chance.choice(["OK", "all"])], None)

    def run(self, case: Line) -> list[str]:
        whole = hs.score(self.work / case.words[1], case.words[5], case.words[7])
        try:
            with environment(self.work, HEADSPAN_CACHE_DIR=str(self.cache)):
                code, out, err = run_apart([*case.words, "--dask", "local"])
                judge(case.words, code, out, err)
                found = hs.load("new.safetensors")
        finally:
            self.place.restore()
        for key in whole.arrays:
            if not _close(whole[key].values, found[key].values):
                raise Finding(f"{key} differs on Dask")
        return []


def _close(a: Any, b: Any) -> bool:
    import numpy as np

    return np.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
