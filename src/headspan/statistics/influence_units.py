"""Influence in its units, and beside what the same two heads would have without interaction.

The square of influence is an amount: for Q and K the expected KL divergence, in nats, between the target's attention
rows before and after the source is resampled (to second order in the change); for V the share of the value's variance
that the source accounts for; for another node the variance of what it reads. The influence expected without interaction
is that of a source and a target of the same sizes in random directions: spread × sensitivity / √d. The ratio to it is
the part that is specific to the pair.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headspan.results.checks import pair_sizes
from headspan.results.scores import Scores
from headspan.statistics.dimension import centred_by, dimension_between
from headspan.subspaces.metrics import metric_of
from headspan.vocabulary.heads import Pairing, Role

FIELDS = ("expected", "ratio", "amount", "unit")
UNITS = {Role.Q: "nats", Role.K: "nats", Role.V: "share", Role.R: "variance"}


def expected_influence(scores: Scores, metric: str, pairing: Pairing) -> np.ndarray:
    """The influence of every pair without interaction, as the matrix of its scores."""
    about = scores.provenance.get("statistics") or {}
    first, second = (centred_by(about, scores.heads(role), role) for role in pairing)
    d = dimension_between(scores.d_model, first[:, None], second[None, :])
    ranks = scores.ranks(pairing.source)[:, None], scores.ranks(pairing.target)[None, :]
    return metric_of(metric).chance(d, *ranks, pair_sizes(scores.sizes, metric, pairing))[0]


def with_units(rows: list[dict[str, Any]], scores: Scores) -> list[dict[str, Any]]:
    """Rows of edges with `FIELDS`, None for other similarities; unchanged where no row is of an observed similarity."""
    if not any(metric_of(row["metric"]).observed for row in rows):
        return rows
    known: dict[tuple[str, str], tuple[Any, np.ndarray]] = {}
    found = []
    for row in rows:
        fields: dict[str, Any] = dict.fromkeys(FIELDS)
        if metric_of(row["metric"]).observed:
            key = row["metric"], row["pairing"]
            if key not in known:
                matrix = scores[key]
                known[key] = matrix, expected_influence(scores, row["metric"], matrix.pairing)
            matrix, expected = known[key]
            place = matrix.find(row["source"], row["target"])
            fields["expected"] = float(expected[place])
            fields["ratio"] = row["score"] / fields["expected"] if fields["expected"] > 0 else None
            fields |= {"amount": row["score"] ** 2, "unit": UNITS[matrix.pairing.target]}
        found.append(row | fields)
    return found


def input_of(scores: Scores) -> str | None:
    """What the statistics of a result were collected on, in words; None for a result without them."""
    inputs = (scores.provenance.get("statistics") or {}).get("inputs")
    if not inputs:
        return None
    from headspan.results.observations import inputs_text

    return inputs_text(inputs)
