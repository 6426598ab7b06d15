"""Convert the sizes in configs with unusual keys to the usual keys.

>>> falcon_sizes({"multi_query": True})["num_key_value_heads"]
1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headspan.checkpoints.untrusted import config_part
from headspan.models.families.entry import Config


def multi_query_sizes(config: Config) -> Config:
    """One key/value head, or one for every query head; the number in the config is ignored."""
    return {"num_key_value_heads": 1 if config.get("multi_query", True) else None, "num_kv_heads": None}


def falcon_sizes(config: Config) -> Config:
    return {} if config.get("new_decoder_architecture", False) else multi_query_sizes(config)


def dbrx_sizes(config: Config) -> Config:
    inner = config_part(config, "attn_config")
    return {"num_key_value_heads": inner.get("kv_n_heads", 1)} if inner else {}


def laguna_sizes(config: Config) -> Config:
    per_layer = config.get("num_attention_heads_per_layer")
    return {"num_attention_heads": per_layer} if per_layer else {}


def deci_sizes(config: Config) -> Config:
    """Blocks from architecture search: each gives its number of query heads per key/value head, or has no attention."""
    blocks, heads = config.get("block_configs"), config.get("num_attention_heads")
    if not isinstance(blocks, (list, tuple)) or type(heads) is not int:
        per_layer = config.get("num_key_value_heads_per_layer")
        return {"num_key_value_heads": per_layer} if per_layer else {}
    about = [config_part(block, "attention") for block in blocks]
    attends = [not (part.get("no_op") or part.get("replace_with_linear")) for part in about]
    shared = [_quotient(heads, part.get("n_heads_in_group")) for part in about]
    return {
        "num_attention_heads": [heads * here for here in attends],
        "num_key_value_heads": [count if here else 0 for count, here in zip(shared, attends, strict=True)],
    }


def _quotient(whole: int, part: Any) -> int | float | None:
    """The quotient of two integers; anything else is returned unchanged, so that the error shows it."""
    if type(part) is not int or part <= 0:
        return None
    return whole // part if whole % part == 0 else whole / part


def mimo_sizes(config: Config) -> Config:
    """Layers with a sliding window have twice the key/value heads; ``layer_types`` says which."""
    count, kinds = config.get("num_key_value_heads"), config.get("layer_types")
    if type(count) is not int or not isinstance(kinds, (list, tuple)):
        return {}
    return {"num_key_value_heads": [2 * count if kind == "sliding_attention" else count for kind in kinds]}


def step3_sizes(config: Config) -> Config:
    """Layers with a sliding window have a different number of heads; published files call key/value heads groups."""
    groups = config.get("num_attention_groups", config.get("num_key_value_heads"))
    other, kinds = config_part(config, "attention_other_setting"), config.get("layer_types")
    count = config.get("num_sliding_attention_heads", other.get("num_attention_heads"))
    if count is None or not isinstance(kinds, (list, tuple)):
        return {"num_key_value_heads": groups}
    usual, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    kinds = kinds[:layers] if type(layers) is int else kinds  # layers for multi-token prediction come last
    heads = [count if kind == "sliding_attention" else usual for kind in kinds]
    return {"num_key_value_heads": groups, "num_attention_heads": heads}


def _own_sizes(config: Config) -> dict[int, Mapping[str, Any]] | None:
    """Per-layer sizes as written by transformers, by layer number; keys may be zero-padded ("5" or "05")."""
    if not isinstance(config.get("per_layer_config"), Mapping):
        return None
    own = config["per_layer_config"]
    return {int(key): sizes for key, sizes in own.items() if str(key).isdecimal() and isinstance(sizes, Mapping)}


def gemma4_sizes(config: Config) -> Config:
    """Layers with full attention have a different size and number of heads."""
    kinds, own = config.get("layer_types"), _own_sizes(config)
    if not isinstance(kinds, (list, tuple)):
        return {}
    if own is None:
        same = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        everywhere = {"head_dim": config.get("global_head_dim", 512), **({"num_key_value_heads": same} if same else {})}
        own = {layer: everywhere for layer, kind in enumerate(kinds) if kind == "full_attention"}
    layers = [own.get(layer, {}) for layer in range(len(kinds))]
    return {key: [layer.get(key, config.get(key)) for layer in layers] for key in ("head_dim", "num_key_value_heads")}


_DOTS3_SLIDING = {
    "num_attention_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "qk_nope_head_dim": 192, "v_head_dim": 128,
}  # fmt: skip


def dots3_sizes(config: Config) -> Config:
    """Layers with a sliding window have different head and latent sizes (``swa_…`` in published files)."""
    count, kinds, own = config.get("num_hidden_layers"), config.get("layer_types"), _own_sizes(config)
    if type(count) is not int or not 0 < count < 10**5:
        return {}
    if not isinstance(kinds, (list, tuple)):
        windows = config.get("use_sliding_window", True)
        kinds = ["sliding_attention" if windows and n > 1 and n % 4 != 1 else "full_attention" for n in range(count)]
    if own is None:
        sliding = {key: config.get(f"swa_{key}", usual) for key, usual in _DOTS3_SLIDING.items()}
        whole, free = config.get("swa_head_dim", 256), sliding["qk_nope_head_dim"]
        rotary = whole - free if type(whole) is int and type(free) is int else None
        sliding["qk_rope_head_dim"] = config.get("swa_qk_rope_head_dim", rotary)
        own = {layer: sliding for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
    layers = {layer: own.get(layer, {}) for layer in range(count)}
    heads = [layers[layer].get("num_attention_heads", config.get("num_attention_heads")) for layer in layers]
    return {"layer_types": list(kinds), "num_attention_heads": heads, "_latent_sizes": layers}


def gemma3n_sizes(config: Config) -> Config:
    """Every fifth layer has full attention, unless the config lists them."""
    count = config.get("num_hidden_layers", 35)
    if config.get("layer_types") or type(count) is not int or not 0 < count < 10**5:
        return {}
    kinds = ["full_attention" if number % 5 == 0 else "sliding_attention" for number in range(1, count + 1)]
    return {"num_hidden_layers": count, "layer_types": kinds}
