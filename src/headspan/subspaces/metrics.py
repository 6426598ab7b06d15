"""The similarities, each an object with everything that the rest of the package needs to know about it.

Five of them are computed from ‖F_AᵀF_B‖_F², where each similarity derives its own normalised *factor* F from a
weight. ``contraction`` computes this number for all pairs at once. To add a similarity of this kind, write its
factor and add one entry to ``METRICS``:

=============  ==============================================  ===============================================
similarity     factor F of the weight A (P its partner)        score from s = ‖F_AᵀF_B‖_F²
=============  ==============================================  ===============================================
``pk``         U, an orthonormal basis of the span of A        s
``cs``         A·chol(PᵀP), divided by its Frobenius norm      √s   (the d×d circuit matrix is never formed)
``simple_cs``  A, divided by its Frobenius norm                √s
``linear_cka`` √(A_cᵀA_c), divided by √‖A_cᵀA_c‖_F; A_c = A − s
               its mean column
``influence``  A·R of the folded weight A, divided by its      √s, times the two norms
               Frobenius norm; R from a run of the model
=============  ==============================================  ===============================================

Procrustes needs singular values for each pair and so has its own all-pairs function.

In ``cs`` the partner P of a weight is the other weight of its circuit: K for Q, Q for K, V for O, O for V. Under
GQA a query head's partner is the K or V of its group; the partners of a shared K or V head are stacked (PᵀP summed
over the group's query heads).

In ``influence`` R Rᵀ describes the port on some input: for O the covariance of what the head computes, for Q and K the
Fisher information of the attention pattern, for V the inverse variance of the value
(:mod:`headspan.results.observations`). It is the composition score without its assumption of isotropic input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike

from headspan.subspaces.random_subspaces import exact_moments
from headspan.subspaces.weight_factors import (
    LayerWeight,
    centred_factor,
    circuit_factor,
    observed_factor,
    plain_factor,
    procrustes_all_pairs,
    subspace_factor,
    triangular_factor,
    weight_itself,
)
from headspan.vocabulary.errors import HeadspanError


def _itself(kernel: np.ndarray) -> np.ndarray:
    return kernel


@dataclass(frozen=True)
class Metric:
    """One similarity; ``headspan.score`` also takes your own.

    key: its name, ``lower_case``; title and short are the same by default.
    factor: computes normalised (n, p, q) factors for some heads of a layer; each depends only on its own head.
        By default the weights themselves, ``weight.own``, (n, d_model, d_head).
    finish: the map from ‖F_AᵀF_B‖_F² to the score.
    reads_partner: whether the factor needs the other weight of the circuit.
    inside_head: the factor is m×m and compares weights column by column, so both need the same d_head;
        otherwise it is d×m.
    grows_with_rank: the largest value is the smaller of the two ranks; otherwise it is 1. The smallest is 0.
    observed: the factor needs statistics of a run, is made of folded weights, and has a size: the score is multiplied
        by the sizes (Frobenius norms) of both ends, whose product is its largest value.
    flow_only: defined only where the source writes and the target reads.
    known: False for a similarity of a result that is not in the table, whose range is unknown.
    all_pairs: computes the scores of the needed pairs from two factor arrays, for similarities without a kernel.
    pair: computes the score of one pair from the factor of the source and that of the target; called for each pair.
    at_random: mean and standard deviation of the score of two random weights if there is a formula; otherwise they
        are sampled.
    random_null: the distribution of the score of two random subspaces is known, so that a pair has a z and a p.
    """

    key: str
    title: str = ""
    short: str = ""
    factor: Callable[[LayerWeight], np.ndarray] = weight_itself
    finish: Callable[[np.ndarray], np.ndarray] = _itself
    reads_partner: bool = False
    inside_head: bool = False
    grows_with_rank: bool = False
    observed: bool = False
    flow_only: bool = False
    all_pairs: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None = None
    at_random: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
    random_null: bool = False
    known: bool = True
    pair: Callable[[np.ndarray, np.ndarray], float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.key)
        object.__setattr__(self, "short", self.short or self.title)

    @property
    def kernel(self) -> bool:
        """Whether the score is computed from ‖F_AᵀF_B‖_F²; otherwise pair by pair."""
        return self.all_pairs is None and self.pair is None

    @property
    def dtype(self) -> type[np.floating]:
        """Factors for the kernel are float32; similarities computed pair by pair keep float64."""
        return np.float32 if self.kernel else np.float64

    def factor_shape(self, d_model: int, d_head: int) -> tuple[int, int]:
        """(p, q) of a factor."""
        if not self.inside_head:
            return d_model, d_head
        return (d_head if self.kernel else min(d_head, d_model)), d_head

    def largest(self, rank: float, other_rank: float, size: float = 1.0) -> float:
        """The largest value for subspaces of these dimensions; ``size``: the product of the sizes of both ends."""
        return float(min(rank, other_rank)) if self.grows_with_rank else size if self.observed else 1.0

    def bounds(
        self, ranks: np.ndarray, other_ranks: np.ndarray, sizes: np.ndarray | None = None
    ) -> tuple[float, np.ndarray]:
        """The range of exact scores of weights that span so many dimensions."""
        if not self.known:
            return -math.inf, np.asarray(math.inf)
        return 0.0, self._largest(ranks, other_ranks, sizes)

    def _largest(self, ranks: np.ndarray, other_ranks: np.ndarray, sizes: np.ndarray | None) -> np.ndarray:
        if self.observed:
            return np.asarray(math.inf if sizes is None else sizes)
        return np.minimum(ranks, other_ranks) if self.grows_with_rank else np.asarray(1.0)

    def chance(
        self, d: ArrayLike, ranks: np.ndarray, other_ranks: np.ndarray, sizes: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the score of two random weights that span so many of d dimensions.

        sizes: for an ``observed`` similarity, the products of the sizes of both ends. The mean is then that of the same
        ends in random directions (exact for its square), and its standard deviation is not known.
        """
        d, ranks, other_ranks = np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in (d, ranks, other_ranks)))
        if self.observed:
            mean = np.zeros(ranks.shape) if sizes is None else sizes / np.sqrt(d)
            return mean, np.zeros(mean.shape)
        if self.at_random is not None:
            return self.at_random(d, ranks, other_ranks)
        drawn = drawn_scores(
            self.key, int(d.max(initial=1)), int(max(ranks.max(initial=1), other_ranks.max(initial=1)))
        )
        return np.full(ranks.shape, drawn.mean()), np.full(ranks.shape, drawn.std())

    def excess(
        self,
        values: np.ndarray,
        d: ArrayLike,
        ranks: np.ndarray,
        other_ranks: np.ndarray,
        sizes: np.ndarray | None = None,
    ) -> np.ndarray:
        """Where a score lies between chance (0) and the largest possible score (1).

        The scale starts three standard deviations above the mean of random weights, in any dimension and for any
        similarity, so it can be used for all models. Of an unknown similarity, the largest given value is 1.
        """
        if not self.known:
            most = np.max(np.abs(values), initial=0.0, where=~np.isnan(values))
            return np.clip(values / (most or 1.0), 0.0, 1.0)
        mean, sd = self.chance(d, ranks, other_ranks, sizes)
        start = mean + 3 * sd
        room = self._largest(ranks, other_ranks, sizes) - start
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.clip(np.where(room > 0, (values - start) / room, 0.0), 0.0, 1.0)


