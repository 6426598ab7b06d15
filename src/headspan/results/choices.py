"""The pairings and labels that a caller chooses from those of a result."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headspan.results.head_scores import BehaviourScores
from headspan.results.labels import Labels, LabelsLike
from headspan.subspaces.metrics import parse_metrics
from headspan.vocabulary.errors import HeadspanError, warn
from headspan.vocabulary.heads import PAIRING_WORDS, Pairing, forward_mask, parse_pairings

if TYPE_CHECKING:
    from headspan.results.scores import Scores
    from headspan.vocabulary.ports import PortTable

BEHAVES = 0.3  # a head score from which the labels "behaviour" give a head its label


def given_pairings(
    pairings: str | Pairing | Iterable[str | Pairing], scores: Scores, metric: str
) -> tuple[Pairing, ...]:
    """The requested pairings; for a name of several (flow, all, nodes), those that these scores have.

    For a result with nodes, flow includes their pairings, and all is everything that was scored.

    >>> import headspan as hs
    >>> [str(p) for p in given_pairings("flow", hs.score("demo", "pk", ["OK", "KK"]), "pk")]
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


def given_metrics(metric: str | Iterable[str], scores: Scores) -> tuple[str, ...]:
    """The requested similarities; names that these scores have need not be known otherwise."""
    asked = [metric] if isinstance(metric, str) else list(metric)
    return tuple(dict.fromkeys(asked)) if asked and set(asked) <= set(scores.metrics) else parse_metrics(asked)


def _flows(scores: Scores, pairing: Pairing) -> bool:
    """Whether a pairing of nodes has forward pairs; a result of all pairs may have only others."""
    return bool(forward_mask(scores.heads(pairing.source), scores.heads(pairing.target)).any())


def given_labels(labels: LabelsLike | None, scores: Scores) -> Labels | None:
    """Labels as they are, as a dict, or by name or file; ``"behaviour"`` takes those of the head scores in the result.

    They are checked against the heads of the model; a shared key/value head takes over those of its group. Warns where
    it is unknown whether they are for these weights.
    """
    return labels_for(labels, scores.ports, scores.provenance, scores)


def labels_for(
    labels: LabelsLike | None,
    ports: PortTable,
    provenance: Mapping[str, Any],
    scores: Scores | None = None,
) -> Labels | None:
    """The same for a model, with its result if there is one."""
    if labels is None:
        return None
    if isinstance(labels, Labels):
        found = labels
    elif isinstance(labels, Mapping):
        found = Labels.from_dict(labels)
    elif isinstance(labels, str) and labels == "behaviour":
        found = _behaviour(scores).labels(threshold=BEHAVES)
    else:
        found = Labels.load(labels)
    checked = found.for_model(ports)
    if doubt := found.doubt(provenance):
        warn(doubt)
    return checked


def given_behaviour(
    behaviour: BehaviourScores | Mapping[str, Mapping[str, float | None]] | str | os.PathLike[str] | None,
    scores: Scores,
) -> BehaviourScores | None:
    """Head scores as they are, as plain numbers, or from their file; warns where their model is unknown."""
    if behaviour is None:
        return None
    if isinstance(behaviour, (str, os.PathLike)):
        behaviour = BehaviourScores.load(behaviour)
    found = behaviour if isinstance(behaviour, BehaviourScores) else BehaviourScores.from_dict(behaviour)
    if found.model and (doubt := found.doubt(scores)):
        warn(doubt)
    return found


def _behaviour(scores: Scores | None) -> BehaviourScores:
    if scores is None:
        raise HeadspanError(
            "the labels behaviour are those of a result with head scores, and a model is given. Give labels by name "
            "or file"
        )
    kept = scores.annotations.get("behaviour")
    if not kept:
        raise HeadspanError(
            "the labels behaviour need head scores, and this result has none: add them with "
            "`hs.behaviour(model, into=scores)`"
        )
    return BehaviourScores.from_dict(kept)
