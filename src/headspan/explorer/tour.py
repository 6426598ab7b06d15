"""A tour of three steps, if a result contains an induction circuit.

A previous-token head writes which token came before; the keys of an induction head read it. The weights show the
overlap, and the effects show how much it matters.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headspan.results.effects import effects_in
from headspan.results.labels import Labels
from headspan.results.matrix import Edge
from headspan.results.scores import Scores
from headspan.statistics.dimension import dimension_at
from headspan.subspaces.metrics import PK, metric_of
from headspan.vocabulary.heads import Pairing

_OK = Pairing.parse("OK")


def tour(scores: Scores, labels: Labels | None) -> list[dict[str, Any]]:
    """Title, text and view of every step; empty without such an edge or without measured effects."""
    measured = effects_in(scores)
    edge = _induction_edge(scores, labels)
    if edge is None or measured is None or _OK not in measured.pairings or not measured.compared:
        return []
    matrix = measured.matrix(_OK)
    place = matrix.sources.index(edge.source), matrix.targets.index(edge.target)
    large = bool(measured.large(_OK)[place])
    ratio = measured.ratio(_OK)[place]
    row = scores.heads("O").index(edge.source)
    ranks = scores.ranks("O")[row], scores.ranks("K")[place[1]]
    metric = metric_of(PK)
    chance = float(metric.chance(dimension_at(scores, _OK, row, place[1]), *ranks)[0])
    pair = f"{edge.source}.O-{edge.target}.K"
    base = {"metric": PK, "pairings": "OK", "rule": "top", "k": "20"}
    verdict = (
        f"Patching {edge.source}'s output as seen by the keys of {edge.target} changes its attention by "
        f"{matrix.values[place]:.2f} (total variation, 0 to 1): "
        + (
            "small on this input."
            if np.isnan(ratio)
            else f"{ratio:.1f} times the effect of a random output of its length."
        )
    )
    return [
        {
            "title": f"{edge.source} attends to the previous token",
            "text": f"Run on text, {edge.source} attends to the previous token, so its output encodes which token "
            "came before. A head that reads this can find what followed a token earlier.",
            "view": base | {"head": str(edge.source)},
        },
        {
            "title": f"{edge.target} reads what {edge.source} writes",
            "text": f"Found from the weights alone: what {edge.source} writes and what the keys of {edge.target} read "
            f"share {edge.score:.2f} of {metric.largest(*map(float, ranks)):.0f} dimensions, {chance:.2f} by chance. "
            f"So {edge.target} can attend to the token that followed the current one last time: an induction head.",
            "view": base | {"pair": pair},
        },
        {
            "title": "Running the model confirms it" if large else "Running the model does not confirm it",
            "text": f"{verdict} Filled dots are large effects, and their area is the effect. A hollow dot is an effect "
            "that is small on this input, or no larger than a random output's.",
            "view": base | {"head": str(edge.target)},
        },
    ]


def _induction_edge(scores: Scores, labels: Labels | None) -> Edge | None:
    """The strongest OK edge from a previous-token head to an induction head."""
    if labels is None or (PK, _OK) not in scores:
        return None
    for edge in scores[PK, _OK].forward().top(20):
        if "previous_token" in labels.of(str(edge.source)) and "induction" in labels.of(str(edge.target)):
            return edge
    return None
