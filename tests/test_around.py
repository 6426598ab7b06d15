"""Published vision and audio models around a text model, and what is refused around a known text model.

The activations of their text models are compared in tests/test_architectures.py and tests/test_latent.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from families import FAMILIES, MLA, ROUTED, SPARSE, Family, Run, build, close, normalise
from families_around import AROUND
from headspan.models.families.lookup import find_architecture
from headspan.models.mlp import Mlps
from headspan.vocabulary.heads import Role
from test_architectures import recorded_rows

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def same_heads(first: Any, second: Any) -> None:
    assert first.ports == second.ports and first.architecture == second.architecture
    for layer in second.layers:
        for role in "QKVO":
            np.testing.assert_array_equal(first.read(role, layer), second.read(role, layer))
    np.testing.assert_array_equal(first.unembedding(), second.unembedding())


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_the_thinker_of_an_omni_model(name: str, tmp_path: Path) -> None:
    """The whole model also has a talker, so its config and tensors are one level deeper."""
    from safetensors.torch import load_file, save_file

    build(AROUND[name]).save_pretrained(tmp_path / "thinker")
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = {f"thinker.{key}": value for key, value in load_file(tmp_path / "thinker/model.safetensors").items()}
    tensors["talker.model.layers.0.self_attn.q_proj.weight"] = torch.ones(3, 3)
    save_file(tensors, whole / "model.safetensors")
    said = json.loads((tmp_path / "thinker/config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": name, "thinker_config": said, "talker_config": {}}))
    same_heads(hs.open(str(whole)), hs.open(str(tmp_path / "thinker")))


def test_experts_of_qwen3_vl_are_read_either_way(tmp_path: Path) -> None:
    """Published files hold them (expert, in, out), those that transformers saves (expert, out, in)."""
    from safetensors.torch import load_file, save_file

    build(AROUND["qwen3_vl_moe"]).save_pretrained(tmp_path)
    saved = Mlps(hs.open(str(tmp_path)))
    (part,) = saved.parts(1)
    expected = [saved.read(1, part, role, expert) for role in (Role.R, Role.W) for expert in range(2)]
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {key: value.transpose(1, 2).contiguous() if ".mlp.experts." in key else value
              for key, value in tensors.items()}  # fmt: skip
    assert {key for key in tensors if turned[key].shape != tensors[key].shape} >= {
        f"model.language_model.layers.{layer}.mlp.experts.{name}_proj"
        for layer in (0, 1)
        for name in ("gate_up", "down")
    }
    save_file(turned, tmp_path / "model.safetensors", {"format": "pt"})
    published = Mlps(hs.open(str(tmp_path)))
    (part,) = published.parts(1)
    found = [published.read(1, part, role, expert) for role in (Role.R, Role.W) for expert in range(2)]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_experts_of_two_sizes_are_refused(tmp_path: Path) -> None:
    """Published ERNIE-4.5-VL has smaller experts for images; its heads are read anyway."""
    family = AROUND["ernie4_5_vl_moe"]
    build(replace(family, config=family.config | {"moe_intermediate_size": [16, 8]})).save_pretrained(tmp_path)
    weights = hs.open(str(tmp_path))
    assert len(weights.heads("Q")) == 8
    with pytest.raises(hs.HeadspanError, match=r"layer 1 .* 16 neurons and 8"):
        hs.nodes(weights, neurons="L1E0:1")


def test_norms_of_chameleon_after_attention_and_mlp(tmp_path: Path) -> None:
    """With swin_norm the norm before the MLP comes after it, under the same name."""
    run = Run(AROUND["chameleon-swin"], tmp_path)
    mlps = Mlps(run.weights)
    for layer in run.weights.layers:
        with recorded_rows({"norm": run.block(layer).post_attention_layernorm}) as seen:
            run.model(run.ids)
        norm = mlps.output_norm(layer)
        assert norm is not None and mlps.norm(layer) is None
        close(normalise(norm, seen["norm"][0]), seen["norm"][1])


def test_layers_of_llama_that_read_pictures_are_left_out(tmp_path: Path) -> None:
    build(AROUND["mllama"]).save_pretrained(tmp_path)
    weights = hs.open(str(tmp_path))
    assert weights.layers == (0, 2)
    assert any("read images by cross-attention" in note for note in weights.notes)


def test_sizes_of_step_3_as_they_are_published() -> None:
    """Key/value heads are called groups, window sizes are separate, and lists continue beyond the last layer."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    said = {"model_type": "step3p5", "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_attention_groups": 2, "layer_types": kinds, "num_nextn_predict_layers": 1,
            "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2}}  # fmt: skip
    found = find_architecture(said)[2]
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"]) == ([4, 6, 6], 2, 128)
    theirs = pytest.importorskip("transformers").AutoConfig.for_model(**said)
    assert [layer.num_attention_heads for layer in theirs.per_layer_config] == [4, 6, 6]
    assert theirs.num_key_value_heads == 2


def test_sizes_of_layers_are_found_among_more_than_ten(tmp_path: Path) -> None:
    """transformers pads layer numbers in a config to one length: "05" and "11"."""
    kinds = ["sliding_attention", "full_attention"] * 6
    family = FAMILIES["gemma4"]
    build(replace(family, config=family.config | {"num_hidden_layers": 12, "layer_types": kinds})).save_pretrained(
        tmp_path
    )
    assert "01" in json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    weights = hs.open(str(tmp_path))
    assert [len(weights.heads_in("K", layer)) for layer in range(12)] == [2, 1] * 6
    assert [weights.read_head(f"L{layer}H0.Q").shape[1] for layer in range(12)] == [8, 12] * 6


def test_an_older_name_of_sparse_attention(tmp_path: Path) -> None:
    """Published configs of DeepSeek-V3.2 and GLM-5 may call it as transformers did."""
    build(Family("glm_moe_dsa", MLA | ROUTED | SPARSE, 4)).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"layer_types": ["deepseek_sparse_attention"] * 2}))
    assert hs.open(str(tmp_path)).layers == (0, 1)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "zamba"}, "'zamba'.*attention"),
        ({"model_type": "muse_spark", "text_config": {"model_type": "muse_spark_text"}}, "models of 'muse_spark' are"),
        ({"model_type": "newer", "text_config": {"model_type": "kosmos_2_text_model"}}, "a norm over all heads"),
        ({"model_type": "gemma4_unified_assistant", "text_config": {"model_type": "gemma4_unified_text"}}, "draft for"),
        ({"model_type": "nonesuch"}, "'nonesuch'.*afmoe"),
        ({}, "model_type.*afmoe"),
    ],
)
def test_what_is_not_read_is_reported_with_its_reason(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(hs.HeadspanError, match=sentence) as error:
        find_architecture(config)
    assert len(str(error.value).splitlines()) == 1
