"""Resolve the arguments of an analysis: an object, or the string that a command would accept for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from headspan.results.choices import given_metrics
from headspan.results.scores import Scores, is_result
from headspan.subspaces.metrics import DEFAULT_METRICS, parse_metrics
from headspan.vocabulary.heads import Pairing, parse_pairings

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike
    from headspan.models.weights import AttentionWeights
    from headspan.results.tasks.circuit import Circuit
    from headspan.system.progress import Update

ScoresLike: TypeAlias = "Scores | ModelLike"  # a text or path may also be that of a result


def given_scores(
    scores: ScoresLike,
    metrics: str | Iterable[str] = DEFAULT_METRICS,
    pairings: str | Iterable[str | Pairing] = "all",
    progress: Update | None = None,
    *,
    whole: str | None = None,
) -> Scores:
    """Scores as given, loaded from a result file, or computed now for a model.

    whole: what needs every pair; with it a screened result is refused.

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
    if isinstance(scores, (str, os.PathLike)) and is_result(scores):
        return Scores.load(scores)
    from headspan.models.opening import open
    from headspan.scoring.run import score  # a saved result needs nothing of the engine

    weights = open(scores)
    chosen = pairings if isinstance(pairings, str) else list(pairings)
    return score(weights, metrics if isinstance(metrics, str) else list(metrics), chosen, progress=progress)


def opened(reference: ScoresLike) -> Scores | AttentionWeights:
    """A result, or the weights of a model that has not been scored yet."""
    if isinstance(reference, Scores):
        return reference
    return Scores.load(reference) if is_result(reference) else given_weights(reference)


def asked_metrics(metric: str | Iterable[str] | None, *opened: Scores | AttentionWeights) -> tuple[str, ...] | None:
    """The similarities that a caller asks for, or None for all; names in a result need not be known otherwise."""
    if metric is None:
        return None
    asked = [metric] if isinstance(metric, str) else list(metric)
    result = next((one for one in opened if isinstance(one, Scores)), None)
    return parse_metrics(asked) if result is None else given_metrics(asked, result)


def scores_of_circuit(
    scores: ScoresLike,
    metrics: Iterable[str],
    circuit: Circuit | str | os.PathLike[str],
    progress: Update | None = None,
    *,
    whole: str | None = None,
) -> tuple[Scores, Circuit]:
    """Scores of the pairings of a circuit, and the circuit: given, or in a file of headspan, EAP-IG or MIB."""
    from headspan.results.tasks.circuit import given_circuit
    from headspan.results.tasks.graph_files import graph_circuit, is_graph

    if isinstance(circuit, (str, os.PathLike)) and is_graph(circuit):
        found = given_scores(scores, metrics, "flow", progress, whole=whole)
        return found, graph_circuit(circuit, found.ports)
    read = given_circuit(circuit)
    pairings = parse_pairings(read.between_heads()[0].pairings or "flow")
    return given_scores(scores, metrics, pairings, progress, whole=whole), read


def given_weights(weights: ModelLike, fold: bool = False, download: bool = False) -> AttentionWeights:
    """Weights as given, or those of a model reference; ``download`` fetches whole files from the hub."""
    from headspan.models.opening import open

    opened = open(weights, download=download)
    if not fold:
        return opened
    from headspan.models.folding import fold as folded

    return folded(opened)
