"""How well a similarity of weights predicts which edges have the largest effects.

For each pairing, and each material the model was run on:

* ``spearman``: rank correlation of score and effect over all edges. It mostly reflects that close layers interact more.
* ``within``: the same with ranks taken among the edges between the same two layers, which removes the effect of depth.
* ``spec``: the same after removing the means of sources and targets from the logarithms of score and effect, which
  leaves what is specific to a pair: a head that writes much and one that notices much have a large effect anyway.
* ``ap``: average precision of the ranking by score in finding the largest 1 % of effects (``largest_edges``, of any
  size); a random ranking has about 0.01.
* ``hits``: the number of those among the ``k`` edges with the highest scores.
* ``habit_ap``: average precision in finding the edges without which the target loses more than a tenth of a
  head score (a clean score of 0.2 or more; only on random sequences, only Q and K).

Intervals are 95 % bootstrap intervals over source heads, because edges of one source are not independent. There are
two baselines that do not use the target: layer distance, and the length of the source's output. Influence has a
stronger one, the product of the source's spread and the target's sensitivity, which knows both heads but not the pair.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np

from headspan.results.checks import pair_sizes
from headspan.results.effects import Effects
from headspan.results.observations import Statistics, StatisticsLike, given_statistics
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import given_weights
from headspan.subspaces.metrics import DEFAULT_METRICS, METRICS, OBSERVED_METRICS, PK, check_statistics, parse_metrics
from headspan.system.arguments import checked
from headspan.system.ordering import groups, mean_ranks
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Pairing, layers_of

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike
    from headspan.models.weights import AttentionWeights

LARGEST_SHARE = 0.01  # fraction of a pairing's edges that count as those with the largest effects
MEASURES = ("spearman", "within", "spec", "ap", "hits", "habit_ap")
FOILS = ("layer distance", "write norm")
LOUDNESS = "spread × sensitivity"
_SAME = 1e-5  # differences of logarithms that are rounding

Predictors = Mapping[str, Mapping[Pairing, np.ndarray]]


class Prediction(TypedDict):
    """How well one predictor finds the largest effects: each measure with its interval, None where it is undefined."""

    material: str
    pairing: str
    predictor: str
    edges: int
    largest_edges: int
    habit_edges: int
    k: int
    spearman: float | None
    spearman_low: float | None
    spearman_high: float | None
    within: float | None
    within_low: float | None
    within_high: float | None
    spec: float | None
    spec_low: float | None
    spec_high: float | None
    ap: float | None
    ap_low: float | None
    ap_high: float | None
    hits: float | None
    hits_low: float | None
    hits_high: float | None
    habit_ap: float | None
    habit_ap_low: float | None
    habit_ap_high: float | None


class Agreement(TypedDict):
    """Rank correlation over all edges between the scores of one similarity on two inputs."""

    pairing: str
    first: str
    second: str
    spearman: float | None


class Difference(TypedDict):
    """Two predictors compared on the same resamples."""

    material: str
    pairing: str
    first: str
    second: str
    measure: str
    difference: float | None
    low: float | None
    high: float | None


@dataclass(repr=False, eq=False)
class EffectsSummary(Tabular):
    """One row per material, pairing and predictor; ``differences``: between two predictors, same resamples."""

    predictions: list[Prediction]
    differences: list[Difference]
    k: int
    notes: list[str] = field(default_factory=list[str])
    inputs: dict[str, str] = field(default_factory=dict[str, str])  # by name, what statistics were collected on
    agreement: list[Agreement] = field(default_factory=list[Agreement])  # of influence between two inputs

    def rows(self) -> list[dict[str, Any]]:
        """One record per material, pairing and predictor: every measure with its interval."""
        return [dict(line) for line in self.predictions]

    def _headline(self) -> str:
        return f"how well similarities find the largest effects, {len(self.predictions)} predictions"


@checked
def effects_summary(
    model: ModelLike,
    effects: Effects,
    metric: str | Sequence[str] | None = None,
    *,
    stats: StatisticsLike | Sequence[StatisticsLike] | None = None,
    k: int = 20,
    resamples: int = 400,
    seed: int = 0,
) -> EffectsSummary:
    """How well similarities of a model's weights predict its measured effects; ``headspan effects --summary``.

    Parameters
    ----------
    model : the model that was run (``headspan.effects``), raw and, where possible, folded.
    effects : its measured effects.
    metric : similarities to compare: pk and cs by default, with ``stats`` also influence.
    stats : statistics of other input (``headspan.observe``), or their files; several show how far influence depends on
        the input.
    k : edges with the highest scores in which ``hits`` are counted. resamples, seed : of the bootstrap.
    """
    with given_weights(model) as weights:
        if not weights.ports.same_heads(effects.ports):
            raise HeadspanError(f"these are not the effects of {weights.reference}: it has other heads")
        notes = [] if weights.foldable else [f"raw weights only: {weights.not_foldable_reason}"]
        observed = _by_input(stats)
        usual = (*DEFAULT_METRICS, *OBSERVED_METRICS) if observed else DEFAULT_METRICS
        names = parse_metrics(metric or usual, bool(observed))
        check_statistics(names, bool(observed), then="give them as `stats`")
        predictors = predictors_of(weights, names, effects.pairings, observed)
    found = summarise_effects(effects, predictors, k=k, resamples=resamples, seed=seed)
    inputs = {name: one.input for name, one in observed.items()}
    return replace(found, notes=notes, inputs=inputs, agreement=agreement(predictors))


def _by_input(stats: StatisticsLike | Sequence[StatisticsLike] | None) -> dict[str, Statistics]:
    """Statistics by a short name of what they were collected on."""
    found: dict[str, Statistics] = {}
    given = [stats] if isinstance(stats, (Statistics, str, os.PathLike)) else stats or []
    for one in map(given_statistics, given):
        number = sum(other.kind == one.kind for other in found.values())
        found[f"{one.kind} {number + 1}" if number else one.kind] = one
    return found


def summarise_effects(
    effects: Effects, predictors: Predictors, *, k: int = 20, resamples: int = 400, seed: int = 0
) -> EffectsSummary:
    """How well each predictor, by name and pairing an array like the effects', finds the largest 1 % of effects."""
    if k < 1 or resamples < 10:
        raise HeadspanError(f"a summary needs k of at least 1 and at least 10 resamples, not {k} and {resamples}")
    rows: list[Prediction] = []
    differences: list[Difference] = []
    for material in effects.materials:
        for pairing in effects.pairings:
            if (material, pairing) not in effects.arrays:
                continue
            edges = _Edges.of(effects, material, pairing)
            weights = edges.resampled(resamples, seed)
            named = {name: found[pairing] for name, found in predictors.items() if pairing in found}
            named |= _foils(effects, pairing)
            drawn: dict[str, dict[str, np.ndarray]] = {}
            for name, values in named.items():
                drawn[name] = edges.measure(values, weights, k)
                rows.append(_row(material, pairing, name, edges, drawn[name], k))
            differences += _differences(material, pairing, drawn)
    return EffectsSummary(rows, differences, k)


