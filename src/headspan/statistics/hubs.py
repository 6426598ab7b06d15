"""Hub heads: targets that many sources prefer (inlets) and sources that many targets prefer (outlets)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from headspan.results.checks import damaged
from headspan.results.choices import given_pairings
from headspan.results.matrix import ScoreMatrix
from headspan.results.scores import Scores
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import ScoresLike, given_scores
from headspan.subspaces.metrics import PK, one_metric
from headspan.system.arguments import checked
from headspan.system.ordering import places
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import HeadOrNode, OnePairing, Pairing, parse_pairings
from headspan.vocabulary.ports import PortTable


class HubHead(NamedTuple):
    """One row of a hub list."""

    rank: int
    head: HeadOrNode
    score: float


@dataclass(frozen=True, repr=False, eq=False)
class HubScores(Tabular):
    """One value per head; NaN for heads that no other head can choose (the first layer has no inlets).

    kind: ``inlet`` or ``outlet``; corrected: whether ``values`` are z-scores rather than sums of similarities.
    """

    kind: str = field(metadata={"written": "hub"})  # a file has its own kind
    corrected: bool
    metric: str
    pairing: Pairing
    heads: tuple[HeadOrNode, ...]
    values: np.ndarray
    ports: PortTable | None = None  # knows which query heads a shared head serves

    def _check(self, path: Path) -> None:
        if self.values.shape != (len(self.heads),):
            raise damaged(path, f"its values have shape {self.values.shape}, expected {(len(self.heads),)}")

    def rows(self) -> list[dict[str, Any]]:
        """One record per head with a value, best first: kind, pairing, rank, head, score (and ``serves`` under GQA)."""
        about = {"kind": self.kind, "pairing": str(self.pairing)}
        return [about | line._asdict() | self.named(line.head) for line in self.top(len(self.heads))]

    def named(self, head: HeadOrNode) -> dict[str, str]:
        """A head's name and, under GQA, the query heads that a shared head serves."""
        if self.ports is None or not self.ports.shared:
            return {"head": str(head)}
        return {"head": str(head), "serves": ";".join(map(str, self.ports.group_of(str(head)))) if head.kv else ""}

    def _headline(self) -> str:
        what = "z-scores" if self.corrected else f"sums of {self.metric}"
        return f"{self.kind} heads of {self.pairing}, {what}"

    @checked
    def top(self, k: int = 10) -> list[HubHead]:
        """The k heads with the largest values; equal values share a rank and come in head order.

        Heads without a value are left out.
        """
        if k < 0:
            raise HeadspanError(f"k is {k}. Give 0 or more")
        ranks = places(self.values)
        present = np.flatnonzero(ranks)
        order = present[np.argsort(ranks[present], kind="stable")][:k]
        return [HubHead(int(ranks[i]), self.heads[i], float(self.values[i])) for i in order]

    @checked
    def of(self, head: HeadOrNode | str) -> float:
        return float(self.values[self._find(head)])

    @checked
    def rank_of(self, head: HeadOrNode | str) -> int:
        """The rank of a head, 1 for the strongest hub; equal values (often 0) share a rank."""
        index = self._find(head)
        if np.isnan(self.values[index]):
            raise HeadspanError(f"{head} has no {self.kind} score: no head of another layer could choose it")
        return int(places(self.values)[index])

    def _find(self, head: HeadOrNode | str) -> int:
        role = self.pairing.target if self.kind == "inlet" else self.pairing.source
        return (self.ports or PortTable({role: self.heads})).find(head, role)


@dataclass(frozen=True, repr=False, eq=False)
class Hubs(Tabular):
    """Inlet and outlet scores of one pairing, as published and corrected for the number of candidates."""

    inlet: HubScores
    outlet: HubScores
    inlet_corrected: HubScores
    outlet_corrected: HubScores

    @checked
    def rows(self, k: int | None = None, corrected: bool = False) -> list[dict[str, Any]]:
        """One record per inlet, then per outlet: kind, pairing, rank, head, score, corrected; k of each, best first."""
        rows: list[dict[str, Any]] = []
        for raw, z in ((self.inlet, self.inlet_corrected), (self.outlet, self.outlet_corrected)):
            for rank, head, _ in (z if corrected else raw).top(len(raw.heads) if k is None else k):
                about = {"kind": raw.kind, "pairing": str(raw.pairing), "rank": rank, **raw.named(head)}
                rows.append(about | {"score": raw.of(head), "corrected": z.of(head)})
        return rows

    def _headline(self) -> str:
        return f"inlet and outlet heads of {self.inlet.pairing} by {self.inlet.metric}"


class HubLists(Tabular, dict[str, Hubs]):
    """Hubs of several pairings: ``lists["OK"].outlet``."""

    def rows(self, k: int | None = None, corrected: bool = False) -> list[dict[str, Any]]:
        """The records of all pairings, one pairing after the other."""
        return [row for found in self.values() for row in found.rows(k, corrected)]

    def _headline(self) -> str:
        return f"inlet and outlet heads of {', '.join(self)}"


