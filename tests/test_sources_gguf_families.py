"""The same random model as a Hugging Face directory and as a GGUF file gives the same heads, family by family.

The GGUF file is written with the gguf package: its name map, and the changes llama.cpp's converter makes to each
family's tensors, done here in the forward direction.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headspan.heads import ROLES, Role
from headspan.models.mlp import Mlps
from headspan.models.weights import open as open_weights
from headspan.sources import open_source

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEADS, KV, D_HEAD, D_MODEL = 4, 2, 8, 32
# general.architecture → model_type, and what the converter does to its Q, K and V
FAMILIES = {
    "llama": ("llama", "rope"), "granite": ("granite", "rope"), "smollm3": ("smollm3", "rope"),
    "olmo": ("olmo", "rope"), "qwen2": ("qwen2", ""), "qwen3": ("qwen3", ""), "qwen2moe": ("qwen2_moe", ""),
    "qwen3moe": ("qwen3_moe", ""), "gemma": ("gemma", "plus one"), "gemma2": ("gemma2", "plus one"),
    "gemma3": ("gemma3_text", "plus one"), "nemotron": ("nemotron", "plus one"), "phi2": ("phi", ""),
    "phi3": ("phi3", ""), "starcoder2": ("starcoder2", ""), "stablelm": ("stablelm", ""), "olmo2": ("olmo2", ""),
    "olmoe": ("olmoe", ""), "command-r": ("cohere", ""), "cohere2": ("cohere2", ""), "gpt-oss": ("gpt_oss", ""),
    "glm4": ("glm4", ""), "gpt2": ("gpt2", "transpose"), "starcoder": ("gpt_bigcode", ""), "mpt": ("mpt", ""),
    "bloom": ("bloom", "ungroup"), "gptneox": ("gpt_neox", "ungroup"), "falcon": ("falcon", "ungroup"),
    "bert": ("bert", ""),
}  # fmt: skip
ONE_KV_EACH = ("phi", "gpt2", "mpt", "bloom", "gpt_neox", "bert")  # families without shared heads, or tested so


def make_model(model_type: str) -> Any:
    """A random model whose norms are not all ones."""
    kv = HEADS if model_type in ONE_KV_EACH else KV
    sizes: dict[str, Any] = {
        "hidden_size": D_MODEL, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": kv,
        "head_dim": D_HEAD, "intermediate_size": 32, "moe_intermediate_size": 8, "num_experts": 4,
        "num_local_experts": 4, "vocab_size": 64, "pad_token_id": 0,
    }  # fmt: skip
    if model_type in ("gpt2", "gpt_bigcode"):
        sizes = {"n_embd": D_MODEL, "n_layer": 2, "n_head": HEADS, "vocab_size": 64}
    elif model_type == "mpt":
        sizes = {"d_model": D_MODEL, "n_layers": 2, "n_heads": HEADS, "vocab_size": 64}
    elif model_type == "falcon":
        sizes = {**sizes, "new_decoder_architecture": True, "num_kv_heads": KV}
        del sizes["head_dim"]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    factory = transformers.AutoModel if model_type == "bert" else transformers.AutoModelForCausalLM
    model = factory.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def kv_heads(model_type: str) -> int:
    return 1 if model_type == "gpt_bigcode" else HEADS if model_type in ONE_KV_EACH else KV


def convert(name: str, array: np.ndarray, change: str, kv: int) -> np.ndarray:
    """What llama.cpp's converter stores for a Hugging Face tensor."""
    if change == "rope" and (match := re.search(r"self_attn\.([qk])_proj", name)):
        heads = HEADS if match[1] == "q" else kv
        rows = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
        return rows.swapaxes(1, 2).reshape(array.shape)
    if change == "ungroup" and "query_key_value" in name:
        groups = array.reshape(kv, HEADS // kv + 2, D_HEAD, *array.shape[1:])
        parts = groups[:, :-2], groups[:, -2], groups[:, -1]
        return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
    if change == "transpose" and re.search(r"c_(attn|proj|fc)\.weight", name):
        return array.T
    if change == "plus one" and name.endswith("norm.weight"):
        return array + 1
    return array


def write(path: Path, architecture: str, directory: Path, change: str, kv: int) -> None:
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, 2)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_embedding_length(D_MODEL)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv)
    writer.add_key_length(D_HEAD)
    writer.add_value_length(D_HEAD)
    writer.add_layer_norm_eps(1e-5)
    source = open_source(directory)
    for name, array in stacked_experts(source).items():
        writer.add_tensor(name, array)
    for name in source.names():
        bare = name.removeprefix("transformer.")  # as Bloom's converter reads them
        theirs = next(
            (found for n in (name, bare) if (found := names.get_name(n, try_suffixes=(".weight", ".bias")))), None
        )
        if theirs and ".experts." not in name and source.dtype(name) == "float32":
            writer.add_tensor(theirs, np.ascontiguousarray(convert(name, source.read(name), change, kv)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked_experts(source: Any) -> dict[str, np.ndarray]:
    """The experts of each layer in one tensor, as the converter writes them."""
    found: dict[str, np.ndarray] = {}
    for layer in range(2):
        for ours, theirs in {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}.items():
            names = [f"model.layers.{layer}.mlp.experts.{expert}.{ours}.weight" for expert in range(4)]
            if names[0] in source.names():
                found[f"blk.{layer}.ffn_{theirs}_exps.weight"] = np.stack([source.read(name) for name in names])
    for name in source.names() if "model.layers.0.mlp.experts.gate_up_proj" in source.names() else ():
        if name.endswith("experts.gate_up_proj"):  # gpt-oss: by turns, (expert, in, out)
            start, both = f"blk.{name.split('.')[2]}.ffn_", source.read(name).transpose(0, 2, 1)
            found |= {f"{start}gate_exps.weight": both[:, ::2].copy(), f"{start}up_exps.weight": both[:, 1::2].copy()}
            down = source.read(name.replace("gate_up_proj", "down_proj")).transpose(0, 2, 1)
            found[f"{start}down_exps.weight"] = down.copy()
    return found


@pytest.mark.parametrize("architecture", FAMILIES)
def test_gguf_and_directory_have_the_same_heads(tmp_path, architecture):
    model_type, change = FAMILIES[architecture]
    make_model(model_type).save_pretrained(tmp_path / "hf")
    write(tmp_path / "m.gguf", architecture, tmp_path / "hf", change, kv_heads(model_type))
    original, stored = open_weights(tmp_path / "hf"), open_weights(tmp_path / "m.gguf")
    assert (stored.n_layers, stored.n_heads, stored.n_kv_heads) == (2, HEADS, kv_heads(model_type))
    assert original.ports == stored.ports
    for layer in range(2):
        for role in ROLES:
            np.testing.assert_array_equal(stored.read(role, layer), original.read(role, layer))
            ours, theirs = stored.bias(role, layer), original.bias(role, layer)
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                np.testing.assert_array_equal(ours, theirs)
        norms = (stored.norm, original.norm), (stored.output_norm, original.output_norm)
        for ours, theirs in ((first(layer), second(layer)) for first, second in norms):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                np.testing.assert_allclose(ours.gain, theirs.gain, rtol=1e-6)
    assert stored.foldable == original.foldable
    check_neurons(stored, original)


def check_neurons(stored: Any, original: Any) -> None:
    ours, theirs = Mlps(stored), Mlps(original)
    assert ours.parallel == theirs.parallel
    for layer in range(2):
        pairs = list(zip(ours.parts(layer), theirs.parts(layer), strict=True))
        assert pairs
        for mine, other in pairs:
            assert (mine.experts, mine.neurons) == (other.experts, other.neurons)
            for role in (Role.R, Role.W):
                for expert in range(mine.experts):
                    found = ours.read(layer, mine, role, expert)
                    np.testing.assert_array_equal(found, theirs.read(layer, other, role, expert))
        for first, second in ((ours.norm, theirs.norm), (ours.output_norm, theirs.output_norm)):
            assert (first(layer) is None) == (second(layer) is None)
            if first(layer) is not None:
                np.testing.assert_allclose(first(layer).gain, second(layer).gain, rtol=1e-6)