def predictors_of(
    weights: AttentionWeights,
    metrics: Sequence[str],
    pairings: Sequence[Pairing],
    stats: Mapping[str, Statistics] | None = None,
) -> Predictors:
    """Scores of a model's raw weights and, if they can be folded, of the folded ones: ``"pk raw"`` …

    stats: statistics by the name of their input; each gives influence and its baseline, ``"influence (text)"`` …
    """
    from headspan.models.folding import fold
    from headspan.scoring.run import score

    found: dict[str, dict[Pairing, np.ndarray]] = {}
    observed = [metric for metric in metrics if METRICS[metric].observed]
    metrics = [metric for metric in metrics if metric not in observed]
    kinds = {"raw": weights} | ({"folded": fold(weights)} if weights.foldable else {}) if metrics else {}
    scored = {kind: score(one, metrics, pairings, "forward") for kind, one in kinds.items()}
    for metric in metrics:
        for kind, scores in scored.items():
            found[f"{metric} {kind}"] = {pairing: scores[metric, pairing].values for pairing in pairings}
    for name, one in (stats or {}).items() if observed else ():
        scores = score(weights, observed, pairings, "forward", stats=one)
        for metric in observed:
            found[f"{metric} ({name})"] = {pairing: scores[metric, pairing].values for pairing in pairings}
        sizes = {pairing: pair_sizes(scores.sizes, observed[0], pairing) for pairing in pairings}
        found[f"{LOUDNESS} ({name})"] = {pairing: size for pairing, size in sizes.items() if size is not None}
    return found


