"""LoRA adapters made and merged by PEFT: headspan must read the weights of the merged model."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import headspan as hs
from families import BASE, GPT2, GQA
from headspan.models.adapters import adapt, is_adapter
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES

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


Make = Callable[[str], tuple[Path, Path, Path]]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Every case is made once."""
    return functools.cache(lambda case: make(tmp_path_factory.mktemp("stock"), *LORAS[case])[0].parent)


@pytest.fixture
def copy(stock: Callable[[str], Path], tmp_path: Path) -> Make:
    """Copies of a case, which a test may change."""

    def copied(case: str) -> tuple[Path, Path, Path]:
        folder = shutil.copytree(stock(case), tmp_path / "copy")
        return folder / "base", folder / "adapter", folder / "merged"

    return copied


@pytest.fixture
def llama(copy: Make) -> tuple[Path, Path, Path]:
    return copy("llama qkvo")


def config_of(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LORAS)
def test_weights_are_those_that_peft_merges(case: str, copy: Make) -> None:
    base, adapter, merged = copy(case)
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["llama qkvo", "llama rslora", "gpt2 fused", "neox fused", "phi3 fused"])
@pytest.mark.parametrize("fold", [False, True])
def test_diff_with_the_adapter_is_diff_with_the_merged_model(case: str, fold: bool, copy: Make) -> None:
    base, adapter, merged = copy(case)
    one, two = hs.diff(str(base), str(adapter), fold=fold), hs.diff(str(base), merged, fold=fold)
    assert max(line.drift for line in one.drift) > 0.01
    for a, b in zip(one.drift, two.drift, strict=True):
        assert (a.head, a.role, a.moved) == (b.head, b.role, b.moved)
        assert a.drift == pytest.approx(b.drift, abs=1e-5) and a.angle == pytest.approx(b.angle, abs=1e-2)
    assert [e[:4] for e in one.edges] == [e[:4] for e in two.edges]
    for a, b in zip(one.edges, two.edges, strict=True):
        assert (a.before, a.after) == (pytest.approx(b.before, abs=1e-5), pytest.approx(b.after, abs=1e-5))
        assert a[7:] == b[7:]
    assert [h[:4] + h[7:] for h in one.hubs] == [h[:4] + h[7:] for h in two.hubs]


def test_what_the_adapter_does_not_touch_does_not_move(copy: Make) -> None:
    base, adapter, _ = copy("llama q only")
    for line in hs.diff(base, adapter).drift:
        assert line.moved == (str(line.role) == "Q")
        assert (line.drift > 1e-4) == line.moved


def test_an_adapter_on_a_half_precision_base_is_judged_by_arithmetic_alone(llama: tuple[Path, ...]) -> None:
    base, adapter, _ = llama
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(base.with_name("half"))
    change = hs.diff(base.with_name("half"), adapter)
    assert max(line.floor for line in change.drift) < 1e-10


def test_torch_files_and_prefixes(llama: tuple[Path, ...]) -> None:
    base, adapter, merged = llama
    tensors = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, adapter / "adapter_model.bin")
    bare = load_file(base / "model.safetensors")
    save_file({name.removeprefix("model."): array for name, array in bare.items()}, base / "model.safetensors")
    weights, expected = adapt(hs.open(base), adapter), hs.open(merged)
    assert np.abs(weights.read("O", 1) - expected.read("O", 1)).max() < 1e-5


def test_folded_weights_take_an_adapter_too(llama: tuple[Path, ...]) -> None:
    base, adapter, merged = llama
    weights, expected = adapt(hs.fold(hs.open(base)), adapter), hs.fold(hs.open(merged))
    assert weights.folding == "folded"
    assert np.abs(weights.read("K", 1) - expected.read("K", 1)).max() < 1e-5


def test_other_bases_are_refused(llama: tuple[Path, ...], tmp_path: Path) -> None:
    _, adapter, _ = llama
    for kind, config, sentence in [
        ("gpt2", GPT2, "another base"),
        ("llama", GQA | {"num_hidden_layers": 1}, "has 1 layers"),
        ("llama", GQA | {"hidden_size": 32}, "does not fit .* has factors of shapes"),
    ]:
        folder = tmp_path / f"{kind}{len(config)}{config.get('hidden_size')}"
        transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **config)
        ).save_pretrained(folder)
        with pytest.raises(HeadspanError, match=sentence):
            hs.diff(folder, adapter)
    with pytest.raises(HeadspanError, match="changes named tensors of a checkpoint"):
        hs.diff({role: np.ones((1, 1, 4, 2)) for role in "QKVO"}, adapter)


def test_an_adapter_alone_is_not_taken_for_a_model(llama: tuple[Path, ...]) -> None:
    with pytest.raises(HeadspanError, match="is an adapter"):
        hs.open(llama[1])


@pytest.mark.parametrize("name", ["", " ", "a\0b", "a" * 5000, 3, None])
def test_what_cannot_be_a_directory_is_not_an_adapter(name: Any) -> None:
    assert not is_adapter(name)


