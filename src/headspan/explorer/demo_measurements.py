"""Head scores and effects of the demo model, shipped with the package so that they can be shown without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

from headspan.results.effects import effects_in
from headspan.results.scores import Scores


def with_shipped(scores: Scores) -> Scores:
    """Add the shipped head scores and effects to a result of the demo model that has none; return others unchanged.

    The result must be of the same weights, by their fingerprint. ``docs/demo-model.md`` has the
    commands that made the files.
    """
    if scores.provenance.get("reference") != "demo":
        return scores
    folder = Path(str(resources.files("headspan"))) / "data"
    habits, measured = folder / "demo" / "behaviour.json", folder / "demo-effects.safetensors"
    if not (habits.is_file() and measured.is_file()):
        return scores
    shipped = Scores.load(measured)
    if scores.provenance.get("fingerprint") != shipped.provenance["fingerprint"]:
        return scores
    annotations, extra = dict(scores.annotations), dict(scores.extra)
    if not annotations.get("behaviour"):
        annotations["behaviour"] = json.loads(habits.read_text(encoding="utf-8"))
    if effects_in(scores) is None and scores.ports.same_heads(shipped.ports):
        extra |= shipped.extra
        annotations["effects"] = shipped.annotations["effects"]
    return replace(scores, annotations=annotations, extra=extra)
