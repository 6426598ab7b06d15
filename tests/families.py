"""One small model of every family in the table, built with transformers' own classes and random everywhere."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from headspan.heads import ROLES
from headspan.models.checkpoint import CheckpointWeights
from headspan.sources import open_source

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
ROUTED = {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
          "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
MASKED = ("bert", "camembert", "distilbert", "electra", "esm", "eurobert", "modernbert", "mpnet", "roberta",
          "xlm-roberta")  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A transformers config, and what opening its model must show."""

    model_type: str
    config: dict[str, Any]
    n_kv_heads: int = 2
    d_head: int = 6
    place: str = "pre"
    layers: tuple[int, ...] = (0, 1)


FAMILIES: dict[str, Family] = {
    "gpt2": Family("gpt2", GPT2, 4),
    "gpt_neo": Family(
        "gpt_neo",
        {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
         "vocab_size": 50, "max_position_embeddings": 64}, 4,
    ),
    "gptj": Family("gptj", GPT2 | {"rotary_dim": 4, "n_embd": 32}, 4, 8),
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
    "bert": Family("bert", BASE, 4, place="post"),
    "roberta": Family("roberta", BASE, 4, place="post"),
    "distilbert": Family(
        "distilbert",
        {"dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, "vocab_size": 50, "max_position_embeddings": 64},
        4, place="post",
    ),
}  # fmt: skip


def build(family: Family, seed: int = 0) -> Any:
    """The model in float32, evaluation mode, every parameter random (fresh ones would be 1 and 0)."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family.model_type, **family.config)
    masked = family.model_type in MASKED
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
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
    """One forward pass of a small model beside our view of its saved checkpoint."""

    def __init__(self, family: Family, folder: Any) -> None:
        self.family = family
        self.model = build(family)
        self.model.save_pretrained(folder)
        self.weights = CheckpointWeights(open_source(str(folder)))
        where = self.weights._map
        modules = {f"{role}{layer}": where.module(role, layer) for role in ROLES for layer in self.weights.layers}
        if where.entry.final_norm:
            modules["final"] = where.in_body(where.entry.final_norm)
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
        attentions = [a.numpy()[0] for a in out.attentions if a is not None]
        self.attention = dict(zip(self.weights.layers, attentions, strict=True))
        self.logits = out.logits.numpy()[0]

    def project(self, role: str, layer: int) -> np.ndarray:
        """(token, head, d_head) vectors from our weights and the model's own attention input."""
        x = self.seen[f"{role}{layer}"][0]
        vectors = np.einsum("td,hdm->thm", x, self.weights.read(role, layer))
        bias = self.weights.bias(role, layer)
        return vectors if bias is None else vectors + bias


def _parameters(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(ours, theirs, atol=tolerance * max(1.0, np.abs(theirs).max()), rtol=0)


def normalise(norm: Any, x: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True) if norm.kind == "layer" else x
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + norm.eps) * norm.gain
    return x if norm.bias is None else x + norm.bias