@overload
def hubs(scores: ScoresLike, pairing: Pairing | OnePairing = "OK", metric: str | Iterable[str] = PK) -> Hubs: ...
@overload
def hubs(
    scores: ScoresLike,
    pairing: Literal["flow", "all", "nodes"] | list[str] | list[Pairing] | list[str | Pairing] | tuple[str, ...],
    metric: str | Iterable[str] = PK,
) -> HubLists: ...
@overload
def hubs(
    scores: ScoresLike, pairing: str | Iterable[str | Pairing], metric: str | Iterable[str] = PK
) -> Hubs | HubLists: ...
@checked
def hubs(
    scores: ScoresLike, pairing: str | Pairing | Iterable[str | Pairing] = "OK", metric: str | Iterable[str] = PK
) -> Hubs | HubLists:
    """Inlet and outlet scores over the forward pairs of a pairing; of several pairings (a list, "flow") by pairing.

    inlet(h) is the sum of the scores of the sources whose best later target is h; outlet(h) is the same for the targets
    whose best earlier source is h. If several are tied for best, each gets the score.

    The corrected values are z-scores under the null that every chooser picks a random candidate: the sum of h minus
    its expectation, divided by its standard deviation. The plain sum grows with the number of choosers and is larger
    if h has few rivals, so it depends on the layer; the z-score does not. Dividing by the number of choosers
    instead would keep the second bias and let single choices decide in layers with few choosers.

    >>> hubs("demo", "OK").outlet.top(1)[0].head, list(hubs("demo", ["OQ", "OK"]))
    (Head(layer=0, index=3, kind='H'), ['OQ', 'OK'])
    """
    one = isinstance(pairing, Pairing) or (isinstance(pairing, str) and len(pairing.strip()) == 2)
    chosen, metric = parse_pairings(pairing), one_metric(metric)
    scores = given_scores(scores, [metric], chosen, whole="finding hubs")
    if one:
        return _hubs(scores, chosen[0], metric)
    return HubLists({str(p): _hubs(scores, p, metric) for p in given_pairings(pairing, scores, metric)})


def _hubs(scores: Scores, pairing: Pairing, metric: str) -> Hubs:
    matrix = scores[metric, pairing].forward()
    if not len(matrix.pairs()[2]):
        raise HeadspanError(f"{matrix.pairing} has no forward pairs. Hubs need heads in at least two layers")
    inlet, inlet_z = _chosen(matrix.values)
    outlet, outlet_z = _chosen(matrix.values.T)
    return Hubs(
        _scores_of("inlet", False, matrix, inlet),
        _scores_of("outlet", False, matrix, outlet),
        _scores_of("inlet", True, matrix, inlet_z),
        _scores_of("outlet", True, matrix, outlet_z),
    )


def _scores_of(kind: str, corrected: bool, matrix: ScoreMatrix, values: np.ndarray) -> HubScores:
    heads = matrix.targets if kind == "inlet" else matrix.sources
    return HubScores(kind, corrected, matrix.metric, matrix.pairing, heads, values, matrix.ports)


class _Choices(NamedTuple):
    """The choices of one side of a pairing: (choosers, candidates), and the best score of every chooser, (choosers, 1).

    expected, variance: of the sum of every candidate if every chooser picked one of its candidates at random.
    """

    values: np.ndarray
    candidate: np.ndarray
    best: np.ndarray
    expected: np.ndarray
    variance: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> _Choices:
        values = np.asarray(values, dtype=np.float64)
        candidate = ~np.isnan(values)
        choosers = candidate.any(axis=1)
        values, candidate = values[choosers], candidate[choosers]
        best = np.nanmax(values, axis=1, keepdims=True)
        chance = candidate / candidate.sum(axis=1, keepdims=True)
        expected = (best * chance).sum(axis=0)
        return cls(values, candidate, best, expected, (best**2 * chance * (1 - chance)).sum(axis=0))

    def z(self, total: np.ndarray) -> np.ndarray:
        """NaN for a head that is the only candidate of all its choosers: its sum is constant."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.variance > 0, (total - self.expected) / np.sqrt(self.variance), np.nan)


def _chosen(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and z-score per column when every row gives its best score to its best column; (choosers, candidates)."""
    sides = _Choices.of(values)
    total = np.where(sides.candidate & (sides.values == sides.best), sides.values, 0.0).sum(axis=0)
    total[~sides.candidate.any(axis=0)] = np.nan
    return total, sides.z(total)


EXTREME = 0.95  # probability that no head at random lies beyond the largest (or the smallest) value
DRAWS = 400


def extremes_at_random(values: np.ndarray, draws: int = DRAWS, seed: int = 0) -> tuple[float, float] | None:
    """The z-scores that the smallest and the largest of all heads reach if every chooser picks a candidate at random.

    values: (choosers, candidates), NaN where a pair is none. From ``draws`` simulated choices: the point above which
    the smallest z-score stays with probability `EXTREME`, and the one below which the largest stays. None if no head
    has a z-score.
    """
    sides = _Choices.of(values)
    if not (sides.variance > 0).any():
        return None
    rng = np.random.default_rng(seed)
    counts = sides.candidate.sum(axis=1)
    flat, first = np.flatnonzero(sides.candidate), np.concatenate([[0], np.cumsum(counts)[:-1]])
    width = sides.candidate.shape[1]
    found = np.empty((draws, 2))
    for row in found:
        picked = flat[first + rng.integers(counts)] % width
        z = sides.z(np.bincount(picked, weights=sides.best[:, 0], minlength=width))
        row[:] = np.nanmin(z), np.nanmax(z)
    return float(np.quantile(found[:, 0], 1 - EXTREME)), float(np.quantile(found[:, 1], EXTREME))
