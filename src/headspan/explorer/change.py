"""Pages of change: two models compared, and a training run with a slider for its steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headspan.analysis.behaviour import KIND_TITLES
from headspan.analysis.drift import Diff
from headspan.analysis.series import Series
from headspan.explorer import Report
from headspan.explorer.encode import pack
from headspan.explorer.page import render
from headspan.heads import ROLES, Role

SCRIPTS = ("core.js", "table.js", "change.js")


def change_page(change: Diff | Series) -> Report:
    """The page of a comparison or of a series; it needs no other file and asks for none."""
    payload = _diff_payload(change) if isinstance(change, Diff) else _series_payload(change)
    return Report(payload, render(payload, template="change.html", scripts=SCRIPTS))


def _diff_payload(change: Diff) -> dict[str, Any]:
    moved = sum(line.moved for line in change.drift)
    kinds = [edge.kind for edge in change.edges]
    facts = {
        "before": change.base,
        "after": change.other,
        "folding": change.folding,
        "weights that moved": f"{moved} of {len(change.drift)}",
        "edges gained / lost": f"{kinds.count('gained')} / {kinds.count('lost')}",
    }
    return {
        "kind": "diff",
        "model": {"name": f"{change.base} → {change.other}"},
        "facts": facts,
        "notes": change.notes,
        "heads": _heads({role: [line.head for line in change.drift if line.role is role] for role in ROLES}),
        "drift": _plain(change.records("drift")),
        "edges": _plain(change.records("edge")),
        "hubs": _plain(change.records("hub")),
        "k": change.k,
    }


def _series_payload(series: Series) -> dict[str, Any]:
    first, last = series.steps[0], series.steps[-1]
    return {
        "kind": "series",
        "model": {"name": f"{first.name} to {last.name}"},
        "facts": {
            "steps": str(len(series.steps)), "first": first.name, "last": last.name, "folding": series.folding,
            "edges kept": f"{len(series.edges)}, ever among the top {series.k} of their pairing",
        },
        "notes": series.notes,
        "heads": _heads(series.heads),
        "steps": [[step.step, step.name] for step in series.steps],
        "k": series.k,
        "edge_list": [[str(edge.pairing), str(edge.source), str(edge.target)] for edge in series.edges],
        "scores": pack(series.scores, "f4"),
        "ranks": pack(series.ranks, "i4"),
        "from_previous": {str(role): pack(series.from_previous[role], "f4") for role in ROLES},
        "from_last": {str(role): pack(series.from_last[role], "f4") for role in ROLES},
        "head_scores": [
            {"kind": kind, "title": KIND_TITLES.get(kind, kind), "values": pack(values, "f4")}
            for kind, values in series.head_scores.items()
        ],
        "query": [str(head) for head in series.heads[Role.Q]],
        "trajectories": _plain(series.records("trajectory")),
    }  # fmt: skip


def _heads(heads: dict[Role, Any]) -> dict[str, list[list[Any]]]:
    """Name, layer and number of every head by role."""
    return {str(role): [[str(head), head.layer, head.index] for head in heads[role]] for role in ROLES}


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records for JSON: no NaN, no numpy."""

    def plain(value: Any) -> Any:
        value = value.item() if isinstance(value, np.generic) else value
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [{key: plain(value) for key, value in row.items() if key != "table"} for row in rows]
