"""GGUF files, against the gguf package's own reader, dequantiser and name map, and against transformers' loader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headspan.checkpoints.gguf.families import FAMILIES
from headspan.checkpoints.live import checkpoint_names
from headspan.checkpoints.opening import open_source
from headspan.vocabulary.errors import HeadspanError

gguf = pytest.importorskip("gguf")


def write(
    path: Path,
    tensors: dict[str, np.ndarray],
    architecture: str = "llama",
    types: dict[str, Any] | None = None,
    heads: tuple[int | list[int], int | list[int]] = (4, 2),
    **metadata: Any,
) -> Path:
    """A GGUF file by the gguf package's writer; ``types`` asks for quantised tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count(heads[0])
    writer.add_head_count_kv(heads[1])
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quantisable() -> list[Any]:
    """All types the gguf package can both write and read back."""
    found = []
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.quants.dequantize(gguf.quants.quantize(normal(1, 256), kind), kind)
        except (NotImplementedError, KeyError, AttributeError, TypeError):
            continue
        found.append(kind)
    return found


def readable_only() -> list[Any]:
    """Types the package can dequantise but not write: tested on random blocks."""
    written = set(quantisable())
    return [kind for kind in gguf.quants._type_traits if kind not in written]


@pytest.mark.parametrize("kind", quantisable(), ids=lambda kind: kind.name)
def test_every_quantisation_equals_ggufs_own(tmp_path, kind):
    values = normal(6, 512)
    path = write(tmp_path / "m.gguf", {"blk.0.attn_v.weight": values}, types={"blk.0.attn_v.weight": kind})
    source = open_source(path)
    name = "model.layers.0.self_attn.v_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    ours = source.read(name)
    assert ours.dtype == np.float32
    assert source.shape(name) == ours.shape == (6, 512)
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(source.read(name, slice(2, 5)), expected[2:5])
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    assert source.dtype(name) == plain.get(kind.name, kind.name)


