"""Do the edges of a circuit overlap more than others: against plain loops, planted and random circuits, and files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kstest

import headspan as hs
from headspan.cli import _run
from headspan.results.tasks.circuit import CircuitEdge
from headspan.results.tasks.edge_table import EdgeTable
from headspan.results.tasks.graph_files import write_graph
from headspan.statistics import circuit_overlap as module
from headspan.vocabulary.errors import HeadspanError

LAYERS, HEADS, KV = 4, 6, 2


def model(n_kv: int = HEADS, seed: int = 0) -> hs.Scores:
    rng = np.random.default_rng(seed)
    counts = {"Q": HEADS, "O": HEADS, "K": n_kv, "V": n_kv}
    return hs.score({role: rng.normal(size=(LAYERS, n, 24, 3)) for role, n in counts.items()}, "pk", "flow")


@pytest.fixture(scope="module")
def plain() -> hs.Scores:
    return model()


@pytest.fixture(scope="module")
def shared() -> hs.Scores:
    return model(KV)


def circuit(*edges: str) -> hs.Circuit:
    return hs.Circuit("c", "m", tuple(CircuitEdge(*edge.split()) for edge in edges))


def by_hand(scores: hs.Scores, edges: list[tuple[str, str, str]]) -> float:
    """The mean over edges of the fraction of other pairs of the same layers that score less; ties count half."""
    total = []
    for pairing, source, target in edges:
        rows = scores["pk", pairing].forward().rows()
        block = [e for e in rows if (e["source"][:2], e["target"][:2]) == (source[:2], target[:2])]
        mine = next(e["score"] for e in block if (e["source"], e["target"]) == (source, target))
        others = [e["score"] for e in block if (pairing, e["source"], e["target"]) not in edges]
        total.append(np.mean([(x < mine) + 0.5 * (x == mine) for x in others]))
    return float(np.mean(total))


def test_against_plain_loops(plain: hs.Scores) -> None:
    edges = [("OK", "L0H1", "L2H3"), ("OK", "L0H2", "L2H3"), ("OV", "L1H0", "L3H5"), ("OQ", "L0H1", "L1H1")]
    found = hs.circuit_overlap(plain, circuit(*(f"{s}.O {t}.{p[1]}" for p, s, t in edges)), bootstrap=0)
    rows = {row["pairing"]: row for row in found.rows()}
    assert list(rows) == ["all", "OK", "OQ", "OV"]
    assert rows["all"]["exceeds"] == pytest.approx(by_hand(plain, edges)) and rows["all"]["compared"] == 4
    assert rows["OK"]["exceeds"] == pytest.approx(by_hand(plain, edges[:2]))
    assert np.isnan(rows["all"]["low"])


def test_ties_count_half(plain: hs.Scores) -> None:
    flat = hs.score({role: np.ones((2, 3, 8, 1)) for role in "QKVO"}, "pk", "OK")
    row = hs.circuit_overlap(flat, circuit("L0H0.O L1H0.K", "L0H1.O L1H2.K")).rows()[0]
    assert (row["exceeds"], row["p"]) == (0.5, 1.0)


def test_shared_keys_count_once(shared: hs.Scores) -> None:
    """L2H0, L2H1 and L2H2 share the keys of L2KV0."""
    edges = [("OK", "L0H1", "L2KV0"), ("OV", "L1H4", "L3KV1")]
    several = circuit("L0H1.O L2H0.K", "L0H1.O L2H2.K", "l0h1.o L2KV0.K", "L1H4.O L3H5.V")
    row = hs.circuit_overlap(shared, several).rows()[0]
    assert row["edges"] == row["compared"] == 2
    assert row["exceeds"] == pytest.approx(by_hand(shared, edges))


def planted(scores: hs.Scores, k: int = 3) -> hs.Circuit:
    """The k best pairs of every block of OK."""
    chosen: dict[tuple[str, str], list[str]] = {}
    for edge in scores["pk", "OK"].forward().top(10**6):
        chosen.setdefault((str(edge.source)[:2], str(edge.target)[:2]), []).append(f"{edge.source}.O {edge.target}.K")
    return circuit(*(edge for block in chosen.values() for edge in block[:k]))


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_a_planted_circuit_is_found(kind: str, request: pytest.FixtureRequest) -> None:
    scores = request.getfixturevalue(kind)
    row = hs.circuit_overlap(scores, planted(scores)).rows()[0]
    assert row["exceeds"] == 1 and row["p"] < 0.005 and row["low"] == 1


def random_circuit(scores: hs.Scores, rng: np.random.Generator, shape: str) -> hs.Circuit:
    """Edges drawn at random, or all the edges that leave one random head: neither knows the weights."""
    pairs = [(e["pairing"], e["source"], e["target"]) for e in scores.rows() if e["source"][1] < e["target"][1]]
    if shape == "hub":
        hub = f"L{rng.integers(0, 3)}H{rng.integers(0, HEADS)}"
        pairs = [pair for pair in pairs if pair[1] == hub]
    chosen = rng.choice(len(pairs), size=8, replace=False)
    return circuit(*(f"{pairs[i][1]}.O {pairs[i][2]}.{pairs[i][0][1]}" for i in chosen))


@pytest.mark.parametrize(("kind", "shape"), [("plain", "edges"), ("shared", "edges"), ("plain", "hub")])
def test_p_is_uniform_for_random_circuits(
    kind: str, shape: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for hubs, whose edges are not independent, and the interval covers 0.5 as often as it promises."""
    monkeypatch.setattr(module, "_DRAWS", 99)
    scores, rng = request.getfixturevalue(kind), np.random.default_rng(1)
    circuits = [random_circuit(scores, rng, shape) for _ in range(200)]
    rows = [hs.circuit_overlap(scores, c, bootstrap=100, seed=i).rows()[0] for i, c in enumerate(circuits)]
    p = np.array([row["p"] for row in rows])
    assert kstest(p - rng.random(len(p)) / 100, "uniform").pvalue > 0.01  # p has steps of 1 %
    assert np.mean(p <= 0.05) < 0.1
    if shape == "edges":
        covered = np.mean([row["low"] <= 0.5 <= row["high"] for row in rows])
        assert covered > 0.9
        assert np.mean([row["exceeds"] for row in rows]) == pytest.approx(0.5, abs=0.03)


