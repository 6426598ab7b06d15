"""Directories and safetensors files, against the safetensors package, torch and transformers as oracles."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headspan.checkpoints.base import TensorSource
from headspan.checkpoints.mapping import MappingSource
from headspan.checkpoints.opening import open_source
from headspan.checkpoints.safetensors_file import SafetensorsFile
from headspan.vocabulary.errors import HeadspanError

ALL_16_BIT = np.arange(65536, dtype=np.uint16)


def make_directory(path: Path, tensors: dict[str, np.ndarray], config: dict | None = None) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config or {"model_type": "gpt2"}))
    return path


def same_bits(ours: np.ndarray, oracle: np.ndarray) -> bool:
    """Equal numbers, with NaN equal to NaN and the sign of zero kept."""
    same_value = (ours == oracle) | (np.isnan(ours) & np.isnan(oracle))
    return bool(np.all(same_value & (np.isnan(oracle) | (np.signbit(ours) == np.signbit(oracle)))))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny Llama saved by transformers in several shards, and its tensors."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    path = tmp_path_factory.mktemp("sharded")
    model.save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path, {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_sharded_checkpoint_equals_the_model(sharded):
    path, tensors = sharded
    with open_source(path) as source:
        assert set(source.names()) == set(tensors)
        assert source.config["model_type"] == "llama"
        for name, expected in tensors.items():
            assert source.shape(name) == expected.shape
            assert source.dtype(name) == "float32"
            assert source.nbytes(name) == expected.nbytes
            np.testing.assert_array_equal(source.read(name), expected)
            np.testing.assert_array_equal(source.read(name, slice(1, 5)), expected[1:5])
        assert {file.name for file in source.files()} == {file.name for file in path.glob("*.safetensors")}


def test_real_gpt2_equals_the_safetensors_package(gpt2_dir):
    source = open_source(str(gpt2_dir))
    expected = load_file(gpt2_dir / "model.safetensors")
    assert set(source.names()) == set(expected)
    for name in sorted(expected)[::17]:
        np.testing.assert_array_equal(source.read(name), expected[name])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_every_16_bit_pattern_is_read_exactly(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    values = ALL_16_BIT.view(dtype).reshape(256, 256)
    source = open_source(make_directory(tmp_path, {"x": values}))
    torch_dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[np.dtype(dtype).name]
    oracle = torch.from_numpy(ALL_16_BIT.astype(np.int32).astype(np.int16)).view(torch_dtype).float().numpy()
    ours = source.read("x")
    assert ours.dtype == np.float32
    assert source.dtype("x") == np.dtype(dtype).name
    assert same_bits(ours.ravel(), oracle)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_every_8_bit_pattern_is_read_exactly(tmp_path, name):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    bits = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    tensor = bits.view(getattr(torch, name)).reshape(16, 16)
    make_directory(tmp_path, {"y": np.zeros(1, np.float32)})
    save_torch({"x": tensor}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert source.dtype("x") == name
    assert same_bits(source.read("x"), tensor.float().numpy())


def test_float8_blocks_are_scaled_as_transformers_scales_them(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    random = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 12, generator=random).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3, generator=random) + 0.5
    config = {"model_type": "qwen3", "quantization_config": {"weight_block_size": [8, 4]}}
    make_directory(tmp_path, {"y": np.zeros(1, np.float32)}, config)
    save_torch({"w.weight": weight, "w.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    expected = np.kron(scale.numpy(), np.ones((8, 4), np.float32))[:20] * weight.float().numpy()
    source = open_source(tmp_path)
    np.testing.assert_array_equal(source.read("w.weight"), expected)
    np.testing.assert_array_equal(source.read("w.weight", slice(5, 13)), expected[5:13])


def test_float64_stays_float64(tmp_path):
    values = np.random.default_rng(0).normal(size=(5, 7))
    ours = open_source(make_directory(tmp_path, {"x": values})).read("x")
    assert ours.dtype == np.float64
    np.testing.assert_array_equal(ours, values)


def test_scalars_and_empty_tensors(tmp_path):
    source = open_source(make_directory(tmp_path, {"a": np.array(3, np.float32), "b": np.empty((0, 4), np.float32)}))
    assert source.read("a").shape == ()
    assert source.read("a") == 3
    assert source.read("b").shape == (0, 4)


def test_integers_are_listed_but_not_taken_for_weights(tmp_path):
    source = open_source(make_directory(tmp_path, {"q": np.ones((2, 2), np.int8)}))
    assert source.dtype("q") == "int8"
    with pytest.raises(HeadspanError, match="q holds int8 numbers"):
        source.read("q")


def test_steps_are_refused(tmp_path):
    source = open_source(make_directory(tmp_path, {"x": np.ones((4, 2), np.float32)}))
    with pytest.raises(HeadspanError, match="one run"):
        source.read("x", slice(0, 4, 2))


def test_only_the_asked_tensor_is_read(tmp_path):
    """The file is sparse and has 40 GB of MLP: nothing but a lazy reader gets through this."""
    attention = np.arange(12, dtype=np.float32).reshape(3, 4)
    mlp_bytes = 40 * 2**30
    header = {
        "attn": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "mlp": {"dtype": "F32", "shape": [mlp_bytes // 4], "data_offsets": [48, 48 + mlp_bytes]},
    }
    raw = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw + attention.tobytes())
        file.truncate(8 + len(raw) + 48 + mlp_bytes)
    (tmp_path / "config.json").write_text("{}")
    source = open_source(tmp_path)
    np.testing.assert_array_equal(source.read("attn"), attention)
    assert len(source.fingerprint(["attn"])) == 64


def test_broken_tensors_that_are_not_needed_do_no_harm(tmp_path):
    attention = np.ones((2, 2), np.float32)
    header = {
        "attn": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "mlp.up": {"dtype": "F3_NEW", "shape": [1], "data_offsets": [16, 24]},
        "mlp.down": {"dtype": "F32", "shape": [7, 7], "data_offsets": [24, 32]},
    }
    raw = json.dumps(header).encode()
    content = struct.pack("<Q", len(raw)) + raw + attention.tobytes() + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    source = open_source(tmp_path)
    np.testing.assert_array_equal(source.read("attn"), attention)
    for name in ("mlp.up", "mlp.down"):
        with pytest.raises(HeadspanError, match=name):
            source.read(name)


def test_shards_that_are_not_needed_may_be_missing(sharded, tmp_path):
    path, tensors = sharded
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = "model.layers.1.self_attn.q_proj.weight"
    for shard in set(index.values()) - {index[wanted]}:
        (copy / shard).unlink()
    source = open_source(copy)
    np.testing.assert_array_equal(source.read(wanted), tensors[wanted])
    gone = next(name for name, shard in index.items() if shard != index[wanted])
    with pytest.raises(HeadspanError, match="no such file"):
        source.read(gone)


def test_shards_without_an_index_are_joined(sharded, tmp_path):
    path, tensors = sharded
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    (copy / "model.safetensors.index.json").unlink()
    assert set(open_source(copy).names()) == set(tensors)


def test_a_single_file_uses_the_config_in_its_folder(tmp_path):
    make_directory(tmp_path, {"x": np.ones(2, np.float32)}, {"model_type": "opt"})
    source = open_source(tmp_path / "model.safetensors")
    assert source.config == {"model_type": "opt"}
    assert list(source.names()) == ["x"]


def test_hub_cache_layout_with_links_works(tmp_path):
    repo = tmp_path / "models--a--b"
    blobs, snapshot = repo / "blobs", repo / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"x": np.ones(3, np.float32)}, blobs / "abc")
    (blobs / "def").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "config.json").symlink_to("../../blobs/def")
    np.testing.assert_array_equal(open_source(snapshot).read("x"), np.ones(3, np.float32))


def test_fingerprint_depends_on_content_alone(tmp_path):
    tensors = {"x": np.arange(50_000, dtype=np.float32), "y": np.ones(3, np.float32)}
    first = open_source(make_directory(tmp_path / "a", tensors)).fingerprint()
    os.utime(tmp_path / "a" / "model.safetensors", (1, 1))
    assert open_source(tmp_path / "a").fingerprint() == first
    assert open_source(make_directory(tmp_path / "b", tensors)).fingerprint() == first
    assert open_source(make_directory(tmp_path / "c", tensors, {"model_type": "opt"})).fingerprint() != first
    renamed = {"x": tensors["x"], "z": tensors["y"]}
    assert open_source(make_directory(tmp_path / "d", renamed)).fingerprint() != first
    changed = {"x": tensors["x"] + 1, "y": tensors["y"]}
    assert open_source(make_directory(tmp_path / "e", changed)).fingerprint() != first


@pytest.mark.parametrize("what", ["grow", "rewrite", "replace", "delete"])
def test_a_file_changed_in_use_is_noticed(tmp_path, what):
    path = make_directory(tmp_path, {"x": np.ones(64, np.float32)}) / "model.safetensors"
    source = open_source(tmp_path)
    source.check_unchanged()
    if what == "grow":
        path.write_bytes(path.read_bytes() + b"\0")
    elif what == "rewrite":
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(7, 7))
    elif what == "replace":
        save_file({"x": np.zeros(64, np.float32)}, tmp_path / "new")
        (tmp_path / "new").replace(path)
    else:
        path.unlink()
    with pytest.raises(HeadspanError, match=r"changed while|disappeared while"):
        source.check_unchanged()
    with pytest.raises(HeadspanError, match=r"changed while|no such file"):
        source.read("x")


def test_names_that_do_not_exist(tmp_path):
    source = open_source(make_directory(tmp_path, {"x": np.ones(2, np.float32)}))
    for call in (source.read, source.shape, source.dtype, source.nbytes):
        with pytest.raises(HeadspanError, match="has no tensor named 'nope'"):
            call("nope")


def test_mapping_source_reads_numpy_and_torch():
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float16)
    plain = MappingSource({"x": values}, {})
    live = MappingSource({"x": torch.from_numpy(values.copy())}, {})
    assert plain.dtype("x") == live.dtype("x") == "float16"
    assert plain.nbytes("x") == live.nbytes("x") == 24
    np.testing.assert_array_equal(plain.read("x"), values.astype(np.float32))
    np.testing.assert_array_equal(live.read("x", slice(1, 3)), values[1:3].astype(np.float32))
    assert plain.fingerprint() == live.fingerprint()


def test_what_is_read_can_be_changed_without_harm():
    values = np.ones((2, 2), np.float32)
    source = MappingSource({"x": values}, {})
    source.read("x")[:] = 7
    assert values.max() == 1


def test_demo_notes_that_it_is_random():
    from headspan.checkpoints.demo import random_demo

    source = random_demo()
    assert source.config["model_type"] == "gpt2"
    assert "random" in source.notes[0]
    assert source.fingerprint() == random_demo().fingerprint()
    assert isinstance(open_source("demo"), TensorSource)


def test_a_source_opens_as_itself():
    source = MappingSource({}, {})
    assert open_source(source) is source


def test_safetensors_metadata_is_kept(tmp_path):
    save_file({"x": np.ones(1, np.float32)}, tmp_path / "m.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.metadata == {"format": "pt"}
    assert list(file.names()) == ["x"]


def test_opening_a_directory_loads_neither_torch_nor_gguf(tmp_path):
    make_directory(tmp_path, {"x": np.ones(1, np.float32)})
    code = (
        "import sys; from headspan.checkpoints.opening import open_source; open_source(sys.argv[1]).read('x');"
        "print(sorted({'torch', 'transformers', 'gguf', 'huggingface_hub', 'tokenizers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
