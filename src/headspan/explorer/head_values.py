"""Values of single heads: their head scores, their largest effects, and their drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headspan.results.effects import Effects
from headspan.results.scores import Scores

HeadScores = Mapping[str, Mapping[str, "float | None"]]


def head_scores(scores: Scores, given: HeadScores | None) -> dict[str, dict[str, float]] | None:
    """Head scores given by the caller or stored in the result, restricted to heads of this model."""
    kept = given or scores.annotations.get("behaviour")
    if not isinstance(kept, Mapping):
        return None
    known = {str(head) for head in scores.ports.query}
    found: dict[str, dict[str, float]] = {}
    for kind, by_head in kept.items():
        if isinstance(by_head, Mapping):
            numbers = {str(h): v for h, v in by_head.items() if str(h) in known and isinstance(v, (int, float))}
            values = {head: float(v) for head, v in numbers.items() if math.isfinite(v)}
            if values:
                found[str(kind)] = values
    return found or None


def head_values(scores: Scores, measured: Effects | None) -> dict[str, dict[str, Any]]:
    """A title and the values of the heads, by key."""
    found: dict[str, dict[str, Any]] = {}
    for pairing in measured.pairings if measured is not None else ():
        matrix, unit = measured.matrix(pairing), measured.unit(pairing)  # type: ignore[union-attr]
        for side, heads, values in (("out", matrix.sources, matrix.values), ("in", matrix.targets, matrix.values.T)):
            with np.errstate(invalid="ignore"):
                largest = np.where(np.isnan(values), -np.inf, values).max(axis=1)
            found[f"effect-{side}-{pairing}"] = _entry(f"largest {pairing} effect {side} ({unit})", heads, largest)
    drift = scores.annotations.get("drift")
    if isinstance(drift, Mapping):
        known = {str(head) for head in scores.ports.heads}
        numbers = {str(h): float(v) for h, v in drift.items() if str(h) in known and isinstance(v, (int, float))}
        found["drift"] = {"title": "drift", "values": {h: v for h, v in numbers.items() if math.isfinite(v)}}
    return {key: entry for key, entry in found.items() if entry["values"]}


def _entry(title: str, heads: Sequence[Any], values: np.ndarray) -> dict[str, Any]:
    return {
        "title": title,
        "values": {str(h): round(float(v), 6) for h, v in zip(heads, values, strict=True) if np.isfinite(v)},
    }
