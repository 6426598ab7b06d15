"""Circuits: written, read back, drawn; a bad file is refused with a message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from headspan.cli import _run
from headspan.results.tasks.circuit import CircuitEdge
from headspan.results.tasks.edge_table import EdgeTable
from notices import noticed

GOOD: dict[str, Any] = {
    "format": "headspan circuit", "version": 1, "name": "induction", "model": "demo", "nodes": ["L0H3", "L1H2"],
    "edges": [{"source": "L0H3.O", "target": "L1H2.K", "metric": "pk", "score": 10.1}],
}  # fmt: skip
HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e"


@pytest.fixture(scope="module")
def scores() -> hs.Scores:
    return hs.score("demo")


def written(folder: Path, content: Any) -> Path:
    path = folder / "c.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_there_and_back(tmp_path: Path) -> None:
    circuit = hs.Circuit(HOSTILE, "demo", (CircuitEdge("L0H3.O", "L1H2.K", score=1.5), CircuitEdge("L0H1.O", "L1H2.V")))
    circuit.save(tmp_path / "c.json")
    found = hs.Circuit.load(tmp_path / "c.json")
    assert found == circuit and found.name == HOSTILE and found.nodes == ("L0H3", "L1H2", "L0H1")
    assert list(json.loads((tmp_path / "c.json").read_text())) == list(GOOD)


def test_the_wiring_of_a_circuit(tmp_path: Path, scores: hs.Scores) -> None:
    edges = [*GOOD["edges"], {"source": "L0H1.O", "target": "L1H2.V"}, {"source": "l0h1.o", "target": "L1H2.V"}]
    path = written(tmp_path, GOOD | {"edges": edges})
    with noticed() as said:
        found = hs.wiring(scores, circuit=path)
    assert {(str(e.source), str(e.target), str(e.pairing)) for e in found.edges} == {
        ("L0H3", "L1H2", "OK"), ("L0H1", "L1H2", "OV"),
    }  # fmt: skip
    assert all(edge.score == scores["pk", edge.pairing].at(edge.source, edge.target) for edge in found.edges)
    assert all(edge.rank == scores["pk", edge.pairing].rank_of(edge.source, edge.target) for edge in found.edges)
    assert found.rule == "circuit induction" and not said
    assert "L0H3" in (found._repr_svg_() or "")
    with noticed() as said:
        hs.wiring(scores, circuit=hs.Circuit.from_dict(GOOD | {"edges": [edges[0] | {"score": 3}]}))
    assert "may have been made from another model" in said[0]
    assert hs.wiring("demo", circuit=path, metric="cs").edges[0].metric == "cs"
    assert hs.wiring(scores, circuit=path, large_effect=False, labels=None).nodes


def test_shared_heads_of_a_circuit() -> None:
    rng = np.random.default_rng(0)
    weights = hs.open({r: rng.normal(size=(2, 2 if r in "KV" else 4, 24, 4)) for r in "QKVO"})
    edges = [{"source": "L0H3.O", "target": "L1H3.K"}, {"source": "L0H3.O", "target": "L1H3.Q"}]
    found = hs.wiring(weights, circuit=hs.Circuit.from_dict(GOOD | {"edges": edges}))
    assert {str(edge.target) for edge in found.edges} == {"L1KV1", "L1H3"}


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "cannot be read as a circuit"),
    "a list": ([], "is not a circuit"),
    "another format": (GOOD | {"format": "theirs"}, "is not a circuit"),
    "a wiring": ({"generator": "headspan", "edges": []}, "is not a circuit"),
    "a newer version": (GOOD | {"version": 2}, "a newer headspan"),
    "a true version": (GOOD | {"version": True}, "a newer headspan"),
    "edges of no list": (GOOD | {"edges": {}}, "must be a list"),
    "many edges": (GOOD | {"edges": GOOD["edges"] * 20_001}, "at most 20,000"),
    "an edge of no object": (GOOD | {"edges": ["L0H3"]}, "must be an object"),
    "an edge without a target": (GOOD | {"edges": [{"source": "L0H3.O"}]}, "must be a port"),
    "an edge without roles": (GOOD | {"edges": [{"source": "L0H3", "target": "L1H2"}]}, "is not a head with a role"),
    "an edge from keys": (GOOD | {"edges": [{"source": "L0H3.K", "target": "L1H2.K"}]}, "goes from O"),
    "backwards": (GOOD | {"edges": [{"source": "L1H3.O", "target": "L0H2.K"}]}, "later layer to an earlier"),
    "an unknown head": (GOOD | {"edges": [{"source": "L0H99.O", "target": "L1H2.K"}]}, "there is no head L0H99"),
    "no head": (GOOD | {"edges": [{"source": "x.O", "target": "L1H2.K"}]}, "is not a head name"),
    "a score in words": (GOOD | {"edges": [GOOD["edges"][0] | {"score": "1"}]}, "must be a number"),
    "NaN": (json.dumps(GOOD).replace("10.1", "NaN"), "NaN is not a number"),
    "a long name": (GOOD | {"name": "x" * 400}, "at most 300 letters"),
    "a name of numbers": (GOOD | {"name": 3}, "at most 300 letters"),
    "nodes of no names": (GOOD | {"nodes": [3]}, "must be names of heads"),
    "deep": ("[" * 100_000, "cannot be read as a circuit"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_file_is_one_message(
    what: str, tmp_path: Path, scores: hs.Scores, capfd: pytest.CaptureFixture[str]
) -> None:
    content, words = BAD[what]
    path = written(tmp_path, content)
    with pytest.raises(hs.HeadspanError) as caught:
        hs.wiring(scores, circuit=path)
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert _run(["wiring", "demo", "--circuit", str(path)]) == 2
    assert capfd.readouterr().err.startswith("headspan: ")


def test_a_huge_file_is_not_read(tmp_path: Path, scores: hs.Scores) -> None:
    path = tmp_path / "c.json"
    with path.open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(hs.HeadspanError, match="too many for a circuit"):
        hs.wiring(scores, circuit=path)


def test_what_is_not_a_file(tmp_path: Path, scores: hs.Scores) -> None:
    for path in (tmp_path, tmp_path / "nowhere.json"):
        with pytest.raises(hs.HeadspanError, match=r"not an ordinary file|there is no file"):
            hs.wiring(scores, circuit=path)


def test_a_circuit_takes_no_rule(scores: hs.Scores) -> None:
    for options in ({"rule": "threshold", "minimum": 1.0}, {"minimum": 1.0}, {"rule": "significance"}):
        with pytest.raises(hs.HeadspanError, match="a circuit defines its own edges"):
            hs.wiring(scores, circuit=hs.Circuit.from_dict(GOOD), **options)


def test_a_hostile_name_stays_text(tmp_path: Path, scores: hs.Scores, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, GOOD | {"name": HOSTILE})
    drawn = hs.wiring(scores, circuit=path)
    svg = drawn._repr_svg_() or ""
    assert "<img" not in svg and "<script" not in svg
    drawn.to_json(tmp_path / "w.json")
    drawn.to_graphml(tmp_path / "w.graphml")
    assert _run(["wiring", "demo", "--circuit", str(path), "--out", str(tmp_path / "x.svg")]) == 0
    assert _run(["wiring", "demo", "--circuit", str(path)]) == 0
    out, err = capfd.readouterr()
    assert all(line.isprintable() for line in [*out.split("\n"), *err.split("\n")])


# -- circuits of a whole model ---------------------------------------------------------------------------------

TABLE = EdgeTable.regular(n_layers=2, n_heads=4, n_kv_heads=2)


def kept_edges(*edges: tuple[str, str]) -> np.ndarray:
    kept = np.zeros_like(TABLE.mask)
    for edge in edges:
        kept[TABLE.place(*edge)] = True
    return kept


def test_a_circuit_of_a_whole_model(tmp_path: Path) -> None:
    edges = [("embedding.W", "L0H0.Q"), ("L0H3.O", "L1KV1.K"), ("L0MLP.W", "logits.R"), ("L0H1.O", "L0MLP.R")]
    values = np.zeros(TABLE.mask.shape)
    for size, edge in enumerate(edges):
        values[TABLE.place(*edge)] = size * (-1) ** size
    circuit = hs.Circuit.of_table(TABLE, values, kept_edges(*edges), "ioi", "demo")
    circuit.save(tmp_path / "c.json")
    found = hs.Circuit.load(tmp_path / "c.json")
    assert [(e.source, e.target, e.metric, e.score) for e in found.edges] == [
        ("L0H1.O", "L0MLP.R", "attribution", -3.0),
        ("L0MLP.W", "logits.R", "attribution", 2.0),
        ("L0H3.O", "L1KV1.K", "attribution", -1.0),
        ("embedding.W", "L0H0.Q", "attribution", 0.0),
    ]
    assert np.array_equal(found.kept(TABLE), kept_edges(*edges))
    assert "4 edges between 7 heads and nodes" in repr(found)


def test_keys_of_a_query_head_are_those_of_its_group() -> None:
    edges = [{"source": "L0H3.O", "target": "l1h3.k"}, {"source": "EMBEDDING.W", "target": "L1H2.V"}]
    found = hs.Circuit.from_dict(GOOD | {"edges": edges}).kept(TABLE)
    assert np.array_equal(found, kept_edges(("L0H3.O", "L1KV1.K"), ("embedding.W", "L1KV1.V")))


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("L0H9.O", "L1H2.K", "there is no head L0H9"),
        ("L5MLP.W", "logits.R", "there is no node L5MLP"),
        ("L1MLP.W", "L1H2.K", "later layer to an earlier"),
        ("logits.W", "L1H2.K", "there is no node logits with the role W"),
    ],
)
def test_edges_that_a_model_does_not_have(source: str, target: str, words: str) -> None:
    circuit = hs.Circuit.from_dict(GOOD | {"edges": [{"source": source, "target": target}]})
    with pytest.raises(hs.HeadspanError, match=words):
        circuit.kept(TABLE)


def test_a_circuit_that_no_file_holds() -> None:
    table = EdgeTable.regular(n_layers=12, n_heads=12, n_kv_heads=12)
    with pytest.raises(hs.HeadspanError, match=r"at most 20,000 edges, and this circuit has 32,491"):
        hs.Circuit.of_table(table, np.ones(table.mask.shape), table.mask, "all", "demo")


def test_the_wiring_leaves_out_nodes_that_a_result_lacks(
    tmp_path: Path, scores: hs.Scores, capfd: pytest.CaptureFixture[str]
) -> None:
    others = [("embedding.W", "L1H2.V"), ("L0H3.O", "L0MLP.R"), ("L0MLP.W", "L1H2.Q"), ("L1H2.O", "logits.R")]
    edges = [*GOOD["edges"], *({"source": a, "target": b, "metric": "attribution", "score": 2.0} for a, b in others)]
    path = written(tmp_path, GOOD | {"edges": edges, "nodes": ["L0H3", "L1MLP"]})
    words = "4 of 5 edges of the circuit 'induction' involve the embedding, MLPs or logits, which this result does not"
    saved = tmp_path / "s.safetensors"
    scores.save(saved)
    for given in (scores, saved, "demo"):
        with noticed() as said:
            found = hs.wiring(given, circuit=path)
        assert [str(edge.source) + str(edge.target) for edge in found.edges] == ["L0H3L1H2"]
        assert len([text for text in said if words in text]) == 1
    assert _run(["wiring", str(saved), "--circuit", str(path), "--out", str(tmp_path / "x.svg")]) == 0
    assert capfd.readouterr().err.count(words) == 1
    with noticed() as said:
        found = hs.wiring(scores, circuit=hs.Circuit.from_dict(GOOD | {"edges": edges[1:]}))
    assert not found.edges and found.notes == ("the circuit has no edges to show here",) and "4 of 4" in said[0]


def test_the_wiring_draws_nodes_that_a_result_has() -> None:
    rng = np.random.default_rng(0)
    weights = hs.open({r: rng.normal(size=(2, 2, 24, 4)) for r in "QKVO"})
    scores = hs.score(weights, "pk", "all", nodes=[hs.Node(rng.normal(size=24), "logits", writes=False)])
    edges = [{"source": "L0H1.O", "target": "logits.R"}, {"source": "L0H1.O", "target": "L1MLP.R"}]
    with noticed() as said:
        found = hs.wiring(scores, circuit=hs.Circuit.from_dict(GOOD | {"edges": edges}))
    assert [str(edge.target) for edge in found.edges] == ["logits"] and "1 of 2 edges" in said[0]
    with pytest.raises(hs.HeadspanError, match="refusal"):
        hs.wiring(scores, circuit=hs.Circuit.from_dict(GOOD | {"edges": [{"source": "L0H1.O", "target": "refusal.R"}]}))
