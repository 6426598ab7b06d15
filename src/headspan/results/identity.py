"""Whether a result, head scores and weights are of one model: compared by the hashes in their provenance.

>>> same_model({"fingerprint": "2:ab"}, {"fingerprint": "2:ab"}, "the result", "these weights")
>>> same_model({"fingerprint": "ab"}, {"fingerprint": "2:ab"}, "the result", "these weights")
'the result was made by headspan 0.1, whose fingerprint cannot show whether these weights belong to the same model'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headspan.results.metadata import IDENTITY
from headspan.vocabulary.errors import HeadspanError

IDENTITY_PREFIX = "2:"  # fingerprints of version 0.1 lack it: they were computed from samples of the bytes


def same_model(made: Mapping[str, Any], given: Mapping[str, Any], what: str, other: str) -> str | None:
    """None if two provenances are of one model, a note if that is unknown; raises if they are of different models.

    ``what`` and ``other`` name ``made`` and ``given`` in the message. Scores of unfolded weights depend on
    the attention weights alone, so different biases, norms or configs with equal weights are reported but accepted.
    """
    first, second = made.get("fingerprint"), given.get("fingerprint")
    for text, who, partner in ((first, what, other), (second, other, what)):
        if not isinstance(text, str):
            return f"{who} has no fingerprint, so headspan cannot check whether {partner} belong to the same model"
        if not text.startswith(IDENTITY_PREFIX):
            return (
                f"{who} was made by headspan 0.1, whose fingerprint cannot show whether {partner} belong to the "
                "same model"
            )
    if first == second:
        return None
    if _unfolded_weights(made) is not None and _unfolded_weights(made) == _unfolded_weights(given):
        return f"{what} and {other} have the same attention weights, but their configs, biases or norms differ"
    raise HeadspanError(
        f"{what} and {other} are of different models (fingerprints {str(first)[:14]}… and {str(second)[:14]}…): "
        "give the model that the result was made from, or score this one again"
    )


def identity(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a provenance that identifies the model, stored with what was measured on it.

    >>> identity({"fingerprint": "2:ab", "notes": ["long"]})
    {'fingerprint': '2:ab'}
    """
    return {key: provenance[key] for key in IDENTITY if key in provenance}


def _unfolded_weights(provenance: Mapping[str, Any]) -> tuple[Any, Any] | None:
    if provenance.get("folding", "none") != "none" or not provenance.get("attention_hash"):
        return None
    return provenance["attention_hash"], provenance.get("architecture")


def short_name(reference: str) -> str:
    """A path's last part; a hub id as it is.

    >>> short_name("/models/gpt2/"), short_name("openai-community/gpt2")
    ('gpt2', 'openai-community/gpt2')
    """
    parts = [part for part in reference.replace("\\", "/").split("/") if part]
    is_path = reference.startswith((".", "/", "~")) or len(parts) > 2 or "\\" in reference
    return parts[-1] if is_path and parts else reference
