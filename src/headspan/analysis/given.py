"""What a caller may give to an analysis: the thing itself, or the word that a command would take for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from headspan.errors import HeadspanError
from headspan.heads import PAIRING_WORDS, Pairing, forward_mask, parse_pairings
from headspan.scores import Scores

if TYPE_CHECKING:
    from headspan.analysis.behaviour import BehaviourScores
    from headspan.analysis.labels import Labels
    from headspan.models.weights import AttentionWeights
    from headspan.system.progress import Update

ScoresLike = Any  # Scores, the path of a result, or anything that `headspan.open` takes
WeightsLike = Any  # AttentionWeights, or anything that `headspan.open` takes

BEHAVES = 0.3  # a head score from which the labels "behaviour" give a head its label


def given_scores(
    scores: ScoresLike,
    metrics: str | Iterable[str] = ("pk", "cs"),
    pairings: str | Iterable[str | Pairing] = "all",
    progress: Update | None = None,
    *,
    whole: str | None = None,
) -> Scores:
    """Scores as they are, those of a result file, or those of a model that is scored on the spot.

    whole: what needs every pair, so that a screened result is refused.

    >>> given_scores("demo", "pk", "OK").metrics
    ('pk',)
    """
    found = _scores(scores, metrics, pairings, progress)
    if whole is not None:
        found.check_all_pairs(whole)
    return found


def _scores(
    scores: ScoresLike, metrics: str | Iterable[str], pairings: str | Iterable[str | Pairing], progress: Update | None
) -> Scores:
    if isinstance(scores, Scores):
        return scores
    from headspan.models.weights import open
    from headspan.scores import is_result
    from headspan.scoring.run import score

    if isinstance(scores, (str, os.PathLike)) and is_result(scores):
        return Scores.load(scores)
    weights = open(scores)
    chosen = pairings if isinstance(pairings, str) else list(pairings)
    return score(weights, metrics if isinstance(metrics, str) else list(metrics), chosen, progress=progress)


def given_pairings(
    pairings: str | Pairing | Iterable[str | Pairing], scores: Scores, metric: str
) -> tuple[Pairing, ...]:
    """Pairings as they are asked for; of a word for several (flow, all, nodes) those that these scores have.

    Where a result has nodes, flow means what they write and read too, and all everything that was scored.

    >>> [str(p) for p in given_pairings("flow", given_scores("demo", "pk", ["OK", "KK"]), "pk")]
    ['OK']
    """
    asked = [pairings] if isinstance(pairings, (str, Pairing)) else list(pairings)
    chosen = parse_pairings(asked)
    words = {str(word).strip().lower() for word in asked}
    if not words <= set(PAIRING_WORDS):
        return chosen
    nodes = [p for p in scores.pairings if p.of_nodes and (p.flow or "all" in words)]
    found = dict.fromkeys([*(p for p in chosen if not p.of_nodes), *(p for p in nodes if _flows(scores, p))])
    return tuple(pairing for pairing in found if (metric, pairing) in scores) or chosen


def _flows(scores: Scores, pairing: Pairing) -> bool:
    """Whether a pairing of nodes has pairs along the stream: a result of all pairs may have only others."""
    return bool(forward_mask(scores.heads(pairing.source), scores.heads(pairing.target)).any())


def given_weights(weights: WeightsLike, fold: bool = False, download: bool = False) -> AttentionWeights:
    """Weights as they are, or those of a model reference; ``download`` brings whole files from the hub."""
    from headspan.models.folding import fold as folded
    from headspan.models.weights import open

    opened = open(weights, download=download)
    return folded(opened) if fold else opened


def given_labels(
    labels: Labels | str | os.PathLike[str] | None,
    scores: Scores,
    say: Callable[[str], None] = lambda sentence: None,
) -> Labels | None:
    """Labels as they are, or by name or file; ``"behaviour"`` are those of the head scores kept with the scores.

    They are checked against the heads of the model; a shared key/value head takes over those of its group. ``say``
    hears of it where nobody can tell whether they are for these weights.
    """
    from headspan.analysis.labels import Labels

    if labels is None:
        return None
    if isinstance(labels, Labels):
        found = labels
    elif labels == "behaviour":
        found = _behaviour(scores).labels(threshold=BEHAVES)
    else:
        found = Labels.load(labels)
    checked = found.for_model(scores.ports)
    if doubt := found.doubt(scores.provenance):
        say(doubt)
    return checked


def _behaviour(scores: Scores) -> BehaviourScores:
    from headspan.analysis.behaviour import BehaviourScores

    kept = scores.annotations.get("behaviour")
    if not kept:
        raise HeadspanError(
            "the labels behaviour need head scores, which are not kept with this result: put them there with "
            "headspan behaviour MODEL --into RESULT"
        )
    return BehaviourScores.from_dict(kept)
