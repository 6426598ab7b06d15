"""How llama.cpp's converter writes each model family, one table entry each; reading a GGUF file undoes it.

GGUF tensors have names like ``blk.3.attn_q.weight``; the rest of the package uses the Hugging Face name
``model.layers.3.self_attn.q_proj.weight``. Some families are also stored in a different order:

* ``rope``: the rows of Q and K of each head are permuted from (2, d_head/2) to (d_head/2, 2) for llama.cpp's RoPE.
* ``grouped``: a fused QKV that Hugging Face stores head by head is stored as all Q, all K, all V.
* ``transposed``: Conv1D weights are transposed.

All three are undone, so a float32 file gives exactly the tensors of the original checkpoint, with one exception:
where a norm's gain is stored as γ − 1 (Gemma, Nemotron, Qwen3-Next), GGUF files hold γ (``config["_gguf"]``).

The experts of a layer are always one tensor in a GGUF file, with the same names for all families.
A name that is not in :data:`FAMILIES` is refused (:mod:`headspan.checkpoints.gguf.unread`).
"""

from __future__ import annotations

from dataclasses import replace

from headspan.checkpoints.gguf.config import falcon_layout, one_key_value_head, value_length, windows
from headspan.checkpoints.gguf.family import Family
from headspan.checkpoints.gguf.unread import why_unread

# The norm before the MLP, in families where llama.cpp names it after what precedes it.
_BEHIND = {"post_attention_norm": "post_attention_layernorm"}
# Blocks with a norm on both sides of attention and of the MLP.
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _mlp(
    start: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), end: str = ""
) -> dict[str, str]:
    """The stems of an MLP that is not called ``mlp``; ``end`` is that of the stored names."""
    return {f"ffn_{part}{end}": f"{start}.{name}" for part, name in zip(("gate", "up", "down"), names, strict=True)}


