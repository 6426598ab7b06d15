"""State dicts of TransformerLens' HookedTransformer (``blocks.0.attn.W_Q`` …), with or without a config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headspan.checkpoints.base import TensorSource
from headspan.vocabulary.errors import HeadspanError

_QUERY = re.compile(r"blocks\.(\d{1,6})\.attn\.W_Q")


def is_hooked_state(names: Iterable[str]) -> bool:
    """True if the tensor names are those of a HookedTransformer.

    >>> is_hooked_state(["embed.W_E", "blocks.0.attn.W_Q"])
    True
    """
    return any(_QUERY.fullmatch(name) for name in names)


def state_config(source: TensorSource, given: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a HookedTransformer state dict, from its config file and its shapes.

    Always has model_type "transformer_lens", n_layers, n_heads, n_key_value_heads, d_model, d_head and
    normalization_type: "LN" or "RMS" with gains, "LNPre" or "RMSPre" if they are already folded in, or None
    for a model without norms. W_Q is (n_heads, d_model, d_head), W_O (n_heads, d_head, d_model).
    """
    names = set(source.names())
    layers = sorted(int(match[1]) for name in names if (match := _QUERY.fullmatch(name)))
    if not layers:
        raise HeadspanError(f"{source.reference} has no blocks.0.attn.W_Q: it is not a HookedTransformer state dict")
    query = source.shape(f"blocks.{layers[0]}.attn.W_Q")
    if len(query) != 3:
        raise HeadspanError(
            f"blocks.{layers[0]}.attn.W_Q of {source.reference} should be heads × d_model × d_head, got {list(query)}"
        )
    key = f"blocks.{layers[0]}.attn._W_K"  # TransformerLens' name for shared key heads
    return {
        **given,
        "model_type": "transformer_lens",
        "n_layers": layers[-1] + 1,
        "n_heads": query[0],
        "n_key_value_heads": source.shape(key)[0] if key in names and source.shape(key) else query[0],
        "d_model": query[1],
        "d_head": query[2],
        "normalization_type": _normalization(names, layers[0], given),
    }


def _normalization(names: set[str], layer: int, given: Mapping[str, Any]) -> str | None:
    if f"blocks.{layer}.ln1.w" in names:
        return "LN" if f"blocks.{layer}.ln1.b" in names else "RMS"
    if "normalization_type" in given:
        return given["normalization_type"]
    return "LNPre"  # no gains and no config: this is how TransformerLens saves folded LayerNorm models
