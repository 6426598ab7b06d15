"""A Hugging Face config from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headspan.checkpoints.gguf.family import Family

About = Callable[[str], Any]
"""Returns the value of a metadata key without the architecture prefix, or None."""

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


def make_config(family: Family, metadata: Mapping[str, Any], tensor_names: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face config from GGUF metadata. ``_unread`` is the reason if a family cannot be read."""
    architecture = str(metadata.get("general.architecture"))

    def about(key: str) -> Any:
        return metadata.get(f"{architecture}.{key}")

    config: dict[str, Any] = {"model_type": family.model_type, "_gguf": True}
    if family.unread:
        config["_unread"] = family.unread
    config |= {hf_key: value for key, hf_key in _CONFIG_KEYS.items() if (value := about(key)) is not None}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and isinstance(tokens, list):
        config["vocab_size"] = len(tokens)
    config["tie_word_embeddings"] = "output.weight" not in tensor_names
    if "kv_lora_rank" in config:
        config |= _latent_sizes(about)
    elif "head_dim" not in config:
        config |= _even_heads(config)
    if family.config is not None:
        config |= family.config(config, about)
    return _without_further_layers(config, about("nextn_predict_layers"))


def _even_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """The head size if a file leaves it out, by llama.cpp's rule (families have other defaults)."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if type(width) is not int or type(heads) is not int or heads < 1 or width % heads:
        return {}
    return {"head_dim": width // heads}


def _without_further_layers(config: dict[str, Any], further: Any) -> dict[str, Any]:
    """Blocks for multi-token prediction, which files count as layers but configs do not."""
    count = config.get("num_hidden_layers")
    if type(count) is not int or type(further) is not int or not 0 < further < count:
        return config
    cut = {key: value[:-further] for key, value in config.items() if isinstance(value, list) and len(value) == count}
    return {**config, **cut, "num_hidden_layers": count - further}


def _latent_sizes(about: About) -> dict[str, Any]:
    """Sizes of latent attention; files that keep the latent compressed name the sizes of heads ``…_mla``."""

    def length(what: str) -> Any:
        found = about(f"attention.{what}_length_mla")
        return about(f"attention.{what}_length") if found is None else found

    whole, rotary = length("key"), about("rope.dimension_count")
    free = whole - rotary if type(whole) is int and type(rotary) is int else None
    return {"qk_nope_head_dim": free, "qk_rope_head_dim": rotary, "v_head_dim": length("value")}


# Metadata of single families, named by their entries in the table.


def one_key_value_head(config: Mapping[str, Any], about: About) -> dict[str, Any]:
    """GPT-BigCode: one key/value head or one for every query head."""
    return {"multi_query": config.get("num_key_value_heads", config.get("num_attention_heads")) == 1}


def falcon_layout(config: Mapping[str, Any], about: About) -> dict[str, Any]:
    heads = config.get("num_attention_heads")
    shared = config.get("num_key_value_heads", heads)
    return {"multi_query": shared == 1, "new_decoder_architecture": shared not in (1, heads)}


def value_length(config: Mapping[str, Any], about: About) -> dict[str, Any]:
    """Values have their own size."""
    found = about("attention.value_length")
    return {} if found is None else {"v_head_dim": found}


def windows(config: Mapping[str, Any], about: About) -> dict[str, Any]:
    """Gemma: which layers use a sliding window, the heads of both kinds, and layers without their own keys."""
    found: dict[str, Any] = {"num_kv_shared_layers": about("attention.shared_kv_layers") or 0}
    found["enable_moe_block"] = bool(config.get("num_local_experts"))
    pattern, wide, narrow = (about(f"attention.{key}") for key in _WINDOW_KEYS)
    if not isinstance(pattern, list):
        return found
    found["layer_types"] = ["sliding_attention" if window else "full_attention" for window in pattern]
    if narrow is None:
        return found
    counts = config.get("num_key_value_heads")
    counts = counts if isinstance(counts, list) else [counts] * len(pattern)
    found["per_layer_config"] = {
        str(layer): {"head_dim": narrow if window else wide, "num_key_value_heads": count}
        for layer, (window, count) in enumerate(zip(pattern, counts, strict=False))
    }
    return {**found, "head_dim": narrow, "global_head_dim": wide}


_WINDOW_KEYS = ("sliding_window_pattern", "key_length", "key_length_swa")
