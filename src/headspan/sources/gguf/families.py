"""How llama.cpp's converter writes each model family: one entry a family, undone when a GGUF file is read.

GGUF tensors are called ``blk.3.attn_q.weight``; the rest of the package knows the Hugging Face name
``model.layers.3.self_attn.q_proj.weight``. Some families are also stored in another order:

* ``rope``: rows of Q and K of each head are (2, d_head/2) turned into (d_head/2, 2), for the rotary code there.
* ``grouped``: a fused QKV that Hugging Face keeps head by head is stored as all Q, all K, all V.
* ``transposed``: Conv1D weights are turned round.

All three are undone, so that a file in float32 gives exactly the tensors of the original checkpoint. One thing is
not: where a norm's gain is stored as γ − 1 (Gemma, Nemotron), GGUF files hold γ; ``config["_gguf"]`` tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Stems of the tensors of one block, and outside the blocks, in the Llama way.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    # all experts of a layer in one tensor, and the MLP that they share
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Blocks with a norm on both sides of attention and of the MLP.
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Family:
    """One value of ``general.architecture``; the defaults are those of Llama without its rotary order."""

    model_type: str
    layer: str = "model.layers.{}."
    block: Mapping[str, str] = field(default_factory=dict)  # on top of the Llama names
    top: Mapping[str, str] = field(default_factory=dict)
    fused: str | None = None  # Hugging Face's name of a fused QKV; without it a fused QKV is split
    rope: bool = False
    grouped: bool = False
    transposed: tuple[str, ...] = ()

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a GGUF tensor; a name that no rule covers stays as it is.

        >>> FAMILIES["gpt2"].hf_name("blk.3.attn_qkv.bias")
        'transformer.h.3.attn.c_attn.bias'
        """
        match = _BLOCK_NAME.fullmatch(name)
        if match:
            stem = self.fused if match["stem"] == "attn_qkv" else {**_BLOCK, **self.block}.get(match["stem"])
            return f"{self.layer.format(int(match['layer']))}{stem}{_suffix(stem, match['end'])}" if stem else name
        stem, dot, end = name.rpartition(".")
        renamed = {**_TOP, **self.top}.get(stem)
        return f"{renamed}{dot}{end}" if renamed else name


_BLOCK_NAME = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<stem>\w+)\.(?P<end>weight|bias)")


def _suffix(stem: str, end: str) -> str:
    return "" if stem.endswith("sinks") else f".{end}"  # a parameter, not a module


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
# Latent attention; newer files keep what makes keys and what makes values of the latent apart.
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
_OLMO2 = Family("olmo2", block=_SANDWICH)
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
    "arcee": _LLAMA,
    "baichuan": _LLAMA,
    "deepseek": _LLAMA,
    "internlm2": _LLAMA,
    "minicpm": _LLAMA,
    "xverse": _LLAMA,
    "smollm3": replace(_LLAMA, model_type="smollm3"),
    "granite": replace(_LLAMA, model_type="granite"),
    "granitemoe": replace(_LLAMA, model_type="granite"),
    "olmo": replace(_LLAMA, model_type="olmo"),
    "qwen2": Family("qwen2"),
    "qwen2vl": Family("qwen2"),
    "qwen2moe": Family("qwen2_moe"),
    "qwen3": Family("qwen3"),
    "qwen3vl": Family("qwen3"),
    "qwen3moe": Family("qwen3_moe"),
    "qwen3vlmoe": Family("qwen3_moe"),
    "olmo2": _OLMO2,
    "olmoe": Family("olmoe"),
    "gemma": Family("gemma"),
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, model_type="gemma3_text"),
    "gemma-embedding": replace(_GEMMA2, model_type="gemma3_text"),
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
    "stablelm": Family(
        "stablelm", block={"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
    ),
    "starcoder2": Family("starcoder2", block={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "nemotron": Family("nemotron"),
    "gpt-oss": Family("gpt_oss", block={"post_attention_norm": "post_attention_layernorm"}),
    "phi2": Family(
        "phi",
        block={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        top={"output_norm": "model.final_layernorm"},
    ),
    "phi3": Family("phi3", block={"ffn_up": "mlp.gate_up_proj"}, fused="self_attn.qkv_proj"),
    # latent attention
    "deepseek2": Family("deepseek_v2", block=_LATENT),
    "mistral4": Family("mistral4", block=_LATENT),
    "kimi-linear": Family("kimi_linear", block=_LATENT),
    "glm-dsa": Family("glm_moe_dsa", block=_LATENT),
    "minicpm3": Family("minicpm3", block=_LATENT),
    # GPT-2 and other families with a fused QKV
    "gpt2": _GPT2,
    "starcoder": replace(_GPT2, model_type="gpt_bigcode", transposed=()),
    "bloom": _BLOOM,
    "falcon": replace(_BLOOM, model_type="falcon", block={**_BLOOM.block, "attn_norm_2": "ln_attn"}, top=_BLOOM.top),
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
    "bert": _BERT,
}

# Latent attention and its kind keep their own model_type, which the architecture table refuses with a reason.


def family_of(architecture: str) -> Family:
    """The entry of a ``general.architecture``, or Llama's names under that architecture's own name."""
    known = FAMILIES.get(architecture)
    return known or Family(architecture.replace("-", "_"))


# Metadata key (after the architecture) → config key.
_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.sliding_window": "sliding_window",
    "attention.clamp_kqv": "clip_qkv",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "rope_dim",
    "expert_count": "num_local_experts",
    "use_parallel_residual": "use_parallel_residual",
}


def make_config(metadata: Mapping[str, Any], tensor_names: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face config from GGUF metadata."""
    architecture = str(metadata.get("general.architecture"))
    family = family_of(architecture)
    config: dict[str, Any] = {"model_type": family.model_type, "_gguf": True}
    for key, hf_key in _CONFIG_KEYS.items():
        if (value := metadata.get(f"{architecture}.{key}")) is not None:
            config[hf_key] = value
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and isinstance(tokens, list):
        config["vocab_size"] = len(tokens)
    config["tie_word_embeddings"] = "output.weight" not in tensor_names
    heads, kv = config.get("num_attention_heads"), config.get("num_key_value_heads", config.get("num_attention_heads"))
    if "kv_lora_rank" in config:
        config |= _latent_sizes(metadata, architecture)
    if family.model_type == "falcon":
        config |= {"multi_query": kv == 1, "new_decoder_architecture": kv not in (1, heads)}
    if family.model_type == "gpt_bigcode":
        config["multi_query"] = kv == 1
    return config


def _latent_sizes(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Sizes of latent attention: files that keep the latent compressed call a head's own sizes ``…_mla``."""

    def length(what: str) -> Any:
        found = metadata.get(f"{architecture}.attention.{what}_length_mla")
        return metadata.get(f"{architecture}.attention.{what}_length") if found is None else found

    whole, rotary = length("key"), metadata.get(f"{architecture}.rope.dimension_count")
    free = whole - rotary if type(whole) is int and type(rotary) is int else None
    return {"qk_nope_head_dim": free, "qk_rope_head_dim": rotary, "v_head_dim": length("value")}
