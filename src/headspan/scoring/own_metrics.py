"""Scores by a caller's own function of a pair, or of all pairs.

Such a function may depend on which weight is the source and which the target, so each pair is computed in the order of
its pairing. If both orders of one pair are scored, as in OQ and QO with ``pairs="all"``, it must be symmetric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.scoring.arrangement import Job
from headspan.scoring.plan import Panel, Plan, Tile
from headspan.subspaces.metrics import Metric
from headspan.vocabulary.errors import HeadspanError

_TOLERANCE = 1e-4  # of symmetry, as a share of the largest score


def own_scores(
    weights: AttentionWeights,
    plan: Plan,
    metric: Metric,
    pair: tuple[Panel, Panel],
    factors: Mapping[Panel, np.ndarray],
) -> np.ndarray:
    """Scores of the heads of two panels, (n_first, n_second); NaN where no pairing has the pair."""
    onward, back = plan.directions(metric.key, *pair)
    first, second = (_Heads(factors[p], weights.widths(p.role)[plan.rows(metric.key, p)]) for p in pair)
    values = _scores(metric, first, second, onward)
    others = _scores(metric, second, first, back.T).T
    both = onward & back
    largest = np.abs(values[both]).max(initial=0.0)
    if not np.allclose(values[both], others[both], rtol=0, atol=_TOLERANCE * largest, equal_nan=True):
        raise HeadspanError(
            f"{metric.key} differs between the two orders of a pair, and this run scores both. Use pairs='default'"
        )
    return np.where(back, others, values)


class _Heads:
    """Factors of some heads, which a caller's function can only read."""

    def __init__(self, factors: np.ndarray, widths: np.ndarray) -> None:
        self.all = factors.view()
        self.all.flags.writeable = False
        self.each = [factor[:, :width] for factor, width in zip(self.all, widths.tolist(), strict=True)]


def _scores(metric: Metric, source: _Heads, target: _Heads, needed: np.ndarray) -> np.ndarray:
    found = np.full(needed.shape, np.nan)
    if not needed.any():
        return found
    if metric.pair is None:
        assert metric.all_pairs is not None
        given = np.asarray(metric.all_pairs(source.all, target.all, needed))
        if given.shape != needed.shape:
            raise HeadspanError(f"{metric.key} gave an array of shape {given.shape} for {needed.shape} pairs")
        return np.where(needed, given, np.nan)
    for i, j in np.argwhere(needed):
        found[i, j] = _number(metric.key, metric.pair(source.each[i], target.each[j]))
    return found


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise HeadspanError(f"{name} must return a number for each pair, not a {type(value).__name__}") from None


def check_numbers(plan: Plan, tile: Tile, jobs: Sequence[Job], values: Sequence[np.ndarray]) -> None:
    """Refuse what is not a number: a result has NaN where there is no pair."""
    for (first, second), job, found in zip(tile.pairs, jobs, values, strict=True):
        wrong = np.argwhere(job.needed & ~(np.abs(found) <= np.finfo(np.float32).max))
        if len(wrong):
            ends = (plan.ports.of(p.role)[plan.rows(tile.metric, p)] for p in (first, second))
            pair = " and ".join(
                f"{heads[i]}.{p.role}" for heads, i, p in zip(ends, wrong[0], (first, second), strict=True)
            )
            raise HeadspanError(f"{tile.metric} of {pair} is {found[tuple(wrong[0])]:g}. It must be a finite number")
