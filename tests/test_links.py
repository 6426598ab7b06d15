"""Heads between the features of an attribution graph: against plain numpy, a planted head, and damaged graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attribution_graphs as made
import headspan as hs
from headspan.cli import _run
from headspan.reading import links as module
from headspan.reading.attribution_graph import read_attribution_graph
from headspan.vocabulary.errors import HeadspanError


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return made.saved(tmp_path_factory.mktemp("links"))


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("kv", [made.HEADS, 1])
def test_against_plain_numpy(kv: int, place: tuple[str, Path]) -> None:
    tc, weights = made.vectors(), made.model(kv)
    rows = hs.links(made.weights(kv), place[1], place[0], k=99).rows()
    assert {row["source"] for row in rows} == {"L0F5@1", "L0F6@1", "L1F2@4", "L0F9@2"}
    for (first, f, p), (last, g, q), weight in made.EDGES:
        mine = [row for row in rows if (row["source"], row["target"]) == (f"L{first}F{f}@{p}", f"L{last}F{g}@{q}")]
        assert [row["head"] for row in sorted(mine, key=lambda row: row["head"])] == [
            f"L{layer}H{i}" for layer in range(first + 1, last + 1) for i in range(made.HEADS)
        ]
        assert [abs(row["strength"]) for row in mine] == sorted((abs(row["strength"]) for row in mine), reverse=True)
        dec, enc = unit(tc[first]["W_dec"][f]), unit(tc[last]["W_enc"][g])
        for row in mine:
            layer, head = int(row["head"][1]), int(row["head"][3])
            w_o, w_v = weights["O"][layer, head], weights["V"][layer, head * kv // made.HEADS]
            whole = w_o @ w_v.T
            assert row["strength"] == pytest.approx(enc @ whole @ dec / np.linalg.norm(whole) * made.D, rel=1e-4)
            for name, vector, matrix in (("reads", dec, w_v), ("writes", enc, w_o)):
                assert row[name] == pytest.approx(np.sum((vector @ np.linalg.qr(matrix)[0]) ** 2), rel=1e-4)
            assert row["weight"] == weight
        assert {row["route"] for row in mine} == {"either" if p == q else "attention"}
        assert mine[0]["direct"] == (pytest.approx(float(dec @ enc), abs=1e-6) if p == q else None)


@pytest.mark.parametrize("kind", ["circuit-tracer", "gemma-scope", "sae-lens"])
def test_the_planted_head_comes_first(kind: str, place: tuple[str, Path], tmp_path: Path) -> None:
    found = hs.links(made.weights(), place[1], made.save_transcoders(tmp_path, kind), k=1)
    best = {row["source"]: row for row in found.rows()}
    assert [best[name]["head"] for name in ("L0F5@1", "L0F6@1")] == [made.PLANTED] * 2
    for name in ("L0F5@1", "L0F6@1"):  # the head's sign is that of the link
        assert best[name]["strength"] * best[name]["weight"] > 0 and abs(best[name]["strength"]) > 4
        assert best[name]["p_kind"] < 0.02 and best[name]["reads"] > 0.4
    assert (found.between, found.left_out) == (4, 3) and found.links[0].heads == 9


def test_random_features_are_not_special(place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all heads, strengths of random features have a root mean square of 1 and p_kind a mean of one half."""
    rows = hs.links(made.weights(planted=False), place[1], place[0], k=99).rows()
    assert np.sqrt(np.mean([row["strength"] ** 2 for row in rows])) == pytest.approx(1, abs=0.35)
    assert np.mean([row["p_kind"] for row in rows]) == pytest.approx(0.5, abs=0.15)
    assert module._SAMPLE >= 50