@pytest.mark.parametrize("kind", readable_only(), ids=lambda kind: kind.name)
def test_quantisations_that_only_llama_cpp_writes(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 255, (4, 512 // block * size)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(4)
    writer.add_tensor("blk.0.attn_v.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_source(tmp_path / "m.gguf")
    with np.errstate(all="ignore"):
        ours = source.read("model.layers.0.self_attn.v_proj.weight")
        np.testing.assert_array_equal(ours, gguf.quants.dequantize(raw, kind))
    assert source.nbytes("model.layers.0.self_attn.v_proj.weight") == raw.nbytes


@pytest.fixture(scope="module")
def real_reader(smollm2_gguf):
    return gguf.GGUFReader(smollm2_gguf)


def test_real_file_equals_ggufs_reader_and_transformers(smollm2_gguf, real_reader):
    source = open_source(smollm2_gguf)
    stored = {tensor.name: tensor for tensor in real_reader.tensors}
    assert len(source.names()) == len(stored)
    value = stored["blk.7.attn_v.weight"]
    expected = gguf.quants.dequantize(value.data, value.tensor_type)
    np.testing.assert_array_equal(source.read("model.layers.7.self_attn.v_proj.weight"), expected)
    sizes = {
        "model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "hidden_size": 576, "vocab_size": 49152, "tie_word_embeddings": True, "_gguf": True,
    }  # fmt: skip
    assert sizes.items() <= source.config.items()
    for key, field in real_reader.fields.items():
        if not key.startswith("GGUF."):
            assert source.metadata[key] == field.contents(), key  # type: ignore[attr-defined]


def test_real_file_has_the_rows_of_the_hugging_face_model(smollm2_gguf, real_reader):
    """Named and reordered by transformers' own rules, without the minute in which it builds the whole model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    source = open_source(smollm2_gguf)
    sizes = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    processor = theirs.TENSOR_PROCESSORS["llama"](config=sizes)
    names = theirs.get_gguf_hf_weights_map(model, processor)
    wanted = {f"model.layers.{layer}.self_attn.{role}_proj.weight" for layer in (0, 29) for role in "qkvo"}
    wanted.add("model.norm.weight")
    compared = set()
    for tensor in real_reader.tensors:
        if names[tensor.name] in wanted:
            stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            expected = processor.process(weights=stored, name=tensor.name).weights
            np.testing.assert_allclose(source.read(names[tensor.name]), expected, rtol=0, atol=1e-6)
            compared.add(names[tensor.name])
    assert compared == wanted


def test_real_file_has_its_vocabulary(smollm2_gguf):
    vocabulary = open_source(smollm2_gguf).vocabulary()
    assert vocabulary is not None
    assert vocabulary.size == 49152


# What llama.cpp's converter does to a Hugging Face tensor, in the forward direction.


def rope_order(weight: np.ndarray, heads: int) -> np.ndarray:
    rows = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def ungrouped(weight: np.ndarray, heads: int, kv: int) -> np.ndarray:
    group = weight.reshape(kv, heads // kv + 2, -1, *weight.shape[1:])
    q, k, v = group[:, :-2], group[:, -2], group[:, -1]
    return np.concatenate([part.reshape(-1, *weight.shape[1:]) for part in (q, k, v)])


@pytest.mark.parametrize("architecture", ["llama", "granite", "smollm3", "olmo", "mistral3"])
def test_rotary_order_is_undone(tmp_path, architecture):
    q, k, b = normal(64, 32), normal(32, 32, seed=1), normal(64, seed=2)
    stored = {"blk.1.attn_q.weight": rope_order(q, 4), "blk.1.attn_q.bias": rope_order(b, 4),
              "blk.1.attn_k.weight": rope_order(k, 2)}  # fmt: skip
    source = open_source(write(tmp_path / "m.gguf", stored, architecture))
    attention = "model.layers.1.self_attn."
    np.testing.assert_array_equal(source.read(attention + "q_proj.weight"), q)
    np.testing.assert_array_equal(source.read(attention + "q_proj.weight", slice(3, 40)), q[3:40])
    np.testing.assert_array_equal(source.read(attention + "q_proj.bias"), b)
    np.testing.assert_array_equal(source.read(attention + "k_proj.weight"), k)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "olmo2", "starcoder2", "command-r", "gpt-oss"])
def test_other_families_keep_their_rows(tmp_path, architecture):
    q = normal(64, 32)
    source = open_source(write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": q}, architecture))
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.q_proj.weight"), q)


def test_heads_may_differ_from_layer_to_layer(tmp_path):
    k = normal(32, 32)
    stored = {"blk.1.attn_k.weight": rope_order(k, 4)}
    source = open_source(write(tmp_path / "m.gguf", stored, heads=([4, 8], [2, 4])))
    np.testing.assert_array_equal(source.read("model.layers.1.self_attn.k_proj.weight"), k)
    assert source.config["num_key_value_heads"] == [2, 4]


@pytest.mark.parametrize(
    ("architecture", "heads", "name"),
    [
        ("bloom", (4, 4), "transformer.h.0.self_attention.query_key_value"),
        ("gptneox", (4, 4), "gpt_neox.layers.0.attention.query_key_value"),
        ("falcon", (8, 2), "transformer.h.0.self_attention.query_key_value"),
        ("falcon", (8, 1), "transformer.h.0.self_attention.query_key_value"),
    ],
)
def test_grouped_qkv_is_restored(tmp_path, architecture, heads, name):
    n_heads, kv = heads
    weight, bias = normal((n_heads + 2 * kv) * 8, 64), normal((n_heads + 2 * kv) * 8, seed=1)
    stored = {"blk.0.attn_qkv.weight": ungrouped(weight, *heads), "blk.0.attn_qkv.bias": ungrouped(bias, *heads)}
    source = open_source(write(tmp_path / "m.gguf", stored, architecture, heads=heads))
    np.testing.assert_array_equal(source.read(name + ".weight"), weight)
    np.testing.assert_array_equal(source.read(name + ".bias"), bias)
    if architecture == "falcon":
        assert source.config["new_decoder_architecture"] == (kv == 2)
        assert source.config["multi_query"] == (kv == 1)


def test_conv1d_weights_are_turned_back(tmp_path):
    weight = normal(64, 192)
    stored = {"blk.0.attn_qkv.weight": np.ascontiguousarray(weight.T), "output.weight": normal(32, 64)}
    source = open_source(write(tmp_path / "m.gguf", stored, "gpt2", heads=(4, 4)))
    name = "transformer.h.0.attn.c_attn.weight"
    assert source.shape(name) == (64, 192)
    np.testing.assert_array_equal(source.read(name), weight)
    np.testing.assert_array_equal(source.read(name, slice(10, 20)), weight[10:20])
    assert source.shape("lm_head.weight") == (32, 64)
    assert source.config["tie_word_embeddings"] is False


def test_fused_qkv_is_split_where_the_family_has_three_tensors(tmp_path):
    fused, bias = normal(64, 32), normal(64, seed=3)
    stored = {"blk.0.attn_qkv.weight": fused, "blk.0.attn_qkv.bias": bias}
    source = open_source(write(tmp_path / "m.gguf", stored, "phi2", heads=(4, 2)))
    bounds = {"q": slice(0, 32), "k": slice(32, 48), "v": slice(48, 64)}
    for role, rows in bounds.items():
        name = f"model.layers.0.self_attn.{role}_proj"
        np.testing.assert_array_equal(source.read(name + ".weight"), fused[rows])
        np.testing.assert_array_equal(source.read(name + ".weight", slice(1, 3)), fused[rows][1:3])
        np.testing.assert_array_equal(source.read(name + ".bias"), bias[rows])
        assert source.nbytes(name + ".weight") == fused[rows].nbytes


HUGGING_FACE = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "phi2": "phi", "phi3": "phi3", "gpt2": "gpt2",
    "starcoder2": "starcoder2", "starcoder": "gpt_bigcode", "falcon": "falcon", "stablelm": "stablelm",
    "olmo": "olmo", "olmo2": "olmo2", "olmoe": "olmoe", "granite": "granite", "command-r": "cohere",
    "cohere2": "cohere2", "gpt-oss": "gpt_oss", "smollm3": "smollm3", "bloom": "bloom", "gptneox": "gpt_neox",
    "mpt": "mpt", "nemotron": "nemotron", "glm4": "glm4", "bert": "bert",
}  # fmt: skip
WANTED = re.compile(r"attn|attention\.|norm|ln_|embed|wte|wpe|lm_head|LayerNorm", re.IGNORECASE)
UNNAMED = re.compile(r"rotary|\.bias$|token_type|masked_bias|experts|router|pooler|\.norms\.|_layernorm\.norms")


@pytest.mark.parametrize("architecture", HUGGING_FACE)
def test_names_agree_with_llama_cpp(architecture):
    """Each Hugging Face name, through llama.cpp's own name map and back through our table, is itself."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
        "intermediate_size": 32, "vocab_size": 64, "pad_token_id": 0,
    }  # fmt: skip
    family = HUGGING_FACE[architecture]
    if family in ("gpt2", "gpt_bigcode"):
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    elif family == "mpt":
        sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64}
    elif family == "falcon":
        sizes |= {"new_decoder_architecture": True, "num_kv_heads": 2}
        del sizes["head_dim"]
    config = transformers.AutoConfig.for_model(family, **sizes)
    factory = transformers.AutoModel if family == "bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, 2)
    checked = 0
    for name in checkpoint_names(model):
        if not WANTED.search(name) or UNNAMED.search(name):
            continue
        stem, _, end = name.rpartition(".")
        theirs = names.get_name(name, try_suffixes=(".weight",)) or names.get_name(stem)
        if theirs is None or end == "sinks":
            continue
        stored = theirs if theirs.endswith(".weight") else f"{theirs}.{end}"
        ours = FAMILIES[architecture].hf_name(stored)
        if architecture == "falcon" and name.endswith("ln_mlp.weight"):
            continue  # the norm of the MLP in the 40B layout
        assert ours == name, (stored, ours)
        checked += 1
    assert checked >= 8


def test_metadata_of_unknown_families_keeps_their_name(tmp_path):
    source = open_source(write(tmp_path / "m.gguf", {"x": normal(2, 2)}, "mamba2"))
    assert source.config["model_type"] == "mamba2"
    assert list(source.names()) == ["x"]


def test_latent_attention_is_recognisable(tmp_path):
    source = open_source(write(tmp_path / "m.gguf", {"x": normal(2, 2)}, "deepseek2"))
    assert source.config["model_type"] == "deepseek_v2"


def test_head_dim_comes_from_the_metadata(tmp_path):
    source = open_source(write(tmp_path / "m.gguf", {"x": normal(2, 2)}, "qwen3", qwen3__attention__key_length=96))
    assert source.config["head_dim"] == 96


def test_fingerprint_and_changes(tmp_path):
    values = normal(4, 64)
    first = open_source(write(tmp_path / "a.gguf", {"x": values})).fingerprint()
    assert open_source(write(tmp_path / "b.gguf", {"x": values})).fingerprint() == first
    source = open_source(write(tmp_path / "c.gguf", {"x": values + 1}))
    assert source.fingerprint() != first
    write(tmp_path / "c.gguf", {"x": normal(8, 64), "y": values})
    with pytest.raises(HeadspanError, match="changed while"):
        source.read("x")
    with pytest.raises(HeadspanError, match="changed while"):
        source.check_unchanged()


def test_integer_tensors_are_refused(tmp_path):
    source = open_source(write(tmp_path / "m.gguf", {"x": np.ones((2, 32), np.int8)}))
    with pytest.raises(HeadspanError, match="stored as I8"):
        source.read("x")


def test_directory_with_one_gguf(tmp_path):
    write(tmp_path / "m.gguf", {"x": normal(2, 2)})
    assert open_source(tmp_path).config["model_type"] == "llama"
    write(tmp_path / "n.gguf", {"x": normal(2, 2)})
    with pytest.raises(HeadspanError, match="several models"):
        open_source(tmp_path)


def test_split_files_are_joined(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2", split_max_tensors=2)
    tensors = {f"blk.{layer}.attn_v.weight": normal(4, 8, seed=layer) for layer in range(5)}
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    for reference in (parts[0], parts[2], tmp_path):
        source = open_source(reference)
        assert source.config["model_type"] == "qwen2"
        assert source.files() == parts
        for layer in range(5):
            ours = source.read(f"model.layers.{layer}.self_attn.v_proj.weight")
            np.testing.assert_array_equal(ours, tensors[f"blk.{layer}.attn_v.weight"])
    assert open_source(parts[0]).fingerprint() == open_source(parts[1]).fingerprint()
    parts[1].unlink()
    with pytest.raises(HeadspanError, match="no such file"):
        open_source(parts[0])
