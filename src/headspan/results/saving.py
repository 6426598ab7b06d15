"""Saving results and loading them again: one sealed file for every kind, and one table of the kinds.

A file is safetensors with the arrays of a result, and everything else as JSON with its kind, its schema, the version
of headspan and a hash (:mod:`headspan.system.sealed_file`). Circuits and head scores are JSON, because people write
them by hand. Scores and series have formats of their own, which earlier versions wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import headspan
from headspan.results.metadata import is_object
from headspan.results.plain_values import as_lists, encode, read_parts
from headspan.system.arguments import checked
from headspan.system.inputs import input_file, read_text, reason
from headspan.system.outputs import check_output
from headspan.system.sealed_file import ALTERED, check_seal, read_sealed, write_sealed
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    from headspan.results.tabular import Tabular

SCHEMA = 2  # of the common format; 1: a diff of version 0.3, which cannot be read again
SCORES = "result"  # the kind of scores, whose files do not name it
# Kind -> the class that it loads as. Classes are imported when a file of their kind is read.
KINDS = {
    SCORES: "results.scores:Scores",
    "matrix": "results.matrix:ScoreMatrix",
    "edges": "results.matrix:Edges",
    "around": "results.strongest:Around",
    "effects": "results.effects:Effects",
    "statistics": "results.observations:Statistics",
    "task": "results.tasks.task_result:Task",
    "effects summary": "running.effects_summary:EffectsSummary",
    "effect curve": "running.effects_curve:EffectCurve",
    "hubs": "statistics.hubs:Hubs",
    "hub lists": "statistics.hubs:HubLists",
    "hub scores": "statistics.hubs:HubScores",
    "baseline": "statistics.baseline:Baseline",
    "significance": "statistics.significance:Significance",
    "paths": "graphs.paths:Paths",
    "wiring": "plotting.drawn_wiring:DrawnWiring",
    "info": "reading.info:Info",
    "nodes": "reading.node_overlaps:NodeReport",
    "links": "reading.links:Links",
    "pair": "reading.pair:PairReport",
    "pairs of two heads": "reading.head_pairs:HeadPairs",
    "tokens": "reading.tokens:TokenList",
    "comparison": "change.compare:Comparison",
    "diff": "change.diff:Diff",
    "series": "change.series:Series",
    "cached files": "checkpoints.hub.chunk_room:CachedFiles",
    "evaluation": "paper.evaluation:Evaluation",
    "circuit overlap": "statistics.circuit_overlap:CircuitOverlap",
    "reproduction": "paper.reproduction:Reproduction",
}
# In JSON files: the key that a kind has -> its class. Every other JSON file is read as head scores.
JSON_KINDS = {"format": "results.tasks.circuit:Circuit", "": "results.head_scores:BehaviourScores"}
_SAVED_AS = {where: kind for kind, where in KINDS.items()} | {"graphs.graph:Wiring": "wiring"}
_MAKERS = {  # advice where another kind was given
    SCORES: "make those with `hs.score(model)`",
    "statistics": "make those with `hs.observe(model)`",
    "effects": "make those with `hs.effects(model)`",
    "task": "make those with `hs.task(model, task)`",
}
_LARGEST_JSON = 10**8  # bytes


def kind_of(cls: type) -> str:
    """The kind of file that a result of this class is saved as."""
    names = (f"{base.__module__.removeprefix('headspan.')}:{base.__qualname__}" for base in cls.__mro__)
    found = next((_SAVED_AS[name] for name in names if name in _SAVED_AS), None)
    if found is None:
        raise TypeError(f"{cls.__qualname__} is not in the table of results that are saved")
    return found


def class_of(where: str) -> Any:
    """A class by its place in the tables."""
    module, _, name = where.partition(":")
    return getattr(import_module(f"headspan.{module}"), name)


# -- plain values ----------------------------------------------------------------------------------------------


def to_dict(result: Any) -> dict[str, Any]:
    """A result as JSON values; arrays are lists."""
    return _about(result) | encode(result, as_lists)


def from_dict(cls: type, content: Any) -> Any:
    """The inverse of `to_dict`; raises if the content is not that of this class."""
    where = Path(f"this {kind_of(cls)}")
    _check_kind(cls, content, where, "this")
    return read_parts(cls, content, {}, where)


def _about(result: Any) -> dict[str, Any]:
    about = {"kind": kind_of(result.__class__), "schema": SCHEMA, "headspan": headspan.__version__}
    return about | ({ALTERED: True} if getattr(result, ALTERED, False) else {})


def _check_kind(cls: type, head: Any, path: Path, named: str) -> None:
    """Refuse the content of another kind, of a newer version or of one that cannot be read."""
    facts = cast("Mapping[str, Any]", head) if isinstance(head, Mapping) else None
    kind = None if facts is None else facts.get("kind", SCORES)
    if facts is None or kind != kind_of(cls):
        advice = _MAKERS.get(kind_of(cls), "headspan.load reads every kind")
        raise HeadspanError(f"{named} holds {_described(kind)}, not {_described(kind_of(cls))}: {advice}")
    if hasattr(cls, "_from_parts"):
        return  # it checks its own schema
    schema = facts.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise HeadspanError(f"{named} was written by a newer headspan (schema {schema}). Upgrade headspan")
    if schema != SCHEMA:
        raise HeadspanError(f"{named} has no schema that can be read, or was written by headspan 0.3. Make it again")


def _described(kind: Any) -> str:
    if not isinstance(kind, str):
        return "nothing that headspan knows"
    return "the scores of one model" if kind == SCORES else f"a result of the kind {kind[:40]!r}"


# -- files -----------------------------------------------------------------------------------------------------


def save(result: Any, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a result to one sealed file, if it may be written there; it appears only when complete."""
    target = check_output(path, kind_of(result.__class__), inputs=result._inputs(), force=force)
    if hasattr(result, "_to_parts"):
        head, arrays = result._to_parts()
    else:
        arrays: dict[str, np.ndarray] = {}

        def put(place: str, array: np.ndarray) -> dict[str, str]:
            arrays[place.strip("/")] = array
            return {"array": place.strip("/")}

        head = _about(result) | encode(result, put)
    write_sealed(target, arrays, head)


