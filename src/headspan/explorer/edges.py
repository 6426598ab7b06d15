"""The edges that a page keeps, with what is known of each: rank, z, q and, where it was measured, its effect."""

from __future__ import annotations

from typing import Any

import numpy as np

from headspan.analysis.baseline import significance
from headspan.analysis.effects_result import Effects
from headspan.explorer.encode import Limits, encode_edges
from headspan.heads import FLOW_PAIRINGS, Pairing
from headspan.scores import Scores


def edges_of(scores: Scores, metric: str, pairing: Pairing, limits: Limits, measured: Effects | None) -> dict[str, Any]:
    """The kept edges with their statistics and, where they were measured, their effects; used edges are all kept."""
    statistics, also = _statistics(scores, metric, pairing), None
    if measured is not None and pairing in measured.pairings:
        also = measured.used(pairing)
        statistics |= {"effect": measured.of(pairing), "percentile": measured.percentiles(pairing), "used": also}
    return encode_edges(scores[metric, pairing], limits, statistics, also)


def about_effects(measured: Effects | None) -> dict[str, Any] | None:
    """What the page says about effects in general."""
    if measured is None:
        return None
    count = {str(p): int(measured.used(p).sum()) for p in measured.pairings}
    return {"materials": list(measured.materials), "pairings": list(count), "used": count}


def _statistics(scores: Scores, metric: str, pairing: Pairing) -> dict[str, np.ndarray]:
    """z and q of every pair, under the nulls that exist for this similarity and pairing."""
    found: dict[str, np.ndarray] = {}
    if metric == "pk":
        random = significance(scores, pairing)
        found |= {"z": random.z, "q_random": random.q}
    if _has_reverse(scores, metric, pairing):
        found["q_reversed"] = significance(scores, pairing, null="reversed", metric=metric).q
    return found


def _has_reverse(scores: Scores, metric: str, pairing: Pairing) -> bool:
    back = Pairing(pairing.target, pairing.source)
    if pairing not in FLOW_PAIRINGS or (metric, back) not in scores:
        return False
    return len(scores[metric, back].forward().pairs()[2]) > 1
