"""The model that a result came from: opened as it was scored, and refused if it is another one."""

from __future__ import annotations

from headspan.analysis.comparison import shape_text
from headspan.errors import HeadspanError
from headspan.models.folding import fold
from headspan.models.weights import AttentionWeights, open
from headspan.scores import Scores


def weights_of(scores: Scores, reference: str) -> AttentionWeights:
    """The weights a result was made from, folded if the result is; any others are refused."""
    weights = open(reference)
    if scores.provenance.get("folding", "none") != "none" and weights.folding == "none":
        weights = fold(weights)
    check_same_model(scores, weights)
    return weights


def check_same_model(scores: Scores, weights: AttentionWeights) -> None:
    """Refuse weights that are not those of the result: pictures and pages would mix two models."""
    if weights.ports != scores.ports or weights.d_model != scores.d_model:
        raise HeadspanError(
            f"{weights.reference} is not the model of this result: it has {shape_text(weights)}, and the result was "
            f"made from {scores.provenance.get('reference', 'arrays')} with {shape_text(scores)}"
        )
    for key, what in (("fingerprint", "other weights"), ("folding", "another folding")):
        made, given = scores.provenance.get(key), weights.provenance.get(key)
        if made and given and made != given:
            raise HeadspanError(
                f"{weights.reference} is not the model of this result: it was made from {what} ({key} {made}, these "
                f"have {given}); give the weights it was made from, or score these"
            )