@checked
def load(path: str | os.PathLike[str]) -> Tabular:
    """Read any result that was saved: scores, a diff, a series, effects, hubs, a circuit, head scores …

    The file says which kind it is; ``Scores.load``, ``Series.load`` and so on read one kind only. A file of a newer
    version or with impossible content is refused; one that was edited is read with a warning.
    """
    if _is_json(path):
        return _from_json(path)
    head, arrays = _read(path)
    kind = head.get("kind", SCORES) if is_object(head) else SCORES
    if not isinstance(kind, str) or kind not in KINDS:
        raise HeadspanError(f"{path} holds {_described(kind)}, which this version cannot read. Upgrade headspan")
    return _made(class_of(KINDS[kind]), head, arrays, Path(path))


def load_as(cls: Any, path: str | os.PathLike[str]) -> Any:
    """Read a result of one class; other kinds are refused."""
    head, arrays = _read(path)
    return _made(cls, head, arrays, Path(path))


def _read(path: str | os.PathLike[str]) -> tuple[Any, dict[str, np.ndarray]]:
    name = path if str(path).endswith(".safetensors") else f"{path}.safetensors"
    missing = f"there is no result file {path}: make one with `hs.score(model, out={str(name)!r})`"
    head, arrays = read_sealed(path, "headspan result", missing)
    if head is None:
        raise HeadspanError(f"{path} is a safetensors file but not a headspan result: make one with `hs.score(model)`")
    return head, arrays


def _made(cls: Any, head: Any, arrays: Mapping[str, np.ndarray], path: Path) -> Any:
    """The result that a file holds; a file that was edited after headspan wrote it is reported."""
    _check_kind(cls, head, path, str(path))
    if hasattr(cls, "_from_parts"):
        made = cls._from_parts(head, arrays, path)
        check_seal(head, arrays, path, made.provenance, expected=head["schema"] >= cls._sealed_since)
        return made
    made = read_parts(cls, head, arrays, path)
    if head.get(ALTERED) is True:
        made.__dict__[ALTERED] = True
    check_seal(head, arrays, path, made.__dict__, expected=True)
    return made


def _is_json(path: str | os.PathLike[str]) -> bool:
    """Whether an existing file begins like a JSON object."""
    if not os.path.isfile(path):
        return False
    with open(input_file(path, ""), "rb") as file:
        return file.read(64).lstrip()[:1] in (b"{", b"[")


def _from_json(path: str | os.PathLike[str]) -> Any:
    try:
        content = json.loads(read_text(path, f"there is no file {path}", "result in JSON", most=_LARGEST_JSON))
    except (ValueError, RecursionError) as error:
        raise HeadspanError(f"{path} cannot be read as JSON ({reason(error)[:120]}): make it again") from None
    key = next((key for key in JSON_KINDS if is_object(content) and key in content), "")
    return class_of(JSON_KINDS[key]).from_dict(content)
