"""Compare two results of the same shape: original and folded weights, or two checkpoints of a training run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.results.matrix import ScoreMatrix
from headspan.results.scores import Scores
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import ScoresLike, asked_metrics, given_scores, opened
from headspan.subspaces.metrics import DEFAULT_METRICS, metric_of
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.ordering import spearman
from headspan.system.progress import Update
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, Pairing, parse_pairings
from headspan.vocabulary.ports import shape_text


class PairingComparison(NamedTuple):
    """One pairing of two results; ``mse`` is that of the score, which for pk is divided by the subspace dimension."""

    metric: str
    pairing: Pairing
    pairs: int
    shared_top: int
    k: int
    mse: float
    spearman: float


def check_same_shape(first: Scores | AttentionWeights, second: Scores | AttentionWeights) -> None:
    """Refuse results, or models that have yet to be scored, whose heads or widths differ."""
    if not first.ports.same_heads(second.ports):
        shapes = " against ".join(shape_text(one.ports, one.d_model) for one in (first, second))
        raise HeadspanError(
            f"the two have different heads ({shapes}, or other layers): only models of the same shape can be compared"
        )
    if first.d_model != second.d_model:
        raise HeadspanError(
            f"the two have residual streams of different width ({first.d_model} against {second.d_model}): only "
            "models of the same shape can be compared"
        )


class Comparison(Tabular, list[PairingComparison]):
    """One row per similarity and pairing of two results."""

    def rows(self) -> list[dict[str, Any]]:
        return [line._asdict() | {"pairing": str(line.pairing)} for line in self]

    def _headline(self) -> str:
        return f"two results compared in {len(self)} similarities and pairings"


@renamed(metrics="metric", pairings="pairing")
@checked
def compare(
    first: ScoresLike,
    second: ScoresLike,
    k: int = 20,
    metric: str | Iterable[str] | None = None,
    pairing: str | Pairing | Iterable[str | Pairing] | None = None,
    progress: Update | None = None,
) -> Comparison:
    """Shared top-k edges, mean squared difference and Spearman correlation over forward pairs, per pairing.

    Takes results, or models to score now; ``metric`` and ``pairing`` choose among what both have. Pairings of nodes
    are compared if both results have the same nodes.
    """
    chosen = None if pairing is None else parse_pairings(pairing)
    first, second = opened(first), opened(second)
    wanted = asked_metrics(metric, first, second)
    check_same_shape(first, second)  # before anything is scored
    a, b = (
        given_scores(x, wanted or DEFAULT_METRICS, chosen or "all", progress, whole="a comparison")
        for x in (first, second)
    )
    keys = [
        (name, pair)
        for name, pair in a.arrays
        if (name, pair) in b.arrays
        and (not pair.of_nodes or all(a.heads(role) == b.heads(role) for role in pair))
        and (wanted is None or name in wanted)
        and (chosen is None or pair in chosen)
    ]
    if not keys:
        asked = "" if wanted is None and chosen is None else " as requested"
        raise HeadspanError(f"the two results have no similarity and pairing in common{asked}")
    keys.sort(key=lambda key: (a.metrics.index(key[0]), key[1] not in FLOW_PAIRINGS))
    return Comparison(_compare(a, b, name, pair, k) for name, pair in keys)


def shared_edges(first: ScoreMatrix, second: ScoreMatrix, k: int = 20) -> int:
    """How many of the k largest pairs are the same in both."""
    return len({e[3:5] for e in first.top(k)} & {e[3:5] for e in second.top(k)})


def _compare(first: Scores, second: Scores, metric: str, pairing: Pairing, k: int) -> PairingComparison:
    a, b = first[metric, pairing].forward(), second[metric, pairing].forward()
    x, y = a.values.astype(np.float64), b.values.astype(np.float64)
    if metric_of(metric).grows_with_rank:
        x, y = (v / _smaller_ranks(scores, pairing) for v, scores in ((x, first), (y, second)))
    both = ~(np.isnan(x) | np.isnan(y))
    x, y = x[both], y[both]
    mse = float(np.mean((x - y) ** 2)) if x.size else float("nan")
    return PairingComparison(metric, pairing, x.size, shared_edges(a, b, k), k, mse, spearman(x, y))


def _smaller_ranks(scores: Scores, pairing: Pairing) -> np.ndarray:
    """min(m, m') of each pair, which normalises PK."""
    ranks = np.minimum(scores.ranks(pairing.source)[:, None], scores.ranks(pairing.target)[None, :])
    return np.maximum(ranks, 1)
