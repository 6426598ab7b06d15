"""Two results of one shape: original against folded weights, or two checkpoints of a training run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headspan.errors import HeadspanError
from headspan.heads import FLOW_PAIRINGS, Pairing
from headspan.models.weights import AttentionWeights
from headspan.scores import ScoreMatrix, Scores


class PairingComparison(NamedTuple):
    """One pairing of two results; ``mse`` is of PK divided by the subspace dimension for pk, of the score otherwise."""

    metric: str
    pairing: Pairing
    pairs: int
    shared_top: int
    k: int
    mse: float
    spearman: float


def check_same_shape(first: Scores | AttentionWeights, second: Scores | AttentionWeights) -> None:
    """Refuse results, or models that have yet to be scored, whose heads or widths differ."""
    if first.ports != second.ports:
        raise HeadspanError(
            f"the two have different heads ({shape_text(first)} against {shape_text(second)}, or other layers): only "
            "models of one shape can be compared"
        )
    if first.d_model != second.d_model:
        raise HeadspanError(
            f"the two have residual streams of different width ({first.d_model} against {second.d_model}): only "
            "models of one shape can be compared"
        )


def shape_text(of: Scores | AttentionWeights) -> str:
    """The shape of a model or result in words: heads and width."""
    query, kv = len(of.ports.query), len(of.ports.kv)
    heads = f"{query} heads" if query == kv else f"{query} query and {kv} key/value heads"
    return f"{heads}, d_model {of.d_model}"


def compare(
    first: Scores, second: Scores, k: int = 20, metrics: tuple[str, ...] | None = None
) -> list[PairingComparison]:
    """Shared top-k edges, mean squared difference and Spearman correlation over forward pairs, per pairing."""
    check_same_shape(first, second)
    keys = [key for key in first.arrays if key in second.arrays and (metrics is None or key[0] in metrics)]
    if not keys:
        raise HeadspanError("the two results have no similarity and pairing in common")
    keys.sort(key=lambda key: (first.metrics.index(key[0]), key[1] not in FLOW_PAIRINGS))
    return [_compare(first, second, metric, pairing, k) for metric, pairing in keys]


def shared_edges(first: ScoreMatrix, second: ScoreMatrix, k: int = 20) -> int:
    """How many of the k largest pairs are the same in both."""
    return len({e[3:5] for e in first.top(k)} & {e[3:5] for e in second.top(k)})


def _compare(first: Scores, second: Scores, metric: str, pairing: Pairing, k: int) -> PairingComparison:
    a, b = first[metric, pairing].forward(), second[metric, pairing].forward()
    x, y = a.values.astype(np.float64), b.values.astype(np.float64)
    if metric == "pk":
        x, y = (v / _smaller_ranks(scores, pairing) for v, scores in ((x, first), (y, second)))
    both = ~(np.isnan(x) | np.isnan(y))
    x, y = x[both], y[both]
    mse = float(np.mean((x - y) ** 2)) if x.size else float("nan")
    return PairingComparison(metric, pairing, x.size, shared_edges(a, b, k), k, mse, spearman(x, y))


def _smaller_ranks(scores: Scores, pairing: Pairing) -> np.ndarray:
    """min(m, m') of each pair, by which PK is normalised."""
    ranks = np.minimum(scores.ranks(pairing.source)[:, None], scores.ranks(pairing.target)[None, :])
    return np.maximum(ranks, 1)


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's ρ with mean ranks for ties; NaN for fewer than two values or a constant.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    if x.size < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])
