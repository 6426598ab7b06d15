"""Models whose layers have different numbers of heads, heads of different sizes, or no keys and values of their own:
from the file to the page.

OpenELM is not in transformers, so its layout is written down here once more: one tensor with all query, key and value
heads of a layer one after the other, RMS norms before attention and before the MLP, one norm for all queries and one
for all keys.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from families import FAMILIES, Run, build, close, normalise
from headspan.models.families.borrowed_kv import kv_layers
from headspan.models.families.lookup import find_architecture
from headspan.models.folding import fold
from headspan.models.mlp import Mlps
from headspan.models.weights import AttentionWeights
from headspan.results.labels import Labels
from headspan.vocabulary.heads import ROLES, Role
from report_browser import Open, drawing

D, M, F, VOCABULARY = 24, 4, 20, 50
QUERY, KV = [2, 4, 6], [1, 2, 2]
TOKENS = np.arange(1, 8) * 5 % VOCABULARY


def config() -> dict[str, Any]:
    return {
        "model_type": "openelm", "model_dim": D, "head_dim": M, "num_transformer_layers": 3, "num_query_heads": QUERY,
        "num_kv_heads": KV, "vocab_size": VOCABULARY, "share_input_output_layers": True,
        "normalize_qk_projections": True,
    }  # fmt: skip


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * 0.2 + (1 if len(shape) == 1 else 0)).astype(np.float32)

    found = {"transformer.token_embeddings.weight": normal(VOCABULARY, D), "transformer.norm.weight": normal(D)}
    for layer, (n, n_kv) in enumerate(zip(QUERY, KV, strict=True)):
        found |= {
            f"transformer.layers.{layer}.{name}.weight": normal(*shape)
            for name, shape in {
                "attn.qkv_proj": ((n + 2 * n_kv) * M, D), "attn.out_proj": (D, n * M), "attn.q_norm": (M,),
                "attn.k_norm": (M,), "attn_norm": (D,), "ffn_norm": (D,), "ffn.proj_1": (2 * F, D),
                "ffn.proj_2": (D, F),
            }.items()
        }  # fmt: skip
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openelm")
    (path / "config.json").write_text(json.dumps(config()))
    save_file(tensors(), path / "model.safetensors")
    return path


def rms(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * gain


def forward() -> list[dict[str, np.ndarray]]:
    """What every layer of the model computes, without rotary positions, which no weight depends on."""
    stored, seen = tensors(), []
    x = stored["transformer.token_embeddings.weight"][TOKENS]
    for layer, (n, n_kv) in enumerate(zip(QUERY, KV, strict=True)):
        here = {k.split(f"layers.{layer}.")[1]: v for k, v in stored.items() if f"layers.{layer}." in k}
        read = rms(x, here["attn_norm.weight"])
        qkv = (read @ here["attn.qkv_proj.weight"].T).reshape(len(x), n + 2 * n_kv, M)
        q, k, v = qkv[:, :n], qkv[:, n : n + n_kv], qkv[:, n + n_kv :]
        keys = np.repeat(rms(k, here["attn.k_norm.weight"]), n // n_kv, axis=1)
        logits = np.einsum("ihm,jhm->hij", rms(q, here["attn.q_norm.weight"]), keys) / np.sqrt(M)
        pattern = np.exp(np.where(np.tri(len(x)) == 1, logits, -np.inf))
        pattern /= pattern.sum(-1, keepdims=True)
        z = np.einsum("hij,jhm->ihm", pattern, np.repeat(v, n // n_kv, axis=1))
        out = z.reshape(len(x), -1) @ here["attn.out_proj.weight"].T
        seen.append({"stream": x, "read": read, "Q": q, "K": k, "V": v, "pattern": pattern, "out": out})
        x = x + out
        gate, up = np.split(rms(x, here["ffn_norm.weight"]) @ here["ffn.proj_1.weight"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ here["ffn.proj_2.weight"].T
    return seen


def test_openelm_is_read_by_its_layout(folder: Path) -> None:
    weights = hs.open(str(folder))
    assert [str(h) for h in weights.heads("K")] == ["L0KV0", "L1KV0", "L1KV1", "L2KV0", "L2KV1"]
    assert str(weights.ports.kv_of("L2H3")) == "L2KV1"
    for layer, seen in enumerate(forward()):
        norm = weights.norm(layer)
        assert norm is not None
        close(normalise(norm, seen["stream"]), seen["read"])
        for role in "QKV":
            close(np.einsum("td,hdm->thm", seen["read"], weights.read(role, layer)), seen[role])
        values = np.repeat(seen["V"], QUERY[layer] // KV[layer], axis=1)
        mixed = np.einsum("hij,jhm->ihm", seen["pattern"], values)
        close(np.einsum("ihm,hdm->id", mixed, weights.read("O", layer)), seen["out"])
    np.testing.assert_array_equal(weights.unembedding(), tensors()["transformer.token_embeddings.weight"])


def test_openelm_neurons_are_rows_of_its_two_projections(folder: Path) -> None:
    mlps, stored = Mlps(hs.open(str(folder))), tensors()
    (part,) = mlps.parts(1)
    reads, writes = (mlps.read(1, part, role, 0) for role in (Role.R, Role.W))
    both = stored["transformer.layers.1.ffn.proj_1.weight"]
    np.testing.assert_array_equal(reads, np.stack([both[:F], both[F:]], axis=2))
    np.testing.assert_array_equal(writes[:, :, 0], stored["transformer.layers.1.ffn.proj_2.weight"].T)
    norm = mlps.norm(1)
    assert norm is not None
    np.testing.assert_array_equal(norm.gain, stored["transformer.layers.1.ffn_norm.weight"])


def test_scores_of_uneven_layers_are_those_of_their_subspaces(folder: Path, tmp_path: Path) -> None:
    weights = hs.open(str(folder))
    assert all(fact in repr(weights) for fact in ("3 layers", "2 to 6 heads", "1 to 2 key/value heads"))
    assert any("layers differ: 2 to 6 heads" in note and "1 to 2 key/value" in note for note in weights.notes)
    scores = hs.score(str(folder), metric=["pk"], pairing="all")
    scores.save(tmp_path / "uneven.safetensors")
    for result in (scores, hs.load(tmp_path / "uneven.safetensors")):
        for pairing in ("OK", "OQ", "VV"):
            first, second = pairing
            bases = {r: [np.linalg.qr(weights.read_head(f"{h}.{r}"))[0] for h in weights.heads(r)] for r in pairing}
            expected = [[np.square(a.T @ b).sum() for b in bases[second]] for a in bases[first]]
            ours = result["pk", pairing].values
            assert np.isfinite(ours).sum() > 5
            np.testing.assert_allclose(ours, np.where(np.isfinite(ours), expected, np.nan), atol=1e-5)


def test_the_page_and_a_comparison_of_uneven_layers(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config()))
    save_file(tensors(1), other / "model.safetensors")
    page = hs.report(hs.score(str(folder), metric=["pk"], pairing="flow"), str(folder))
    assert page.payload["model"]["n_heads"] == "2 to 6"
    assert "34 weights, 34 moved" in repr(hs.diff(str(folder), str(other)))  # 12 Q and O, 5 K and V


def test_gemma4_sizes_by_layer_or_by_kind() -> None:
    """Published configs give the sizes of full-attention layers once; those that transformers saves, by layer."""
    common = {"model_type": "gemma4_text", "head_dim": 8, "num_key_value_heads": 2, "attention_k_eq_v": True,
              "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    by_kind = find_architecture({**common, "global_head_dim": 16, "num_global_key_value_heads": 1})[2]
    by_layer = find_architecture({**common, "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}}})[2]
    for found in (by_kind, by_layer):
        assert (found["head_dim"], found["num_key_value_heads"]) == ([8, 16], [2, 1])


def test_a_mixture_with_its_own_norms_is_refused(tmp_path: Path) -> None:
    mixture = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}
    run = Run(replace(FAMILIES["gemma4"], config=FAMILIES["gemma4"].config | mixture), tmp_path)
    with pytest.raises(hs.HeadspanError, match="parts have their own norms"):
        hs.nodes(str(tmp_path), neurons="L0:*")
    assert hs.nodes(run.weights, hs.Node(np.ones(run.weights.d_model), "ones", layer=1)).count == 1


def test_an_adapter_of_a_mixture_with_its_own_norms(tmp_path: Path) -> None:
    """Its attention modules are nodes; those of the mixture are noted, and refused if there is nothing else."""
    peft = pytest.importorskip("peft")
    mixture = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}
    family = replace(FAMILIES["gemma4"], config=FAMILIES["gemma4"].config | mixture)
    build(family).save_pretrained(tmp_path / "base")
    for name, modules in (
        ("heads", ["q_proj", "per_layer_input_gate"]),
        ("both", ["q_proj", "up_proj"]),
        ("mlp", ["up_proj"]),
    ):
        tuned = peft.get_peft_model(
            build(family), peft.LoraConfig(r=2, target_modules=modules, init_lora_weights=False)
        )
        tuned.save_pretrained(tmp_path / name)
    base = str(tmp_path / "base")
    report = hs.nodes(base, adapter=tmp_path / "heads", k=3)
    assert report.count == 3
    (inside,) = (note for note in report.notes if "are not nodes" in note)
    assert inside.startswith("3 modules of heads") and "per_layer_input_gate" in inside and "MLP" not in inside
    weights = hs.open(base)
    first = next(row for row in report.rows() if "L1.self_attn.q_proj" in str(row["node"]))
    assert first["kind"] == "adapter" and weights.architecture == "gemma4"
    both = hs.nodes(base, adapter=tmp_path / "both", k=3)
    assert both.count == 3
    assert any("3 modules of both are not nodes" in note for note in both.notes)
    with pytest.raises(hs.HeadspanError, match="parts have their own norms"):
        hs.nodes(base, adapter=tmp_path / "mlp")


# ------------------------------------------------------------------- keys and values of earlier layers


@pytest.fixture(scope="module", params=["gemma4-lent-keys", "gemma3n"])
def lent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Five layers; layer 3 uses the keys and values of layer 2, layer 4 those of layer 1."""
    return Run(FAMILIES[request.param], tmp_path_factory.mktemp("lent"))


