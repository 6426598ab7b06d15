"""Task circuits for the page: the best edges in order with everything known about them, and the curve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from headspan.explorer.encode import finite, pack
from headspan.results.effects import check_same_heads
from headspan.results.identity import same_model
from headspan.results.scores import Scores
from headspan.results.tasks.task_result import Task, on_edges
from headspan.subspaces.metrics import OBSERVED_METRICS, PK, metric_of
from headspan.vocabulary.heads import Head, Node

MOST_EDGES = 400  # of each task, those with the largest attributions

TaskFile: TypeAlias = Task | str | os.PathLike[str]
TaskFiles: TypeAlias = TaskFile | Sequence[TaskFile]


def given_tasks(tasks: TaskFiles | None) -> list[Task]:
    """Tasks as given, or read from their files."""
    listed = [tasks] if isinstance(tasks, (Task, str, os.PathLike)) else list(tasks or ())
    return [task if isinstance(task, Task) else Task.load(task) for task in listed]


def check_tasks(scores: Scores, tasks: Sequence[Task]) -> list[str | None]:
    """Refuse tasks of another model; a note for each whose model cannot be compared."""
    for task in tasks:
        check_same_heads(task.ports, scores, f"the model of the task {task.name}")
    return [same_model(scores.provenance, task.model, "the result", f"the task {task.name}") for task in tasks]


def encode_task(task: Task, scores: Scores) -> dict[str, Any]:
    """One task for the page; similarities that it lacks are those of the result."""
    table, n = task.table, min(MOST_EDGES, task.table.n_edges)
    best = table.strongest(task.attribution, n)
    rows, columns = np.divmod(best, len(table.readers))
    size = None if task.circuit is None else int(task.circuit.sum())
    known = _similarities(task, scores)
    content: dict[str, Any] = {
        "name": task.name,
        "method": {"ig": "EAP-IG", "eap": "EAP"}.get(str(task.protocol.get("method")), ""),
        "objective": str(task.protocol.get("objective", "")).replace("-", " "),
        "values": task.values,
        "held_out": task.held_out,
        "n_edges": table.n_edges,
        "circuit": size,
        # A circuit of the largest attributions is one point of the curve; one from a file may be any edges.
        "largest": task.circuit is not None
        and bool((table.circuit(task.attribution, size or 0) == task.circuit).all()),
        "faithfulness": finite(task.faithfulness),
        "cpr": finite(task.cpr),
        "cmd": finite(task.cmd),
        "curve": [[p["edges"], p["faithfulness"]] for p in task.curve if np.isfinite(p["faithfulness"])],
        "interrupted": task.interrupted,
        "edges": [list(table.edge(int(row), int(column))) for row, column in zip(rows, columns, strict=True)],
        "nodes": _nodes(task, rows, columns),
        "columns": [
            {"key": name, "title": _title(name), "values": pack(values[rows, columns], "f4")}
            for name, values in known.items()
        ],
    }
    for name in ("attribution", "exact", "frequency"):
        content[name] = pack(getattr(task, name)[rows, columns], "f4")
    if task.circuit is not None:
        content["in_circuit"] = pack(task.circuit[rows, columns], "u1")
    return content


def _similarities(task: Task, scores: Scores) -> dict[str, np.ndarray]:
    """Overlap and influence on the edges between heads: those of the task, or of the result."""
    found = dict(task.similarities)
    for metric in (PK, *OBSERVED_METRICS):
        if metric not in found and metric in scores.metrics:
            found |= on_edges(scores, metric, task.table)
    return found


def _title(name: str) -> str:
    metric = name.removesuffix("_rank")
    return metric_of(metric).short + (" rank" if metric != name else "")


def _nodes(task: Task, rows: np.ndarray, columns: np.ndarray) -> list[list[Any]]:
    """Name, kind and position in the stream of everything on these edges, in stream order."""
    ends: list[Head | Node] = [task.table.writers[i].head for i in np.unique(rows)]
    ends += [task.table.readers[i].head for i in np.unique(columns)]
    ordered = sorted(dict.fromkeys(ends), key=lambda end: end.position)
    return [[str(end), end.kind, end.position] for end in ordered]