def drawing_strength(excess: np.ndarray) -> np.ndarray:
    """How strongly to draw pairs, from 0 to 1, in every picture: their excess over chance; 0 where there is no score.

    The width of a line is linear in it, so a line twice as far above chance is twice as far from the thinnest.
    """
    return np.nan_to_num(excess)


def _random_kernel(d: np.ndarray, m: np.ndarray, m2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of PK of uniform random subspaces."""
    found = exact_moments(d, m, m2)
    return found.mean, found.sd


_DRAWN = 12  # random weights on either side: 144 scores
_DRAWN_ENTRIES = 2**24


@lru_cache(maxsize=64)
def drawn_scores(name: str, d_model: int, width: int) -> np.ndarray:
    """Scores of pairs of Gaussian d×m weights with Gaussian partners, as in an untrained model. The seed is fixed.

    >>> round(float(drawn_scores("cs", 100, 10).mean()), 2)  # about 1/√d
    0.1
    """
    metric, rng = METRICS[name], np.random.default_rng(0)
    n = max(4, min(_DRAWN, _DRAWN_ENTRIES // max(1, d_model * width)))

    def factors() -> np.ndarray:
        own, partner = (rng.standard_normal((n, d_model, width)) for _ in range(2))
        return metric.factor(LayerWeight(own, partner if metric.reads_partner else None, "F64"))

    first, second = factors(), factors()
    if metric.all_pairs is not None:
        return metric.all_pairs(first, second, np.ones((n, n), dtype=bool)).ravel()
    products = np.einsum("aij,bik->abjk", first, second, optimize=True)
    return metric.finish(np.square(products).sum(axis=(2, 3), dtype=np.float64)).ravel()


def parse_metrics(names: str | Iterable[str], observed: bool = False) -> tuple[str, ...]:
    """Metric names from ``"all"``, ``"pk,cs"`` or a list of them, each once, in the table's order.

    "all" are those of weights alone; with ``observed`` also those that need statistics of a run.

    >>> parse_metrics(["cs", "pk"])
    ('pk', 'cs')
    """
    given = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(name, str) for name in given):
        raise HeadspanError(
            f"{str(names)[:80]!r} is not a list of similarities: choose from {', '.join(METRICS)} or all"
        )
    parts = [part.strip().lower() for name in given for part in name.split(",")]
    for part in parts:
        if part != "all" and part not in METRICS:
            raise HeadspanError(f"unknown similarity {part[:80]!r}: choose from {', '.join(METRICS)} or all")
    everything = [*METRICS] if observed else WEIGHT_METRICS
    return tuple(name for name in METRICS if name in parts or ("all" in parts and name in everything))


def check_statistics(
    names: Sequence[str],
    given: bool,
    *,
    argument: str = "stats",
    then: str = "run `hs.score(model, metric='influence', stats='stats.safetensors')`",
) -> list[str]:
    """Those of the similarities that need statistics of a run, which must be given for them and for no others.

    argument: what gave statistics. then: what to do with statistics once they are made.

    >>> check_statistics(["pk", "influence"], given=True)
    ['influence']
    """
    needed = [name for name in names if METRICS[name].observed]
    if needed and not given:
        raise HeadspanError(
            f"{needed[0]} needs statistics of a run: make them with `hs.observe(model, out='stats.safetensors')`. "
            f"Then {then}"
        )
    if given and not needed:
        raise HeadspanError(
            f"{', '.join(names)} use no statistics. Add influence to `metric`, or leave out `{argument}`"
        )
    return needed


def one_metric(names: str | Iterable[str]) -> str:
    """The only name of a list, where several make no sense.

    >>> one_metric(["pk"])
    'pk'
    """
    found = [names] if isinstance(names, str) else list(names)
    if len(found) != 1 or "," in found[0] or found[0] == "all":
        raise HeadspanError(f"this takes one similarity at a time, not {', '.join(found)[:80] or 'none'}: choose one")
    return found[0]


PK, CS = "pk", "cs"
DEFAULT_METRICS = (PK, CS)  # the two that the paper compares throughout

METRICS = {
    metric.key: metric
    for metric in (
        Metric(
            PK,
            "Projection Kernel",
            "PK",
            subspace_factor,
            grows_with_rank=True,
            at_random=_random_kernel,
            random_null=True,
        ),
        Metric(CS, "Composition Score", "CS", circuit_factor, np.sqrt, reads_partner=True),
        Metric("simple_cs", "Simple-CS", "Simple-CS", plain_factor, np.sqrt),
        Metric("linear_cka", "Linear CKA", "Linear CKA", centred_factor, inside_head=True),
        Metric(
            "procrustes",
            "Procrustes similarity",
            "Procrustes",
            triangular_factor,
            inside_head=True,
            all_pairs=procrustes_all_pairs,
        ),
        Metric("influence", "Influence", "Influence", observed_factor, np.sqrt, observed=True, flow_only=True),
    )
}
OBSERVED_METRICS = tuple(name for name, metric in METRICS.items() if metric.observed)  # need statistics of a run
WEIGHT_METRICS = tuple(name for name in METRICS if name not in OBSERVED_METRICS)


def metric_of(name: str) -> Metric:
    """The similarity with this name; for an unknown one, an object with only the name."""
    if name in METRICS:
        return METRICS[name]
    return Metric(name, at_random=_unknown_chance, known=False)


def _unknown_chance(d: np.ndarray, ranks: np.ndarray, other_ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return 0.0 * ranks, 0.0 * ranks


# -- those of a caller ---------------------------------------------------------------------------------------

PairFunction: TypeAlias = Callable[[np.ndarray, np.ndarray], float]  # of two weights, each (d_model, d_head)
MetricsLike: TypeAlias = "str | Metric | PairFunction | Sequence[str | Metric | PairFunction]"
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_TAKEN = ("all", "rank", "size", "effect")  # by files of results


def split_metrics(given: MetricsLike) -> tuple[list[str], dict[str, Metric]]:
    """The names among similarities, and those that are the caller's own: `Metric` objects and functions of a pair.

    >>> def shared(a, b):
    ...     return float(np.abs(a.T @ b).max())
    >>> names, own = split_metrics(["pk", shared])
    >>> names, list(own), own["shared"].pair is shared
    (['pk'], ['shared'], True)
    """
    alone = isinstance(given, (str, Metric)) or not isinstance(given, Iterable)
    several: list[Any] = [given] if alone else list(cast("Iterable[Any]", given))
    names: list[str] = [one for one in several if not isinstance(one, Metric) and not callable(one)]
    own: dict[str, Metric] = {}
    for one in (one for one in several if isinstance(one, Metric) or callable(one)):
        metric = (
            one
            if isinstance(one, Metric)
            else Metric(str(getattr(one, "__name__", "")), pair=cast("PairFunction", one))
        )
        if not _NAME.fullmatch(str(metric.key)):
            raise HeadspanError(
                f"{str(metric.key)[:60]!r} cannot be the name of a similarity. Give it one in lower case: "
                "hs.Metric('my_metric', pair=function)"
            )
        if metric.key in METRICS or metric.key in own or metric.key in _TAKEN:
            raise HeadspanError(f"there is another similarity {metric.key}. Give yours another name with hs.Metric")
        if metric.observed:
            raise HeadspanError(f"{metric.key} cannot use statistics of a run, which influence alone does")
        own[metric.key] = metric
    return names, own
