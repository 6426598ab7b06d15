"""The file of a series: its arrays, everything else as JSON, and the hash of both, like the file of a result."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import headspan
from headspan.results.checks import SLACK, check_heads, damaged
from headspan.results.metadata import SERIES, SERIES_PROVENANCE, check_fields
from headspan.system.outputs import check_output
from headspan.system.sealed_file import check_seal, read_sealed, write_sealed
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Head, Pairing, Role

if TYPE_CHECKING:
    from headspan.change.series import Series

SCHEMA = SEALED_SCHEMA = 2  # 1: without a hash
_SHARE = (-SLACK, 1 + SLACK)  # drift and head scores
Arrays = dict[str, np.ndarray]


def write_series(path: str | os.PathLike[str], series: Series, force: bool) -> None:
    """Write everything to one file, after checking the path; the file appears only when complete."""
    head = {
        "schema": SCHEMA, "kind": "series", "headspan": headspan.__version__, "k": series.k, "folding": series.folding,
        "steps": [list(step) for step in series.steps], "edges": [list(map(str, edge)) for edge in series.edges],
        "heads": {str(role): list(map(str, heads)) for role, heads in series.heads.items()}, "notes": series.notes,
        "provenance": series.provenance,
    }  # fmt: skip
    target = check_output(path, "series", inputs=[step.name for step in series.steps], force=force)
    write_sealed(target, _tensors(series), head)


def _tensors(series: Series) -> Arrays:
    tensors = {"scores": series.scores.astype(np.float32), "ranks": series.ranks.astype(np.int32)}
    for role in series.heads:
        tensors[f"from_previous/{role}"] = series.from_previous[role].astype(np.float32)
        tensors[f"from_last/{role}"] = series.from_last[role].astype(np.float32)
    tensors |= {f"{hub}/{pairing}": values.astype(np.float32) for (hub, pairing), values in series.hubs.items()}
    return tensors | {f"head/{kind}": values.astype(np.float32) for kind, values in series.head_scores.items()}


def read_series(path: str | os.PathLike[str]) -> tuple[Any, ...]:
    """The fields of the series in a file that `write_series` wrote; other files are refused, edits are reported."""
    place = Path(path)
    head, tensors = read_sealed(path, "series", f"there is no file {path}. Make a series with `hs.track(model)`")
    if not isinstance(head, dict) or head.get("kind") != "series":
        raise HeadspanError(f"{path} is not a series. Make one with `hs.track(model)`")
    if type(head.get("schema")) is not int or head["schema"] > SCHEMA:
        raise HeadspanError(f"{path} was written by a newer version of headspan. Upgrade headspan")
    if not {*SERIES} - {"hash"} <= {*head}:
        raise damaged(place, "its metadata is incomplete")
    check_fields(head, SERIES, "metadata", place)
    check_fields(head["provenance"], SERIES_PROVENANCE, "provenance", place)
    try:
        fields = _fields(head, tensors, place)
    except (KeyError, ValueError) as error:
        raise damaged(place, f"it lacks or contradicts {str(error)[:80]}") from None
    check_seal(head, tensors, place, fields[-1], expected=head["schema"] >= SEALED_SCHEMA)
    return fields


def _fields(head: Mapping[str, Any], tensors: Arrays, path: Path) -> tuple[Any, ...]:
    steps = tuple(Step(*step) for step in head["steps"])
    edges = tuple(SeriesEdge(Pairing.parse(p), Head.parse(s), Head.parse(t)) for p, s, t in head["edges"])
    heads = {Role(role): tuple(Head.parse(h) for h in names) for role, names in head["heads"].items()}
    if not steps or not {*ROLES} <= {*heads}:
        raise damaged(path, "it has no steps, or not all roles")
    check_heads(heads, path)
    for edge in edges:
        if edge.source not in heads[edge.pairing.source] or edge.target not in heads[edge.pairing.target]:
            raise damaged(path, f"its edge {edge} names heads that it does not have")

    def take(name: str, columns: int, low: float = -math.inf, high: float = math.inf, kind: str = "f") -> np.ndarray:
        values = tensors[name]
        if values.shape != (len(steps), columns) or values.dtype.kind != kind:
            raise damaged(path, f"{name[:80]} has shape {values.shape}, expected {(len(steps), columns)}")
        if np.isinf(values).any() or (values < low).any() or (values > high).any():
            raise damaged(path, f"{name[:80]} holds numbers outside their range")
        return values

    widths = head["provenance"].get("dimensions") or {}
    widest = min((max(widths.values(), default=math.inf), head["provenance"].get("d_model", math.inf)))
    hubs: dict[tuple[str, Pairing], np.ndarray] = {}
    for name in tensors:
        kind, _, rest = name.partition("/")
        if kind in ("inlet", "outlet"):
            pairing = Pairing.parse(rest)
            hubs[kind, pairing] = take(name, len(heads[pairing.target if kind == "inlet" else pairing.source]))
    return (
        steps, head["k"], head["folding"], heads, edges,
        take("scores", len(edges), -SLACK, widest * (1 + SLACK)), take("ranks", len(edges), 0, kind="i"),
        {role: take(f"from_previous/{role}", len(heads[role]), *_SHARE) for role in ROLES},
        {role: take(f"from_last/{role}", len(heads[role]), *_SHARE) for role in ROLES},
        hubs,
        {n.partition("/")[2]: take(n, len(heads[Role.Q]), -0.01, 1.01) for n in tensors if n.startswith("head/")},
        list(head["notes"]), dict(head["provenance"]),
    )  # fmt: skip


class Step(NamedTuple):
    """One checkpoint of a series; content is the hash of its attention weights."""

    step: int
    name: str
    content: str


class SeriesEdge(NamedTuple):
    """An edge that was among the strongest k of its pairing at some step."""

    pairing: Pairing
    source: Head
    target: Head

    def __str__(self) -> str:
        return f"{self.source} → {self.target} ({self.pairing})"
