"""LoRA adapters: PEFT itself makes them and merges them; we must read what its merged model holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import BASE, FAMILIES, GPT2, GQA
from safetensors.numpy import load_file, save_file

import headspan as hs
from headspan.errors import HeadspanError
from headspan.heads import ROLES
from headspan.models.adapters import adapt, is_adapter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORAS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama qkvo": ("llama", GQA, {"target_modules": QKVO}),
    "llama rslora": ("llama", GQA, {"target_modules": QKVO, "use_rslora": True, "lora_alpha": 5}),
    "llama q only": ("llama", GQA, {"target_modules": ["q_proj"]}),
    "llama regex": ("llama", GQA, {"target_modules": r".*layers\.1\.self_attn\.(q|o)_proj"}),
    "llama all-linear": ("llama", GQA, {"target_modules": "all-linear"}),
    "llama patterns": ("llama", GQA, {
        "target_modules": QKVO, "rank_pattern": {"v_proj": 2, r"layers\.0\.self_attn\.q_proj": 1},
        "alpha_pattern": {"k_proj": 40, r"^model\.layers\.1\..*o_proj": 3},
    }),
    "llama one layer": ("llama", GQA, {"target_modules": QKVO, "layers_to_transform": [1]}),
    "gpt2 fused": ("gpt2", GPT2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gpt2 fused rslora": ("gpt2", GPT2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_rslora": True}),
    "gpt2 all-linear": ("gpt2", GPT2, {"target_modules": "all-linear"}),
    "neox fused": ("gpt_neox", BASE, {"target_modules": ["query_key_value", "dense"]}),
    "phi3 fused": ("phi3", GQA, {"target_modules": ["qkv_proj", "o_proj"]}),
    "bert": ("bert", BASE, {"target_modules": ["query", "key", "value"]}),
    "saved module": ("llama", GQA, {"target_modules": ["q_proj"], "modules_to_save": ["k_proj", "embed_tokens"]}),
    "trained biases": ("gpt2", GPT2, {"target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
    "lora bias": ("gpt2", GPT2, {"target_modules": ["c_attn"], "lora_bias": True, "fan_in_fan_out": True}),
    "embedding": ("llama", GQA, {"target_modules": ["embed_tokens", "v_proj"]}),
}  # fmt: skip


def make(folder: Path, kind: str, config: dict[str, Any], lora: dict[str, Any]) -> tuple[Path, Path, Path]:
    """Directories of a random base, of a random adapter and of PEFT's own merged model."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
    base, adapter, merged = (folder / name for name in ("base", "adapter", "merged"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(base)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=3, **{"lora_alpha": 7, "task_type": "CAUSAL_LM"} | lora))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name or "modules_to_save" in name or (parameter.requires_grad and name.endswith("bias")):
                parameter.normal_(0.0, 0.2)
    tuned.save_pretrained(adapter)
    tuned.merge_and_unload().save_pretrained(merged)
    return base, adapter, merged


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, Path, Path]:
    return make(tmp_path, *LORAS["llama qkvo"])


def config_of(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LORAS)
def test_weights_are_those_that_peft_merges(case: str, tmp_path: Path) -> None:
    base, adapter, merged = make(tmp_path, *LORAS[case])
    original, expected = hs.open(base), hs.open(merged)
    weights = adapt(original, adapter)
    moved = 0.0
    for layer in weights.layers:
        for role in ROLES:
            seen, right = weights.read(role, layer), expected.read(role, layer)
            assert np.abs(seen - right).max() < 1e-5, (role, layer)
            moved = max(moved, np.abs(seen - original.read(role, layer)).max())
            assert weights.changes(role, layer) == (np.abs(right - original.read(role, layer)).max() > 1e-3)
            bias, wanted = weights.bias(role, layer), expected.bias(role, layer)
            assert (bias is None) == (wanted is None)
            assert bias is None or wanted is None or np.abs(bias - wanted).max() < 1e-5
    assert moved > 0.05
    assert np.abs(weights.embedding() - expected.embedding()).max() < 1e-5
    assert np.abs(weights.unembedding_rows(7, 19) - expected.unembedding_rows(7, 19)).max() < 1e-5
    assert weights.fingerprint() != original.fingerprint()
    assert not weights.reopenable
