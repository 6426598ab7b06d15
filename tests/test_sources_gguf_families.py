"""The same random model as a Hugging Face directory and as a GGUF file gives the same heads, family by family.

The GGUF file is written with the gguf package: its name map, and the changes llama.cpp's converter makes to each
family's tensors and metadata, done here in the forward direction.
"""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import test_uneven
from families import FAMILIES as MODELS
from families import Family, build
from headspan.checkpoints.gguf.config import make_config
from headspan.checkpoints.gguf.families import FAMILIES
from headspan.checkpoints.gguf.unread import UNREAD
from headspan.checkpoints.opening import open_source
from headspan.models.families.table import ALIASES, ARCHITECTURES
from headspan.models.mlp import Mlps
from headspan.models.opening import open as open_weights
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Role

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

KNOWN = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


@dataclass(frozen=True)
class Converted:
    """A model of tests/families.py as llama.cpp's converter stores it."""

    architecture: str
    model: str
    change: str = ""  # of Q, K, V or norms
    config: tuple[tuple[str, Any], ...] = ()  # of the model, beside that of tests/families.py
    zeros: bool = False  # layers without attention have 0 key/value heads
    further: int = 0  # blocks that predict further tokens, at the end
    like: str = ""  # whose names it has, while the gguf package does not know its own

    def family(self) -> Family:
        family = MODELS[self.model]
        more = dict(self.config)
        n_kv, d_head = more.get("num_key_value_heads", family.n_kv_heads), more.get("head_dim", family.d_head)
        return replace(family, config=family.config | more, n_kv_heads=n_kv, d_head=d_head)


CONVERTED = [
    *(Converted(name, name, "rope") for name in ("llama", "granite", "smollm3", "olmo", "arcee")),
    *(Converted("llama", name, "rope") for name in ("mistral", "mixtral")),
    *(Converted("granitemoe", name, "rope") for name in ("granitemoe", "granitemoeshared")),
    Converted("mistral3", "ministral3", "rope"),
    *(Converted(name, name) for name in (
        "qwen2", "qwen3", "phi3", "starcoder2", "stablelm", "olmo2", "olmoe", "cohere2", "glm4", "mpt", "llama4",
        "apertus", "seed_oss", "dots1", "ernie4_5", "exaone4", "jais2", "phimoe", "afmoe", "dbrx", "eurobert",
    )),
    *(Converted(name, name, "plus one") for name in ("gemma", "gemma2", "gemma3", "nemotron")),
    Converted("qwen2moe", "qwen2_moe"), Converted("qwen3moe", "qwen3_moe"), Converted("command-r", "cohere"),
    Converted("gpt-oss", "gpt_oss"), Converted("phi2", "phi", config=(("num_key_value_heads", 4),)),
    Converted("gpt2", "gpt2", "transpose"), Converted("starcoder", "gpt_bigcode"),
    Converted("bloom", "bloom", "ungroup"),
    Converted("gptneox", "gpt_neox", "ungroup"), Converted("falcon", "falcon-40b", "ungroup"),
    Converted("olmo2", "olmo3"), Converted("ernie4_5-moe", "ernie4_5_moe"),
    Converted("exaone-moe", "exaone_moe", further=1),
    Converted("hunyuan-dense", "hunyuan_v1_dense"), Converted("hunyuan-moe", "hunyuan_v1_moe"),
    Converted("glm4moe", "glm4_moe", further=1), Converted("glm4moe", "solar_open"),
    Converted("minimax-m2", "minimax_m2"),
    Converted("chatglm", "glm", config=(("head_dim", 6),)),
    # layers that differ
    Converted("gemma4", "gemma4"), Converted("gemma4", "gemma4_unified"),
    Converted("mimo2", "mimo_v2_flash", further=3),
    # hybrids
    Converted("lfm2", "lfm2", zeros=True), Converted("lfm2moe", "lfm2_moe", zeros=True),
    Converted("jamba", "jamba", zeros=True), Converted("falcon-h1", "falcon_h1"),
    Converted("granitehybrid", "granitemoehybrid", "rope", zeros=True),
    Converted("granitehybrid", "bamba", "rope", zeros=True),
    Converted("nemotron_h_moe", "nemotron_h", "rope", zeros=True),
    Converted("qwen3next", "qwen3_next", "plus one"), Converted("qwen35", "qwen3_5_text", "plus one", further=1),
    Converted("qwen35moe", "qwen3_5_moe_text", "plus one"),
    # encoders
    *(Converted("bert", name) for name in ("bert", "roberta", "xlm-roberta", "camembert", "distilbert")),
    Converted("modern-bert", "modernbert"),
    # newer than the gguf package may be
    Converted("cohere2moe", "cohere2_moe", like="cohere2"), Converted("laguna", "laguna", like="glm4moe"),
    Converted("hy_v3", "hy_v3", like="glm4moe"), Converted("mellum", "mellum", like="qwen3moe"),
    Converted("minimax-m3", "minimax_m3_vl_text", "plus one", like="glm4moe"),
]  # fmt: skip
# Prefixes that converters remove from names, and changes inside them, before looking them up.
PREFIXES = ("", "transformer.", "bert.", "roberta.", "distilbert.", "model.")
LEFT = r"(?<!shared_)experts?\.|shared_mlp\.output_linear|linear_attn\.in_proj"  # what is not stored as it is
UP_AND_GATE = ("chatglm", "glm4", "phi3", "modern-bert")  # their ffn_up holds both
MLP_STEMS = {
    "": ("FFN_GATE", "FFN_UP", "FFN_DOWN"),
    "experts": ("FFN_GATE_EXP", "FFN_UP_EXP", "FFN_DOWN_EXP"),
    "shared": ("FFN_GATE_SHEXP", "FFN_UP_SHEXP", "FFN_DOWN_SHEXP"),
}