def agreement(predictors: Predictors) -> list[Agreement]:
    """Rank correlations over all edges between the scores that one similarity has on different inputs."""
    rows: list[Agreement] = []
    names = [name for name in predictors if name.endswith(")") and not name.startswith(LOUDNESS)]
    for first, second in combinations(names, 2):
        if first.partition(" (")[0] != second.partition(" (")[0]:
            continue
        for pairing, values in predictors[first].items():
            there = ~np.isnan(values)
            ranks = [mean_ranks(predictors[name][pairing][there]) for name in (first, second)]
            found = _correlation(ranks[0], ranks[1], np.ones(int(there.sum())))
            rows.append({"pairing": str(pairing), "first": first, "second": second, "spearman": _number(found)})
    return rows


def _foils(effects: Effects, pairing: Pairing) -> dict[str, np.ndarray]:
    sources, targets = effects.ports.of(pairing.source), effects.ports.of(pairing.target)
    nearness = (layers_of(sources)[:, None] - layers_of(targets)[None, :]).astype(float)
    lengths = np.broadcast_to(effects.write_norms[:, None], nearness.shape)
    return dict(zip(FOILS, (nearness, lengths), strict=True))


def _row(
    material: str, pairing: Pairing, name: str, edges: _Edges, drawn: Mapping[str, np.ndarray], k: int
) -> Prediction:
    row: dict[str, Any] = {"material": material, "pairing": str(pairing), "predictor": name}
    row |= {"edges": len(edges.effect), "largest_edges": int(edges.largest.sum())}
    row |= {"habit_edges": int(edges.habit.sum()), "k": k}
    for measure in MEASURES:
        row |= dict(zip((measure, f"{measure}_low", f"{measure}_high"), _estimate(drawn[measure]), strict=True))
    return cast("Prediction", row)


def _differences(material: str, pairing: Pairing, drawn: Mapping[str, Mapping[str, np.ndarray]]) -> list[Difference]:
    """Every similarity against pk of the same folding, folded against raw, influence against pk and its baseline."""
    pairs: list[tuple[str, str]] = []
    for name in drawn:
        if name.endswith(")") and not name.startswith(LOUDNESS):
            rivals = (f"{PK} folded", f"{LOUDNESS} ({name.partition(' (')[2]}")
            pairs += [(name, rival) for rival in rivals if rival in drawn]
        metric, _, kind = name.partition(" ")
        if kind in ("raw", "folded") and metric != PK and f"{PK} {kind}" in drawn:
            pairs.append((f"{PK} {kind}", name))
        if kind == "folded" and f"{metric} raw" in drawn:
            pairs.append((name, f"{metric} raw"))
    rows: list[Difference] = []
    for first, second in pairs:
        for measure in ("within", "spec", "ap"):
            value, low, high = _estimate(drawn[first][measure] - drawn[second][measure])
            rows.append({
                "material": material, "pairing": str(pairing), "first": first, "second": second, "measure": measure,
                "difference": value, "low": low, "high": high,
            })  # fmt: skip
    return rows


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _estimate(drawn: np.ndarray) -> tuple[float | None, float | None, float | None]:
    """The value, which comes first, and the 95 % interval of the resamples after it."""
    present = drawn[1:][~np.isnan(drawn[1:])]
    low, high = np.quantile(present, [0.025, 0.975]).tolist() if len(present) else (None, None)
    return _number(drawn[0]), low, high


