"""Results and series that were edited after they were written: every field and array, read by every reader.

    python tests/fuzz/edited.py [--values 4] [--seed N] [--readers N]

An edit changes one field of the metadata (each value in it replaced or removed), one array (values, type, shape, name,
swapped with another), or something that only a person would do: heads renamed, effects of another model inserted. It
keeps the old hash, or is *resealed* with the hash of the edited content.

A finding is what `commands.judge` finds (a traceback, exit code 70, more than one message), an exception in Python that
is not a `HeadspanError`, an edit with the old hash that is neither refused nor warned of, or a warning about an
unedited file.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from commands import environment, judge, run_here
from mutations import HOSTILE, places
from place import Finding, Place
from safetensors.numpy import load_file, save_file
from seeds import write_extras, write_seeds

import headspan as hs
from headspan.system.sealed_file import HASH, content_hash

FILE = "edited.safetensors"
SEEDS = ("whole", "screened", "nodes", "series")
Arrays = dict[str, np.ndarray]
Head = dict[str, Any]

# What each command is asked; FILE is the edited file.
COMMANDS: dict[str, str] = {
    "top": "top FILE -k 3 --json", "top of a head": "top FILE --head L1H1 -k 2", "hubs": "hubs FILE --csv",
    "baseline": "baseline FILE", "significance": "baseline FILE --pairing OK --null reversed",
    "evaluate": "evaluate FILE --labels labels.csv --bootstrap 3", "compare": "compare FILE whole.safetensors",
    "compare with": "compare gpt2 FILE", "wiring": "wiring FILE -k 3 --out new.json",
    "wiring by rule": "wiring FILE --rule significance --out new.graphml",
    "wiring of behaviour": "wiring FILE --labels behaviour --out new.csv", "diff": "diff FILE gpt2",
    "figures": "figures FILE --only two-layer,scatter --out made --dpi 20",
    "figures of wiring": "figures FILE --only wiring,grid -k 2 --out made --dpi 20",
    "figures of chance": "figures FILE --only kl,random,use --out made --dpi 20",
    "figures of heads": "figures FILE --only identity,head-scores --out made --dpi 20",
    "figures with weights": "figures FILE --weights gpt2 --only norms,mse,folded-wiring --out made --dpi 20",
    "report": "report FILE --out new.html",
    "report with weights": "report FILE --weights gpt2 --tokens 0 --out new.html",
    "paths": "paths FILE --weights gpt2 --depth 2 -k 2", "pair": "pair FILE L0H1.O L1H1.K",
    "effects": "effects gpt2 FILE --sequences 2 --length 4 --random -k 2",
    "effects into": "effects gpt2 --into FILE --sequences 2 --length 4 --random",
    "behaviour into": "behaviour gpt2 --into FILE --sequences 1 --length 4",
    "site": "site gallery FILE", "track": "track FILE --table all --csv",
    "track to a page": "track FILE --out new.html",
    "info": "info FILE",
}  # fmt: skip


def _python(path: Path) -> None:
    """Everything that a result can be asked for in Python."""
    scores = hs.load(path)
    repr(scores), scores._repr_html_(), scores.to_pandas(), scores.to_networkx("pk", ["OK"]), scores.to_xarray()
    for key in scores.arrays:
        matrix = scores[key]
        matrix.top(2), matrix.forward().pairs(), matrix._repr_html_()
    hs.significance(scores, "OK"), hs.around(scores, "L1H1"), hs.wiring(scores, "OK")
    scores.save(path.with_name("new.safetensors"))


def _python_series(path: Path) -> None:
    series = hs.Series.load(path)
    repr(series), series._repr_html_(), series.rows("all"), series.to_pandas("drift")
    series.save(path.with_name("new.safetensors"))


PYTHON: dict[str, Callable[[Path], None]] = {"hs.load": _python, "Series.load": _python_series}
OF_SERIES = ("track", "track to a page", "Series.load")
READERS = (*COMMANDS, *PYTHON)


def readers_of(seed: str) -> tuple[str, ...]:
    """Who reads a file of that kind; one of the others reads it too, and refuses it."""
    return (*OF_SERIES, "top") if seed == "series" else (*(r for r in READERS if r not in OF_SERIES), "track")


class Edit(NamedTuple):
    """One edited file and who reads it."""

    seed: str
    what: str
    resealed: bool
    head: Head
    tensors: Arrays
    reader: str

    def __repr__(self) -> str:
        return f"{self.what} of {self.seed}{', resealed' if self.resealed else ''}, by {self.reader}"


class Edited:
    """Makes edits of small results and has them read."""

    cpu_seconds, memory = 60.0, 3 << 30

    def __init__(self, folder: Path) -> None:
        self.work, self.cache = folder / "place", folder / "cache"
        write_seeds(self.work)
        write_extras(self.work)
        write_results(self.work)
        self.seeds = {name: read(self.work / f"{name}.safetensors") for name in SEEDS}
        self.foreign = read(self.work / "foreign.safetensors")
        self.place = Place(self.work)

    def case(self, chance: random.Random) -> Edit:
        seed = chance.choices(SEEDS, [6, 2, 2, 2])[0]
        head, tensors = deepcopy(self.seeds[seed])
        kind = chance.choices(["field", "array", "person"], [5, 4, 2])[0]
        if kind == "field":
            path = chance.choice(places(head)[1:])
            what = change_field(head, path, chance.choice([_REMOVED, *HOSTILE]))
        elif kind == "array":
            what = change_array(tensors, chance.choice(sorted(tensors)), chance)
        else:
            what = chance.choice(list(PERSON)) if seed != "series" else "hash taken away"
            PERSON[what](head, tensors, self.foreign)
        resealed = chance.random() < 0.35
        return Edit(seed, what, resealed, head, tensors, chance.choice(readers_of(seed)))

    def every(self, values: int, chance: random.Random) -> Iterator[Edit]:
        """Every field with some values, every array with every change, what a person would do: each by some reader."""
        for seed, (head, tensors) in self.seeds.items():
            for path in places(head)[1:]:
                for value in chance.sample([_REMOVED, *HOSTILE], values):
                    changed = deepcopy(head)
                    yield Edit(seed, change_field(changed, path, value), False, changed, dict(tensors), "")
            for name in tensors:
                for change in ARRAYS:
                    changed = {key: array.copy() for key, array in tensors.items()}
                    yield Edit(seed, change_array(changed, name, chance, change), False, deepcopy(head), changed, "")
            for what, change in PERSON.items():
                edited = deepcopy((head, tensors))
                if seed != "series" or what == "hash taken away":
                    change(*edited, self.foreign)
                    yield Edit(seed, what, False, *edited, "")

    def run(self, case: Edit) -> list[str]:
        """The message of a refusal; a finding is raised."""
        head, tensors = case.head, case.tensors
        try:
            altered = content_hash(tensors, head) != content_hash(*reversed(self.seeds[case.seed]))
            altered |= head.get(HASH) != self.seeds[case.seed][0][HASH]
            if case.resealed:
                head = head | {HASH: content_hash(tensors, head)}
            save_file(tensors, self.work / FILE, {"headspan": json.dumps(head)})
        except (TypeError, ValueError, AttributeError, UnicodeEncodeError):
            return ["no such file can be written"]
        try:
            with environment(self.work, HEADSPAN_CACHE_DIR=str(self.cache), HF_HUB_OFFLINE="1", COLUMNS="100"):
                refusal, warned = self._read(case.reader)
        finally:
            self.place.restore()
            shutil.rmtree(self.cache, ignore_errors=True)
        if altered and not case.resealed and not refusal and not warned:
            raise Finding(f"{case}: neither refused nor warned of")
        if not altered and warned:
            raise Finding(f"{case}: warned of, though nothing is changed")
        return [refusal] if refusal else []

    def _read(self, reader: str) -> tuple[str, bool]:
        if reader in PYTHON:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", hs.HeadspanWarning)
                try:
                    PYTHON[reader](self.work / FILE)
                except hs.HeadspanError as error:
                    return str(error), False
            return "", any(issubclass(one.category, hs.HeadspanWarning) for one in caught)
        words = COMMANDS[reader].replace("FILE", FILE).split()
        code, out, err = run_here(words)
        judge(words, code, out, err)
        return (err.strip().splitlines()[-1] if code else ""), "warning: " in err


def write_results(folder: Path) -> None:
    """A whole result with head scores and effects, a screened one, one with nodes, a series, one of other weights."""
    from headspan.results.effects import attach

    names = ("identity", "previous_token", "duplicate_token", "induction")
    for name, model in (("whole", "gpt2"), ("foreign", "tuned")):
        scores = hs.score(folder / model, "all", "all")
        scores.provenance["reference"] = model
        measured = hs.effects(folder / model, sequences=2, length=4, random=True)
        attach(scores, measured)
        table: dict[str, Any] = {kind: {str(h): h.index / 4 for h in scores.heads("Q")} for kind in names}
        scores.annotations["behaviour"] = table | {"_model": scores.annotations["effects"]["model"]}
        scores.save(folder / f"{name}.safetensors")
    hs.score(folder / "gpt2", "pk", "flow", screen=3).save(folder / "screened.safetensors")
    hs.score(folder / "gpt2", ["pk", "cs"], ["OK", "OR", "WK"], nodes=[str(folder / "probe.npy")]).save(
        folder / "nodes.safetensors"
    )
    hs.track([folder / "gpt2", folder / "tuned"], folder / "series.safetensors", k=2)


def read(path: Path) -> tuple[Head, Arrays]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return json.loads(file.metadata()["headspan"]), load_file(path)


_REMOVED = object()


def change_field(head: Head, path: tuple[Any, ...], value: Any) -> str:
    parent: Any = head
    for key in path[:-1]:
        parent = parent[key]
    if value is _REMOVED:
        del parent[path[-1]]
        return f"{'.'.join(map(str, path))} removed"
    parent[path[-1]] = deepcopy(value)
    return f"{'.'.join(map(str, path))} = {str(value)[:40]!r}"


def _at(number: float) -> Callable[[np.ndarray], np.ndarray]:
    """One entry, of those that are there, set to a number."""

    def change(values: np.ndarray) -> np.ndarray:
        there = np.argwhere(~np.isnan(values)) if values.dtype.kind == "f" else np.argwhere(values > -1)
        if len(there):
            values[tuple(there[len(there) // 2])] = number if values.dtype.kind == "f" else int(min(number, 2**31 - 1))
        return values

    return change


def _fill(number: float) -> Callable[[np.ndarray], np.ndarray]:
    """What is not there filled in: the backward pairs of a result."""
    return lambda values: np.where(np.isnan(values), number, values).astype(values.dtype)


ARRAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "1e30": _at(1e30), "-1": _at(-1.0), "0.3": _at(0.3), "times 50": lambda v: v * v.dtype.type(50),
    "zeros": np.zeros_like, "backward pairs filled in": _fill(0.5), "turned": lambda v: np.ascontiguousarray(v.T),
    "reversed": lambda v: np.ascontiguousarray(v[::-1]), "rolled": lambda v: np.roll(v, 1), "flat": np.ravel,
    "shorter": lambda v: np.ascontiguousarray(v[:-1]), "float64": lambda v: v.astype(np.float64),
    "int64": lambda v: np.nan_to_num(v).astype(np.int64), "half": lambda v: v.astype(np.float16),
    "bytes": lambda v: np.ascontiguousarray(v).view(np.uint8), "empty": lambda v: v[:0],
    "NaN": _at(float("nan")), "infinity": _at(float("inf")),
}  # fmt: skip
_OTHERS = ("removed", "renamed", "swapped")


def change_array(tensors: Arrays, name: str, chance: random.Random, change: str | None = None) -> str:
    """One array changed, removed, renamed or swapped with another of its shape."""
    change = change or chance.choice([*ARRAYS, *_OTHERS])
    if change in ARRAYS:
        values = tensors[name]
        if values.dtype.kind != "f" and change in ("NaN", "infinity", "backward pairs filled in"):
            change = "-1"
        with np.errstate(all="ignore"):
            tensors[name] = ARRAYS[change](values.copy())
    elif change == "swapped":
        alike = [other for other in tensors if tensors[other].shape == tensors[name].shape]
        other = chance.choice(alike)
        tensors[name], tensors[other] = tensors[other], tensors[name]
        change = f"swapped with {other}"
    else:
        values = tensors.pop(name)
        if change == "renamed":
            tensors[chance.choice(["pk/XX", "x", "effect/random/OK", "rank/O", "kp/OK", name + "x", ""])] = values
    return f"{name}: {change}"


def _rename(head: Head, tensors: Arrays, foreign: tuple[Head, Arrays]) -> None:
    head["ports"] = {role: names[::-1] for role, names in head["ports"].items()}


MEASURED = ("effect/", "example/")  # names of arrays that come with effects


def _graft(head: Head, tensors: Arrays, foreign: tuple[Head, Arrays], arrays: bool = True) -> None:
    """Effects and head scores of another model, with their annotations."""
    tensors |= {name: array for name, array in foreign[1].items() if arrays and name.startswith(MEASURED)}
    head["extra"] = [name for name in tensors if name.startswith(MEASURED)]
    head["annotations"] = deepcopy(foreign[0]["annotations"])


def _fewer_heads(head: Head, tensors: Arrays, foreign: tuple[Head, Arrays]) -> None:
    head["ports"] = {role: names[1:] for role, names in head["ports"].items()}


PERSON: dict[str, Callable[[Head, Arrays, tuple[Head, Arrays]], None]] = {
    "heads reversed": _rename,
    "first head taken away": _fewer_heads,
    "effects of another model": _graft,
    "head scores of another model": lambda head, tensors, foreign: _graft(head, tensors, foreign, arrays=False),
    "hash taken away": lambda head, tensors, foreign: head.pop(HASH) and None,
    "all scores of one similarity": lambda head, tensors, foreign: tensors.update(
        {name: array for name, array in foreign[1].items() if name.startswith("pk/") and name in tensors}
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=4, help="values tried for every field")
    parser.add_argument("--readers", type=int, default=2, help="readers of every edit, each in turn")
    parser.add_argument("--resealed", type=float, default=0.3, help="share of edits with a new hash")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from fuzz import prepare, run_case

    chance, counts, turn = random.Random(options.seed), Counter(), 0
    with tempfile.TemporaryDirectory(prefix="headspan-edited-") as name:
        prepare()
        edited = Edited(Path(name))
        for edit in edited.every(options.values, chance):
            for _ in range(options.readers):
                turn, readers = turn + 1, readers_of(edit.seed)
                case = edit._replace(reader=readers[turn % len(readers)], resealed=chance.random() < options.resealed)
                outcome = run_case(edited, case)
                counts[outcome["outcome"]] += 1
                if outcome["outcome"] == "finding":
                    print(f"{case}: {outcome['text']}", flush=True)
    print(f"{counts.total()} cases, seed {options.seed}: {dict(counts)}")
    return 1 if counts["finding"] else 0


if __name__ == "__main__":
    sys.exit(main())