def test_a_base_of_another_name_is_noted(llama: tuple[Path, ...]) -> None:
    base, adapter, _ = llama
    config_of(adapter, base_model_name_or_path="someone/else")
    assert any("the base someone/else" in note for note in hs.diff(base, adapter).notes)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "LOHA"}, "of the kind 'LOHA'"),
        ({"peft_type": "IA3"}, "of the kind 'IA3'"),
        ({"peft_type": None}, "of the kind 'None'"),
        ({"use_dora": True}, "DoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer replication"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4: its start was subtracted"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"lora_alpha": "seven"}, "has α = 'seven'"),
        ({"lora_alpha": None}, "has α = 'None'"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern that is not an object"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "alpha_pattern .* not valid"),
        ({"alpha_pattern": {"q_proj(": 1}}, "alpha_pattern .* not valid"),
        ({"alpha_pattern": {".*.*.*.*.*x": 1}}, "alpha_pattern .* not valid"),
    ],
)
def test_what_is_not_a_plain_lora_is_refused_by_name(
    change: dict[str, Any], sentence: str, llama: tuple[Path, ...]
) -> None:
    base, adapter, _ = llama
    config_of(adapter, **change)
    with pytest.raises(HeadspanError, match=sentence) as caught:
        hs.diff(base, adapter)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_real_dora_is_refused(tmp_path: Path) -> None:
    kind, config, lora = LORAS["llama qkvo"]
    base, adapter, _ = make(tmp_path, kind, config, lora | {"use_dora": True})
    with pytest.raises(HeadspanError, match="DoRA"):
        hs.diff(base, adapter)
    config_of(adapter, use_dora=False)  # its tensors give it away as well
    with pytest.raises(HeadspanError, match=r"lora_magnitude_vector.*plain LoRA"):
        hs.diff(base, adapter)


@pytest.mark.parametrize("damage", ["half a pair", "no tensors", "no file", "not finite", "vector", "bad json", "two"])
def test_damaged_adapters_are_one_message(damage: str, llama: tuple[Path, ...]) -> None:
    base, adapter, _ = llama
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "q_proj.lora_B" in name)
    if damage == "half a pair":
        del tensors[name]
    elif damage == "no tensors":
        tensors = {}
    elif damage == "not finite":
        tensors[name][0, 0] = np.nan
    elif damage == "vector":
        tensors[name] = tensors[name].reshape(-1)
    save_file(tensors, path)
    if damage == "no file":
        path.unlink()
    if damage == "bad json":
        (adapter / "adapter_config.json").write_text("{")
    if damage == "two":
        (adapter / "model.safetensors").write_bytes(b"")
    assert is_adapter(adapter)
    with pytest.raises(HeadspanError) as caught:
        hs.diff(base, adapter)
    assert "\n" not in str(caught.value) and str(adapter) in str(caught.value)
    assert damage != "not finite" or name in str(caught.value)


def factors(adapter: Path, module: str) -> list[np.ndarray]:
    tensors = load_file(adapter / "adapter_model.safetensors")
    return [next(array for name, array in tensors.items() if f"{module}.lora_{factor}" in name) for factor in "BA"]


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8 / 3), (True, 8 / np.sqrt(3))])
def test_a_config_without_alpha_means_8(llama: tuple[Path, ...], rslora: bool, scale: float) -> None:
    base, adapter, _ = llama
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text()) | {"use_rslora": rslora}
    del config["lora_alpha"]
    path.write_text(json.dumps(config))
    b, a = factors(adapter, "layers.1.self_attn.o_proj")
    name = "model.layers.1.self_attn.o_proj.weight"
    found = adapt(hs.open(base), adapter).source.read(name)  # type: ignore[attr-defined]
    assert np.abs(found - (load_file(base / "model.safetensors")[name] + scale * b @ a)).max() < 1e-6


@pytest.mark.parametrize(
    ("pattern", "valid"),
    [("q.*p.*r.*j", True), ("q.*p.*r.*o.*j", False), ("q" * 500, True), ("q" * 501, False), ("(q)+", False)],
)
def test_patterns_that_could_take_for_ever_are_refused(llama: tuple[Path, ...], pattern: str, valid: bool) -> None:
    base, adapter, _ = llama
    config_of(adapter, alpha_pattern={pattern: 1})
    if valid:
        assert adapt(base, adapter).layers == (0, 1)
    else:
        with pytest.raises(HeadspanError, match="alpha_pattern"):
            adapt(base, adapter)


def test_what_does_not_touch_attention_or_is_not_in_the_base_is_noted(llama: tuple[Path, ...]) -> None:
    base, adapter, _ = llama
    path = adapter / "adapter_model.safetensors"
    assert not any("attention" in note or "left out" in note for note in adapt(base, adapter).notes)
    pair = {"A": np.ones((2, 24), np.float32), "B": np.ones((24, 2), np.float32)}
    unknown = {f"base_model.model.other.thing.lora_{k}.weight": array for k, array in pair.items()}
    save_file(load_file(path) | unknown, path)
    notes = adapt(base, adapter).notes
    assert any(note.startswith("1 modules") and "other.thing" in note for note in notes)
    assert not any("no attention weights" in note for note in notes)
    size = load_file(base / "model.safetensors")["model.norm.weight"].shape
    save_file({"base_model.model.model.norm.weight": np.ones(size, np.float32)}, path)
    assert any("no attention weights" in note for note in adapt(base, adapter).notes)
    save_file(unknown, path)
    with pytest.raises(HeadspanError, match=r"other\.thing"):
        adapt(base, adapter)
