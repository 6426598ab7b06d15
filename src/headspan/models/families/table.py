"""The table of model families: where each stores Q, K, V, O, its norms and its (un)embedding.

To add a family, add one entry to :data:`ARCHITECTURES`; :mod:`headspan.models.families.entry` documents its fields.
Tensor names are those of the Hugging Face classes, without the prefix of the body (``transformer.``, ``model.``).
A module ``name`` means the tensors ``name.weight`` and ``name.bias``; ``"a|b"`` names the two explicitly.

>>> ARCHITECTURES["gpt2"].fused
'attn.c_attn'
>>> ALIASES["xlm-roberta"]
'roberta'
"""

from __future__ import annotations

from dataclasses import replace

from headspan.models.families.config_sizes import (
    dbrx_sizes,
    deci_sizes,
    dots3_sizes,
    falcon_sizes,
    gemma3n_sizes,
    gemma4_sizes,
    laguna_sizes,
    mimo_sizes,
    multi_query_sizes,
    step3_sizes,
)
from headspan.models.families.entry import Architecture
from headspan.models.families.variants import (
    bloom_variant,
    chameleon_variant,
    clova_variant,
    lens_variant,
    lfm3_variant,
    opt_variant,
)

_LLAMA = Architecture()
_COSMOS_FILES = {  # attention as Diffusers names it
    "q": "self_attn.to_q", "k": "self_attn.to_k", "v": "self_attn.to_v", "o": "self_attn.to_out",
    "qk_norm": "self_attn.norm_q",
}  # fmt: skip
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
    adapt=bloom_variant,
)  # fmt: skip
_GEMMA = Architecture(one_plus=True, defaults={"head_dim": 256})
_GEMMA2 = replace(_GEMMA, norm_place="sandwich", output_norm=("post_attention_layernorm",), defaults={
    "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
})  # fmt: skip
_GLM4 = Architecture(norm_place="sandwich", output_norm=("post_self_attn_layernorm",))
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
        final_norm="final_layer_norm", adapt=opt_variant,
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
    "qwen3": Architecture(defaults={"head_dim": 128}, in_files=_COSMOS_FILES),
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
    "glm4": replace(_GLM4, defaults={"head_dim": 128}),
    "glm4v_text": _GLM4,
    "kolibri1": replace(
        _GLM4, output_norm=("post_self_attn_layernorm", "post_attn_norm"), defaults={"head_dim": 128},
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
    "biogpt": replace(_XGLM, body="biogpt.", unembedding=("output_projection",), eps=1e-5),
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
    "hyperclovax": Architecture(adapt=clova_variant, defaults={"use_post_norm": True}),
    "granite_swa": Architecture(sinks=True),
    "minimax_m3_vl_text": Architecture(one_plus=True, defaults={"head_dim": 128}),
    "afmoe": Architecture(
        norm_place="sandwich", output_norm=("post_attention_layernorm",), own_gate=True, defaults={"head_dim": 128},
    ),
    "paddleocr_vl_text": Architecture(defaults={"head_dim": 128, "num_key_value_heads": 2}),
    "cosmos3_edge_text": Architecture(
        defaults={"head_dim": 128, "num_key_value_heads": 8}, in_files=_COSMOS_FILES,
    ),
    "muse_glimmer_text": Architecture(
        norm_place="sandwich", output_norm=("post_attention_layernorm",), one_plus=True, plain_final_norm=True,
        own_gate=True, defaults={"head_dim": 128, "num_key_value_heads": 2},
    ),
    "chameleon": Architecture(adapt=chameleon_variant),
    # layers with different numbers of heads
    "gemma4": Architecture(
        norm_place="sandwich", output_norm=("post_attention_layernorm",), keys_as_values=True, lends_kv=True,
        value_norm=True, sizes=gemma4_sizes,
        defaults={"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "gemma3n": Architecture(
        norm_place="sandwich", output_norm=("post_attention_layernorm",), lends_kv=True, value_norm=True, streams=True,
        sizes=gemma3n_sizes, remark="the LAuReL branch around attention is not followed, and tokens are those of "
        "the first stream: the other streams have their own projections to the vocabulary",
        defaults={"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 15},
    ),
    "laguna": Architecture(own_gate=True, sizes=laguna_sizes, defaults={"head_dim": 128}),
    "mimo_v2_flash": Architecture(
        sinks=True, value_size=True, sizes=mimo_sizes, defaults={"head_dim": 192, "v_head_dim": 128},
    ),
    "step3p5": Architecture(
        one_plus=True, own_gate=True, sizes=step3_sizes, defaults={"head_dim": 128, "num_key_value_heads": 8},
    ),
    "nemotron-nas": Architecture(sizes=deci_sizes),
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
        final_norm="embedding_norm", own_gate=True, hybrid=True, adapt=lfm3_variant,
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
    "minimax": Architecture(norm_place="residual", hybrid=True),
    "mllama_text_model": Architecture(
        hybrid=True, remark="the layers left out read images by cross-attention and write to the stream",
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
    "glm5_next_text": replace(_LATENT, hybrid=True, streams=True, defaults={"qk_rope_head_dim": 0}),
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
    "modernbert-decoder": Architecture(
        q="attn.q_proj", k="attn.k_proj", v="attn.v_proj", o="attn.Wo", norm=("attn_norm",), norm_kind="layer",
        norm_place="partial", final_norm="final_norm", embedding="embeddings.tok_embeddings", unembedding=("decoder",),
    ),
    "git": replace(_BERT, body="git.", unembedding=("output",)),
    # state dicts of TransformerLens' HookedTransformer
    "transformer_lens": Architecture(
        body="", layer="blocks.{}.", layout="heads", q="attn.W_Q|attn.b_Q", k="attn.W_K|attn.b_K",
        v="attn.W_V|attn.b_V", o="attn.W_O|attn.b_O", norm=("ln1.w|ln1.b",), final_norm="ln_final.w|ln_final.b",
        embedding="embed.W_E|", unembedding=("unembed.W_U|unembed.b_U",), adapt=lens_variant,
    ),
}  # fmt: skip

ALIASES: dict[str, str] = {
    **dict.fromkeys(
        ("arcee", "aria_text", "cwm", "deepseek_ocr2_text", "dots1", "emu3_text_model", "ernie4_5", "ernie4_5_moe",
         "ernie4_5_vl_moe_text", "eurobert", "exaone_moe", "glm4_moe", "glm4v_moe_text", "helium", "hy_v3",
         "llama4_text", "mellum", "minimax_m2", "ministral", "ministral3", "seed_oss", "solar_open",
         "unlimited_ocr_text"), "llama",
    ),
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "minicpm3", "mistral4",
         "youtu"), "deepseek_v3",
    ),
    **dict.fromkeys(
        ("granite4_vision_text", "granite_docling_text", "granitemoe", "granitemoeshared"), "granite",
    ),
    "dots3_note": "dots3_note_text",
    "glm5_next": "glm5_next_text",
    "gpt-sw3": "gpt2",
    **dict.fromkeys(("cohere2_moe", "cohere_compass_text"), "cohere2"),
    "granitemoe_swa": "granite_swa",
    "beam": "afmoe",
    "deci": "nemotron-nas",
    **dict.fromkeys(("exaone4", "flex_olmo"), "olmo2"),
    **dict.fromkeys(("jais2", "phimoe"), "starcoder2"),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"), "qwen2"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "qwen3_next"),
    **dict.fromkeys(("qwen3_omni_moe_text", "qwen3_vl_moe_text"), "qwen3_moe"),
    "qwen3_vl_text": "qwen3",
    **dict.fromkeys(("xlm-roberta", "camembert"), "roberta"),
    **dict.fromkeys(("hunyuan_v1_moe", "hunyuan_vl_text"), "hunyuan_v1_dense"),
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), "gemma4"),
    "glm_ocr_text": "glm4v_text",
    "phi4_multimodal": "phi3",
    "vaultgemma": "gemma",
    "lfm2_moe": "lfm2",
    **dict.fromkeys(("bamba", "falcon_h1"), "jamba"),
}  # fmt: skip
"""Other model_type names with exactly the layout of a table entry."""

BODY_PREFIXES = (
    "", "model.", "backbone.", "model.language_model.", "language_model.", "language_model.model.",
    "language_model.backbone.", "model.text_model.", "text_model.model.", "thinker.model.", "llm.model.",
)  # fmt: skip
"""Other prefixes of the body's tensors: bare, wrapped, or inside a multimodal model."""
