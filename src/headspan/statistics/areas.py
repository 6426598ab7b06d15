"""Areas under precision–recall and ROC curves for many weightings at once, with bootstrap intervals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headspan.vocabulary.errors import HeadspanError

MOST_DRAWS = 1_000_000


class Estimate(NamedTuple):
    """A value with its bootstrap interval (NaN without a bootstrap) and its expectation by chance."""

    value: float
    low: float = float("nan")
    high: float = float("nan")
    chance: float = float("nan")


class Areas(NamedTuple):
    """Areas under the precision–recall and the ROC curve, and average precision, one per column of weights."""

    pr: np.ndarray
    roc: np.ndarray
    ap: np.ndarray


def areas_under_curves(
    scores: np.ndarray, positive: np.ndarray, weights: np.ndarray | None = None, *, anchored: bool = True
) -> Areas:
    """Areas for one ranking of n items under b weightings: scores (n,), positive (n,), weights (n, b).

    Items with equal scores enter together, so their order does not matter. The trapezoid rule joins the points;
    ``anchored`` adds the point (recall 0, precision 1) as ``sklearn.metrics.precision_recall_curve`` does.
    An item of weight 2 counts as two equal items, and one of weight 0 is ignored.

    >>> areas_under_curves(np.array([3.0, 2.0, 1.0]), np.array([True, False, True])).roc
    array([0.5])
    """
    weights = np.ones((len(scores), 1)) if weights is None else weights
    order = np.argsort(-scores, kind="stable")
    # Both curves gain area only where a positive enters: at groups of equal scores that contain one.
    starts = _group_starts(scores[order])
    group = np.searchsorted(starts, np.flatnonzero(positive[order]), side="right") - 1
    first, last = starts[np.unique(group)], np.append(starts, len(scores))[np.unique(group) + 1]
    cuts = np.unique(np.concatenate([[0], first, last]))
    sums = np.add.reduceat(weights[order], cuts[cuts < len(scores)], axis=0).cumsum(axis=0)
    entered = np.vstack([np.zeros((1, weights.shape[1])), sums])  # weight above each cut
    before, after = entered[np.searchsorted(cuts, first)], entered[np.searchsorted(cuts, last)]

    own = weights[order[positive[order]]]
    gained = np.add.reduceat(own, np.flatnonzero(np.append(True, np.diff(group) > 0)), axis=0)
    true = gained.cumsum(axis=0)
    step = gained / true[-1]
    precision = true / np.where(after > 0, after, 1.0)
    precision_before = (true - gained) / np.where(before > 0, before, 1.0)
    # The curve starts at (0, 1), or at its first point.
    height = np.where(before > 0, (precision_before + precision) / 2, (1 + precision) / 2 if anchored else 0.0)
    false = entered[-1] - true[-1]
    passed = (before - (true - gained) + after - true) / 2  # negatives above, counting those in the same group as half
    with np.errstate(divide="ignore", invalid="ignore"):
        roc = (step * (1 - passed / false)).sum(axis=0)
    return Areas((step * height).sum(axis=0), roc, (step * precision).sum(axis=0))


def chance_areas(scores: np.ndarray, positives: int, *, anchored: bool = True) -> Areas:
    """The mean of ``areas_under_curves`` when that many positives are assigned to the items at random.

    Exact for this ranking with its ties. A group of g items with b items above it gains t positives, where
    E[t] = g·P/n, E[t·T] = g·b·P(P−1)/n(n−1) for the T positives above, E[t²] = E[t] + g(g−1)·P(P−1)/n(n−1).
    With many positives both precision areas are close to the share of positives; with few they are well above it.

    >>> [round(float(area[0]), 3) for area in chance_areas(np.arange(100.0), 1)]
    [0.031, 0.5, 0.052]
    """
    n = len(scores)
    ranked = np.sort(scores)[::-1]
    starts = _group_starts(ranked).astype(np.float64)
    size = np.diff(np.append(starts, n))
    one = positives / n
    two = one * (positives - 1) / max(n - 1, 1)  # chance that two given items are both positive
    with_itself, with_above = size * one + size * (size - 1) * two, size * starts * two
    after = (with_above + with_itself) / (starts + size)
    before = with_above / np.where(starts > 0, starts, 1.0)
    height = (before + after) / 2
    height[0] = (size[0] * one + after[0]) / 2 if anchored else 0.0
    return Areas(*(np.array([area]) for area in (height.sum() / positives, 0.5, after.sum() / positives)))


def _group_starts(ranked: np.ndarray) -> np.ndarray:
    """The start of each group of equal scores."""
    return np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))


def resampled(positive: np.ndarray, times: int, seed: int, distinct: int = 1) -> np.ndarray:
    """How often each item was drawn, (n, times): a bootstrap of the positives and of the rest separately.

    At least ``distinct`` different positives are drawn each time.
    """
    check_draws(times, seed)
    rng = np.random.default_rng(seed)
    weights = np.zeros((len(positive), times))
    for members, least in ((np.flatnonzero(positive), distinct), (np.flatnonzero(~positive), 0)):
        if not len(members):
            continue
        chances = np.full(len(members), 1 / len(members))
        drawn = rng.multinomial(len(members), chances, size=times)
        while len(short := np.flatnonzero(np.count_nonzero(drawn, axis=1) < least)):
            drawn[short] = rng.multinomial(len(members), chances, size=len(short))
        weights[members] = drawn.T
    return weights


def check_draws(times: int, seed: int) -> None:
    """Refuse a number of draws or a seed that a bootstrap cannot have."""
    if not 0 <= times <= MOST_DRAWS:
        raise HeadspanError(f"the number of bootstrap draws must be from 0 to {MOST_DRAWS:,}, not {times}")
    if seed < 0:
        raise HeadspanError(f"the seed of a bootstrap must be a whole number of 0 or more, not {seed}")


def estimate_from(replicates: np.ndarray, level: float, chance: float = float("nan")) -> Estimate:
    """The observed value (the first entry) with the percentile interval of the replicates (the others)."""
    if not 0 < level < 1:
        raise HeadspanError(f"the confidence level must be between 0 and 1, not {level}")
    value = float(replicates[0])
    if len(replicates) == 1:
        return Estimate(value, chance=chance)
    low, high = np.quantile(replicates[1:], [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), chance)
