"""Change pages: a comparison of two models, or a training run with a slider over its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from headspan.change.diff import Diff
from headspan.change.edge_changes import aligned
from headspan.change.series import Series
from headspan.explorer.encode import pack
from headspan.explorer.page import STYLES, Report, render
from headspan.plotting.style import EDGE_LOOKS
from headspan.results.head_scores import KIND_TITLES
from headspan.results.scores import Scores
from headspan.statistics.dimension import centred_by, dimension_between, usual_dimension
from headspan.subspaces.metrics import PK, drawing_strength, metric_of
from headspan.system.ordering import places
from headspan.vocabulary.heads import FLOW_PAIRINGS, ROLES, Pairing, Role
from headspan.vocabulary.ports import PortTable

SCRIPTS = ("core.js", "table.js", "layout.js", "routing.js", "flow.js", "change.js")


def change_page(change: Diff | Series) -> Report:
    """The self-contained page of a comparison or a series."""
    payload = _diff_payload(change) if isinstance(change, Diff) else _series_payload(change)
    return Report(payload, render(payload, "change.html", SCRIPTS, (*STYLES, "change.css")))


def _diff_payload(change: Diff) -> dict[str, Any]:
    moved = sum(line.moved for line in change.drift)
    kinds = [edge.kind for edge in change.edges]
    facts = {
        "before": change.base,
        "after": change.other,
        "folding": change.folding,
        "weights that moved": f"{moved} of {len(change.drift)}",
        "edges entered / left": f"{kinds.count('entered')} / {kinds.count('left')}",
    }
    return {
        "kind": "diff",
        "model": {"name": f"{change.base} → {change.other}"},
        "facts": facts,
        "looks": EDGE_LOOKS,
        "notes": change.notes,
        "heads": _heads({role: [line.head for line in change.drift if line.role is role] for role in ROLES}),
        "served_by": _names(change.before.ports),
        "drift": _plain(change.rows("drift")),
        "edges": _with_strengths(change, _plain([*change.rows("edge"), *_kept(change)])),
        "hubs": _plain(change.rows("hub")),
        "k": change.k,
    }


def _series_payload(series: Series) -> dict[str, Any]:
    first, last = series.steps[0], series.steps[-1]
    return {
        "kind": "series",
        "model": {"name": f"{first.name} to {last.name}"},
        "facts": {
            "steps": str(len(series.steps)), "first": first.name, "last": last.name, "folding": series.folding,
            "edges kept": f"{len(series.edges)}, in the top {series.k} of their pairing at some step",
        },
        "notes": series.notes,
        "looks": EDGE_LOOKS,
        "heads": _heads(series.heads),
        "served_by": _served(series),
        "steps": [[step.step, step.name] for step in series.steps],
        "k": series.k,
        "edge_list": [[str(edge.pairing), str(edge.source), str(edge.target)] for edge in series.edges],
        "scores": pack(series.scores, "f4"),
        "strengths": _strengths(series),
        "ranks": pack(series.ranks, "i4"),
        "from_previous": {str(role): pack(series.from_previous[role], "f4") for role in ROLES},
        "from_last": {str(role): pack(series.from_last[role], "f4") for role in ROLES},
        "head_scores": [
            {"kind": kind, "title": KIND_TITLES.get(kind, kind), "values": pack(values, "f4")}
            for kind, values in series.head_scores.items()
        ],
        "query": [str(head) for head in series.heads[Role.Q]],
        "trajectories": _plain(series.rows("trajectory")),
    }  # fmt: skip


def _kept(change: Diff) -> Iterator[dict[str, Any]]:
    """Edges in the top k both before and after that are not listed as changed."""
    listed = {(edge.pairing, edge.source, edge.target) for edge in change.edges}
    for pairing in FLOW_PAIRINGS:
        if (PK, pairing) not in change.before or (PK, pairing) not in change.after:
            continue
        before, after = aligned(change.before[PK, pairing], change.after[PK, pairing])
        ranks, later = places(before.values), places(after.values)
        for i, j in np.argwhere((ranks > 0) & (ranks <= change.k) & (later > 0) & (later <= change.k)):
            source, target = before.sources[i], before.targets[j]
            if (pairing, source, target) in listed:
                continue
            was, now = float(before.values[i, j]), float(after.values[i, j])
            yield {
                "pairing": str(pairing), "source": str(source), "target": str(target), "kind": "kept", "before": was,
                "after": now, "change": now - was, "rank_before": int(ranks[i, j]), "rank_after": int(later[i, j]),
            }  # fmt: skip


def _with_strengths(change: Diff, edges: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Edges with their drawing strength before and after."""
    for pairing in FLOW_PAIRINGS:
        mine = [edge for edge in edges if edge["pairing"] == str(pairing)]
        for name, scores in (("before", change.before), ("after", change.after)):
            if mine:
                values = np.array([np.nan if edge[name] is None else edge[name] for edge in mine], dtype=np.float64)
                excess = metric_of(PK).excess(values, usual_dimension(scores, pairing), *_widest(scores, pairing))
                for edge, strength in zip(mine, drawing_strength(excess), strict=True):
                    edge[f"{name}_strength"] = round(float(strength), 4)
    return edges


def _widest(scores: Scores, pairing: Pairing) -> tuple[np.ndarray, np.ndarray]:
    first, second = (np.asarray(scores.ranks(role).max(initial=1)) for role in pairing)
    return first, second


def _strengths(series: Series) -> str | None:
    """Drawing strength of every edge at every step; None if the file does not record the width of its heads."""
    known = series.provenance.get("dimensions")
    if not isinstance(known, dict) or not series.edges:
        return None
    ranks = np.array([[int(known[str(role)]) for role in edge.pairing] for edge in series.edges])
    about = {"folding": series.folding, **series.provenance}
    centred = {
        role: dict(zip(ports, centred_by(about, ports, role), strict=True)) for role, ports in series.heads.items()
    }
    flags = [(centred[e.pairing.source][e.source], centred[e.pairing.target][e.target]) for e in series.edges]
    d = dimension_between(int(series.provenance["d_model"]), *np.array(flags).T)
    return pack(drawing_strength(metric_of(PK).excess(series.scores, d, ranks[:, 0], ranks[:, 1])), "f4")


def _served(series: Series) -> dict[str, str]:
    """The key/value head of every query head that shares one; files from earlier versions do not record it."""
    said = series.provenance.get("served_by")
    if isinstance(said, dict):
        return {str(head): str(kv) for head, kv in said.items()}
    return _names(PortTable.of_heads(series.heads[Role.Q], series.heads[Role.V]))


def _names(table: PortTable) -> dict[str, str]:
    return {str(head): str(kv) for head, kv in table.served_by.items()}


def _heads(heads: dict[Role, Any]) -> dict[str, list[list[Any]]]:
    """Name, layer and number of every head by role."""
    return {str(role): [[str(head), head.layer, head.index] for head in heads[role]] for role in ROLES}


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records for JSON, without NaN or numpy types."""

    def plain(value: Any) -> Any:
        value = value.item() if isinstance(value, np.generic) else value
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [{key: plain(value) for key, value in row.items() if key != "table"} for row in rows]
