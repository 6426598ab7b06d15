"""Head scores, effects and a task circuit of the demo model, shipped with the package: they need no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

from headspan.results.effects import effects_in
from headspan.results.scores import Scores
from headspan.results.tasks.task_result import Task

_DATA = Path(str(resources.files("headspan"))) / "data"
_EFFECTS, _TASK = _DATA / "demo-effects.safetensors", _DATA / "demo-task.safetensors"


def with_shipped(scores: Scores) -> Scores:
    """Add the shipped head scores and effects to a result of the demo model that has none; return others unchanged.

    The result must be of the same weights, by their fingerprint. ``docs/demo-model.md`` has the
    commands that made the files.
    """
    shipped = _shipped_for(scores)
    if shipped is None:
        return scores
    annotations, extra = dict(scores.annotations), dict(scores.extra)
    if not annotations.get("behaviour"):
        annotations["behaviour"] = json.loads((_DATA / "demo" / "behaviour.json").read_text(encoding="utf-8"))
    if effects_in(scores) is None and scores.ports.same_heads(shipped.ports):
        extra |= shipped.extra
        annotations["effects"] = shipped.annotations["effects"]
    return replace(scores, annotations=annotations, extra=extra)


def shipped_tasks(scores: Scores) -> list[Task]:
    """The shipped task circuit of the demo model; none for a result of another model."""
    return [Task.load(_TASK)] if _shipped_for(scores) is not None and _TASK.is_file() else []


def _shipped_for(scores: Scores) -> Scores | None:
    """The shipped measurements, for a result of the same weights."""
    if scores.provenance.get("reference") != "demo":
        return None
    if not ((_DATA / "demo" / "behaviour.json").is_file() and _EFFECTS.is_file()):
        return None
    shipped = Scores.load(_EFFECTS)
    return shipped if scores.provenance.get("fingerprint") == shipped.provenance["fingerprint"] else None
