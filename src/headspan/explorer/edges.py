"""The edges stored in a page, each with rank, z, q and, if measured, its effect."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headspan.explorer.encode import Limits, encode_edges
from headspan.results.checks import pair_sizes
from headspan.results.effects import Effects
from headspan.results.large_effects import LEAST_RATIO, SHORT_UNITS
from headspan.results.matrix import ScoreMatrix
from headspan.results.scores import Scores
from headspan.statistics.dimension import centred, dimension_at, usual_dimension
from headspan.statistics.evidence import Evidence, evidence_of
from headspan.statistics.significance import DISCOVERY_RATE, Significance, has_reverse, significance
from headspan.subspaces.metrics import drawing_strength, metric_of
from headspan.vocabulary.heads import FLOW_PAIRINGS, Pairing, forward_mask


class Nulls(NamedTuple):
    """A pairing tested against both nulls where the similarity has them; used for its edges and its summary."""

    random: Significance | None
    reversed: Significance | None

    @classmethod
    def of(cls, scores: Scores, metric: str, pairing: Pairing) -> Nulls:
        random = significance(scores, pairing) if metric_of(metric).random_null else None
        shown = pairing in FLOW_PAIRINGS or (metric_of(metric).random_null and not pairing.of_nodes)
        if not (shown and has_reverse(scores, metric, pairing)):
            return cls(random, None)
        back = scores[metric, Pairing(pairing.target, pairing.source)].forward()
        if np.count_nonzero(~np.isnan(back.values)) < 2:
            return cls(random, None)
        return cls(random, significance(scores, pairing, null="reversed", metric=metric))


def edges_of(
    scores: Scores, metric: str, pairing: Pairing, limits: Limits, measured: Effects | None, nulls: Nulls, above: bool
) -> dict[str, Any]:
    """The kept edges with their statistics, measured effects and evidence. All edges with a large effect are kept.

    above: whether the model rises above chance.
    """
    statistics, also = _statistics(pairing, nulls), None
    least = {name[2:]: _least(q) for name, q in statistics.items() if name.startswith("q_")}
    if "q_within" in statistics:  # a pair can stand out within its two layers without one of the largest scores
        with np.errstate(invalid="ignore"):
            also = statistics["q_within"] <= DISCOVERY_RATE
    if measured is not None and pairing in measured.pairings:
        large = measured.large(pairing)
        also = large if also is None else large | also
        large = np.where(measured.judged(pairing), large, np.nan)
        statistics |= {"effect": measured.of(pairing), "percentile": measured.percentiles(pairing)}
        statistics |= {"large": large, "ratio": measured.ratio(pairing)}

    def strength(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        ranks = scores.ranks(pairing.source)[rows], scores.ranks(pairing.target)[columns]
        values, d = scores[metric, pairing].values[rows, columns], dimension_at(scores, pairing, rows, columns)
        sizes = pair_sizes(scores.sizes, metric, pairing)
        sizes = None if sizes is None else sizes[rows, columns]
        return drawing_strength(metric_of(metric).excess(values, d, *ranks, sizes))

    evidence = evidence_of(scores, metric, pairing, measured=measured, above=above, q=statistics.get("q_reversed"))
    encoded = encode_edges(scores[metric, pairing], limits, statistics, also, strength, evidence.bits)
    return encoded | {"least_q": least, **_counts(evidence, scores[metric, pairing])}


def _counts(evidence: Evidence, matrix: ScoreMatrix) -> dict[str, Any]:
    """How many of all forward pairs have each kind of evidence, and any; the kinds that were tested."""
    ahead = forward_mask(matrix.sources, matrix.targets) & ~np.isnan(matrix.values)
    found = {kind: int(np.count_nonzero(getattr(evidence, kind) & ahead)) for kind in evidence.tested}
    bits = evidence.bits
    found["any"] = 0 if bits is None else int(np.count_nonzero((bits > 0) & ahead))
    return {"tested": list(evidence.tested), "passing": found}


def _least(q: np.ndarray) -> float | None:
    """The smallest q of a pairing: below it, the rule by q chooses nothing."""
    present = q[~np.isnan(q)]
    return float(present.min()) if present.size else None


def centred_roles(scores: Scores) -> dict[str, bool | list[bool]]:
    """Which weights of every role are centred; a single value if it is the same for all."""
    flags = {str(role): centred(scores, role).tolist() for role in scores.role_ranks}
    return {role: found if len(set(found)) > 1 else any(found) for role, found in flags.items()}


def chance_levels(scores: Scores) -> dict[str, list[float]]:
    """Mean and spread of random weights' scores by ``metric/pairing``, where they are the same for all heads."""
    found = {}
    for metric, pairing in scores.arrays:
        about = metric_of(metric)
        if about.known and not about.grows_with_rank and not about.observed:
            ranks = scores.ranks(pairing.source).max(initial=1), scores.ranks(pairing.target).max(initial=1)
            level = about.chance(usual_dimension(scores, pairing), *map(np.asarray, ranks))
            found[f"{metric}/{pairing}"] = [float(value) for value in level]
    return found


def about_effects(measured: Effects | None) -> dict[str, Any] | None:
    """How the effects were measured, for the page."""
    if measured is None:
        return None
    return {
        "materials": list(measured.materials),
        "tokens": measured.tokens,
        "pairings": list(map(str, measured.pairings)),
        "compared": measured.compared,
        "large": {str(p): int(measured.large(p).sum()) for p in measured.pairings},
        "units": {str(p): measured.unit(p) for p in measured.pairings},
        "short_units": {str(p): SHORT_UNITS[measured.unit(p)] for p in measured.pairings},
        "floors": {str(p): measured.floor(p) for p in measured.pairings},
        "least_ratio": float(measured.protocol.get("least_ratio", LEAST_RATIO)),
    }


def _statistics(pairing: Pairing, nulls: Nulls) -> dict[str, np.ndarray]:
    """z and q of every pair. q against reversed pairs is limited to forward pairs, as the edge rules are."""
    found: dict[str, np.ndarray] = {}
    if nulls.random is not None:
        found |= {"z": nulls.random.z, "q_random": nulls.random.q}
    if nulls.reversed is not None and pairing in FLOW_PAIRINGS:
        found["q_reversed"] = nulls.reversed.q
        if nulls.reversed.q_within is not None and not np.isnan(nulls.reversed.q_within).all():
            found["q_within"] = nulls.reversed.q_within
    return found
