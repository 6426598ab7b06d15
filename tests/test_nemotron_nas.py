"""Nemotron-NAS and DeciLM: Llama whose blocks were chosen one by one, so that some do not attend and others share more.

They are not in transformers, but their blocks are Llama's: the oracle is a Llama with another attention in every layer.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from families import GQA, Family, build, close, normalise, recorded
from headspan.models.mlp import Mlps
from headspan.vocabulary.heads import Role

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

GROUPS = [2, None, 4, None]  # query heads that share keys and values; None where a block does not attend
KINDS = ["attends", "no_op", "attends", "replace_with_linear"]


def config(model: Any) -> dict[str, Any]:
    """As published: one entry per block, and no number of key/value heads."""
    blocks = [
        {"attention": {"n_heads_in_group": group, "no_op": kind == "no_op",
                       "replace_with_linear": kind == "replace_with_linear", "window_length": None},
         "ffn": {"ffn_mult": 1.0, "no_op": layer == 2, "replace_with_linear": False}}
        for layer, (group, kind) in enumerate(zip(GROUPS, KINDS, strict=True))
    ]  # fmt: skip
    said = {key: value for key, value in model.config.to_dict().items() if key not in ("head_dim", "layer_types")}
    return said | {"model_type": "nemotron-nas", "num_key_value_heads": None, "block_configs": blocks}


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama of four layers, with other numbers of key/value heads in its attentions."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    llama = build(Family("llama", GQA | {"num_hidden_layers": 4}))
    for layer, group in enumerate(GROUPS):
        own = copy.deepcopy(llama.config)
        own.num_key_value_heads = 4 // (group or 1)
        llama.model.layers[layer].self_attn = LlamaAttention(own, layer)
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if "self_attn" in name:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return llama


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("nas")
    gone = ("layers.1.self_attn.", "layers.1.input_layernorm.", "layers.3.self_attn.", "layers.2.mlp.",
            "layers.2.post_attention_layernorm.")  # fmt: skip
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if not any(g in name for g in gone)}
    state["model.layers.3.self_attn.linear_attn.weight"] = torch.randn(24, 24)
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config(model)))
    return path


def test_heads_equal_those_of_llamas_attention(model: Any, folder: Path) -> None:
    weights = hs.open(str(folder))
    assert weights.architecture == "nemotron-nas" and weights.layers == (0, 2)
    assert [str(h) for h in weights.heads("K")] == ["L0KV0", "L0KV1", "L2KV0"]
    assert any("2 of 4 layers" in note and "(1, 3)" in note for note in weights.notes)
    assert any("1 to 2 key/value heads" in note for note in weights.notes)
    ids = torch.arange(1, 8)[None] * 5 % 50
    parts = {f"{n}.{part}": model.model.layers[n].get_submodule(part) for n in weights.layers
             for part in ("input_layernorm", *(f"self_attn.{role}_proj" for role in "qkvo"))}  # fmt: skip
    with torch.no_grad(), recorded(parts) as seen:
        out = model(ids, position_ids=torch.zeros_like(ids), output_attentions=True)
    for layer in weights.layers:
        norm = weights.norm(layer)
        assert norm is not None
        stream, x = seen[f"{layer}.input_layernorm"]
        close(normalise(norm, stream), x)
        found = {role: np.einsum("td,hdm->thm", x, weights.read(role, layer)) for role in "QKV"}
        for role, vectors in found.items():
            close(vectors.reshape(7, -1), seen[f"{layer}.self_attn.{role.lower()}_proj"][1])
        values = np.repeat(found["V"], 4 // found["V"].shape[1], axis=1)
        mixed = np.einsum("hij,jhm->ihm", out.attentions[layer].numpy()[0], values)
        close(np.einsum("ihm,hdm->id", mixed, weights.read("O", layer)), seen[f"{layer}.self_attn.o_proj"][1])


def test_scores_and_neurons(model: Any, folder: Path) -> None:
    weights = hs.open(str(folder))
    scores = hs.score(weights, ["pk"], ["OK"])
    ends = [np.linalg.qr(weights.read_head(name))[0] for name in ("L0H1.O", "L2KV0.K")]
    assert scores["pk", "OK"].at("L0H1", "L2KV0") == pytest.approx(np.square(ends[0].T @ ends[1]).sum(), abs=1e-5)
    mlps = Mlps(weights)
    assert [len(mlps.parts(layer)) for layer in range(4)] == [1, 1, 0, 1]
    down = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_array_equal(mlps.read(1, mlps.parts(1)[0], Role.W, 0)[:, :, 0], down.T)


def test_deci_lists_the_shared_heads(model: Any, tmp_path: Path) -> None:
    """DeciLM 7B: every layer has attention, and a list gives its numbers of key/value heads."""
    from safetensors.torch import save_file

    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    said = config(model) | {"model_type": "deci", "num_key_value_heads_per_layer": [2, 4, 1, 4]}
    del said["block_configs"]
    (tmp_path / "config.json").write_text(json.dumps(said))
    weights = hs.open(str(tmp_path))
    assert [len(weights.heads_in("K", layer)) for layer in range(4)] == [2, 4, 1, 4]


@pytest.mark.parametrize("blocks", ["x", [], [{}] * 4, [{"attention": {"n_heads_in_group": 3}}] * 4, [None] * 4])
def test_impossible_blocks_are_refused(model: Any, folder: Path, tmp_path: Path, blocks: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config(model) | {"block_configs": blocks}))
    with pytest.raises(hs.HeadspanError) as error:
        hs.open(str(tmp_path))
    assert len(str(error.value).splitlines()) == 1
