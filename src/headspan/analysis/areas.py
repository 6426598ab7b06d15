"""Areas under precision–recall and ROC curves for many weightings at once, and bootstrap intervals made of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headspan.errors import HeadspanError


class Estimate(NamedTuple):
    """A value with its bootstrap interval; low and high are NaN when no bootstrap was asked for."""

    value: float
    low: float = float("nan")
    high: float = float("nan")


class Areas(NamedTuple):
    """Area under the precision–recall curve and under the ROC curve, one per row of weights."""

    pr: np.ndarray
    roc: np.ndarray


def areas_under_curves(
    scores: np.ndarray, positive: np.ndarray, weights: np.ndarray | None = None, *, anchored: bool = True
) -> Areas:
    """Areas for one ranking of n items under b weightings: scores (n,), positive (n,), weights (n, b).

    Items with equal scores enter together, so that their order cannot matter. The trapezoid rule joins the points;
    ``anchored`` adds the point (recall 0, precision 1) as ``sklearn.metrics.precision_recall_curve`` does.
    An item of weight 2 counts as two equal items, one of weight 0 as none.

    >>> areas_under_curves(np.array([3.0, 2.0, 1.0]), np.array([True, False, True])).roc
    array([0.5])
    """
    weights = np.ones((len(scores), 1)) if weights is None else weights
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    # Both curves gain area only where a positive enters: at the groups of equal scores that hold one.
    starts = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))
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
    # Where nothing has entered before, the curve begins: at (0, 1), or with this very point.
    height = np.where(before > 0, (precision_before + precision) / 2, (1 + precision) / 2 if anchored else 0.0)
    false = entered[-1] - true[-1]
    passed = (before - (true - gained) + after - true) / 2  # negatives above, those in the same group by half
    with np.errstate(divide="ignore", invalid="ignore"):
        roc = (step * (1 - passed / false)).sum(axis=0)
    return Areas((step * height).sum(axis=0), roc)


def resampled(positive: np.ndarray, times: int, seed: int, distinct: int = 1) -> np.ndarray:
    """How often each item was drawn, (n, times): positives and the rest apart, with replacement, as many as there are.

    At least ``distinct`` different positives are drawn each time.
    """
    if times < 0:
        raise HeadspanError(f"a bootstrap needs a number of draws of 0 or more, not {times}")
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


def estimate_from(replicates: np.ndarray, level: float) -> Estimate:
    """The observed value, which comes first, with the percentile interval of the replicates after it."""
    if not 0 < level < 1:
        raise HeadspanError(f"a confidence level lies between 0 and 1, not at {level}")
    value = float(replicates[0])
    if len(replicates) == 1:
        return Estimate(value)
    low, high = np.quantile(replicates[1:], [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high))
