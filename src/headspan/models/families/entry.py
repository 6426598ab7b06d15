"""The fields of an entry in the table of model families: tensor names, storage, positions of norms.

The table itself is :mod:`headspan.models.families.table`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Config = Mapping[str, Any]

NormKind = Literal["layer", "rms"]
NormPlace = Literal["pre", "post", "output", "sandwich", "residual", "partial", "none"]
Layout = Literal["separate", "concatenated", "grouped", "quarters", "heads"]
"""How Q, K and V are stored, as rows of (out, d_model) tensors.

``separate``: one tensor each. ``concatenated``: all Q heads, then all K heads, then all V heads.
``grouped``: for each KV head its Q heads, then K, then V; with as many KV heads as Q heads this is the
per-head interleaving of GPT-NeoX and BLOOM, with a single one the multi-query layout of Falcon-7B.
``quarters``: CodeGen: four parts, each a quarter of the Q heads, then of the V heads, then of the K heads.
``heads``: TransformerLens tensors, already (head, d_model, d_head).
"""


@dataclass(frozen=True)
class Architecture:
    """Names and conventions of one family; the defaults are those of Llama."""

    body: str = "model."
    layer: str = "layers.{}."
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    fused: str | None = None  # the one module that holds Q, K and V, in `layout`
    layout: Layout = "separate"
    transposed: bool = False  # Conv1D: weights stored (in, out)
    norm: tuple[str, ...] = ("input_layernorm",)  # before attention; the first that exists
    norm_kind: NormKind = "rms"
    norm_place: NormPlace = "pre"
    output_norm: tuple[str, ...] = ()  # between attention and the stream, of the same kind; the first that exists
    one_plus: bool = False  # the stored gain is γ − 1
    plain_final_norm: bool = False  # except for the final norm, which stores γ
    weightless_norm: bool = False  # the norm has no gain and no bias
    final_norm: str | None = "norm"
    embedding: str = "embed_tokens"
    unembedding: tuple[str, ...] = ("lm_head",)  # the first that exists
    qk_norm: str = "self_attn.q_norm"
    sinks: bool = False  # attention rows do not sum to 1, so a value bias is not a constant output
    gated: bool = False  # each head's query rows are followed by as many rows that gate its output
    own_gate: bool = False  # a separate module gates each head before the output weight
    hybrid: bool = False  # some layers may have no softmax attention
    latent: bool = False  # keys and values come from a compressed vector: latent_attention
    latent_scaled: bool = False  # and are multiplied by √(d_model / its size)
    rotary_norm: str | None = None  # the norm of the rotary key, besides that of the latent
    sublayers: int = 1  # attentions in one numbered layer, each counted as a layer; names hold {sub}
    sizes: Callable[[Config], Config] | None = None  # converts unusual config keys to the usual ones
    value_size: bool = False  # values have their own size, v_head_dim
    keys_as_values: bool = False  # if a layer has no value weight, its keys are its values
    lends_kv: bool = False  # the last layers may use keys and values of earlier layers: borrowed_kv
    value_norm: bool = False  # values are normalised, so a value bias is not a constant output
    streams: bool = False  # several residual streams, read and written with weights for each token
    remark: str | None = None  # a further note on the family
    in_files: Mapping[str, Any] = field(default_factory=dict)  # differences in published files with other names
    adapt: Callable[[Architecture, Config], Architecture] | None = None  # variants chosen by the config
    eps: float | None = None  # of its norms, if they do not use the config's
    defaults: Config = field(default_factory=dict)  # values of the family's config class for missing keys


WHY_NOT_FOLDABLE: dict[NormPlace, str] = {
    "post": "its blocks normalise after the attention output is added (post-norm), so a gain acts on the stream "
    "itself and cannot be moved into the weights exactly",
    "residual": "its residual stream continues from the normalised stream, so the gain cannot be moved into the "
    "weights exactly",
    "none": "it has no norm before attention, so there is nothing to fold",
}

WHY_NO_DIRECT_EDGE: dict[NormPlace, str] = {
    "post": "its blocks normalise the stream itself after attention has written to it (post-norm), so what a head "
    "writes reaches no later head directly",
    "residual": "its stream continues from the normalised stream, so what a head writes reaches no later head directly",
}
"""Families in which an edge from head to head is not a sum in the stream, by the position of their norm."""