def test_renaming_keeps_layers_and_groups(shared: hs.Scores) -> None:
    heads = {head: i for i, head in enumerate(shared.ports.heads)}
    names = list(heads)
    draws = module._Renaming(shared.ports, heads).draw(50, np.random.default_rng(0))
    for draw in draws:
        new = {head: names[draw[i]] for head, i in heads.items()}
        assert sorted(new.values()) == sorted(names)
        assert all(head.layer == to.layer and head.kind == to.kind for head, to in new.items())
        assert all(shared.ports.kv_of(new[head]) == new[shared.ports.kv_of(head)] for head in shared.ports.query)
    assert len({tuple(draw) for draw in draws}) == 50


def test_what_cannot_be_compared_is_counted() -> None:
    """One head per layer leaves nothing to compare with; the embedding has no layer."""
    rng = np.random.default_rng(0)
    one = hs.score({role: rng.normal(size=(3, 1, 16, 2)) for role in "QKVO"}, "pk", "OK")
    found = hs.circuit_overlap(one, circuit("L0H0.O L1H0.K", "embedding.W L1H0.K", "L0MLP.W L1H0.K", "L0H0.O probe.R"))
    row = found.rows()[0]
    assert (row["edges"], row["compared"], found.left_out) == (1, 0, 3) and np.isnan(row["exceeds"])
    assert any("no other pair" in line for line in found.remarks())
    assert hs.circuit_overlap("demo", circuit("L0H0.O L1H0.K", "L0H0.O probe.R"), "pk").left_out == 1
    with pytest.raises(HeadspanError, match="no edges between heads"):
        hs.circuit_overlap(one, circuit("embedding.W L1H0.K"))
    screened = hs.score({role: rng.normal(size=(3, 4, 16, 2)) for role in "QKVO"}, "pk", "OK", screen=2)
    with pytest.raises(HeadspanError, match="needs all of them"):
        hs.circuit_overlap(screened, circuit("L0H0.O L1H0.K"))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("suffix", ["json", "pt"])
def test_graphs_of_other_tools(plain: hs.Scores, tmp_path: Path, suffix: str, parallel: bool) -> None:
    if suffix == "pt":
        pytest.importorskip("torch")
    table = EdgeTable.regular(LAYERS, HEADS, HEADS, parallel=parallel)
    values = np.random.default_rng(0).normal(size=table.mask.shape)
    kept = np.zeros_like(table.mask)
    edges = [("L0H1.O", "L2H3.K"), ("L1H2.O", "L3H3.V"), ("embedding.W", "L0H0.Q"), ("L0MLP.W", "logits.R")]
    for edge in edges:
        kept[table.place(*edge)] = True
    write_graph(tmp_path / f"g.{suffix}", table, values, kept, d_model=24)
    found = hs.circuit_overlap(plain, tmp_path / f"g.{suffix}")
    same = hs.circuit_overlap(plain, circuit(*(" ".join(edge) for edge in edges[:2])))
    assert found.rows() == [pytest.approx(row, nan_ok=True) for row in same.rows()] and found.left_out == 2
    with pytest.warns(UserWarning, match="2 of 4 edges"):
        drawn = hs.wiring(plain, circuit=tmp_path / f"g.{suffix}")
    assert {(str(e.source), str(e.target)) for e in drawn.edges} == {("L0H1", "L2H3"), ("L1H2", "L3H3")}


def test_the_command(tmp_path: Path, plain: hs.Scores, capsys: pytest.CaptureFixture[str]) -> None:
    result, file = tmp_path / "r.safetensors", tmp_path / "c.json"
    plain.save(result)
    planted(plain).save(file)
    assert _run(["evaluate", str(result), "--circuit", str(file), "--csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["metric"], row["pairing"], row["exceeds"]) == ("pk", "all", "1.0")
    assert _run(["evaluate", str(result), "--circuit", str(file)]) == 0
    assert "1.000 [1.000, 1.000]" in capsys.readouterr().out
    for words in (["--labels", "gpt2"], ["--metric", "cs"]):
        assert _run(["evaluate", str(result), "--circuit", str(file), *words]) == 2
    file.write_text(json.dumps({"cfg": {}, "nodes": {}, "edges": {}}))
    assert _run(["evaluate", str(result), "--circuit", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 3
