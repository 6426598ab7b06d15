"""The effect of an edge as columns of a table: its value and unit, whether it is large, and its percentile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from headspan.results.effects import Effects, effects_in
from headspan.results.scores import Scores
from headspan.vocabulary.heads import Pairing

EFFECT_FIELDS = ("effect", "effect_unit", "large_effect", "percentile_in_layers")


def with_effects(rows: list[dict[str, Any]], scores: Scores) -> list[dict[str, Any]]:
    """Rows of edges with their effects, None where one was not measured; unchanged for a result without effects."""
    measured = effects_in(scores)
    if measured is None:
        return rows
    edges = [(row["pairing"], row["source"], row["target"]) for row in rows]
    return [row | fields for row, fields in zip(rows, effect_fields(measured, edges), strict=True)]


def effect_fields(measured: Effects | None, edges: Iterable[tuple[Pairing | str, Any, Any]]) -> list[dict[str, Any]]:
    """``EFFECT_FIELDS`` of edges (pairing, source, target); None for what is not known."""
    known: dict[Pairing, tuple[Any, np.ndarray, np.ndarray, np.ndarray]] = {}
    found: list[dict[str, Any]] = []
    for name, source, target in edges:
        fields: dict[str, Any] = dict.fromkeys(EFFECT_FIELDS)
        pairing = Pairing.parse(name)
        if measured is not None and pairing in measured.pairings:
            if pairing not in known:
                values = measured.matrix(pairing), measured.large(pairing), measured.judged(pairing)
                known[pairing] = *values, measured.percentiles(pairing)
            matrix, large, judged, percentiles = known[pairing]
            place = matrix.find(source, target)
            if not np.isnan(matrix.values[place]):
                fields |= {"effect": float(matrix.values[place]), "effect_unit": measured.unit(pairing)}
                fields["large_effect"] = bool(large[place]) if judged[place] else None
                fields["percentile_in_layers"] = float(percentiles[place])
        found.append(fields)
    return found
