"""Which edges stand above chance: the rule by which pages and figures colour them.

An edge has evidence of up to three kinds. Each answers another question, so they may disagree:

``reversed``
    The pair scores higher than pairs in the impossible direction: q ≤ 0.05 against the reversed pairs of this
    similarity (:mod:`headspan.statistics.significance`).
``effect``
    Patching the source as seen by the target has a large effect (:mod:`headspan.results.large_effects`).
``influence``
    Influence is at least three times that of a source and a target of the same sizes in random directions. In models of
    random weights this is rare even where one direction holds all that a head writes or reads: the ratio is then the
    size of a standard normal number.

All other edges are drawn thin and grey, whatever their score.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headspan.results.effects import Effects, effects_in
from headspan.results.scores import Scores
from headspan.statistics.dimension import dimension_at, usual_dimension
from headspan.statistics.influence_units import expected_influence
from headspan.statistics.significance import DISCOVERY_RATE, reversed_q
from headspan.subspaces.metrics import METRICS, OBSERVED_METRICS, PK, drawn_scores, metric_of
from headspan.subspaces.random_subspaces import moments, random_quantile
from headspan.vocabulary.heads import FLOW_PAIRINGS, Pairing

KINDS = ("reversed", "effect", "influence")
LEAST_INFLUENCE = 3.0  # times the influence without interaction


class Evidence(NamedTuple):
    """Masks over all pairs of one pairing, by kind of evidence; None for a kind that could not be tested."""

    reversed: np.ndarray | None
    effect: np.ndarray | None
    influence: np.ndarray | None

    @property
    def tested(self) -> tuple[str, ...]:
        """The kinds that were tested."""
        return tuple(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def bits(self) -> np.ndarray | None:
        """One number per pair: the sum of 1 (reversed), 2 (effect) and 4 (influence); None if nothing was tested."""
        masks = [(2**i, mask) for i, mask in enumerate(self) if mask is not None]
        return sum((bit * mask.astype(np.uint8) for bit, mask in masks), np.uint8(0)) if masks else None  # type: ignore[return-value]


def kinds_of(bits: int) -> tuple[str, ...]:
    """The kinds of evidence in one number of `Evidence.bits`.

    >>> kinds_of(3), kinds_of(0)
    (('reversed', 'effect'), ())
    """
    return tuple(kind for i, kind in enumerate(KINDS) if bits >> i & 1)


def evidence_of(
    scores: Scores,
    metric: str,
    pairing: Pairing,
    *,
    measured: Effects | None = None,
    above: bool | None = None,
    q: np.ndarray | None = None,
) -> Evidence:
    """The evidence for every pair of one pairing.

    measured: the effects in the result; above: `rises_above_chance`; q: of the reversed null. All three are computed
    where they are not given. In a model that does not rise above chance, no pair counts as above the reversed pairs.
    """
    measured = effects_in(scores) if measured is None else measured
    q = reversed_q(scores, metric, pairing) if q is None and pairing in FLOW_PAIRINGS else q
    stands = None
    if q is not None:
        with np.errstate(invalid="ignore"):
            stands = (q <= DISCOVERY_RATE) & (rises_above_chance(scores) if above is None else above)
    compared = measured is not None and measured.compared and pairing in measured.pairings
    return Evidence(stands, measured.large(pairing) if compared else None, strong_influence(scores, pairing))  # type: ignore[union-attr]


def strong_influence(scores: Scores, pairing: Pairing) -> np.ndarray | None:
    """Which pairs have `LEAST_INFLUENCE` times the influence without interaction; None without influence."""
    metric = next((name for name in OBSERVED_METRICS if (name, pairing) in scores), None)
    if metric is None:
        return None
    values = scores[metric, pairing].values.astype(np.float64)
    expected = expected_influence(scores, metric, pairing)
    with np.errstate(invalid="ignore"):
        return (values >= LEAST_INFLUENCE * expected) & (expected > 0)


# ------------------------------------------------------------------------------------------------ a whole model

_FALSE_ALARM = 0.001  # probability that a model of noise is reported to be above chance
_FAR = 7.0  # standard deviations of sampled scores, for similarities without a known null distribution


def rises_above_chance(scores: Scores) -> bool:
    """Whether any pair scores more than random weights would.

    Uses Projection Kernel if present, because its distribution for random subspaces is known: either one of n pairs is
    above the point that n random pairs stay below, or more pairs are above the 99.9 % point than expected by chance.
    """
    kernel = [p for p in scores.pairings if (PK, p) in scores and not p.of_nodes]
    if not kernel:
        return any(_far_from_drawn(scores, metric, pairing) for metric, pairing in scores.arrays)
    found = [scores[PK, pairing].forward().pairs() for pairing in kernel]
    total = sum(len(values) for _, _, values in found)
    if not total:
        return True  # one layer: there are no forward pairs to compare with chance
    for pairing, (rows, columns, values) in zip(kernel, found, strict=True):
        ranks = scores.ranks(pairing.source)[rows], scores.ranks(pairing.target)[columns]
        d = dimension_at(scores, pairing, rows, columns)
        can_vary = moments(d, *ranks).variance > 0
        points = [random_quantile(d, *ranks, level) for level in (0.999, 1 - _FALSE_ALARM / total)]
        often, once = (int(np.count_nonzero((values > point * (1 + 1e-6)) & can_vary)) for point in points)
        expected = 0.001 * len(values)
        if once or often > expected + 6 * np.sqrt(expected) + 4:
            return True
    return False


def _far_from_drawn(scores: Scores, metric: str, pairing: Pairing) -> bool:
    values = scores[metric, pairing].pairs()[2]
    if metric not in METRICS or not len(values):
        return True  # the level of chance is unknown
    if metric_of(metric).observed:
        strong = strong_influence(scores, pairing)
        return strong is not None and bool(strong.any())
    width = int(max(scores.ranks(role).max(initial=1) for role in pairing))
    drawn = drawn_scores(metric, usual_dimension(scores, pairing), width)
    return bool(values.max() > drawn.mean() + _FAR * max(float(drawn.std()), 1e-6))
