"""Evaluate how well similarities find heads that are known to work together.

Detection asks whether the strongest forward pairs lead to labelled heads, classification whether pairs inside a class
score above all other pairs of the same role. Both come with bootstrap intervals in which the **heads** are
resampled: pairs that share a head are not independent, so resampling pairs would give intervals that are too narrow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from headspan.results.choices import given_labels
from headspan.results.labels import Labels, LabelsLike
from headspan.results.scores import Scores
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import ScoresLike, asked_metrics, given_scores, opened
from headspan.statistics.areas import Areas, Estimate, areas_under_curves, chance_areas, estimate_from, resampled
from headspan.subspaces.metrics import CS, DEFAULT_METRICS, PK, metric_of
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.ordering import spearman
from headspan.system.progress import Update
from headspan.vocabulary.errors import HeadspanError, refuse_ignored, warn
from headspan.vocabulary.heads import FLOW_PAIRINGS, SAME_TYPE_PAIRINGS, Pairing, parse_pairings, same_type_mask

Measure = Literal["pr_auc", "average_precision"]
_BATCH = 2**21  # weights handled at once in a bootstrap: 16 MB per temporary array


@checked
def detection(
    scores: Scores,
    labels: Labels,
    metric: str = PK,
    *,
    pairing: str | Pairing | Sequence[str | Pairing] = FLOW_PAIRINGS,
    measure: Measure = "pr_auc",
    bootstrap: int = 0,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Estimate]:
    """How well the ranking of forward pairs finds labelled heads, counting both heads of a pair.

    One estimate per pairing and their ``average``, with the expected value for randomly assigned labels. A head is
    found when its highest-scoring pair is reached, so the curve ranks heads by their best forward pair. Pairs with
    equal scores enter together. The bootstrap resamples labelled and unlabelled heads separately, with replacement.

    measure: ``pr_auc`` is the paper's trapezoidal area without a point (0, 1), so heads found at the very first pair
    add nothing to it; ``average_precision`` has no such gap.
    """
    parsed = parse_pairings(pairing)
    if not parsed:
        raise HeadspanError("detection needs at least one pairing")
    if measure not in _MEASURES:
        raise HeadspanError(f"unknown measure {measure!r}. Choose {' or '.join(_MEASURES)}")
    labels = labels.for_model(scores.ports)
    curves = [_detection_curve(scores, labels, metric, pairing) for pairing in parsed]
    # (chance, observed, then replicates) per pairing: means of replicates are replicates of means.
    table = np.array([_detection_areas(*curve, _MEASURES[measure], bootstrap, seed) for curve in curves])
    named = dict(zip(map(str, parsed), table, strict=True)) | {"average": table.mean(axis=0)}
    return {name: estimate_from(row[1:], level, float(row[0])) for name, row in named.items()}


_MEASURES = {"pr_auc": "pr", "average_precision": "ap"}


def _detection_curve(scores: Scores, labels: Labels, metric: str, pairing: Pairing) -> tuple[np.ndarray, np.ndarray]:
    """The best forward score of every head of a pairing, and which heads have a label."""
    matrix = scores[metric, pairing].forward()
    rows, columns, values = matrix.pairs()
    if not len(values):
        raise HeadspanError(f"{pairing} has no forward pairs. Detection needs heads in at least two layers")
    best: dict[Any, float] = {}  # of heads: pairings of nodes are not evaluated
    for side, heads in ((rows, matrix.sources), (columns, matrix.targets)):
        highest = np.full(len(heads), -np.inf)
        np.maximum.at(highest, side, values)
        for head, score in zip(heads, highest.tolist(), strict=True):
            best[head] = max(score, best.get(head, -np.inf))
    positive = np.array([head in labels for head in best])
    if not positive.any():
        raise HeadspanError(f"none of the {len(best)} heads of {pairing} has a label in {labels.source}")
    return np.array(list(best.values())), positive


def _detection_areas(ranking: np.ndarray, positive: np.ndarray, area: str, bootstrap: int, seed: int) -> np.ndarray:
    """(2 + bootstrap,): the area by chance, the observed area, and those of resampled heads."""
    drawn = resampled(positive, bootstrap, seed)
    found = (
        chance_areas(ranking, int(np.count_nonzero(positive)), anchored=False),
        areas_under_curves(ranking, positive, anchored=False),
        areas_under_curves(ranking, positive, drawn, anchored=False),
    )
    return np.concatenate([getattr(areas, area) for areas in found])


@dataclass(frozen=True)
class Classification:
    """AUCs per pairing and class, and their means; ``average`` is the name of a mean over classes.

    pr_auc, roc_auc: pairing -> class (or ``average``) -> estimate, e.g. ``result.pr_auc["KK"]["induction"]``.
    by_class: ``pr_auc`` or ``roc_auc`` -> class (or ``average``) -> mean over the pairings.
    """

    metric: str
    pr_auc: dict[str, dict[str, Estimate]]
    roc_auc: dict[str, dict[str, Estimate]]
    by_class: dict[str, dict[str, Estimate]]

    @property
    def summary(self) -> dict[str, Estimate]:
        """Means over classes and pairings."""
        return {kind: estimates["average"] for kind, estimates in self.by_class.items()}


@checked
def classification(
    scores: Scores,
    labels: Labels,
    metric: str = PK,
    *,
    pairing: str | Pairing | Sequence[str | Pairing] = SAME_TYPE_PAIRINGS,
    classes: Sequence[str] | None = None,
    bootstrap: int = 0,
    seed: int = 0,
    level: float = 0.95,
) -> Classification:
    """PR-AUC and ROC-AUC for separating pairs inside a class from all other pairs, per class and same-type pairing.

    Each comes with the mean for pairs in random order.

    The bootstrap resamples the heads of the class and the other heads separately, with replacement. The weight of a
    pair is the product of its heads' counts; a head is never paired with itself. Samples with only one distinct head of
    a class are redrawn, so with two or three heads in a class the interval says little about other heads of its kind.
    """
    labels = labels.for_model(scores.ports)
    classes = labels.names if classes is None else tuple(classes)
    parsed = parse_pairings(pairing)
    if not classes or not parsed:
        raise HeadspanError("classification needs at least one class and one pairing")
    # (chance, observed, then replicates) per pairing, class and kind: means of replicates are replicates of means.
    table = np.array([[_class_areas(scores, labels, metric, p, c, bootstrap, seed) for c in classes] for p in parsed])

    def lines(rows: np.ndarray) -> dict[str, Estimate]:
        named = dict(zip(classes, rows, strict=True)) | {"average": rows.mean(axis=0)}
        return {name: estimate_from(row[1:], level, float(row[0])) for name, row in named.items()}

    pr, roc = table[:, :, 0], table[:, :, 1]
    return Classification(
        metric,
        {str(p): lines(pr[i]) for i, p in enumerate(parsed)},
        {str(p): lines(roc[i]) for i, p in enumerate(parsed)},
        {"pr_auc": lines(pr.mean(axis=0)), "roc_auc": lines(roc.mean(axis=0))},
    )


class _ClassPairs(NamedTuple):
    """The same-type pairs of a pairing: scores, which pairs lie inside a class, their heads, and the class members."""

    values: np.ndarray
    positive: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    member: np.ndarray


def _class_pairs(scores: Scores, labels: Labels, metric: str, pairing: Pairing, name: str) -> _ClassPairs:
    if not pairing.same_type:
        raise HeadspanError(f"classification compares heads in one role. Choose QQ, KK, VV or OO, not {pairing}")
    matrix = scores[metric, pairing]
    rows, columns = np.nonzero(same_type_mask(matrix.sources) & ~np.isnan(matrix.values))
    named = set(labels.heads(name))
    member = np.array([head in named for head in matrix.sources])
    positive = member[rows] & member[columns]
    if not positive.any():
        raise HeadspanError(
            f"the class {name!r} has {np.count_nonzero(member)} of the {len(member)} heads of role {pairing.source} "
            "and no pair of them. Classification needs at least two heads in a class"
        )
    if positive.all():
        raise HeadspanError(f"all pairs of {pairing} are inside the class {name!r}, so there is nothing to classify")
    return _ClassPairs(matrix.values[rows, columns], positive, rows, columns, member)


def _class_areas(
    scores: Scores, labels: Labels, metric: str, pairing: Pairing, name: str, bootstrap: int, seed: int
) -> np.ndarray:
    """(2, 2 + bootstrap): PR and ROC areas of one class in one pairing: by chance, observed, and resampled."""
    values, positive, rows, columns, member = _class_pairs(scores, labels, metric, pairing, name)
    found = [chance_areas(values, int(np.count_nonzero(positive))), areas_under_curves(values, positive)]
    if bootstrap:
        # The same draws for every pairing and metric, so that their means and differences make sense.
        weights = resampled(member, bootstrap, seed, distinct=2)
        step = max(1, _BATCH // len(values))
        for batch in (weights[:, start : start + step] for start in range(0, bootstrap, step)):
            found.append(areas_under_curves(values, positive, batch[rows] * batch[columns]))
    return np.concatenate([np.stack([areas.pr, areas.roc]) for areas in found], axis=1)


def near_tie_range(
    scores: Scores, labels: Labels, metric: str, pairing: str | Pairing, name: str, error: float
) -> tuple[Areas, Areas]:
    """Smallest and largest areas of a class if every score may be wrong by a relative error.

    Areas depend on ranks only, so a tiny error matters exactly where pairs are nearly tied: all pairs of the class
    are moved down, or up, by the sum of both errors of a comparison.
    """
    pairs = _class_pairs(scores, labels.for_model(scores.ports), metric, Pairing.parse(pairing), name)
    values = pairs.values.astype(np.float64)
    moved = 2 * error * np.abs(values) * pairs.positive
    return areas_under_curves(values - moved, pairs.positive), areas_under_curves(values + moved, pairs.positive)


def common_pairs(scores: Scores, pairing: str | Pairing, first: str, second: str) -> tuple[np.ndarray, np.ndarray]:
    """Two similarities over the forward pairs that both have."""
    x, y = (scores[metric, pairing].forward().values for metric in (first, second))
    present = ~np.isnan(x) & ~np.isnan(y)
    return x[present], y[present]


def metric_agreement(
    scores: Scores, pairing: str | Pairing, first: str = PK, second: str = CS, quantile: float = 0.97
) -> tuple[float, float]:
    """Spearman correlation of two similarities over all forward pairs, and over those high in either.

    High means at or above the given quantile of that similarity. NaN if a similarity is constant.
    """
    x, y = common_pairs(scores, pairing, first, second)
    if len(x) < 2:
        raise HeadspanError(f"cannot correlate {first} with {second} over {len(x)} pairs of {pairing}")
    high = (x >= np.quantile(x, quantile)) | (y >= np.quantile(y, quantile))
    return spearman(x, y), spearman(x[high], y[high])


@dataclass(frozen=True, repr=False, eq=False)
class Evaluation(Tabular):
    """The evaluation of one result on one set of labels, by metric."""

    detection: dict[str, dict[str, Estimate]]
    average_precision: dict[str, dict[str, Estimate]]  # of detection
    classification: dict[str, Classification]
    spearman: dict[str, dict[str, float]]  # "all" and "top3pct_of_either" -> pairing -> ρ of pk and cs

    def tables(self, pick: Callable[[Estimate], Any] = lambda estimate: estimate.value) -> dict[str, Any]:
        """Nested dictionaries with the section and key names of the published numbers; ``pick`` makes the leaves."""

        def picked(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
            return {name: pick(estimate) for name, estimate in estimates.items()}

        kinds = ("pr_auc", "roc_auc")
        results = self.classification
        by_pairing = {
            kind: {
                str(pairing): {metric: picked(getattr(r, kind)[str(pairing)]) for metric, r in results.items()}
                for pairing in SAME_TYPE_PAIRINGS
            }
            for kind in kinds
        }
        found = {
            "detection_pr_auc": {metric: picked(estimates) for metric, estimates in self.detection.items()},
            "classification_summary": {metric: picked(r.summary) for metric, r in results.items()},
            "classification_by_class": {
                kind: {metric: picked(r.by_class[kind]) for metric, r in results.items()} for kind in kinds
            },
            "classification_by_pairing": by_pairing,
        }
        return found if results else {"detection_pr_auc": found["detection_pr_auc"]}

    def _headline(self) -> str:
        return f"detection and classification of labelled heads by {', '.join(self.detection)}"

    def rows(self) -> list[dict[str, Any]]:
        """One row per estimate: task, metric, measure, pairing, class, value, low, high, chance."""
        names = ("task", "metric", "measure", "pairing", "class", *Estimate._fields)
        rows = [
            ("detection", metric, measure, pairing, None, *estimate)
            for measure, by_metric in (("pr_auc", self.detection), ("average_precision", self.average_precision))
            for metric, estimates in by_metric.items()
            for pairing, estimate in estimates.items()
        ]
        for metric, result in self.classification.items():
            for measure in ("pr_auc", "roc_auc"):
                tables = {**getattr(result, measure), "average": result.by_class[measure]}
                rows += [
                    ("classification", metric, measure, pairing, name, *estimate)
                    for pairing, estimates in tables.items()
                    for name, estimate in estimates.items()
                ]
        for kind, rhos in self.spearman.items():
            rows += [("agreement", "pk,cs", "spearman", p, kind, *Estimate(rho)) for p, rho in rhos.items()]
        return [dict(zip(names, row, strict=True)) for row in rows]


@renamed(metrics="metric")
@checked
def evaluate(
    scores: ScoresLike,
    labels: LabelsLike,
    metric: str | Sequence[str] | None = None,
    *,
    bootstrap: int = 0,
    seed: int | None = None,
    progress: Update | None = None,
) -> Evaluation:
    """Detection, classification and PK against CS for all similarities of a result (pk and cs of a model).

    Classes with fewer than two heads have no pairs to classify; they are left out, with a warning.
    """
    if not bootstrap:
        refuse_ignored("without a bootstrap", seed=seed)
    seed = seed or 0
    scores = opened(scores)
    wanted = asked_metrics(metric, scores)
    if isinstance(labels, (str, os.PathLike)) and labels != "behaviour":
        labels = Labels.load(labels)  # report a wrong name before scoring
    scores = given_scores(
        scores, wanted or DEFAULT_METRICS, FLOW_PAIRINGS + SAME_TYPE_PAIRINGS, progress, whole="an evaluation"
    )
    names = wanted or scores.metrics
    if not names:
        raise HeadspanError("this result has no scores to evaluate. Make one with `hs.score(model)`")
    checked = given_labels(labels, scores)
    if checked is None:
        raise HeadspanError("evaluation needs labels. Give a name such as gpt2-ioi, or a CSV file")
    labels = checked
    usable = [name for name in checked.names if sum(not head.kv for head in checked.heads(name)) >= 2]
    left_out = [name for name in checked.names if name not in usable]
    flow_only = [name for name in names if metric_of(name).flow_only]
    if flow_only:
        warn(f"{', '.join(flow_only)} compares what heads write and read, so it has no classification, only detection")
    if left_out:
        warn(f"left out of classification, with fewer than two heads: {', '.join(left_out)}")
    found = Evaluation({}, {}, {}, {})
    for name in names:
        found.detection[name] = detection(scores, labels, name, bootstrap=bootstrap, seed=seed)
        found.average_precision[name] = detection(
            scores, labels, name, measure="average_precision", bootstrap=bootstrap, seed=seed
        )
        if usable and name not in flow_only:
            found.classification[name] = classification(
                scores, labels, name, classes=usable, bootstrap=bootstrap, seed=seed
            )
    if {PK, CS} <= set(names):
        pairs = {str(p): metric_agreement(scores, p) for p in FLOW_PAIRINGS}
        for i, kind in enumerate(("all", "top3pct_of_either")):
            found.spearman[kind] = {pairing: rhos[i] for pairing, rhos in pairs.items()}
    return found
