"""Compare the Projection Kernels of a model with chance: one row per pairing, and the paper's KL divergence.

The three nulls are those of :mod:`headspan.statistics.significance`, which tests single pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headspan.results.choices import given_pairings
from headspan.results.scores import Scores
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import ScoresLike, given_scores
from headspan.statistics.dimension import dimension_at
from headspan.statistics.significance import DISCOVERY_RATE, Significance, agreement, has_reverse, significance
from headspan.statistics.within_layers import DIRECTED
from headspan.subspaces.metrics import PK
from headspan.subspaces.random_subspaces import moments, random_quantile
from headspan.system.arguments import checked
from headspan.system.progress import Update
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import PAIRINGS, Pairing

_LEAST_SEEN = 0.5  # least share of the random mass for which a KL is shown


class Divergence(NamedTuple):
    """KL(random ‖ observed), and the share of the random mass in the bins that it is summed over."""

    kl: float
    seen: float

    @property
    def shown(self) -> float:
        """The KL, or NaN if most of the random mass was left out: it could then be 0 even far from chance."""
        return self.kl if self.seen >= _LEAST_SEEN else float("nan")


@checked
def kl_divergence(scores: Scores, pairing: str | Pairing) -> float:
    """KL(random ‖ observed) of the PK of forward pairs, over 255 bins between 0 and the largest possible PK.

    Bins that are empty on either side are left out, as in the paper. A small value therefore does not imply agreement:
    with few pairs it can be 0 for the pairing farthest from chance. The distances of ``summarise`` avoid this.
    If subspace dimensions differ between heads, the random mass is the average over the pairs.
    """
    return divergence(scores, pairing).kl


def divergence(scores: Scores, pairing: str | Pairing) -> Divergence:
    """The KL of ``kl_divergence`` with the share of the random mass that it covers."""
    from scipy.special import ndtr

    matrix = scores[PK, pairing].forward()
    rows, columns, values = matrix.pairs()
    if not len(values):
        raise HeadspanError(f"{matrix.pairing} has no forward pairs. KL needs heads in at least two layers")
    ranks, ranks2 = scores.ranks(matrix.pairing.source)[rows], scores.ranks(matrix.pairing.target)[columns]
    d = dimension_at(scores, matrix.pairing, rows, columns)
    (d, ranks, ranks2), counts = np.unique(np.stack([d, ranks, ranks2]), axis=1, return_counts=True)
    edges = np.linspace(0, float(np.minimum(ranks, ranks2).max()), 256)
    mean, variance = moments(d, ranks, ranks2)
    if np.any(variance == 0):
        raise HeadspanError(
            f"{matrix.pairing} has subspaces that are empty or fill the whole space, where PK cannot vary: no KL"
        )
    cumulative = ndtr((edges[:, None] - mean) / np.sqrt(variance)) @ (counts / counts.sum())
    expected = np.diff(cumulative)
    observed = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] / len(values)
    both = (expected > 0) & (observed > 0)
    kl = float(np.sum(expected[both] * np.log(expected[both] / observed[both])))
    return Divergence(kl, float(expected[both].sum()))


class PairingSummary(NamedTuple):
    """One pairing against all nulls; values that need reversed pairs are None if there are none.

    shift: mean distance of a pair from the random mean of its dimensions, in random standard deviations.
    above: share of pairs above the 99.9 % point of random subspaces; by chance 0.001.
    within_significant: pairs that stand out among the heads of their two layers; None if layers have too few heads.
    both_significant: pairs above the reversed pairs that also stand out among the heads of their two layers.
    direction_p: probability of forward layer means this far above the reversed ones; None with too few layers.
    kl: the paper's divergence; NaN if not requested or if it leaves out most of the random mass.
    """

    pairing: Pairing
    pairs: int
    mean: float
    sd: float
    random_mean: float
    random_sd: float
    shift: float
    above: float
    random_significant: int
    reversed_significant: int | None
    within_significant: int | None = None
    both_significant: int | None = None
    direction_p: float | None = None
    kl: float = float("nan")

    @property
    def directed(self) -> bool:
        """Whether whole layers score higher forwards than reversed, which makes the reversed null too optimistic."""
        return self.direction_p is not None and self.direction_p <= DIRECTED


def summarise(scores: Scores, q: float = DISCOVERY_RATE, kl: bool = False) -> list[PairingSummary]:
    """One line per pairing with PK scores: observed and random moments over forward pairs, discoveries at q.

    ``random_sd`` is the expected spread over all pairs, including differences between subspace dimensions.
    Pairings of nodes come last and do not affect the rows of heads.
    """
    scores.check_all_pairs("a comparison with chance")
    nodes = [pairing for pairing in given_pairings("all", scores, PK) if pairing.of_nodes]
    found = [summary_of(scores, pairing, q, kl) for pairing in (*PAIRINGS, *nodes) if (PK, pairing) in scores]
    if not found:
        raise HeadspanError("the random baseline needs pk scores, which this result lacks. Score the model again")
    return found


def summary_of(
    scores: Scores,
    pairing: Pairing,
    q: float = DISCOVERY_RATE,
    kl: bool = False,
    *,
    random_null: Significance | None = None,
    reversed_null: Significance | None = None,
) -> PairingSummary:
    """One row of ``summarise``; results of nulls that were already tested can be passed in."""
    rows, columns, values = scores[PK, pairing].forward().pairs()
    if not len(values):
        raise HeadspanError(f"{pairing} has no forward pairs. The baseline needs heads in at least two layers")
    values = values.astype(np.float64)
    ranks, ranks2 = scores.ranks(pairing.source)[rows], scores.ranks(pairing.target)[columns]
    d = dimension_at(scores, pairing, rows, columns)
    random = moments(d, ranks, ranks2)
    against_random = random_null or significance(scores, pairing)
    # Where PK is constant, rounding must not make it count as above its own value.
    above = (values > random_quantile(d, ranks, ranks2)) & (random.variance > 0)
    if reversed_null is None and has_reverse(scores, PK, pairing):
        reversed_null = significance(scores, pairing, null="reversed")
    return PairingSummary(
        pairing,
        len(values),
        float(values.mean()),
        float(values.std()),
        float(random.mean.mean()),
        float(np.sqrt(random.variance.mean() + random.mean.var())),
        float(against_random.z[rows, columns].mean()),
        float(above.mean()),
        int(np.count_nonzero(against_random.q[rows, columns] <= q)),
        *_against_controls(reversed_null, q),
        divergence(scores, pairing).shown if kl else float("nan"),
    )


def _against_controls(
    reversed_null: Significance | None, q: float
) -> tuple[int | None, int | None, int | None, float | None]:
    """The results from reversed pairs: reversed_significant, within_significant, both_significant, direction_p."""
    if reversed_null is None or reversed_null.q_within is None or reversed_null.direction is None:
        return None, None, None, None
    shared, p = reversed_null.shared(q), reversed_null.direction.forward
    with np.errstate(invalid="ignore"):
        within = None if shared is None else int(np.count_nonzero(reversed_null.q_within <= q))
    return reversed_null.count(q), within, shared, None if np.isnan(p) else p


def remarks(summaries: list[PairingSummary]) -> list[str]:
    """Notes on where the reversed null and the null within layers disagree, or the reversed null is unreliable."""
    found = [
        agreement(line.pairing, line.reversed_significant, line.both_significant)
        for line in summaries
        if line.reversed_significant and line.both_significant != line.reversed_significant
    ]
    directed = [str(line.pairing) for line in summaries if line.directed]
    if directed:
        found.append(
            f"whole layers score higher forwards than reversed in {', '.join(directed)}, so pairs there may exceed "
            "the reversed pairs without being connected"
        )
    return found


class Baseline(Tabular, list[PairingSummary]):
    """One line per pairing against chance."""

    with_kl: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """One record per pairing; ``kl`` only if requested."""
        records = [line._asdict() | {"pairing": str(line.pairing)} for line in self]
        return records if self.with_kl else [{n: v for n, v in record.items() if n != "kl"} for record in records]

    def _headline(self) -> str:
        return f"pk of forward pairs against chance, {len(self)} pairings"


@checked
def baseline(
    scores: ScoresLike, q: float = DISCOVERY_RATE, kl: bool = False, progress: Update | None = None
) -> Baseline:
    """Compare Projection Kernels with chance: one row per pairing, from `summarise`.

    >>> str(baseline("demo")[0].pairing)
    'QQ'
    """
    found = Baseline(summarise(given_scores(scores, [PK], "all", progress), q, kl))
    found.with_kl = kl
    return found