def test_folded_norms_are_in_both_ends(tmp_path: Path) -> None:
    """RMSNorm before attention and MLP: gains multiply what values and encoders read."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=made.D, intermediate_size=8, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=3,
        head_dim=4, vocab_size=16,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            parameter.normal_(1 if "norm" in name else 0, 0.4)
    llama.save_pretrained(tmp_path / "m")
    state = {name: value.double().numpy() for name, value in llama.state_dict().items()}
    transcoders, graph = made.saved(tmp_path)
    tc = made.vectors()
    for hook, gain in (("ln2.hook_normalized", state["model.layers.3.post_attention_layernorm.weight"]), (None, 1.0)):
        given = {} if hook is None else {"hook": hook}
        row = hs.links(tmp_path / "m", graph, transcoders, k=1, fold=True, strongest=1, **given).rows()[0]
        layer, head = int(row["head"][1]), int(row["head"][3])
        part = slice(4 * head, 4 * head + 4)
        attention = f"model.layers.{layer}.self_attn"
        w_v = (
            state[f"{attention}.v_proj.weight"][part].T * state[f"model.layers.{layer}.input_layernorm.weight"][:, None]
        )
        whole = state[f"{attention}.o_proj.weight"][:, part] @ w_v.T
        dec, enc = unit(tc[0]["W_dec"][5]), unit(tc[3]["W_enc"][7] * gain)
        assert row["strength"] == pytest.approx(enc @ whole @ dec / np.linalg.norm(whole) * made.D, rel=1e-4)


def test_links_are_chosen_by_weight_and_by_name(place: tuple[str, Path]) -> None:
    weights = made.weights()

    def sources(**options: Any) -> list[str]:
        return [link.source for link in hs.links(weights, place[1], place[0], k=1, **options).links]

    assert sources() == ["L0F5@1", "L0F6@1", "L1F2@4", "L0F9@2"] and sources(strongest=2) == ["L0F5@1", "L0F6@1"]
    assert sources(from_="l0f6") == sources(from_="L0F6@1") == sources(from_="0_6_1") == ["L0F6@1"]
    assert sources(to="L2F3") == ["L0F9@2"]
    with pytest.raises(HeadspanError, match=r"none of the 4 links .* from L0F6@2"):
        sources(from_="L0F6@2")


def damaged(change: Callable[[dict[str, Any]], Any]) -> str:
    content = made.content()
    replaced = change(content)
    return json.dumps(content if replaced is None else replaced)


def test_an_id_of_two_nodes_says_nothing(tmp_path: Path) -> None:
    """circuit-tracer gives the error of layer 5 at token 1 the id of feature 5 of layer 0."""
    content = made.content()
    content["nodes"].append({**made.node(0, 5, 1), "layer": "5", "feature_type": "mlp reconstruction error"})
    (tmp_path / "g.json").write_text(json.dumps(content))
    found = read_attribution_graph(tmp_path / "g.json")
    assert (len(found.links), found.left_out) == (3, 4) and "L0F5@1" not in {str(link.source) for link in found.links}


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda c: [c], "JSON object"),
    "no links": (lambda c: c.pop("links") and None, "needs nodes, links and metadata"),
    "nodes by id": (lambda c: c.update(nodes={}), "needs nodes, links and metadata"),
    "a node of text": (lambda c: c["nodes"].append("x"), "must have a node_id"),
    "another layer": (lambda c: c["nodes"][0].update(layer="1"), "id must be layer_feature_position"),
    "another id": (lambda c: c["nodes"][0].update(node_id="x"), "id must be layer_feature_position"),
    "an unknown end": (lambda c: c["links"][0].update(source="9_9_9"), "ids of two nodes"),
    "a list as end": (lambda c: c["links"][0].update(source=[]), "ids of two nodes"),
    "no weight": (lambda c: c["links"][0].pop("weight") and None, "finite weight"),
    "nan": (lambda c: c["links"][0].update(weight=float("nan")), "finite weight"),
    "huge": (lambda c: c["links"][0].update(weight=10**400), "finite weight"),
    "backwards": (lambda c: c["links"].append({"source": "3_7_4", "target": "0_5_1", "weight": 1}), "not later"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_graph_is_refused(what: str, tmp_path: Path) -> None:
    change, words = DAMAGE[what]
    (tmp_path / "g.json").write_text(damaged(change))
    with pytest.raises(HeadspanError, match=words):
        read_attribution_graph(tmp_path / "g.json")


def test_transcoders_that_do_not_fit(place: tuple[str, Path], tmp_path: Path) -> None:
    weights, (transcoders, graph) = made.weights(), place
    small = {"model": {role: np.ones((2, 2, made.D, 4)) for role in "QKVO"}}
    for given, words in (
        ({"transcoders": "layer.safetensors"}, "does not name transcoders"),
        ({"transcoders": str(tmp_path / "{}.npz")}, "there is no transcoder"),
        ({"graph": tmp_path / "none.json"}, "there is no file"),
        (small, "Give the model of the graph"),
        ({"k": 0}, "must be 1 or more"),
    ):
        with pytest.raises(HeadspanError, match=words):
            hs.links(**{"model": weights, "graph": graph, "transcoders": transcoders, **given})
    for layer in range(made.LAYERS):
        np.savez(tmp_path / f"{layer}.npz", W_enc_0=np.ones((2, made.D)))
        np.savez(tmp_path / f"few{layer}.npz", W_enc=np.ones((2, made.D)), W_dec=np.ones((2, made.D)))
        np.savez(tmp_path / f"wide{layer}.npz", W_enc=np.ones((2, 9)), W_dec=np.ones((2, 9)))
    for name, words in (("{}", "cross-layer"), ("few{}", "has 2"), ("wide{}", "no axis is of d_model 24")):
        with pytest.raises(HeadspanError, match=words):
            hs.links(weights, graph, str(tmp_path / f"{name}.npz"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the demo, whose features here are random; what is saved is read again."""
    transcoders, graph = made.for_demo(tmp_path)
    words = ["links", "demo", str(graph), "--transcoders", transcoders]
    assert _run([*words, "-k", "2"]) == 0
    shown = capsys.readouterr().out
    assert "L0F3@1" in shown and "attends" in shown and "\x1b" not in shown
    assert _run([*words, "--json", "--fold", "--hook", "ln2.hook_normalized"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 3 and records[0]["head"].startswith("L1H")
    for wrong in (["--hook", "ln2.hook_normalized"], ["--to", "L9F9"], ["--strongest", "0"]):
        assert _run([*words, *wrong]) == 2
    found = hs.links("demo", graph, transcoders)
    found.save(tmp_path / "links.safetensors")
    assert hs.load(tmp_path / "links.safetensors") == found
