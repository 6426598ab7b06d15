"""Checkpoints that contradict themselves, hostile configs, and model directories with code in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from headspan.vocabulary.errors import HeadspanError

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 16, "head_dim": 4, "vocab_size": 7, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def tensors(layers: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    found = {"model.embed_tokens.weight": random.normal(size=(7, 16)), "model.norm.weight": np.ones(16)}
    for i in range(layers):
        for name, rows in {"q": 16, "k": 8, "v": 8, "o": 16}.items():
            found[f"model.layers.{i}.self_attn.{name}_proj.weight"] = random.normal(size=(rows, 16))
        found[f"model.layers.{i}.input_layernorm.weight"] = np.ones(16)
    return {name: array.astype(np.float32) for name, array in found.items()}


def write(folder: Path, content: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors() if content is None else content, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def half(content: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    return {name: array for name, array in content.items() if f".layers.{layer}." in name}


def shards(folder: Path, *parts: dict[str, np.ndarray], names: tuple[str, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(parts):
        save_file(part, folder / (names[i] if names else f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_shards_without_an_index_must_be_of_one_model(tmp_path: Path) -> None:
    one, other = tensors(), tensors(seed=1)
    fine = hs.open(shards(tmp_path / "fine", half(one, 0), half(one, 1)))
    np.testing.assert_array_equal(fine.read("Q", 1), hs.open(write(tmp_path / "whole")).read("Q", 1))
    mixed = hs.open(shards(tmp_path / "mixed", half(one, 0), half(other, 1)))  # no name or shape gives it away
    assert any("shards have no index" in note for note in mixed.provenance["notes"])
    with pytest.raises(HeadspanError, match="not the shards of one model"):
        hs.open(shards(tmp_path / "twice", one, half(other, 1)))
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00003.safetensors")
    with pytest.raises(HeadspanError, match="not all shards"):
        hs.open(shards(tmp_path / "sets", half(one, 0), half(other, 1), names=names))
    names = ("a-00001-of-00002.safetensors", "b-00002-of-00002.safetensors")
    with pytest.raises(HeadspanError, match="not all shards"):
        hs.open(shards(tmp_path / "stems", half(one, 0), half(other, 1), names=names))
    with pytest.raises(HeadspanError, match="not all shards"):
        hs.open(shards(tmp_path / "missing", one, names=("model-00001-of-00002.safetensors",)))
    with pytest.raises(HeadspanError, match="incomplete"):
        hs.open(shards(tmp_path / "layer", half(one, 1)))


def test_layers_that_the_config_does_not_count_are_noted(tmp_path: Path) -> None:
    weights = hs.open(write(tmp_path, tensors(4)))
    assert weights.layers == (0, 1)
    assert any("2 more layers" in note for note in weights.notes)
    assert any("2 more layers" in note for note in weights.provenance["notes"])
    done = subprocess.run([sys.executable, "-m", "headspan", "info", str(tmp_path)], capture_output=True, text=True)
    assert "2 more layers" in " ".join(done.stdout.split())


def test_more_layers_in_the_config_than_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(HeadspanError, match="incomplete"):
        hs.open(write(tmp_path, num_hidden_layers=3))


@pytest.mark.parametrize("number", ["01", "٠", "00"])
def test_layers_numbered_in_two_ways(tmp_path: Path, number: str) -> None:
    content = tensors()
    content[f"model.layers.{number}.self_attn.q_proj.weight"] = content["model.layers.1.self_attn.q_proj.weight"] + 1
    with pytest.raises(HeadspanError, match="could mean"):
        hs.open(write(tmp_path, content))


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention"] * 3, "full_attention", [["x"]] * 3])
def test_kinds_of_another_number_of_layers(tmp_path: Path, kinds: Any) -> None:
    with pytest.raises(HeadspanError, match="layer_types"):
        hs.open(write(tmp_path, layer_types=kinds))


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "two numbers of heads": {"n_head": 2},
    "two numbers of layers": {"n_layer": 1},
    "two widths": {"n_embd": 32},
    "more key/value heads than heads": {"num_key_value_heads": 8},
    "heads that do not divide": {"num_key_value_heads": 3},
    "another d_head": {"head_dim": 8},
    "another number of heads": {"num_attention_heads": 2},
    "heads listed for another number of layers": {"num_attention_heads": [4, 4, 4]},
    "different heads in the layers": {"num_attention_heads": [4, 2]},
    "a trillion layers": {"num_hidden_layers": 10**12},
    "a trillion layers of a hybrid": {"num_hidden_layers": 10**12, "model_type": "jamba"},
    "a trillion heads": {"num_attention_heads": 10**12, "head_dim": None},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_in_the_config(tmp_path: Path, name: str) -> None:
    with pytest.raises(HeadspanError):
        hs.open(write(tmp_path, **CONTRADICTIONS[name]))


def test_unread_weights_in_the_same_folder_are_noted(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"something else")
    assert any("pytorch_model.bin" in note and "not read" in note for note in hs.open(tmp_path).notes)


def test_a_copy_in_another_shard_is_noted(tmp_path: Path) -> None:
    one, other = tensors(), tensors(seed=1)
    save_file(one, tmp_path / "a.safetensors")
    save_file(half(other, 1) | {"model.norm.weight": other["model.norm.weight"]}, tmp_path / "b.safetensors")
    weight_map = dict.fromkeys(one, "a.safetensors") | {"model.layers.1.self_attn.q_proj.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights = hs.open(tmp_path)
    assert any("which the index places in" in note for note in weights.notes)
    expected = other["model.layers.1.self_attn.q_proj.weight"].reshape(4, 4, 16).transpose(0, 2, 1)
    np.testing.assert_array_equal(weights.read("Q", 1), expected)


# Every key that is read, with every kind of wrong value

KEYS = [
    *CONFIG, "layer_types", "layers_block_type", "text_config", "quantization_config", "kv_lora_rank", "n_head",
    "n_layer", "clip_qkv", "attn_config", "layer_norm_eps", "rope_theta", "rope_scaling", "num_nextn_predict_layers",
    "auto_map", "normalization_type",
]  # fmt: skip
VALUES = ["null", "[]", "{}", '"x"', '""', "-1", "0", "1e400", "NaN", "1" + "0" * 30, "true", "false", "2.5", "[null]",
          '{"a": [1]}', "[" * 50 + "]" * 50, "1" + "0" * 5000, '"\\ud800"']  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_wrong_values_in_every_key(tmp_path: Path, key: str) -> None:
    """An answer with the right numbers, or a message."""
    write(tmp_path)
    right = hs.open(tmp_path).read("Q", 1)
    sentences: list[str] = []
    for value in VALUES:
        config = {k: v for k, v in CONFIG.items() if k != key}
        (tmp_path / "config.json").write_text(json.dumps(config)[:-1] + f', "{key}": {value}}}')
        try:
            weights = hs.open(tmp_path)
            weights.fingerprint()
            weights.norm(0)
            weights.unembedding_rows(0, 1)
            hs.fold(weights).read("Q", 1)
        except HeadspanError as error:
            sentences.append(str(error))
        else:
            np.testing.assert_array_equal(weights.read("Q", 1), right)
    assert not [sentence for sentence in sentences if "\n" in sentence]


# Memory


def peak_of(path: Path) -> tuple[int, str]:
    """Megabytes needed to open a model in a separate process, measured from outside."""
    code = (
        "import os, resource, subprocess, sys\n"
        "command = [sys.executable, '-m', 'headspan', 'info', sys.argv[1]]\n"
        "done = subprocess.run(command, capture_output=True, text=True)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024, done.returncode, done.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    peak, rest = done.stdout.split(" ", 1)
    return int(peak), rest


@pytest.mark.parametrize("kind", ["config", "index", "header"])
def test_hostile_json_needs_no_memory(tmp_path: Path, kind: str) -> None:
    write(tmp_path)
    empty = b'{"a":[' + b"[]," * 16_000_000 + b"[]]}"
    if kind == "config":
        (tmp_path / "config.json").write_bytes(empty)
    elif kind == "index":
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / "model.safetensors.index.json").write_bytes(empty)
    else:
        (tmp_path / "model.safetensors").write_bytes(len(empty).to_bytes(8, "little") + empty)
    peak, rest = peak_of(tmp_path)
    assert rest.startswith("2 "), rest
    assert "more than any real" in " ".join(rest.split())
    assert peak < 500


# Code in a model directory


def test_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    """With y on standard input, for configs that transformers knows and for those it does not."""
    pytest.importorskip("transformers")
    marker, folders = tmp_path / "marker", []
    for model_type in ("llama", "my_own_model"):
        folder = write(tmp_path / model_type, model_type=model_type, auto_map={
            "AutoConfig": "code.MyConfig", "AutoModel": "code.MyModel", "AutoTokenizer": ["code.MyTokenizer", None],
            "AutoModelForCausalLM": "code.MyModel",
        }, architectures=["MyModel"])  # fmt: skip
        trap = f"open({str(marker)!r}, 'w')\nclass MyConfig: pass\nclass MyModel: pass\nclass MyTokenizer: pass\n"
        (folder / "code.py").write_text(trap)
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(trap)
        settings = {"auto_map": {"AutoTokenizer": ["code.MyTokenizer", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        folders.append(str(folder))
    code = (
        "import sys; from headspan.cli import _run\n"
        "print([_run(['behaviour', folder, '--sequences', '1', '--length', '4']) for folder in sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], input="y\n" * 6, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[2, 2]\n", done.stderr
    assert "Traceback" not in done.stderr
    assert not marker.exists()
    assert "never run" in " ".join(done.stderr.split()).partition("my_own_model")[2]


def test_a_tied_unembedding_that_is_stored_with_other_numbers(tmp_path: Path) -> None:
    """transformers would use the embedding; headspan reads the separate tensor and notes it."""
    content = tensors()
    copy = write(tmp_path / "copy", content | {"lm_head.weight": content["model.embed_tokens.weight"].copy()})
    assert not any("unembedding" in note for note in hs.open(copy).notes)
    other = content["model.embed_tokens.weight"].copy()
    other[5] += 1
    differs = hs.open(write(tmp_path / "other", content | {"lm_head.weight": other}))
    assert any("lm_head.weight differs" in note for note in differs.provenance["notes"])
    np.testing.assert_array_equal(differs.unembedding_rows(0, 7), other)


def test_number_types_that_differ_between_shards_are_noted(tmp_path: Path) -> None:
    content = tensors()
    later = {name: array.astype(np.float16) for name, array in half(content, 1).items()}
    mixed = hs.open(shards(tmp_path / "mixed", half(content, 0), later))
    assert any("2 number types (float16, float32)" in note for note in mixed.provenance["notes"])
    assert not any("number types" in note for note in hs.open(write(tmp_path / "one")).notes)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "compressed-tensors", "hqq", "quanto", "torchao"])
@pytest.mark.parametrize("form", ["integers", "other names", "other shapes"])
def test_quantised_weights_are_refused_by_the_name_of_their_method(tmp_path: Path, method: str, form: str) -> None:
    content = tensors()
    for name in [name for name in content if "_proj" in name]:
        array = content.pop(name)
        if form == "integers":
            content[name] = array.astype(np.int8)
        elif form == "other shapes":
            content[name] = array.reshape(-1, 1)
        else:
            content[name.replace(".weight", ".W_q")] = array
    with pytest.raises(HeadspanError, match=f"holds {method} quantised weights"):
        hs.open(write(tmp_path / "m", content, quantization_config={"quant_method": method}))
