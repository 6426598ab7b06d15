"""One declarative table: where each model family keeps Q, K, V, O, its norms and its (un)embedding.

Adding a family means adding one entry to :data:`ARCHITECTURES`; what the fields of an entry mean stands beside them in
:mod:`headspan.models.architecture`. Tensor names are those of the Hugging Face classes, without the prefix of the body
(``transformer.``, ``model.``), which a checkpoint may or may not have.
A module ``name`` stands for the tensors ``name.weight`` and ``name.bias``; ``"a|b"`` names the two outright.

>>> ARCHITECTURES["gpt2"].fused
'attn.c_attn'
>>> find_architecture({"model_type": "xlm-roberta"})[0]
'roberta'
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from headspan.errors import HeadspanError
from headspan.models.architecture import Architecture, Config
from headspan.models.family_sizes import (
    dbrx_sizes,
    dots3_sizes,
    falcon_sizes,
    gemma3n_sizes,
    gemma4_sizes,
    laguna_sizes,
    mimo_sizes,
    multi_query_sizes,
)


def _opt_variant(entry: Architecture, config: Config) -> Architecture:
    if config.get("do_layer_norm_before", True):
        return replace(entry, final_norm=None) if config.get("_remove_final_layer_norm") else entry
    return replace(entry, norm=(), norm_place="post", final_norm=None)


def _clova_variant(entry: Architecture, config: Config) -> Architecture:
    if config.get("use_post_norm"):
        return replace(entry, norm_place="sandwich", output_norm=("post_norm1",))
    return entry


def _lfm3_variant(entry: Architecture, config: Config) -> Architecture:
    if not config.get("use_sandwich_norm", True):
        entry = replace(entry, norm_place="pre", output_norm=())
    return replace(entry, own_gate=bool(config.get("use_attention_gate", True)))


def _bloom_variant(entry: Architecture, config: Config) -> Architecture:
    if config.get("apply_residual_connection_post_layernorm"):
        return replace(entry, norm_place="residual")
    return entry


_LENS_NORMS: dict[Any, dict[str, Any]] = {
    "LN": {"norm_kind": "layer"},
    "LNPre": {"norm_kind": "layer", "weightless_norm": True},
    "RMS": {"norm_kind": "rms"},
    "RMSPre": {"norm_kind": "rms", "weightless_norm": True},
    None: {"norm": (), "norm_place": "none", "final_norm": None},
}


def _lens_variant(entry: Architecture, config: Config) -> Architecture:
    kind = config.get("normalization_type")
    if not isinstance(kind, (str, type(None))) or kind not in _LENS_NORMS:
        raise HeadspanError(
            f"normalization_type is {repr(kind)[:80]} in the TransformerLens config: known are LN, LNPre, RMS, RMSPre "
            "and null"
        )
    return replace(entry, **_LENS_NORMS[kind])


_LLAMA = Architecture()
_QWEN3 = Architecture(defaults={"head_dim": 128})
_GPT2 = Architecture(
    body="transformer.", layer="h.{}.", fused="attn.c_attn", layout="concatenated", transposed=True,
    o="attn.c_proj", norm=("ln_1",), norm_kind="layer", final_norm="ln_f", embedding="wte",
)  # fmt: skip
_GPTJ = Architecture(
    body="transformer.", layer="h.{}.", q="attn.q_proj", k="attn.k_proj", v="attn.v_proj", o="attn.out_proj",
    norm=("ln_1",), norm_kind="layer", final_norm="ln_f", embedding="wte",
)  # fmt: skip
_NEOX = Architecture(
    body="gpt_neox.", fused="attention.query_key_value", layout="grouped", o="attention.dense",
    norm_kind="layer", final_norm="final_layer_norm", embedding="embed_in", unembedding=("embed_out", "lm_head"),
)  # fmt: skip
_BLOOM = Architecture(
    body="transformer.", layer="h.{}.", fused="self_attention.query_key_value", layout="grouped",
    o="self_attention.dense", norm_kind="layer", final_norm="ln_f", embedding="word_embeddings",
    adapt=_bloom_variant,
)  # fmt: skip
_GEMMA = Architecture(one_plus=True, defaults={"head_dim": 256})
_GEMMA2 = replace(_GEMMA, norm_place="sandwich", output_norm=("post_attention_layernorm",), defaults={
    "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
})  # fmt: skip
_OLMO2 = Architecture(norm=(), norm_place="output", output_norm=("post_attention_layernorm",))
_GLM = Architecture(defaults={"head_dim": 128})
_LATENT = Architecture(latent=True)
_COHERE = Architecture(norm_kind="layer")
_XGLM = Architecture(
    o="self_attn.out_proj", norm=("self_attn_layer_norm",), norm_kind="layer", final_norm="layer_norm",
)  # fmt: skip
_BERT = Architecture(
    body="bert.", layer="encoder.layer.{}.", q="attention.self.query", k="attention.self.key",
    v="attention.self.value", o="attention.output.dense", norm=(), norm_kind="layer", norm_place="post",
    final_norm=None, embedding="embeddings.word_embeddings", unembedding=("cls.predictions.decoder",),
)  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    # GPT-2 and its relatives
    "gpt2": _GPT2,
    "gpt_neo": replace(
        _GPTJ, q="attn.attention.q_proj", k="attn.attention.k_proj", v="attn.attention.v_proj",
        o="attn.attention.out_proj",
    ),
    "gptj": _GPTJ,
    "codegen": replace(_GPTJ, fused="attn.qkv_proj", layout="quarters"),
    "gpt_neox": _NEOX,
    "gpt_neox_japanese": replace(_NEOX, body="gpt_neox_japanese."),
    "openai-gpt": replace(_GPT2, norm=(), norm_place="post", final_norm=None, embedding="tokens_embed"),
    "gpt_bigcode": replace(_GPT2, layout="grouped", transposed=False, sizes=multi_query_sizes),
    "opt": Architecture(
        body="model.decoder.", o="self_attn.out_proj", norm=("self_attn_layer_norm",), norm_kind="layer",
        final_norm="final_layer_norm", adapt=_opt_variant,
    ),
    "bloom": _BLOOM,
    "falcon": replace(_BLOOM, norm=("ln_attn", "input_layernorm"), sizes=falcon_sizes),
    "mpt": Architecture(
        body="transformer.", layer="blocks.{}.", fused="attn.Wqkv", layout="concatenated", o="attn.out_proj",
        norm=("norm_1",), norm_kind="layer", final_norm="norm_f", embedding="wte",
    ),
    # Llama and its relatives
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "smollm3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2_moe": _LLAMA,
    "qwen3": _QWEN3,
    "qwen3_moe": _LLAMA,
    "internlm3": Architecture(defaults={"head_dim": 128, "num_key_value_heads": 2}),
    "iquestcoder": Architecture(defaults={"head_dim": 128, "num_key_value_heads": 8}),
    "granite": _LLAMA,
    "flint": Architecture(sinks=True),
    "olmo": Architecture(norm_kind="layer", weightless_norm=True),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2,
    "phi": Architecture(o="self_attn.dense", norm_kind="layer", final_norm="final_layernorm",
                        qk_norm="self_attn.q_layernorm"),
    "phi3": Architecture(fused="self_attn.qkv_proj", layout="concatenated"),
    "starcoder2": Architecture(norm_kind="layer"),
    "stablelm": Architecture(norm_kind="layer", qk_norm="self_attn.q_layernorm"),
    "glm": _GLM,
    "glm4": replace(_GLM, norm_place="sandwich", output_norm=("post_self_attn_layernorm",)),
    "kolibri1": replace(
        _GLM, norm_place="sandwich", output_norm=("post_self_attn_layernorm", "post_attn_norm"),
    ),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "gpt_oss": Architecture(sinks=True, defaults={"head_dim": 64}),
    "nemotron": Architecture(norm_kind="layer", one_plus=True),
    "hunyuan_v1_dense": Architecture(qk_norm="self_attn.query_layernorm"),
    "apertus": Architecture(norm=("attention_layernorm",)),
    "nanochat": Architecture(weightless_norm=True),
    "persimmon": Architecture(
        fused="self_attn.query_key_value", layout="grouped", o="self_attn.dense", norm_kind="layer",
        final_norm="final_layernorm", qk_norm="self_attn.q_layernorm",
    ),
    "xglm": _XGLM,
    "biogpt": replace(_XGLM, body="biogpt.", unembedding=("output_projection",)),
    "ctrl": Architecture(
        body="transformer.", layer="h.{}.", q="multi_head_attention.Wq", k="multi_head_attention.Wk",
        v="multi_head_attention.Wv", o="multi_head_attention.dense", norm=("layernorm1",), norm_kind="layer",
        final_norm="layernorm", embedding="w",
    ),
    "dbrx": Architecture(
        body="transformer.", layer="blocks.{}.", fused="norm_attn_norm.attn.Wqkv", layout="concatenated",
        o="norm_attn_norm.attn.out_proj", norm=("norm_attn_norm.norm_1",), norm_kind="layer", final_norm="norm_f",
        embedding="wte", sizes=dbrx_sizes,
    ),
    "hyperclovax": Architecture(adapt=_clova_variant, defaults={"use_post_norm": True}),
    "granite_swa": Architecture(sinks=True),
    "minimax_m3_vl_text": Architecture(one_plus=True, defaults={"head_dim": 128}),
    "afmoe": Architecture(
        norm_place="sandwich", output_norm=("post_attention_layernorm",), own_gate=True, defaults={"head_dim": 128},
    ),
    # layers with different numbers of heads
    "gemma4": Architecture(
        norm_place="sandwich", output_norm=("post_attention_layernorm",), keys_as_values=True, lends_kv=True,
        value_norm=True, sizes=gemma4_sizes,
        defaults={"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "gemma3n": Architecture(
        norm_place="sandwich", output_norm=("post_attention_layernorm",), lends_kv=True, value_norm=True, streams=True,
        sizes=gemma3n_sizes, remark="what LAuReL carries around attention is not followed, and tokens are those of "
        "the first stream: the others have projections of their own between them and the vocabulary",
        defaults={"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 15},
    ),
    "laguna": Architecture(own_gate=True, sizes=laguna_sizes, defaults={"head_dim": 128}),
    "mimo_v2_flash": Architecture(
        sinks=True, value_size=True, sizes=mimo_sizes, defaults={"head_dim": 192, "v_head_dim": 128},
    ),
    "openelm": Architecture(
        body="transformer.", fused="attn.qkv_proj", layout="concatenated", o="attn.out_proj", norm=("attn_norm",),
        embedding="token_embeddings", qk_norm="attn.q_norm", defaults={"rms_norm_eps": 1e-6},
    ),
    # hybrids: only their attention layers are read
    "lfm2": Architecture(
        o="self_attn.out_proj", norm=("operator_norm",), final_norm="embedding_norm",
        qk_norm="self_attn.q_layernorm", hybrid=True,
    ),
    "lfm3": Architecture(
        norm=("operator_norm",), norm_place="sandwich", output_norm=("post_operator_norm",),
        final_norm="embedding_norm", own_gate=True, hybrid=True, adapt=_lfm3_variant,
        defaults={"head_dim": 128, "num_key_value_heads": 4},
    ),
    "jamba": Architecture(final_norm="final_layernorm", hybrid=True),
    "granitemoehybrid": Architecture(hybrid=True),
    "nemotron_h": Architecture(
        q="mixer.q_proj", k="mixer.k_proj", v="mixer.v_proj", o="mixer.o_proj", norm=("norm",), final_norm="norm_f",
        embedding="embeddings", hybrid=True,
    ),
    "olmo_hybrid": replace(_OLMO2, output_norm=("post_attention_layernorm", "feedforward_layer_norm"), hybrid=True),
    "recurrent_gemma": Architecture(
        q="temporal_block.q_proj", k="temporal_block.k_proj", v="temporal_block.v_proj", o="temporal_block.o_proj",
        norm=("temporal_pre_norm",), final_norm="final_norm", one_plus=True, hybrid=True,
    ),
    "qwen3_next": Architecture(one_plus=True, gated=True, hybrid=True),
    # latent attention
    "deepseek_v3": _LATENT,
    "longcat_flash": replace(
        _LATENT, latent_scaled=True, sublayers=2, o="self_attn.{sub}.o_proj", norm=("input_layernorm.{sub}",),
    ),
    "dots3_note_text": replace(
        _LATENT, latent_scaled=True, own_gate=True, rotary_norm="k_rope_only_layernorm", sizes=dots3_sizes,
        defaults={"num_hidden_layers": 46, "num_attention_heads": 128, "q_lora_rank": 1024, "kv_lora_rank": 512,
                  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    ),
    "hy_v4": replace(_LATENT, sinks=True, own_gate=True, streams=True),
    "kimi_linear": replace(_LATENT, hybrid=True),
    "bailing_hybrid": replace(
        _LATENT, hybrid=True, own_gate=True, in_files={"o": "attention.dense", "embedding": "word_embeddings"},
    ),
    # encoders
    "bert": _BERT,
    "roberta": replace(_BERT, body="roberta.", unembedding=("lm_head.decoder",)),
    "distilbert": replace(
        _BERT, body="distilbert.", layer="transformer.layer.{}.", q="attention.q_lin", k="attention.k_lin",
        v="attention.v_lin", o="attention.out_lin", unembedding=("vocab_projector",),
    ),
    "electra": replace(_BERT, body="electra.", unembedding=("generator_lm_head",)),
    "mpnet": replace(
        _BERT, body="mpnet.", q="attention.attn.q", k="attention.attn.k", v="attention.attn.v", o="attention.attn.o",
        unembedding=("lm_head.decoder",),
    ),
    "esm": replace(
        _BERT, body="esm.", norm_place="pre",
        norm=("attention.LayerNorm", "attention.LayerNorm.gamma|attention.LayerNorm.beta"),
        final_norm="encoder.emb_layer_norm_after", unembedding=("lm_head.decoder",),
    ),
    "modernbert": Architecture(
        fused="attn.Wqkv", layout="concatenated", o="attn.Wo", norm=("attn_norm",), norm_kind="layer",
        norm_place="partial", final_norm="final_norm", embedding="embeddings.tok_embeddings",
        unembedding=("decoder",),
    ),
    # state dicts of TransformerLens' HookedTransformer
    "transformer_lens": Architecture(
        body="", layer="blocks.{}.", layout="heads", q="attn.W_Q|attn.b_Q", k="attn.W_K|attn.b_K",
        v="attn.W_V|attn.b_V", o="attn.W_O|attn.b_O", norm=("ln1.w|ln1.b",), final_norm="ln_final.w|ln_final.b",
        embedding="embed.W_E|", unembedding=("unembed.W_U|unembed.b_U",), adapt=_lens_variant,
    ),
}  # fmt: skip

ALIASES: dict[str, str] = {
    **dict.fromkeys(
        ("arcee", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "eurobert", "exaone_moe", "glm4_moe",
         "aria_text", "helium", "hy_v3", "mellum", "solar_open",
         "llama4_text", "minimax_m2", "ministral", "ministral3", "seed_oss"), "llama",
    ),
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "minicpm3", "mistral4",
         "youtu"), "deepseek_v3",
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), "granite"),
    "dots3_note": "dots3_note_text",
    "gpt-sw3": "gpt2",
    **dict.fromkeys(("cohere2_moe", "cohere_compass_text"), "cohere2"),
    "granitemoe_swa": "granite_swa",
    "beam": "afmoe",
    **dict.fromkeys(("exaone4", "flex_olmo"), "olmo2"),
    **dict.fromkeys(("jais2", "phimoe"), "starcoder2"),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "qwen3_next"),
    **dict.fromkeys(("xlm-roberta", "camembert"), "roberta"),
    "hunyuan_v1_moe": "hunyuan_v1_dense",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), "gemma4"),
    "qwen3_vl_text": "qwen3",
    "vaultgemma": "gemma",
    "lfm2_moe": "lfm2",
    **dict.fromkeys(("bamba", "falcon_h1"), "jamba"),
}  # fmt: skip
"""Other model_type names with exactly the layout of a table entry."""

BODY_PREFIXES = ("", "model.", "backbone.", "model.language_model.", "language_model.model.", "model.text_model.")
"""Where a body may stand when it is not under its own name: bare, wrapped, or inside a multimodal model."""


def find_architecture(config: Config, names: Collection[str] = ()) -> tuple[str, Architecture, Config]:
    """The family of a checkpoint: its name, its entry for this very config, and the config of its text model."""
    if config.get("_unread"):
        raise HeadspanError(str(config["_unread"]))
    model_type = config.get("model_type")
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and nested:  # a multimodal model: only its language model is read
        ties = [part["tie_word_embeddings"] for part in (config, nested) if part.get("tie_word_embeddings") is not None]
        config = {**nested, "tie_word_embeddings": any(ties) if ties else None}
        model_type = config.get("model_type", model_type)
    if model_type is None and any(name.endswith(".attn.W_Q") for name in names):
        model_type = "transformer_lens"
    name = ALIASES.get(str(model_type), str(model_type))
    if name not in ARCHITECTURES:
        seen = "the config has no model_type" if model_type is None else f"unknown model_type {str(model_type)[:80]!r}"
        raise HeadspanError(
            f"{seen}: known are {', '.join(sorted({*ARCHITECTURES, *ALIASES}))}; for any other model pass its four "
            'weights as arrays, headspan.open({"Q": Q, "K": K, "V": V, "O": O}), each (layer, head, d_model, d_head)'
        )
    entry = ARCHITECTURES[name]
    if config.get("kv_lora_rank") and not entry.latent:
        raise HeadspanError(
            f"the config says {name} and sets kv_lora_rank, the mark of latent attention, which {name} is not known to "
            "have: check its model_type"
        )
    if entry.in_files and not any(f".{entry.o}." in tensor for tensor in names):
        entry = replace(entry, **entry.in_files)
    config = {**entry.defaults, **{key: value for key, value in config.items() if value is not None}}
    config = {**config, **(entry.sizes(config) if entry.sizes else {})}
    return name, entry.adapt(entry, config) if entry.adapt else entry, config