def test_names_of_lent_keys_and_values(lent: Run) -> None:
    weights = lent.weights
    table, last = weights.ports, len(weights.heads_in("K", 1)) - 1
    assert {head.layer for head in weights.heads("K")} == {0, 1, 2} == {head.layer for head in weights.heads("V")}
    assert {head.layer for head in weights.heads("O")} == {0, 1, 2, 3, 4}
    assert [str(table.kv_of(f"L3H{i}")) for i in range(4)] == ["L2KV0", "L2KV0", "L2KV1", "L2KV1"]
    assert str(table.kv_of("L4H3")) == f"L1KV{last}"
    assert list(map(str, table.group_of("L2KV1"))) == ["L2H2", "L2H3", "L3H2", "L3H3"]
    note = table.note("L3H2", "K")
    assert note is not None and all(fact in note for fact in ("L3H2.K", "L2KV1.K", "L2H2, L2H3, L3H2, L3H3"))
    np.testing.assert_array_equal(weights.read_head("L3H2.V"), weights.read_head("L2KV1.V"))
    assert weights.layers_with("K") == (0, 1, 2) and weights.read("K", 3).shape[0] == 0
    assert weights.bias("V", 4) is None
    assert any("layers 3–4" in note and "layers 1–2" in note for note in weights.notes)


