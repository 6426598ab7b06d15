"""The tokenizer of a model in memory: given beside the model, or attached to it."""

from __future__ import annotations

import json
from typing import Any

from headspan.checkpoints.tokenizer import Vocabulary
from headspan.checkpoints.untrusted import reason
from headspan.vocabulary.errors import HeadspanError


def with_tokenizer(ref: Any) -> tuple[Any, Any | None]:
    """A model in memory and its tokenizer: of a pair (model, tokenizer), of a TransformerLens model, or None."""
    if isinstance(ref, tuple) and len(ref) == 2 and hasattr(ref[0], "state_dict"):
        return ref
    attached = getattr(ref, "tokenizer", None) if hasattr(ref, "blocks") else None
    return ref, attached if attached is not None and _has_tokens(attached) else None


def _has_tokens(tokenizer: Any) -> bool:
    """Whether a tokenizer has ordinary tokens: TransformerLens attaches one without any where it finds no files."""
    try:
        return len(tokenizer) > len(tokenizer.all_special_ids) + 1
    except (TypeError, AttributeError):
        return False


def live_vocabulary(tokenizer: Any) -> Vocabulary | None:
    """The vocabulary of a fast tokenizer of transformers, of a processor that has one, or of `tokenizers.Tokenizer`.

    It is a copy: the tokenizer's padding and truncation are not used and stay as they are.
    """
    if tokenizer is None:
        return None
    inside = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    inside = getattr(inside, "backend_tokenizer", inside)
    name = type(tokenizer).__name__
    try:
        text = inside.to_str()
        content = json.loads(text)
    except Exception as error:  # any object can be given
        raise HeadspanError(
            f"a {name} is not a tokenizer that can be read ({reason(error)}). Give (model, tokenizer) with a fast "
            "tokenizer of transformers"
        ) from None

    def load() -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(text)

    return Vocabulary.from_json(content, f"the tokenizer {name}", load)
