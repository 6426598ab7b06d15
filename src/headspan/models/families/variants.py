"""Variants of table entries: what the config of one checkpoint changes in the entry of its family.

>>> opt_variant(Architecture(), {"do_layer_norm_before": False}).norm_place
'post'
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headspan.models.families.entry import Architecture, Config
from headspan.vocabulary.errors import HeadspanError


def opt_variant(entry: Architecture, config: Config) -> Architecture:
    if config.get("do_layer_norm_before", True):
        return replace(entry, final_norm=None) if config.get("_remove_final_layer_norm") else entry
    return replace(entry, norm=(), norm_place="post", final_norm=None)


def clova_variant(entry: Architecture, config: Config) -> Architecture:
    if config.get("use_post_norm"):
        return replace(entry, norm_place="sandwich", output_norm=("post_norm1",))
    return entry


def lfm3_variant(entry: Architecture, config: Config) -> Architecture:
    if not config.get("use_sandwich_norm", True):
        entry = replace(entry, norm_place="pre", output_norm=())
    return replace(entry, own_gate=bool(config.get("use_attention_gate", True)))


def bloom_variant(entry: Architecture, config: Config) -> Architecture:
    if config.get("apply_residual_connection_post_layernorm"):
        return replace(entry, norm_place="residual")
    return entry


def chameleon_variant(entry: Architecture, config: Config) -> Architecture:
    if config.get("swin_norm"):  # the norms come after attention and the MLP, under the same names
        return replace(entry, norm=(), norm_place="output", output_norm=("input_layernorm",))
    return entry


_LENS_NORMS: dict[Any, dict[str, Any]] = {
    "LN": {"norm_kind": "layer"},
    "LNPre": {"norm_kind": "layer", "weightless_norm": True},
    "RMS": {"norm_kind": "rms"},
    "RMSPre": {"norm_kind": "rms", "weightless_norm": True},
    None: {"norm": (), "norm_place": "none", "final_norm": None},
}


def lens_variant(entry: Architecture, config: Config) -> Architecture:
    kind = config.get("normalization_type")
    if not isinstance(kind, (str, type(None))) or kind not in _LENS_NORMS:
        raise HeadspanError(
            f"normalization_type is {repr(kind)[:80]} in the TransformerLens config: known are LN, LNPre, RMS, RMSPre "
            "and null"
        )
    return replace(entry, **_LENS_NORMS[kind])