def circuit(weights: AttentionWeights, role: str, name: str) -> np.ndarray:
    """The matrix whose columns span what CS uses for one weight: those of all heads of a group, concatenated."""
    own, other = weights.read_head(f"{name}.{role}").astype(np.float64), str(Role(role).partner)
    partners = weights.ports.group_of(name) if role in "KV" else [weights.ports.kv_of(name)]
    return np.concatenate([own @ weights.read_head(f"{partner}.{other}").T for partner in partners], axis=1)


def test_scores_with_lent_keys_and_values_are_their_definitions(lent: Run, tmp_path: Path) -> None:
    """PK of subspaces; CS with the partners of a group in all of its layers, folded or not."""
    for weights in (lent.weights, fold(lent.weights)):
        scores = hs.score(weights, ["pk", "cs"], "all")
        bases = {r: [np.linalg.qr(weights.read_head(f"{h}.{r}"))[0] for h in weights.heads(r)] for r in "QKVO"}
        circuits = {r: [circuit(weights, r, str(h)) for h in weights.heads(r)] for r in "QKVO"}
        for first, second in ("OQ", "OK", "OV", "KK", "VV", "QK", "OO"):
            ours = scores["pk", first + second].values
            expected = [[np.square(a.T @ b).sum() for b in bases[second]] for a in bases[first]]
            np.testing.assert_allclose(ours, np.where(np.isfinite(ours), expected, np.nan), atol=1e-5)
            ours = scores["cs", first + second].values
            expected = [[ratio(a, b) for b in circuits[second]] for a in circuits[first]]
            np.testing.assert_allclose(ours, np.where(np.isfinite(ours), expected, np.nan), atol=1e-5)
        assert scores["pk", "OK"].at("L0H1", "L3H2") == scores["pk", "OK"].at("L0H1", "L2KV1")
        with np.errstate(all="raise"):
            assert np.isnan(scores["pk", "OK"].at("L2H0", "L3H2"))  # its keys are made in layer 2
    scores.save(tmp_path / "lent.safetensors")
    loaded = hs.load(tmp_path / "lent.safetensors")
    assert loaded == scores and loaded.ports == scores.ports


