"""The models that benchmarks/run.py scores: files with random weights, and one whose weights are made on each read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.vocabulary.heads import Role
from headspan.vocabulary.ports import PortTable


def complete_gpt2(folder: Path) -> Path:
    """GPT-2 small as a complete checkpoint: real attention weights if available, the rest random."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config())
    real = os.environ.get("HEADSPAN_GPT2_DIR")
    if real:
        from safetensors.torch import load_file

        tensors = load_file(Path(real) / "model.safetensors")
        named = {k if k.startswith("transformer.") else f"transformer.{k}": v for k, v in tensors.items()}
        model.load_state_dict(named, strict=False)
    model.save_pretrained(folder)
    return folder


def random_llama(folder: Path, layers: int, heads: int, d_model: int, d_head: int, dtype: str) -> Path:
    """Random attention tensors of a Llama-shaped model, one shard per layer."""
    import ml_dtypes
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    where = {}
    for layer in range(layers):
        tensors = {}
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shape = (d_model, heads * d_head) if name == "o_proj" else (heads * d_head, d_model)
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = (
                rng.standard_normal(shape, dtype=np.float32) * 0.02
            ).astype(kind)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = np.ones(d_model, kind)
        shard = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, folder / shard)
        where |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": d_model,
        "head_dim": d_head,
        "intermediate_size": 4 * d_model,
        "vocab_size": 32000,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Seeded(AttentionWeights):
    """A model whose weights are generated on each read, in which some heads write what later heads read."""

    architecture, reference, norm_kind, norm_place = "seeded", "seeded", "none", "none"
    not_foldable_reason, vocab_size, tied_embedding = "it has no norm", None, None
    value_bias_is_constant, notes, folding = True, [], "none"

    def __init__(self, layers: int, heads: int, kv: int, d_model: int, d_head: int) -> None:
        self.n_layers, self.n_heads, self.n_kv_heads, self.d_model, self._d_head = layers, heads, kv, d_model, d_head
        self.layers, self.ports = tuple(range(layers)), PortTable.regular(range(layers), heads, kv)

    def d_head(self, role: Role | str) -> int:
        return self._d_head

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        role = Role(role)
        count = self.n_kv_heads if role.shared else self.n_heads
        rng = np.random.default_rng([layer, "QKVO".index(role.value)])
        weights = rng.standard_normal((count, self.d_model, self._d_head), dtype=np.float32)
        if role is Role.K and layer % 8 == 7:  # the first key head reads what a head four layers before it writes
            weights[0] += 2 * np.random.default_rng([layer - 4, 3]).standard_normal(
                (self.d_model, self._d_head), dtype=np.float32
            )
        return weights

    def bias(self, role: Role | str, layer: int) -> None:
        return None

    def storage_dtype(self, role: Role | str, layer: int) -> str:
        return "float32"

    def norm(self, layer: int) -> None:
        return None

    @property
    def provenance(self) -> dict[str, Any]:
        return {"reference": "seeded", "fingerprint": "0" * 64, "attention_hash": "0" * 64}

    def check_unchanged(self) -> None:
        pass


Seeded.__abstractmethods__ = frozenset()  # scoring never calls the others