def label(case: Converted) -> str:
    return f"{case.architecture}-{case.model}"


def convert(name: str, array: np.ndarray, change: str, heads: tuple[int, int]) -> np.ndarray:
    """What llama.cpp's converter stores for a Hugging Face tensor."""
    if change == "rope" and (match := re.search(r"\.([qk])_proj", name)):
        n = heads[0 if match[1] == "q" else 1]
        rows = array.reshape(n, 2, len(array) // n // 2, *array.shape[1:])
        return rows.swapaxes(1, 2).reshape(array.shape)
    if change == "ungroup" and "query_key_value" in name:
        groups = array.reshape(heads[1], heads[0] // heads[1] + 2, -1, *array.shape[1:])
        parts = groups[:, :-2], groups[:, -2], groups[:, -1]
        return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
    if change == "transpose" and re.search(r"c_(attn|proj|fc)\.weight", name):
        return array.T
    if change == "plus one" and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return array + 1
    return array


def stored_tensors(case: Converted, directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file: by llama.cpp's names, and experts and halves of MLPs as it keeps them."""
    source, original = open_source(directory), open_weights(directory)
    known = case.architecture if case.architecture in KNOWN else case.like
    names = gguf.get_tensor_name_map(KNOWN[known], original.n_layers + case.further)
    found: dict[str, np.ndarray] = {}
    for name in source.names():
        bare = (name[len(prefix) :] for prefix in PREFIXES if name.startswith(prefix))
        theirs = next((n for b in bare if (n := names.get_name(b, try_suffixes=(".weight", ".bias")))), None)
        left = re.search(LEFT if case.architecture in UP_AND_GATE else f"{LEFT}|gate_up_proj", name)
        if theirs and not left and source.dtype(name) == "float32":
            layer = int(match[1]) if (match := re.match(r"blk\.(\d+)", theirs)) else None
            heads = case.family().heads(original.layers.index(layer)) if layer in original.layers else (1, 1)
            found[theirs] = np.ascontiguousarray(convert(name, source.read(name), case.change, heads))
    for layer in range(original.n_layers):
        if case.architecture.startswith("qwen3") and layer not in original.layers:
            found[f"blk.{layer}.attn_qkv.weight"] = np.ones((24, 24), np.float32)  # of linear attention
        for stem, array in mlp_tensors(Mlps(original), layer, case.architecture not in UP_AND_GATE).items():
            found.setdefault(f"blk.{layer}.{stem}.weight", array)
    last = {name: array for name, array in found.items() if name.startswith(f"blk.{original.layers[-1]}.attn_")}
    for layer in range(original.n_layers, original.n_layers + case.further):
        found |= {re.sub(r"\d+", str(layer), name, count=1): 2 * array for name, array in last.items()}
    return found


def mlp_tensors(mlps: Mlps, layer: int, dense: bool) -> dict[str, np.ndarray]:
    """All experts of a layer in one tensor, gate and up apart."""
    found: dict[str, np.ndarray] = {}
    parts = mlps.parts(layer)
    for part in parts:
        kind = "experts" if part.layout.experts else "shared" if part.layout.shared and len(parts) > 1 else ""
        if not kind and not dense:
            continue
        gate, up, down = (gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[name]].split(".")[-1] for name in MLP_STEMS[kind])
        read = np.stack([mlps.read(layer, part, Role.R, expert) for expert in range(part.experts)])
        write = np.stack([mlps.read(layer, part, Role.W, expert)[..., 0].T for expert in range(part.experts)])
        halves = [read[..., half] for half in range(read.shape[-1])]
        arrays = dict(zip((gate, up) if len(halves) == 2 else (up,), halves, strict=True)) | {down: write}
        found |= {
            stem: np.ascontiguousarray(array if kind == "experts" else array[0]) for stem, array in arrays.items()
        }
    return found


def write(path: Path, case: Converted, directory: Path, tensors: dict[str, np.ndarray] | None = None) -> Path:
    original, family = open_weights(directory), case.family()
    places = {layer: place for place, layer in enumerate(original.layers)}
    n_layers = original.n_layers
    counts = [family.heads(places[layer]) if layer in places else (0, 0) for layer in range(n_layers)]
    widths = [family.widths(place) for place in places.values()]
    queries, shared = ([count[i] for count in counts] for i in (0, 1))
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_block_count(n_layers + case.further)
    writer.add_embedding_length(original.d_model)
    writer.add_head_count(queries if len({count for count in queries if count}) > 1 else max(queries))
    listed = case.zeros or len({count for count in shared if count}) > 1
    writer.add_head_count_kv([*shared, *[shared[-1]] * case.further] if listed else max(shared))
    writer.add_layer_norm_rms_eps(1e-6)
    if "attn_config" in family.config:
        writer.add_clamp_kqv(family.config["attn_config"]["clip_qkv"])
    if case.further:
        writer.add_nextn_predict_layers(case.further)
    if case.architecture == "gemma4":
        writer.add_sliding_window_pattern([width[0] == min(widths)[0] for width in widths])
        writer.add_key_length_swa(min(widths)[0])
        writer.add_shared_kv_layers(0)
    if max(widths)[0] * max(queries) != original.d_model or case.architecture in ("gemma4", "mimo2"):
        writer.add_key_length(max(widths)[0])
        writer.add_value_length(max(widths)[1])
    for name, array in (stored_tensors(case, directory) if tensors is None else tensors).items():
        writer.add_tensor(name, array)
    close(writer)
    return path


def close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", CONVERTED, ids=label)
def test_gguf_and_directory_have_the_same_heads(tmp_path: Path, case: Converted) -> None:
    build(case.family()).save_pretrained(tmp_path / "hf")
    original = open_weights(tmp_path / "hf")
    stored = open_weights(write(tmp_path / "m.gguf", case, tmp_path / "hf"))
    check_same(stored, original)
    assert any("more layers" in note for note in stored.notes) == bool(case.further)


def check_same(stored: Any, original: Any) -> None:
    assert (stored.n_layers, stored.layers) == (original.n_layers, original.layers)
    assert stored.ports == original.ports
    for layer in original.layers:
        for role in ROLES:
            np.testing.assert_array_equal(stored.read(role, layer), original.read(role, layer))
            ours, theirs = stored.bias(role, layer), original.bias(role, layer)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                np.testing.assert_array_equal(ours, theirs)
        same_norm(stored.norm(layer), original.norm(layer))
        same_norm(stored.output_norm(layer), original.output_norm(layer))
    same_norm(stored.final_norm(), original.final_norm())
    np.testing.assert_array_equal(stored.embedding(), original.embedding())
    assert (stored.foldable, stored.norm_place) == (original.foldable, original.norm_place)
    assert stored.value_bias_is_constant == original.value_bias_is_constant
    check_neurons(stored, original)


def same_norm(ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    if ours is not None:
        assert ours.kind == theirs.kind
        np.testing.assert_allclose(ours.gain, theirs.gain, rtol=1e-6)
        assert (ours.bias is None) == (theirs.bias is None)
        if ours.bias is not None:
            np.testing.assert_array_equal(ours.bias, theirs.bias)


def check_neurons(stored: Any, original: Any) -> None:
    ours, theirs = Mlps(stored), Mlps(original)
    assert ours.parallel == theirs.parallel
    seen = 0
    for layer in range(original.n_layers):
        for mine, other in zip(ours.parts(layer), theirs.parts(layer), strict=True):
            seen += 1
            assert (mine.experts, mine.neurons) == (other.experts, other.neurons)
            for role in (Role.R, Role.W):
                for expert in range(mine.experts):
                    found = ours.read(layer, mine, role, expert)
                    np.testing.assert_array_equal(found, theirs.read(layer, other, role, expert))
        if theirs.parts(layer):
            same_norm(ours.norm(layer), theirs.norm(layer))
            same_norm(ours.output_norm(layer), theirs.output_norm(layer))
    assert seen


# -- what the table above cannot say -------------------------------------------------------------------------------


def test_openelm(tmp_path: Path) -> None:
    """It is not in transformers: its layout is that of tests/test_uneven.py."""
    tensors, config = test_uneven.tensors(), test_uneven.config()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    names = gguf.get_tensor_name_map(KNOWN["openelm"], 3)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "openelm")
    writer.add_block_count(3)
    writer.add_embedding_length(config["model_dim"])
    writer.add_head_count(config["num_query_heads"])
    writer.add_head_count_kv(config["num_kv_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    for name, array in tensors.items():
        if "proj_1" in name:
            for stem, half in zip(("gate", "up"), np.split(array, 2), strict=True):
                writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_{stem}.weight", half)
        else:
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    close(writer)
    check_same(open_weights(tmp_path / "m.gguf"), open_weights(tmp_path / "hf"))


def test_multiplied_weights_are_noted(tmp_path: Path) -> None:
    case = Converted("falcon-h1", "falcon_h1")
    build(case.family()).save_pretrained(tmp_path / "hf")
    tensors = stored_tensors(case, tmp_path / "hf")
    tensors = {name: array * 0.5 if ".attn_output." in name else array for name, array in tensors.items()}
    stored = open_weights(write(tmp_path / "m.gguf", case, tmp_path / "hf", tensors))
    original = open_weights(tmp_path / "hf")
    np.testing.assert_array_equal(stored.read("O", 0), 0.5 * original.read("O", 0))
    assert any("the multipliers of Falcon-H1" in note for note in stored.notes)


@pytest.mark.parametrize("case", [Converted("llama", "llama", "rope"), Converted("qwen3", "qwen3"),
                                  Converted("mimo2", "mimo_v2_flash", further=3)], ids=label)  # fmt: skip
def test_fused_qkv_is_split_by_its_sizes(tmp_path: Path, case: Converted) -> None:
    build(case.family()).save_pretrained(tmp_path / "hf")
    tensors = stored_tensors(case, tmp_path / "hf")
    for name in [name for name in tensors if ".attn_q." in name]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{role}")) for role in "qkv"]
        tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    check_same(open_weights(write(tmp_path / "m.gguf", case, tmp_path / "hf", tensors)), open_weights(tmp_path / "hf"))
    tensors["blk.0.attn_qkv.weight"] = tensors["blk.0.attn_qkv.weight"][:-1]
    with pytest.raises(HeadspanError, match=r"blk.0.attn_qkv.weight.*4 queries, \d keys and \d values"):
        open_weights(write(tmp_path / "bad.gguf", case, tmp_path / "hf", tensors))


def test_one_tensor_for_gate_and_up_of_all_experts(tmp_path: Path) -> None:
    case = Converted("qwen3moe", "qwen3_moe")
    build(case.family()).save_pretrained(tmp_path / "hf")
    tensors = stored_tensors(case, tmp_path / "hf")
    for layer in range(2):
        halves = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(halves, axis=1)
    check_same(open_weights(write(tmp_path / "m.gguf", case, tmp_path / "hf", tensors)), open_weights(tmp_path / "hf"))


def test_a_tensor_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    case = Converted("llama", "llama", "rope")
    build(case.family()).save_pretrained(tmp_path / "hf")
    tensors = stored_tensors(case, tmp_path / "hf")
    tensors["blk.0.attn_q"] = tensors["blk.0.attn_q.weight"]
    with pytest.raises(HeadspanError, match=r"'model.layers.0.self_attn.q_proj.weight'.*'blk.0.attn_q'"):
        open_weights(write(tmp_path / "m.gguf", case, tmp_path / "hf", tensors))


@pytest.mark.parametrize("key", ["shared", "experts"])
def test_kinds_of_gemma4_that_the_directory_refuses(tmp_path: Path, key: str) -> None:
    case = Converted("gemma4", "gemma4")
    build(case.family()).save_pretrained(tmp_path / "hf")
    write(tmp_path / "m.gguf", case, tmp_path / "hf")
    source = open_source(tmp_path / "m.gguf")
    assert source.config["layer_types"] == ["sliding_attention", "full_attention", "full_attention"]
    metadata = {"gemma4.attention.shared_kv_layers": 2} if key == "shared" else {"gemma4.expert_count": 2}
    config = make_config(FAMILIES["gemma4"], {**source.metadata, **metadata}, {})
    assert config["num_kv_shared_layers"] == (2 if key == "shared" else 0)
    assert config["enable_moe_block"] == (key == "experts")


def test_names_of_gemma3n() -> None:
    names = gguf.get_tensor_name_map(KNOWN["gemma3n"], 2)
    modules = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    modules += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    modules += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    for module in modules:
        name = f"model.layers.1.{module}.weight"
        stored = names.get_name(name.replace("model.", "model.language_model.", 1), try_suffixes=(".weight",))
        assert FAMILIES["gemma3n"].hf_name(stored or names.get_name(name, try_suffixes=(".weight",))) == name


# -- every name of llama.cpp ---------------------------------------------------------------------------------------


def test_every_architecture_of_llama_cpp_has_an_entry_or_a_reason() -> None:
    missing = sorted(set(KNOWN) - FAMILIES.keys() - UNREAD.keys())
    assert not missing, (
        f"say in the table of families how these are stored, or in UNREAD why they are not read: {missing}"
    )
    assert not FAMILIES.keys() & UNREAD.keys()


def test_what_has_no_entry_is_of_no_family_that_is_read() -> None:
    def plain(name: str) -> str:
        return re.sub(r"[-_.]|text$", "", name)

    read = {plain(name): name for name in {*ARCHITECTURES, *ALIASES}}
    own = {"gptj", "persimmon", "chameleon", "deci", "hunyuan_vl"}  # for reasons of their own
    assert {name for name in UNREAD if plain(name) in read} == own
    for name, family in FAMILIES.items():
        assert family.model_type in {*ARCHITECTURES, *ALIASES, "gemma3n_text"}, name


def test_the_page_lists_the_entries_tested_against_a_directory() -> None:
    """All but those that docs/models.md names: an entry that is another's, a borrowed name map, names alone."""
    page = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "make_models_page.py"))
    elsewhere = {"deepseek2", "deepseek32", "mistral4", "kimi-linear", "glm-dsa", "minicpm3"}  # tests/test_latent.py
    tested = {case.architecture for case in CONVERTED} | {"openelm"} | elsewhere
    assert FAMILIES.keys() - tested == {*page["RELATIVES"], *page["NAMES_ONLY"]}
    assert {case.architecture for case in CONVERTED if case.like} | {"deepseek32"} == {*page["BORROWED"]}


@pytest.mark.parametrize(("architecture", "why"), [
    ("mamba2", "no softmax attention"), ("gptj", "no converter writes such files"),
    ("orion", "its family is not supported"),
    ("some-new-thing", "how llama.cpp stores"),
])  # fmt: skip
def test_unknown_architectures_are_refused(tmp_path: Path, architecture: str, why: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_head_count(4)
    writer.add_tensor("blk.0.attn_qkv.weight", np.ones((10, 8), np.float32))
    close(writer)
    assert list(open_source(tmp_path / "m.gguf").names()) == ["blk.0.attn_qkv.weight"]
    with pytest.raises(HeadspanError, match=f"'{architecture}'.*{why}"):
        open_weights(tmp_path / "m.gguf")
