"""Examples of edges for the card of a pair: attention on one short sequence before and after a patch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headspan.explorer.encode import pack
from headspan.results.effects import Effects
from headspan.results.tasks.examples import Examples
from headspan.results.tasks.task_result import Task
from headspan.vocabulary.heads import Role

_SEQUENCES = {
    "text": "The beginning of the text on which effects were measured",
    "tokens": "The beginning of the tokens on which effects were measured",
    "random": "Random tokens, repeated once",
}
_REPLACED = {
    "resample": "is replaced by what it wrote at the same position of another sequence",
    "mean": "is replaced by its mean over sequences and positions",
    "zero": "is replaced by zero",
}
_CORRUPTED = "is replaced by what it wrote on the corrupted prompt"
_STEPS = 65535  # of attention, from 0 to 1


def example_sets(measured: Effects | None, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """What the page shows of every set of examples: those of tasks first."""
    found = [
        _encoded(task.examples, f"A prompt of the task {task.name}", _CORRUPTED) for task in tasks if task.examples
    ]
    if measured is not None and measured.examples is not None:
        replaced = _REPLACED.get(str(measured.protocol.get("ablate")), _REPLACED["resample"])
        found.append(_encoded(measured.examples, _SEQUENCES[measured.examples.about], replaced))
    return found


def _encoded(examples: Examples, sequence: str, replaced: str) -> dict[str, Any]:
    """Edges with the place of their attention or change; attention by row, in steps of 1/65535."""
    places = {False: 0, True: 0}
    edges: list[list[Any]] = []
    for edge in examples.edges:
        values = edge.pairing.target is Role.V
        before = None if values else examples.heads.index(edge.head)
        edges.append([*map(str, edge), before, places[values]])
        places[values] += 1
    return {
        "sequence": sequence,
        "replaced": replaced,
        "tokens": examples.tokens,
        "edges": edges,
        "cells": examples.before.shape[1],
        "before": pack(_steps(examples.before), "u2"),
        "after": pack(_steps(examples.after), "u2"),
        "change": pack(examples.change, "f4"),
    }


def _steps(attention: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(attention.astype(np.float64), 0, 1) * _STEPS)
