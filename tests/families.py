"""One small random model of every family in the table, built with transformers' own classes."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from headspan.checkpoints.live import by_modules
from headspan.checkpoints.opening import open_source
from headspan.models.checkpoint import CheckpointWeights
from headspan.vocabulary.heads import ROLES

TOLERANCE = 1e-5
BASE: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GQA = BASE | {"num_key_value_heads": 2}
WIDE = GQA | {"head_dim": 8}  # d_head is not d_model / n_heads
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64}
FALCON = BASE | {"bias": True, "alibi": False}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LINEAR = WIDE | {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 2,
    "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
}  # fmt: skip
LFM3 = WIDE | {
    "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
    "attention_bias": True,
}  # fmt: skip
GEMMA4 = WIDE | {
    "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "attention_k_eq_v": True, "global_head_dim": 12, "num_global_key_value_heads": 1,
}  # fmt: skip
LENT = WIDE | {
    "num_hidden_layers": 5, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 50,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
ROUTED = {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
          "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
MASKED = ("bert", "camembert", "distilbert", "electra", "esm", "eurobert", "modernbert", "mpnet", "roberta",
          "xlm-roberta")  # fmt: skip

PICTURE_LAYERS = ("mllama_text_model",)  # some of their layers run only where there is a picture


@dataclass(frozen=True)
class Family:
    """A transformers config, and what opening its model must show."""

    model_type: str
    config: dict[str, Any]
    n_kv_heads: int = 2
    d_head: int = 6
    place: str = "pre"
    layers: tuple[int, ...] = (0, 1)
    counts: tuple[tuple[int, int], ...] = ()  # query and key/value heads of each layer, where they differ
    sizes: tuple[tuple[int, int], ...] = ()  # of queries and of values in each layer, where they differ
    around: tuple[str, dict[str, Any]] | None = None  # the vision or audio model that contains it

    def heads(self, place: int) -> tuple[int, int]:
        return self.counts[place] if self.counts else (4, self.n_kv_heads)

    def widths(self, place: int) -> tuple[int, int]:
        return self.sizes[place] if self.sizes else (self.d_head, self.d_head)


FAMILIES: dict[str, Family] = {
    "gpt2": Family("gpt2", GPT2, 4),
    "gpt_neo": Family(
        "gpt_neo",
        {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
         "vocab_size": 50, "max_position_embeddings": 64}, 4,
    ),
    "gptj": Family("gptj", GPT2 | {"rotary_dim": 4, "n_embd": 32}, 4, 8),
    "codegen": Family("codegen", GPT2 | {"rotary_dim": 4, "n_embd": 32, "n_ctx": 64}, 4, 8),
    "gpt-sw3": Family("gpt-sw3", GPT2, 4),
    "openai-gpt": Family("openai-gpt", GPT2, 4, place="post"),
    "gpt_neox_japanese": Family("gpt_neox_japanese", BASE | {"hidden_size": 32}, 4, 8),
    "flint": Family("flint", WIDE | MOE, d_head=8),
    "cohere2_moe": Family("cohere2_moe", WIDE | {"num_experts": 2, "num_experts_per_tok": 1}, d_head=8),
    "aria_text": Family(
        "aria_text", WIDE | {"moe_num_experts": 2, "moe_topk": 1, "moe_num_shared_experts": 1}, d_head=8
    ),
    "hy_v3": Family("hy_v3", WIDE | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
                                     "num_local_experts": 2}, d_head=8),
    "mellum": Family("mellum", WIDE | MOE, d_head=8),
    "solar_open": Family("solar_open", WIDE | ROUTED, d_head=8),
    "gpt_neox": Family("gpt_neox", BASE | {"hidden_size": 32}, 4, 8),
    "gpt_neox-sequential": Family("gpt_neox", BASE | {"hidden_size": 32, "use_parallel_residual": False}, 4, 8),
    "gpt_bigcode": Family("gpt_bigcode", GPT2, 1),
    "gpt_bigcode-mha": Family("gpt_bigcode", GPT2 | {"multi_query": False}, 4),
    "opt": Family("opt", BASE | {"ffn_dim": 32, "word_embed_proj_dim": 24}, 4),
    "opt-post": Family(
        "opt", BASE | {"ffn_dim": 32, "word_embed_proj_dim": 24, "do_layer_norm_before": False}, 4, place="post"
    ),
    "bloom": Family("bloom", {"hidden_size": 24, "n_layer": 2, "n_head": 4, "vocab_size": 50}, 4),
    "bloom-residual": Family(
        "bloom",
        {"hidden_size": 24, "n_layer": 2, "n_head": 4, "vocab_size": 50,
         "apply_residual_connection_post_layernorm": True}, 4, place="residual",
    ),
    "falcon-7b": Family("falcon", FALCON | {"multi_query": True}, 1),
    "falcon-40b": Family("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": Family(
        "falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    ),
    "falcon-rw": Family("falcon", FALCON | {"multi_query": False, "parallel_attn": False}, 4),
    "mpt": Family("mpt", {"d_model": 24, "n_heads": 4, "n_layers": 2, "vocab_size": 50}, 4),
    "llama": Family("llama", WIDE | {"attention_bias": True}, d_head=8),
    "mistral": Family("mistral", WIDE, d_head=8),
    "mixtral": Family("mixtral", WIDE | {"num_local_experts": 2}, d_head=8),
    "smollm3": Family("smollm3", GQA),
    "qwen2": Family("qwen2", GQA),
    "qwen2_moe": Family("qwen2_moe", GQA | MOE | {"shared_expert_intermediate_size": 16}),
    "qwen3": Family("qwen3", WIDE, d_head=8),
    "qwen3_moe": Family("qwen3_moe", WIDE | MOE, d_head=8),
    "internlm3": Family("internlm3", WIDE | {"attention_bias": True, "mlp_bias": True}, d_head=8),
    "iquestcoder": Family("iquestcoder", WIDE, d_head=8),
    "granite": Family("granite", GQA),
    "olmo": Family("olmo", GQA),
    "olmo2": Family("olmo2", GQA, place="output"),
    "olmo3": Family("olmo3", GQA, place="output"),
    "olmoe": Family("olmoe", GQA | {"num_experts": 2, "num_experts_per_tok": 1}),
    "gemma": Family("gemma", WIDE, d_head=8),
    "gemma2": Family("gemma2", WIDE, d_head=8, place="sandwich"),
    "gemma3": Family("gemma3_text", WIDE, d_head=8, place="sandwich"),
    "phi": Family("phi", GQA | {"hidden_size": 32}, d_head=8),
    "phi-qk-norm": Family("phi", GQA | {"hidden_size": 32, "qk_layernorm": True}, d_head=8),
    "phi3": Family("phi3", GQA),
    "starcoder2": Family("starcoder2", GQA),
    "stablelm": Family("stablelm", GQA | {"use_qkv_bias": True}),
    "stablelm-qk-norm": Family("stablelm", GQA | {"qk_layernorm": True, "use_parallel_residual": True}),
    "glm": Family("glm", WIDE, d_head=8),
    "glm4": Family("glm4", WIDE | {"attention_bias": True}, d_head=8, place="sandwich"),
    "cohere": Family("cohere", GQA | {"use_qk_norm": True}),
    "cohere2": Family("cohere2", GQA),
    "gpt_oss": Family("gpt_oss", WIDE | {"num_local_experts": 2, "num_experts_per_tok": 1}, d_head=8),
    "nemotron": Family("nemotron", WIDE | {"attention_bias": True}, d_head=8),
    "lfm2": Family(
        "lfm2", GQA | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        layers=(1, 3),
    ),
    "lfm3": Family("lfm3", LFM3, d_head=8, layers=(1, 3), place="sandwich"),
    "lfm3-bare": Family(
        "lfm3", LFM3 | {"use_sandwich_norm": False, "use_attention_gate": False}, d_head=8, layers=(1, 3)
    ),
    "jamba": Family(
        "jamba",
        GQA | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
               "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        layers=(1, 3),
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        GQA | {"hidden_size": 32, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8,
               "mamba_expand": 2, "mamba_d_state": 8, "num_local_experts": 0, "shared_intermediate_size": 16},
        d_head=8, layers=(1,),
    ),
    "lfm2_moe": Family(
        "lfm2_moe",
        GQA | MOE | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, layers=(1,),
    ),
    "qwen3_next": Family("qwen3_next", LINEAR | MOE, d_head=8, layers=(1, 3)),
    "qwen3_5_text": Family("qwen3_5_text", LINEAR | {"attention_bias": True}, d_head=8, layers=(1, 3)),
    "qwen3_5_moe_text": Family("qwen3_5_moe_text", LINEAR | MOE, d_head=8, layers=(1, 3)),
    **{name: Family(name, WIDE, d_head=8) for name in
       ("arcee", "cwm", "ernie4_5", "hunyuan_v1_dense", "ministral", "ministral3", "seed_oss", "vaultgemma")},
    **{name: Family(name, GQA) for name in ("apertus", "eurobert", "jais2", "nanochat")},
    "bamba": Family(
        "bamba",
        GQA | {"hidden_size": 32, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2,
               "mamba_d_state": 8}, d_head=8, layers=(1,),
    ),
    "llama4": Family("llama4_text", WIDE | {"num_local_experts": 2, "intermediate_size_mlp": 32}, d_head=8),
    "helium": Family("helium", GQA | {"head_dim": 6}),
    "ernie4_5_moe": Family("ernie4_5_moe", GQA | {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 16}),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", WIDE | {"num_experts": 2, "moe_topk": 1}, d_head=8),
    "granitemoe": Family("granitemoe", GQA | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "granitemoeshared": Family("granitemoeshared", GQA | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "minimax_m2": Family("minimax_m2", WIDE | {"num_local_experts": 2, "num_experts_per_tok": 1}, d_head=8),
    "phimoe": Family("phimoe", GQA | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "dots1": Family("dots1", WIDE | ROUTED, d_head=8),
    "glm4_moe": Family("glm4_moe", WIDE | ROUTED, d_head=8),
    "exaone_moe": Family("exaone_moe", WIDE | MOE, d_head=8),
    "exaone4": Family("exaone4", WIDE, d_head=8, place="output"),
    "flex_olmo": Family("flex_olmo", GQA | {"num_experts": 2, "num_experts_per_tok": 1}, place="output"),
    "persimmon": Family("persimmon", BASE | {"hidden_size": 32, "qk_layernorm": False}, 4, 8),
    "xglm": Family("xglm", {"d_model": 24, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32, "vocab_size": 50}, 4),
    "biogpt": Family("biogpt", BASE, 4),
    "electra": Family("electra", BASE | {"embedding_size": 24}, 4, place="post"),
    "mpnet": Family("mpnet", BASE, 4, place="post"),
    "xlm-roberta": Family("xlm-roberta", BASE, 4, place="post"),
    "camembert": Family("camembert", BASE, 4, place="post"),
    "esm": Family("esm", BASE | {"mask_token_id": 4}, 4),
    "modernbert": Family("modernbert", BASE | {"hidden_size": 32}, 4, 8, place="partial"),
    "afmoe": Family(
        "afmoe", WIDE | MOE | {"num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True}, d_head=8,
        place="sandwich",
    ),
    "beam": Family(
        "beam", WIDE | MOE | {"num_experts": 4, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
        d_head=8, place="sandwich",
    ),
    "kolibri1": Family(
        "kolibri1", WIDE | MOE | {"shared_expert_intermediate_size": 16}, d_head=8, place="sandwich"
    ),
    "hyperclovax": Family("hyperclovax", WIDE | {"use_post_norm": False}, d_head=8),
    "hyperclovax-post-norm": Family("hyperclovax", WIDE | {"use_post_norm": True}, d_head=8, place="sandwich"),
    "granite_swa": Family("granite_swa", GQA),
    "granitemoe_swa": Family("granitemoe_swa", GQA | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "cohere_compass_text": Family(
        "cohere_compass_text",
        GQA | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4,
                                                      "mrope_section": [1, 1, 1]}}},
    ),
    "minimax_m3_vl_text": Family(
        "minimax_m3_vl_text",
        WIDE | {"num_local_experts": 2, "num_experts_per_tok": 1, "dense_intermediate_size": 32, "rotary_dim": 4,
                "shared_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse"], "index_head_dim": 8,
                "index_n_heads": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]}, d_head=8,
    ),
    "laguna": Family(
        "laguna", WIDE | MOE | {"num_attention_heads_per_layer": [4, 6], "shared_expert_intermediate_size": 16},
        counts=((4, 2), (6, 2)), d_head=8,
    ),
    "gemma4": Family(
        "gemma4_text", GEMMA4 | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 50},
        counts=((4, 2), (4, 1), (4, 1)), sizes=((8, 8), (12, 12), (12, 12)), layers=(0, 1, 2), place="sandwich",
    ),
    "gemma4_unified": Family(
        "gemma4_unified_text", GEMMA4 | {"attention_k_eq_v": False},
        counts=((4, 2),) * 3, sizes=((8, 8), (12, 12), (12, 12)), layers=(0, 1, 2), place="sandwich",
    ),
    "gemma4-lent-keys": Family(
        "gemma4_text",
        LENT | {"global_head_dim": 12, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
                "use_double_wide_mlp": True},
        counts=((4, 2), (4, 1), (4, 2), (4, 0), (4, 0)), layers=(0, 1, 2, 3, 4), place="sandwich",
        sizes=((8, 8), (12, 12), (8, 8), (8, 8), (12, 12)),
    ),
    "gemma3n": Family(
        "gemma3n_text",
        LENT | {"laurel_rank": 4, "altup_num_inputs": 3, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0]},
        counts=((4, 2), (4, 2), (4, 2), (4, 0), (4, 0)), layers=(0, 1, 2, 3, 4), place="sandwich", d_head=8,
    ),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        WIDE | {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "v_head_dim": 5,
                "num_key_value_heads": 1, "num_hidden_layers": 3,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        counts=((4, 1), (4, 2), (4, 1)), sizes=((8, 5),) * 3, layers=(0, 1, 2),
    ),
    "ctrl": Family("ctrl", GPT2 | {"dff": 32}, 4),
    "dbrx": Family(
        "dbrx", {"d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 50,
                 "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
                 "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 24}},
    ),
    "falcon_h1": Family(
        "falcon_h1", GQA | {"hidden_size": 32, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
                            "mamba_d_state": 8, "attention_out_multiplier": 0.5}, d_head=8,
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {k: v for k, v in WIDE.items() if k != "num_hidden_layers"}
        | {"layer_types": ["linear_attention", "full_attention", "mlp", "full_attention", "moe"],
           "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "n_routed_experts": 2,
           "num_experts_per_tok": 1, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
        d_head=8, layers=(1, 3),
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid", {k: v for k, v in LINEAR.items() if k != "head_dim"}, place="output", layers=(1, 3)
    ),
    "recurrent_gemma": Family(
        "recurrent_gemma",
        GQA | {"num_hidden_layers": 4, "block_types": ["recurrent", "attention"], "lru_width": 24,
               "intermediate_size": 64}, layers=(1, 3),
    ),
    "minimax": Family(
        "minimax",
        WIDE | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8,
                "num_local_experts": 2, "num_experts_per_tok": 1, "full_attn_alpha_factor": 1.5},
        d_head=8, layers=(1, 3), place="residual",
    ),
    "modernbert-decoder": Family("modernbert-decoder", BASE | {"hidden_size": 32}, 4, 8, place="partial"),
    "bert": Family("bert", BASE, 4, place="post"),
    "roberta": Family("roberta", BASE, 4, place="post"),
    "distilbert": Family(
        "distilbert",
        {"dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, "vocab_size": 50, "max_position_embeddings": 64},
        4, place="post",
    ),
}  # fmt: skip

MLA = BASE | {"num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
              "qk_rope_head_dim": 4, "v_head_dim": 5}  # fmt: skip
SPARSE = {"index_topk": 50, "index_head_dim": 8, "index_n_heads": 2}  # picks every token
LATENT: dict[str, Family] = {
    "deepseek_v3": Family("deepseek_v3", MLA | ROUTED | {"attention_bias": True}, 4),
    "deepseek_v3-dense-query": Family("deepseek_v3", MLA | ROUTED | {"q_lora_rank": None}, 4),
    "deepseek_v2": Family("deepseek_v2", MLA | ROUTED, 4),
    "deepseek_v32": Family("deepseek_v32", MLA | ROUTED | SPARSE, 4),
    "glm_moe_dsa": Family("glm_moe_dsa", MLA | ROUTED | SPARSE, 4),
    "glm4_moe_lite": Family("glm4_moe_lite", MLA | ROUTED, 4),
    "axk1": Family("axk1", MLA | ROUTED, 4),
    "mistral4": Family("mistral4", MLA | ROUTED, 4),
    "youtu": Family("youtu", MLA, 4),
    "dots3_note_text": Family(
        "dots3_note_text",
        MLA | SPARSE | {f"swa_{key}": MLA[key] for key in ("num_attention_heads", "num_key_value_heads", "q_lora_rank",
                                                           "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")}
        | {"layer_types": ["indexed_attention", "sliding_attention"], "head_dim": 10, "swa_head_dim": 10,
           "attention_bias": True, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
           "shared_experts_intermediate_size": 16}, 4,
    ),
    "hy_v4": Family(
        "hy_v4", MLA | SPARSE | {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
                                 "swiglu_limit": 1e3, "hc_mult": 3, "indexer_types": ["full", "shared"]}, 4,
    ),
    "minicpm3": Family("minicpm3", MLA, 4),
    "minicpm3-wide-rotary": Family("minicpm3", MLA | {"qk_rope_head_dim": 8, "q_lora_rank": None}, 4),
    "longcat_flash": Family(
        "longcat_flash",
        {k: v for k, v in MLA.items() if k not in ("num_hidden_layers", "intermediate_size")}
        | {"num_layers": 1, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "n_routed_experts": 2, "moe_topk": 2,
           "zero_expert_num": 1, "head_dim": 4}, 4,
    ),
    "kimi_linear": Family(
        "kimi_linear",
        MLA | {"q_lora_rank": None, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
               "linear_head_dim": 8, "linear_num_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
               "moe_intermediate_size": 16}, 4, layers=(1, 3),
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        {k: v for k, v in MLA.items() if k != "q_lora_rank"}
        | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 8,
           "num_local_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
           "moe_intermediate_size": 16}, 4, layers=(1, 3),
    ),
}  # fmt: skip


def build(family: Family, seed: int = 0) -> Any:
    """The model in float32, evaluation mode, every parameter random (fresh ones would be 1 and 0)."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    if family.around is None:
        config = transformers.AutoConfig.for_model(family.model_type, **family.config)
    else:
        outer, rest = family.around
        text = family.config | {"model_type": family.model_type}
        config = transformers.AutoConfig.for_model(outer, text_config=text, **rest)
    auto = transformers.AutoModelForMaskedLM if family.model_type in MASKED else transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = transformers.AutoModelForMultimodalLM
    if family.model_type == "mistral4":  # its automatic class is the one with pictures
        config._attn_implementation = "eager"
        model = transformers.Mistral4ForCausalLM(config).eval()
    else:
        model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.2 * noise if parameter.ndim == 1 else 0.15 * noise)
    return model


