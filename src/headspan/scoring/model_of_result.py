"""Open the model that a result was made from, with the same folding; refuse any other model."""

from __future__ import annotations

from headspan.models.folding import fold
from headspan.models.opening import ModelLike, open
from headspan.models.weights import AttentionWeights
from headspan.results.identity import same_model
from headspan.results.scores import Scores
from headspan.vocabulary.errors import HeadspanError, warn
from headspan.vocabulary.ports import shape_text


def weights_of(scores: Scores, reference: ModelLike) -> AttentionWeights:
    """The weights that a result was made from, folded if the result is; others are refused.

    Warns where it is unknown whether they are the same.
    """
    weights = open(reference)
    if scores.provenance.get("folding", "none") != "none" and weights.folding == "none":
        weights = fold(weights)
    if doubt := check_same_model(scores, weights):
        warn(doubt)
    return weights


def check_same_model(scores: Scores, weights: AttentionWeights) -> str | None:
    """Refuse weights that are not those of the result, so that figures and pages never mix two models.

    Returns a message if this cannot be checked, as with results of version 0.1.
    """
    if not weights.ports.same_heads(scores.ports) or weights.d_model != scores.d_model:
        raise HeadspanError(
            f"{weights.reference} is not the model of this result: it has "
            f"{shape_text(weights.ports, weights.d_model)}, and the result was made from "
            f"{scores.provenance.get('reference', 'arrays')} with {shape_text(scores.ports, scores.d_model)}"
        )
    made = scores.provenance.get("folding", "none")
    if made != weights.folding:
        raise HeadspanError(
            f"{weights.reference} is not the model of this result: the folding differs (result: {made}, "
            f"weights: {weights.folding}). Give the weights that it was made from, or score these"
        )
    return same_model(scores.provenance, weights.provenance, "the result", "these weights")