_LLAMA = Family("llama", rope=True)
_GPT2 = Family(
    "gpt2",
    layer="transformer.h.{}.",
    block={
        "attn_norm": "ln_1",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    top={"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"},
    fused="attn.c_attn",
    transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)
_BLOOM = Family(
    "bloom",
    layer="transformer.h.{}.",
    block={
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    top={
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
    },
    fused="self_attention.query_key_value",
    grouped=True,
)
# Latent attention; newer files store the maps from the latent to keys and to values separately.
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_GEMMA2 = Family("gemma2", block=_SANDWICH)
_SHARED = _mlp("mlp.shared_experts", end="_shexp")
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
# Full attention in some layers, whose queries are stored with their gates; the QKV of other layers has no heads.
_QWEN_LINEAR = Family(
    "qwen3_next", block={**_BEHIND, "attn_gate": "linear_attn.in_proj_z"}, fused="linear_attn.in_proj_qkv"
)
_LFM2 = Family(
    "lfm2",
    block={
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_norm": "ffn_norm",
        **_mlp("feed_forward", ("w1", "w3", "w2")),
    },
    top={"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
)
_JAMBA = Family(
    "jamba",
    block={"ffn_norm": "pre_ff_layernorm", **_mlp("feed_forward")},
    top={"output_norm": "model.final_layernorm"},
)
_NEMOTRON_H = Family(
    "nemotron_h",
    layer="backbone.layers.{}.",
    block={
        "attn_norm": "norm",
        **{f"attn_{short}": f"mixer.{short}_proj" for short in "qkv"},
        "attn_output": "mixer.o_proj",
        **_mlp("mixer"),
        **_mlp("mixer.experts", end="_exps"),
        **_mlp("mixer.shared_experts", end="_shexp"),
    },
    top={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    rope=True,
)
_BERT = Family(
    "bert",
    layer="encoder.layer.{}.",
    block={
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    top={
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
    },
)

FAMILIES: dict[str, Family] = {
    # Llama itself, and families whose attention and norms are Llama's
    "llama": _LLAMA,
    "mistral3": replace(_LLAMA, model_type="mistral"),
    "llama-embed": _LLAMA,
    "arcee": replace(_LLAMA, model_type="arcee"),
    "baichuan": _LLAMA,
    "deepseek": _LLAMA,
    "internlm2": _LLAMA,
    "minicpm": _LLAMA,
    "xverse": _LLAMA,
    "smollm3": replace(_LLAMA, model_type="smollm3"),
    "granite": replace(_LLAMA, model_type="granite"),
    "granitemoe": replace(_LLAMA, model_type="granite"),
    "olmo": replace(_LLAMA, model_type="olmo"),
    "llama4": Family("llama4_text", block=_mlp("feed_forward") | _mlp("feed_forward.shared_expert", end="_shexp")),
    "apertus": Family("apertus", block={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}),
    "seed_oss": Family("seed_oss", block=_BEHIND),
    "dots1": Family("dots1", block=_SHARED),
    "ernie4_5": Family("ernie4_5"),
    "ernie4_5-moe": Family("ernie4_5_moe", block=_SHARED),
    "exaone4": Family("exaone4", block=_SANDWICH),
    "exaone-moe": Family("exaone_moe", block=_SHARED),
    "hunyuan-dense": Family("hunyuan_v1_dense", block=_HUNYUAN),
    "hunyuan-moe": Family("hunyuan_v1_moe", block=_HUNYUAN | _mlp("mlp.shared_mlp", end="_shexp")),
    "hy_v3": Family("hy_v3", block=_BEHIND | _mlp("mlp.shared_mlp", end="_shexp")),
    "jais2": Family("jais2"),
    "mellum": Family("mellum", block=_BEHIND),
    "minimax-m2": Family("minimax_m2"),
    "minimax-m3": Family("minimax_m3_vl_text", block=_BEHIND),
    "qwen2": Family("qwen2"),
    "qwen2vl": Family("qwen2"),
    "qwen2moe": Family("qwen2_moe"),
    "qwen3": Family("qwen3"),
    "qwen3vl": Family("qwen3"),
    "qwen3moe": Family("qwen3_moe"),
    "qwen3vlmoe": Family("qwen3_moe"),
    "olmo2": Family("olmo2", block=_SANDWICH),  # OLMo 3 too
    "olmoe": Family("olmoe"),
    "gemma": Family("gemma"),
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, model_type="gemma3_text"),
    "gemma-embedding": replace(_GEMMA2, model_type="gemma3_text"),
    "gemma3n": replace(_GEMMA2, model_type="gemma3n_text", config=windows),
    "gemma4": replace(_GEMMA2, model_type="gemma4_text", config=windows),
    "chatglm": Family("glm", block={"ffn_up": "mlp.gate_up_proj"}),
    "glm4moe": Family("glm4_moe", block=_BEHIND | _SHARED),
    "glm4": Family(
        "glm4",
        block={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "command-r": Family("cohere"),
    "cohere2": Family("cohere2"),
    "cohere2moe": Family("cohere2_moe", block=_SHARED),
    "stablelm": Family(
        "stablelm", block={"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
    ),
    "starcoder2": Family("starcoder2", block={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "nemotron": Family("nemotron"),
    "gpt-oss": Family("gpt_oss", block=_BEHIND),
    "phimoe": Family("phimoe"),
    "afmoe": Family(
        "afmoe",
        block={
            **_SHARED,
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "phi2": Family(
        "phi",
        block={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        top={"output_norm": "model.final_layernorm"},
    ),
    "phi3": Family("phi3", block={"ffn_up": "mlp.gate_up_proj"}, fused="self_attn.qkv_proj"),
    # layers with different numbers of heads, or heads of different sizes
    "laguna": Family("laguna", block={**_BEHIND, "attn_gate": "self_attn.g_proj"}),
    "mimo2": Family("mimo_v2_flash", config=value_length),
    "openelm": Family(
        "openelm",
        layer="transformer.layers.{}.",
        block={
            "attn_norm": "attn_norm",
            "attn_output": "attn.out_proj",
            "attn_q_norm": "attn.q_norm",
            "attn_k_norm": "attn.k_norm",
            "ffn_norm": "ffn_norm",
        },
        top={"token_embd": "transformer.token_embeddings", "output_norm": "transformer.norm"},
        fused="attn.qkv_proj",
    ),
    # hybrids
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, model_type="lfm2_moe"),
    "jamba": _JAMBA,
    "falcon-h1": replace(
        _JAMBA,
        model_type="falcon_h1",
        note="llama.cpp multiplies the multipliers of Falcon-H1 into its weights, so the weights in a GGUF file are "
        "multiples of the original ones; their spans are the same",
    ),
    "granitehybrid": replace(_LLAMA, model_type="granitemoehybrid"),  # Bamba too
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "qwen3next": _QWEN_LINEAR,
    "qwen35": replace(_QWEN_LINEAR, model_type="qwen3_5_text"),
    "qwen35moe": replace(_QWEN_LINEAR, model_type="qwen3_5_moe_text"),
    # latent attention
    "deepseek2": Family("deepseek_v2", block=_LATENT),
    "deepseek32": Family("deepseek_v32", block=_LATENT),
    "mistral4": Family("mistral4", block=_LATENT),
    "kimi-linear": Family("kimi_linear", block=_LATENT),
    "glm-dsa": Family("glm_moe_dsa", block=_LATENT),
    "minicpm3": Family("minicpm3", block=_LATENT),
    # GPT-2 and other families with a fused QKV
    "gpt2": _GPT2,
    "starcoder": replace(_GPT2, model_type="gpt_bigcode", transposed=(), config=one_key_value_head),
    "bloom": _BLOOM,
    "falcon": replace(
        _BLOOM, model_type="falcon", block={**_BLOOM.block, "attn_norm_2": "ln_attn"}, config=falcon_layout
    ),
    "dbrx": Family(
        "dbrx",
        layer="transformer.blocks.{}.",
        block={
            "attn_norm": "norm_attn_norm.norm_1",
            "attn_output": "norm_attn_norm.attn.out_proj",
            "attn_output_norm": "norm_attn_norm.norm_2",
        },
        top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        fused="norm_attn_norm.attn.Wqkv",
    ),
    "gptneox": Family(
        "gpt_neox",
        layer="gpt_neox.layers.{}.",
        block={
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        fused="attention.query_key_value",
        grouped=True,
    ),
    "mpt": Family(
        "mpt",
        layer="transformer.blocks.{}.",
        block={
            "attn_norm": "norm_1",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        fused="attn.Wqkv",
    ),
    # encoders
    "bert": _BERT,  # RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT too
    "eurobert": Family("eurobert"),
    "modern-bert": Family(
        "modernbert",
        block={
            "attn_norm": "attn_norm",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        top={
            "token_embd": "model.embeddings.tok_embeddings",
            "token_embd_norm": "model.embeddings.norm",
            "output_norm": "model.final_norm",
        },
        fused="attn.Wqkv",
    ),
}


def family_of(architecture: str) -> Family:
    """The entry of a ``general.architecture``; for an unknown one, an entry with the reason why it cannot be read.

    >>> family_of("mamba2").unread[:48]
    "a GGUF file of 'mamba2' is not read: it has no s"
    """
    known = FAMILIES.get(architecture)
    return known or Family(architecture.replace("-", "_"), unread=why_unread(architecture, FAMILIES))