def ratio(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.T @ b) / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("grouping", ["blocks", "before", "roles"])
def test_scores_do_not_depend_on_how_layers_are_cut(lent: Run, grouping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one layer: some of them have no keys and values."""
    whole = hs.score(lent.weights, ["pk", "cs"], "all")
    each = [(layer,) for layer in lent.weights.layers]
    monkeypatch.setattr("headspan.scoring.plan._cut", lambda *given: (each, grouping))
    pieces = hs.score(lent.weights, ["pk", "cs"], "all")
    assert pieces.provenance["blocks"] == {"pk": 5, "cs": 5}
    for key, values in whole.arrays.items():
        np.testing.assert_allclose(pieces.arrays[key], values, atol=1e-6)


def test_what_is_made_of_lent_keys_and_values(lent: Run, tmp_path: Path) -> None:
    """Neighbours, hubs, wiring and its files, labels and paths follow the link to the earlier layer."""
    scores = hs.score(lent.weights, ["pk"], "flow")
    found = hs.around(scores, "L3H2")
    assert {str(e.target) for e in found.incoming if str(e.pairing) != "OQ"} == {"L2KV1"}
    assert "L3H2.K is L2KV1.K" in str(found.note)
    assert {str(e.source) for e in hs.around(scores, "L2KV1").outgoing} <= {"L2H2", "L2H3", "L3H2", "L3H3"}
    hub = next(row for row in hs.hubs(scores, "OK").rows() if row["head"] == "L2KV1")
    assert hub["serves"] == "L2H2;L2H3;L3H2;L3H3"
    wiring = hs.wiring(scores, k=200)
    assert {("L2KV1", "L2H3"), ("L2KV1", "L3H2")} <= {(str(kv), str(head)) for kv, head in wiring.serves()}
    wiring.to_json(tmp_path / "w.json")
    assert {"source": "L2KV1", "target": "L3H2"} in json.loads((tmp_path / "w.json").read_text())["serves"]
    wiring.to_graphml(tmp_path / "w.graphml")
    assert wiring.to_networkx().has_edge("L2KV1", "L3H2", "serves")
    assert Labels.from_pairs([("L3H2", "late")]).for_model(scores.ports).of("L2KV1") == ("late",)
    through = [path for path in hs.paths(lent.weights, to="L4H1.Q", depth=2, k=200) if path.hops == 2]
    assert {path.source.layer for path in through if path.via[0].layer == 3} == {0, 1}  # read in layer 2


def test_paths_through_lent_values_are_products_of_their_weights(lent: Run) -> None:
    weights = lent.weights
    path = next(p for p in hs.paths(weights, to="L4H1.Q", depth=2, k=200) if str(p.via[0]) == "L3H2")
    ends = [np.linalg.qr(weights.read_head(name).astype(float))[0] for name in (f"{path.source}.O", "L4H1.Q")]
    through = weights.read_head("L3H2.O").astype(float) @ weights.read_head("L2KV1.V").T
    through *= np.sqrt(8 / np.square(through).sum())  # of rank 8, scaled to hand on as many directions
    assert path.score == pytest.approx(np.square(ends[1].T @ through @ ends[0]).sum(), rel=1e-5)


def test_models_with_lent_keys_and_values_are_compared(lent: Run, tmp_path: Path) -> None:
    build(lent.family, seed=1).save_pretrained(tmp_path / "other")
    other = hs.open(str(tmp_path / "other"))
    change = hs.diff(lent.weights, other)
    ports = sum(len(lent.weights.heads(role)) for role in ROLES)
    assert f"{ports} weights, {ports} moved" in repr(change)
    series = hs.track([str(lent.weights.reference), str(tmp_path / "other")])
    series.save(tmp_path / "series.safetensors")
    for made in (change, series, hs.Series.load(tmp_path / "series.safetensors")):
        assert hs.report(made).payload["served_by"]["L3H2"] == "L2KV1"
    found = json.loads((tmp_path / "other" / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    if lent.weights.architecture == "gemma3n":
        (tmp_path / "other" / "config.json").write_text(json.dumps(found | {"layer_types": kinds}))
        with pytest.raises(hs.HeadspanError, match=r"L3H0.*L2KV0.*L1KV0"):
            hs.diff(lent.weights, str(tmp_path / "other"))


def test_facts_tokens_figures_and_head_scores_of_lent_keys(lent: Run) -> None:
    from headspan.plotting.weights import circuit_norms

    facts = hs.info(lent.weights, check=True)
    assert facts["check"]["ranks"]["K"]["heads"] == len(lent.weights.heads("K"))
    assert len(hs.tokens(lent.weights, "L3H2", "V", k=3)) == 3
    norms = circuit_norms(lent.weights, 3)
    product = lent.weights.read_head("L3H2.O") @ lent.weights.read_head("L2KV1.V").T
    assert norms["OV"][2] == pytest.approx(np.linalg.norm(product), rel=1e-5)
    found = hs.nodes(lent.weights, hs.Node(np.ones(lent.weights.d_model), "ones", layer=1))
    assert found.count == 1
    assert hs.behaviour(lent.model, sequences=2, length=10).heads == lent.weights.heads("O")


def test_a_value_bias_is_that_of_the_lender(tmp_path: Path) -> None:
    """What folding moves into the output bias of a layer comes from the layer that makes its values."""
    family = replace(FAMILIES["gemma3n"], config=FAMILIES["gemma3n"].config | {"attention_bias": True})
    weights = Run(family, tmp_path).weights
    assert not weights.value_bias_is_constant  # values are normalised behind it
    weights.value_bias_is_constant = True  # as in a family without that norm
    values, gain = weights.bias("V", 2), weights.output_norm(3)
    assert values is not None and gain is not None
    written = sum(weights.read("O", 3)[i] @ values[i // 2] for i in range(4)) + weights.bias("O", 3)
    close(fold(weights).bias("O", 3), gain.gain * written)


def test_unused_weights_of_borrowing_layers_are_left_alone(lent: Run, tmp_path: Path) -> None:
    """Published files hold keys and values of layers that never use them; the body may be inside a larger model."""
    source = lent.weights.source
    stored = {name.replace("model.", "model.language_model.", 1): source.read(name) for name in source.names()}
    stored |= {
        f"model.language_model.layers.{layer}.self_attn.{role}_proj.weight": np.full((5, 3), np.nan, np.float32)
        for layer in (3, 4)
        for role in "kv"
    }
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    text = dict(source.config)
    outer = {"model_type": str(text["model_type"]).removesuffix("_text"), "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    weights = hs.open(str(tmp_path))
    assert weights.architecture == lent.weights.architecture and weights.ports == lent.weights.ports
    assert not any("layers.3.self_attn.k_proj" in name for name in weights.tensors())
    np.testing.assert_array_equal(weights.read_head("L3H1.K"), lent.weights.read_head("L3H1.K"))


def test_which_layer_lends() -> None:
    """Like Gemma 4 E2B: every fifth layer has full attention, and the last twenty of thirty-five borrow."""
    kinds = ["full_attention" if (i + 1) % 5 == 0 else "sliding_attention" for i in range(35)]
    found = kv_layers({"num_kv_shared_layers": 20, "layer_types": kinds}, 35, "a model")
    assert found == {layer: 14 if (layer + 1) % 5 == 0 else 13 for layer in range(15, 35)}
    assert find_architecture({"model_type": "gemma3n_text"})[2]["layer_types"] == kinds


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers = 5"),
        ({"num_kv_shared_layers": True}, "num_kv_shared_layers = True"),
        ({"num_kv_shared_layers": 2, "layer_types": None}, "kinds of its 5 layers"),
        ({"num_kv_shared_layers": 2, "layer_types": [["a"]] * 5}, "kinds of its 5 layers"),
        ({"num_kv_shared_layers": 4}, "layer 1 of a model.*kind"),
    ],
)
def test_impossible_lending_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(hs.HeadspanError, match=sentence):
        kv_layers({"layer_types": ["a", "b", "a", "b", "a"]} | change, 5, "a model")


def test_lenders_must_fit(tmp_path: Path) -> None:
    build(FAMILIES["gemma4-lent-keys"]).save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    about["per_layer_config"] = {"4": {"head_dim": 12, "num_key_value_heads": 1}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(hs.HeadspanError, match=r"layer 4.*layer 1.*4 heads"):
        hs.open(str(tmp_path))


def test_streams_are_mixed_by_numbers_only() -> None:
    """AltUp maps the streams of a token within their span: coordinates are not mixed."""
    import torch

    altup = build(FAMILIES["gemma3n"]).model.layers[0].altup
    with torch.no_grad():
        streams, written = torch.randn(3, 1, 7, 24), torch.randn(1, 7, 24)
        predicted = altup.predict(streams)
        corrected = altup.correct(predicted, written)
    for token in range(7):
        span_of(streams[:, 0, token].numpy(), predicted[:, 0, token].numpy())
        both = np.concatenate([predicted[:, 0, token].numpy(), written[0, token, None].numpy()])
        span_of(both, corrected[:, 0, token].numpy())


def span_of(rows: np.ndarray, found: np.ndarray) -> None:
    close(np.linalg.lstsq(rows.T, found.T, rcond=None)[0].T @ rows, found)


def test_a_report_links_heads_to_the_layer_that_lends(lent: Run) -> None:
    page = hs.report(hs.score(lent.weights, ["pk"], "flow"), lent.weights)
    assert page.payload["served_by"]["L3H2"] == "L2KV1"
    assert {row[:2] for row in page.payload["ports"]["K"]} == {"L0", "L1", "L2"}


def test_the_page_keeps_heads_in_their_own_layers(open_page: Open, tmp_path: Path) -> None:
    """A KV head is framed with the query heads of its layer; those of later layers are drawn there and linked to it."""
    scores = hs.score(hs.open(build(FAMILIES["gemma3n"])), ["pk"], "flow")
    hs.report(scores, out=tmp_path / "page.html")
    view = open_page(tmp_path / "page.html", scores, "#pairings=OQ,OK,OV&k=15&head=L3H2")
    _, boxes = drawing(view.page)
    columns: dict[str, set[int]] = {}
    for name, box in boxes.items():
        columns.setdefault(name.partition("H" if "H" in name else "K")[0], set()).add(round((box[0] + box[2]) / 2))
    assert sorted(columns) == ["L0", "L1", "L2", "L3", "L4"]
    assert all(len(places) == 1 for places in columns.values()), columns
    assert sorted(columns, key=lambda layer: min(columns[layer])) == sorted(columns)
    assert "reads through L2KV1" in " ".join(view.text("#inspector").split())
    assert "kin" in str(view.page.get_attribute('.node[data-head="L2KV1"]', "class"))
    assert view.errors == []
