"""PyTorch files and live models, against torch, transformers and TransformerLens as oracles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headspan.checkpoints.opening import open_source
from headspan.vocabulary.errors import HeadspanError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def tiny(family: str, **extra: Any) -> Any:
    """A random model of transformers' own class."""
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 32, "vocab_size": 64, "pad_token_id": 0,
    }  # fmt: skip
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**sizes, **extra}, bos_token_id=0, eos_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config)


def hooked_state(kv: int = 4, norm: bool = True) -> dict[str, Any]:
    """The tensors a HookedTransformer of two layers would save."""
    torch.manual_seed(1)
    state = {"embed.W_E": torch.randn(11, 16), "unembed.W_U": torch.randn(16, 11)}
    shared = "_" if kv < 4 else ""
    for layer in range(2):
        attn = f"blocks.{layer}.attn."
        state |= {attn + "W_Q": torch.randn(4, 16, 5), attn + "W_O": torch.randn(4, 5, 16)}
        state |= {f"{attn}{shared}W_K": torch.randn(kv, 16, 5), f"{attn}{shared}W_V": torch.randn(kv, 16, 5)}
        if norm:
            state |= {f"blocks.{layer}.ln1.w": torch.ones(16), f"blocks.{layer}.ln1.b": torch.zeros(16)}
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_bin_file_equals_torch(tmp_path: Path, dtype):
    tensors = {"a": torch.randn(6, 5).to(dtype), "b": torch.randn(4).to(dtype)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    source = open_source(tmp_path)
    for name, tensor in tensors.items():
        wide = tensor if dtype == torch.float64 else tensor.float()
        np.testing.assert_array_equal(source.read(name), wide.numpy())
        assert source.dtype(name) == str(dtype).removeprefix("torch.")
        assert source.nbytes(name) == tensor.nbytes
    np.testing.assert_array_equal(source.read("a", slice(2, 4)), source.read("a")[2:4])


def test_older_pickle_format_is_read(tmp_path):
    tensor = torch.randn(3, 3)
    torch.save({"x": tensor}, tmp_path / "m.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "config.json").write_text("{}")
    np.testing.assert_array_equal(open_source(tmp_path / "m.pth").read("x"), tensor.numpy())


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_state_dict_inside_a_training_checkpoint(tmp_path, key):
    torch.save({key: {"x": torch.ones(2)}, "epoch": 3}, tmp_path / "m.pt")
    (tmp_path / "config.json").write_text("{}")
    assert list(open_source(tmp_path / "m.pt").names()) == ["x"]


def test_sharded_bin_checkpoint(tmp_path):
    torch.save({"a": torch.ones(2, 2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    index = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text("{}")
    source = open_source(tmp_path)
    assert source.files() == []
    assert source.read("b").tolist() == [0, 0, 0]
    assert [file.name for file in source.files()] == ["pytorch_model-00002-of-00002.bin"]


def test_real_bin_checkpoint_equals_torch(iglm_dir):
    folder = iglm_dir if (iglm_dir / "config.json").exists() else iglm_dir / "IgLM"
    expected = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    source = open_source(folder)
    assert set(source.names()) == set(expected)
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            np.testing.assert_array_equal(source.read(name), tensor.float().numpy())


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_moe", "mixtral", "gpt_neox", "phi3", "gemma2", "gpt_oss"])
def test_live_model_has_the_names_and_numbers_it_would_save(tmp_path, family):
    extra = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 8} if family != "gpt2" else {}
    model = tiny(family, **extra)
    model.save_pretrained(tmp_path)
    saved, live = open_source(tmp_path), open_source(model)
    for name in saved.names():
        if ".experts." not in name:
            np.testing.assert_array_equal(live.read(name), saved.read(name))
    assert live.config["model_type"] == family
    assert live.files() == []
    live.check_unchanged()


def test_live_model_in_bfloat16():
    model = tiny("llama").to(torch.bfloat16)
    source = open_source(model)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert source.dtype(name) == "bfloat16"
    np.testing.assert_array_equal(source.read(name), model.state_dict()[name].float().numpy())
    assert len(source.fingerprint()) == 64


def test_state_dict_with_config():
    model = tiny("llama")
    for config in (model.config, model.config.to_dict()):
        source = open_source((model.state_dict(), config))
        assert source.config["model_type"] == "llama"
        assert "model.layers.0.self_attn.q_proj.weight" in source.names()


def test_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = tiny("llama")
    with pytest.raises(HeadspanError, match="meta device"):
        open_source(model).read("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize("form", ["pth", "safetensors", "memory"])
def test_hooked_transformer_state_gives_its_sizes(tmp_path, kv, form):
    state = hooked_state(kv)
    if form == "memory":
        source = open_source(state)
    elif form == "pth":
        torch.save(state, tmp_path / "model_final.pth")
        source = open_source(tmp_path)
    else:
        from safetensors.torch import save_file

        save_file(state, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"act_fn": "gelu"}))
        source = open_source(tmp_path / "model.safetensors")
        assert source.config["act_fn"] == "gelu"
    expected = {
        "model_type": "transformer_lens", "n_layers": 2, "n_heads": 4, "n_key_value_heads": kv, "d_model": 16,
        "d_head": 5, "normalization_type": "LN",
    }  # fmt: skip
    assert expected.items() <= source.config.items()
    np.testing.assert_array_equal(source.read("blocks.1.attn.W_Q"), state["blocks.1.attn.W_Q"].numpy())


def test_hooked_transformer_without_gains_is_folded_unless_its_config_differs():
    state = hooked_state(norm=False)
    assert open_source(state).config["normalization_type"] == "LNPre"
    assert open_source((state, {"normalization_type": None})).config["normalization_type"] is None


@pytest.fixture(scope="module")
def bridge(tmp_path_factory) -> tuple[Any, dict[str, Any]]:
    """A TransformerBridge over a random GPT-2 with trained-looking norms, and the tensors before wrapping."""
    bridges = pytest.importorskip("transformer_lens.model_bridge")
    model = tiny("gpt2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = tmp_path_factory.mktemp("bridge")
    model.save_pretrained(path)
    return bridges.TransformerBridge.boot_transformers(str(path), hf_model=model), before


def test_transformer_bridge(bridge):
    live, before = bridge
    source = open_source(live)
    assert source.config["model_type"] == "gpt2"
    for name in (name for name in before if "attn" in name or "ln_" in name):
        np.testing.assert_array_equal(source.read(name), before[name].numpy())
    # Compatibility mode folds the norms into per-head weights: those are what must be read then.
    live.enable_compatibility_mode()
    folded = open_source(live)
    assert folded.config["model_type"] == "transformer_lens"
    for layer in range(2):
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            ours = folded.read(f"blocks.{layer}.attn.{name}")
            np.testing.assert_array_equal(ours, getattr(live.blocks[layer].attn, name).detach().numpy())
    query = before["transformer.h.0.attn.c_attn.weight"][:, :32].reshape(32, 4, 8).permute(1, 0, 2)
    by_hand = before["transformer.h.0.ln_1.weight"][None, :, None] * query
    by_hand = by_hand - by_hand.mean(1, keepdim=True)
    np.testing.assert_allclose(folded.read("blocks.0.attn.W_Q"), by_hand.numpy(), atol=1e-5)


@pytest.mark.parametrize("thing", [3, None, [1, 2], {"x": np.ones(2)}, ({"x": np.ones(2)}, 5), object()])
def test_things_that_are_not_a_model(thing):
    with pytest.raises(HeadspanError):
        open_source(thing)