@dataclass(frozen=True)
class _Edges:
    """The measured edges of a pairing, flat."""

    rows: np.ndarray  # index of the source
    columns: np.ndarray
    blocks: list[np.ndarray]  # indices of the edges between the same two layers
    effect: np.ndarray
    largest: np.ndarray
    habit: np.ndarray
    n_sources: int

    @classmethod
    def of(cls, effects: Effects, material: str, pairing: Pairing) -> _Edges:
        values = effects.arrays[material, pairing]
        rows, columns = np.nonzero(~np.isnan(values))
        if not len(rows):
            raise HeadspanError(f"no {pairing} edge was measured, so there is nothing to summarise")
        source, target = (layers_of(effects.ports.of(role)) for role in pairing)
        blocks = groups(source[rows] * (target.max() + 1) + target[columns])
        effect = values[rows, columns]
        largest = np.zeros(len(effect), dtype=bool)
        largest[np.argsort(-effect, kind="stable")[: max(1, round(LARGEST_SHARE * len(effect)))]] = True
        habit = effects.lost(pairing)[rows, columns] if material == "random" else np.zeros(len(effect), dtype=bool)
        return cls(rows, columns, blocks, effect, largest, habit, len(values))

    def resampled(self, count: int, seed: int) -> np.ndarray:
        """The weight of each edge: 1 in the first row, then the number of times its source was drawn."""
        rng = np.random.default_rng(seed)
        present = np.unique(self.rows)
        drawn = np.zeros((count + 1, self.n_sources))
        drawn[0, present] = 1
        for i in range(1, count + 1):
            np.add.at(drawn[i], rng.choice(present, size=len(present)), 1)
        return drawn

    def measure(self, values: np.ndarray, weights: np.ndarray, k: int) -> dict[str, np.ndarray]:
        """Every measure for every row of weights."""
        scores = np.asarray(values, dtype=float)[self.rows, self.columns]
        order = np.argsort(-scores, kind="stable")
        overall = mean_ranks(scores), mean_ranks(self.effect)
        inside = self._block_ranks(scores), self._block_ranks(self.effect)
        specific = self._block_ranks(self._specific(scores)), self._block_ranks(self._specific(self.effect))
        found: dict[str, list[float]] = {measure: [] for measure in MEASURES}
        for row in weights:
            each = row[self.rows]
            found["spearman"].append(_correlation(*overall, each))
            found["within"].append(_correlation(*inside, each))
            found["spec"].append(_correlation(*specific, each))
            found["ap"].append(_average_precision(self.largest[order], each[order], scores[order]))
            found["hits"].append(_hits(self.largest[order], each[order], k))
            found["habit_ap"].append(_average_precision(self.habit[order], each[order], scores[order]))
        return {measure: np.array(numbers) for measure, numbers in found.items()}

    def _specific(self, values: np.ndarray) -> np.ndarray:
        """Logarithms without the means of sources and targets in each layer pair; 0 where nothing is left but rounding.

        Numbers that have no logarithm (layer distance) know nothing of the pair.
        """
        if not (values > 0).any():
            return np.zeros(len(values))
        logs = np.log(np.maximum(values, values[values > 0].min()))
        left = np.zeros(len(values))
        for members in self.blocks:
            part = logs[members] - logs[members].mean()
            for ends in (self.rows[members], self.columns[members]):
                number = np.unique(ends, return_inverse=True)[1]
                part = part - (np.bincount(number, part) / np.bincount(number))[number]
            left[members] = part
        return np.where(np.abs(left) < _SAME, 0.0, left)

    def _block_ranks(self, values: np.ndarray) -> np.ndarray:
        """Ranks among the edges of the same block, from −½ to ½."""
        out = np.zeros(len(values))
        for members in self.blocks:
            if len(members) > 1:
                out[members] = (mean_ranks(values[members]) - 1) / (len(members) - 1) - 0.5
        return out


def _correlation(first: np.ndarray, second: np.ndarray, weights: np.ndarray) -> float:
    total = weights.sum()
    first, second = first - weights @ first / total, second - weights @ second / total
    size = np.sqrt((weights @ first**2) * (weights @ second**2))
    return float(weights @ (first * second) / size) if size > 1e-9 else float("nan")


def _average_precision(positive: np.ndarray, weights: np.ndarray, scores: np.ndarray) -> float:
    """Average precision of edges sorted by score; equal scores share one threshold."""
    hits, seen = np.cumsum(weights * positive), np.cumsum(weights)
    if hits[-1] == 0:
        return float("nan")
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # of each threshold
    gained = np.diff(hits[last], prepend=0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(seen[last] > 0, hits[last] / seen[last], 0.0)
    return float(gained @ precision / hits[-1])


def _hits(positive: np.ndarray, weights: np.ndarray, k: int) -> float:
    """Positives among the first k edges."""
    first = np.minimum(weights, np.maximum(0.0, k - (np.cumsum(weights) - weights)))
    return float(first @ positive)