@contextmanager
def recorded(modules: dict[str, Any]):
    """Input and output of modules during a forward pass."""
    seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def keep(label: str):
        return lambda module, args, kwargs, out: seen.__setitem__(
            label, tuple(x.detach().numpy()[0] for x in ((args or tuple(kwargs.values()))[0], out))
        )

    handles = [module.register_forward_hook(keep(label), with_kwargs=True) for label, module in modules.items()]
    yield seen
    for handle in handles:
        handle.remove()


class Run:
    """One forward pass of a small model together with headspan's view of its saved checkpoint."""

    def __init__(self, family: Family, folder: Any) -> None:
        self.family = family
        self.model = build(family)
        self.model.save_pretrained(folder)
        self.weights = CheckpointWeights(open_source(str(folder)))
        where = self.where = CheckpointWeights(by_modules(self.model))._map  # files of some families keep other names
        modules = {f"{role}{layer}": where.module(role, layer) for role in ROLES for layer in self.weights.layers}
        if where.entry.final_norm:
            modules["final"] = where.in_body(where.entry.final_norm)
        if where.entry.output_norm:
            modules |= {f"added{n}": where.in_layer(n, where.entry.output_norm[0]) for n in self.weights.layers}
        # Models say what their layers give: not what they read of several streams, nor which layers they passed over.
        fronts = where.entry.streams or family.model_type in PICTURE_LAYERS
        if fronts:
            modules |= {f"front{n}": where.in_layer(n, where.entry.norm[0]) for n in self.weights.layers}
        hooked = {label: self.model.get_submodule(name) for label, name in modules.items()}
        hooked["logits"] = self.model.get_output_embeddings()
        import torch

        ids = self.ids = torch.arange(1, 8)[None] * 5 % 50
        # Rotary embeddings do nothing at position 0. The mask says that this is one sequence nevertheless.
        kwargs = {"attention_mask": torch.ones_like(ids)}
        if "position_ids" in _parameters(self.model):
            kwargs["position_ids"] = torch.zeros_like(ids)
        with torch.no_grad(), recorded(hooked) as self.seen:
            out = self.model(ids, output_attentions=True, output_hidden_states=True, use_cache=False, **kwargs)
        self.stream = [h.numpy()[0] for h in out.hidden_states]
        if fronts:
            self.stream = [self.seen[f"front{n}"][0] if n in self.weights.layers else np.zeros(0)
                           for n in range(self.weights.n_layers)]  # fmt: skip
        pattern = (ids.shape[1],) * 2  # linear attention may give something of another shape
        attentions = [a.numpy()[0] for a in out.attentions if a is not None and a.shape[2:] == pattern]
        self.attention = dict(zip(self.weights.layers, attentions, strict=True))
        self.logits = out.logits.numpy()[0]

    def block(self, layer: int) -> Any:
        return self.model.get_submodule((self.where.prefix + self.where.entry.layer.format(layer)).rstrip("."))

    def project(self, role: str, layer: int) -> np.ndarray:
        """(token, head, d_head) vectors from our weights and the model's own attention input."""
        layer = self.weights.layer_of(role, layer)
        x = self.seen[f"{role}{layer}"][0]
        vectors = np.einsum("td,hdm->thm", x, self.weights.read(role, layer))
        bias = self.weights.bias(role, layer)
        return (vectors if bias is None else vectors + bias)[..., : self.width(role, layer)]

    def width(self, role: str, layer: int) -> int:
        """Columns of the weights of one layer, without padding to the width of other layers."""
        return int(self.weights.widths(role)[self.weights.ports.span(role, self.weights.layer_of(role, layer))][0])

    def per_query(self, layer: int, vectors: np.ndarray) -> np.ndarray:
        """Vectors (token, head, m) of key/value heads, once for each query head."""
        return np.repeat(vectors, len(self.weights.heads_in("Q", layer)) // vectors.shape[1], axis=1)


def _parameters(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(ours, theirs, atol=tolerance * max(1.0, np.abs(theirs).max()), rtol=0)


def normalise(norm: Any, x: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True) if norm.kind == "layer" else x
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + norm.eps) * norm.gain
    return x if norm.bias is None else x + norm.bias
