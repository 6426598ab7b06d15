"""Edge selection, attached data, and exports for other programs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

import headspan as hs
from headspan.cli import app
from headspan.graphs.graph import Wiring
from headspan.models.arrays import ArrayWeights
from headspan.plotting import save_wiring
from headspan.plotting.drawn_wiring import wiring
from headspan.results.labels import Labels
from headspan.results.scores import Scores
from headspan.statistics.hubs import hubs
from headspan.statistics.significance import significance
from headspan.subspaces.random_subspaces import moments
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, Head, Pairing


def small_scores(layers: int = 4, heads: int = 3, kv_heads: int = 3, seed: int = 0) -> Scores:
    random = np.random.default_rng(seed)
    counts = {"Q": heads, "K": kv_heads, "V": kv_heads, "O": heads}
    arrays = {role: random.standard_normal((layers, n, 24, 4)) for role, n in counts.items()}
    return hs.score(ArrayWeights(arrays), ["pk", "cs"], "all")


@pytest.fixture(scope="module")
def scores() -> Scores:
    return small_scores()


def brute_force(scores: Scores, metric: str, pairing: Pairing) -> list[tuple[float, Head, Head]]:
    matrix = scores[metric, pairing]
    pairs = [(matrix.at(s, t), s, t) for s in matrix.sources for t in matrix.targets if s.layer < t.layer]
    return sorted(pairs, key=lambda pair: -pair[0])


@pytest.mark.parametrize("metric", ["pk", "cs"])
@pytest.mark.parametrize("pairings", ["flow", "QK,VV"])
def test_top_takes_the_k_best_forward_pairs_of_every_pairing(scores: Scores, metric: str, pairings: str) -> None:
    chosen = wiring(scores, pairings, metric, k=7)
    for pairing in chosen.pairings:
        expected = brute_force(scores, metric, pairing)[:7]
        assert [(e.score, e.source, e.target) for e in chosen.between(pairing)] == expected
        assert [e.rank for e in chosen.between(pairing)] == list(range(1, 8))
    assert len(chosen.edges) == 7 * len(chosen.pairings)


def test_top_per_target_takes_the_best_sources_of_every_target(scores: Scores) -> None:
    chosen = wiring(scores, "OK", k=2, rule="top-per-target")
    everything = brute_force(scores, "pk", Pairing.parse("OK"))
    for target in scores.heads("K"):
        expected = [(s, t) for _, s, t in everything if t == target][:2]
        assert [(e.source, e.target) for e in chosen.edges if e.target == target] == expected
    assert all(everything[e.rank - 1][1:] == (e.source, e.target) for e in chosen.edges)


def test_threshold_and_minimum(scores: Scores) -> None:
    everything = brute_force(scores, "pk", Pairing.parse("OV"))
    cut = everything[9][0]
    assert len(wiring(scores, "OV", rule="threshold", minimum=cut).edges) == 10
    assert len(wiring(scores, "OV", k=20, minimum=cut).edges) == 10
    assert len(wiring(scores, "OV", k=4, minimum=cut).edges) == 4


@pytest.mark.parametrize(("metric", "null"), [("pk", "random"), ("pk", "reversed"), ("cs", "reversed")])
def test_significance_keeps_exactly_the_pairs_with_a_small_q(scores: Scores, metric: str, null) -> None:
    found = significance(scores, "OQ", null=null, metric=metric)
    cut = float(np.nanquantile(found.q, 0.3))
    chosen = wiring(scores, "OQ", metric, rule="significance", q=cut, null=null)
    with np.errstate(invalid="ignore"):
        expected = {
            (found.matrix.sources[i], found.matrix.targets[j]) for i, j in zip(*np.nonzero(found.q <= cut), strict=True)
        }
    assert {(e.source, e.target) for e in chosen.edges} == expected != set()


def test_labels_and_hub_values_are_attached(scores: Scores) -> None:
    labels = Labels.from_pairs([("L0H0", "early"), ("L0H0", "first"), ("L3H2", "late"), ("L2H1", "middle")])
    chosen = wiring(scores, k=40, labels=labels)
    assert chosen.node("L0H0").labels == ("early", "first")
    assert chosen.label_names == ("early", "first", "late", "middle")
    outlet, inlet = hubs(scores, "OK").outlet, hubs(scores, "OK").inlet
    assert chosen.node("L0H0").outlet["OK"] == outlet.of("L0H0")
    assert chosen.node("L3H2").inlet["OK"] == inlet.of("L3H2")
    assert "OK" not in chosen.node("L0H0").inlet  # nothing writes to the first layer
    counts = chosen.head_counts()
    assert counts.in_class == 3
    assert sum(counts) == len(chosen.nodes) == len({h for e in chosen.edges for h in (e.source, e.target)})
    assert chosen.head_counts(Labels.from_pairs([("L1H1", "x")])).in_class == 1


def test_strengths_are_excess_over_chance_whatever_else_is_drawn(scores: Scores) -> None:
    few, many = (wiring(scores, k=k) for k in (5, 12))
    drawn = dict(zip(((e.pairing, e.source, e.target) for e in many.edges), many.strengths(), strict=True))
    for edge, strength in zip(few.edges, few.strengths(), strict=True):
        ends = zip(edge.pairing, (edge.source, edge.target), strict=True)
        first, second = (int(scores.ranks(role)[scores.heads(role).index(head)]) for role, head in ends)
        mean, variance = moments(scores.d_model, first, second)
        start = float(mean + 3 * variance**0.5)
        share = (edge.score - start) / (min(first, second) - start)
        assert strength == pytest.approx(max(0.0, min(1.0, share)))
        assert strength == drawn[edge.pairing, edge.source, edge.target]
    assert 0 < max(drawn.values()) <= 1 and wiring(scores, k=0).strengths() == []


def test_shared_key_value_heads_are_nodes_of_their_own() -> None:
    chosen = wiring(small_scores(heads=4, kv_heads=2), "OQ,OK", k=10)
    assert {e.target.kv for e in chosen.between("OK")} == {True}
    assert {e.target.kv for e in chosen.between("OQ")} == {False}
    assert any(str(node.head).startswith("L1KV") for node in chosen.nodes)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rule": "best"}, "rule.*'best'"),
        ({"k": -1}, "k is -1"),
        ({"rule": "threshold"}, "needs a smallest score"),
        ({"rule": "significance", "q": 0}, "between 0 and 1"),
        ({"rule": "significance", "metric": "cs"}, "pk only"),
        ({"metric": "procrustes"}, "no procrustes scores"),
        ({"pairing": "OX"}, "unknown pairing"),
    ],
)
def test_bad_requests_are_refused_with_one_message(scores: Scores, options: dict, told: str) -> None:
    with pytest.raises(HeadspanError, match=told):
        wiring(scores, **options)


def test_significance_has_one_default_and_options_without_effect_are_refused(scores: Scores, tmp_path: Path) -> None:
    default = wiring(scores, "OQ", rule="significance")
    assert default.edges == wiring(scores, "OQ", rule="significance", q=0.05, null="random").edges
    assert len(default.edges) == significance(scores, "OQ").count()
    assert default.rule == "q ≤ 0.05 (random null)"
    scores.save(tmp_path / "r.safetensors")
    for rule in ("top", "top-per-target", "threshold"):
        for name, value in (("null", "reversed"), ("null", "random"), ("q", "0.05")):
            with pytest.raises(HeadspanError, match=f"`{name}`.*{rule}"):
                wiring(scores, rule=rule, minimum=0.0, **{name: float(value) if name == "q" else value})  # type: ignore[arg-type]
    run = CliRunner().invoke(app, ["wiring", str(tmp_path / "r.safetensors"), "--null", "reversed"])
    assert isinstance(run.exception, HeadspanError)
    assert "no effect on the rule top" in str(run.exception)


def test_an_empty_selection_suggests_another_and_is_not_drawn(scores: Scores, tmp_path: Path) -> None:
    chosen = wiring(scores, "OQ,OK", rule="significance", q=1e-9, null="reversed")
    assert not chosen.edges
    for pairing, sentence in zip(("OQ", "OK"), chosen.notes, strict=True):
        result = significance(scores, pairing, null="reversed")
        assert f"no {pairing} pair has q ≤ 1e-09" in sentence
        assert f"the smallest q is {result.smallest_q:.3g}" in sentence
        # Asking for that q is not empty.
        assert wiring(scores, pairing, rule="significance", q=result.smallest_q, null="reversed").edges
    assert chosen._repr_svg_() is None
    assert "the smallest q" in str(chosen._repr_html_())
    with pytest.raises(HeadspanError, match="no OQ pair has q"):
        save_wiring(chosen, tmp_path / "w.png")
    assert not list(tmp_path.iterdir())
    high = wiring(scores, "OQ", rule="threshold", minimum=99)
    assert high.notes[0].startswith("no OQ pair scores 99 or more; the largest pk is ")
    assert "Give a larger k" in wiring(scores, k=0).notes[0]
    drawn = wiring(scores, k=2)
    assert (drawn.notes, drawn._repr_html_()) == ((), None)
    scores.save(tmp_path / "r.safetensors")
    options = ["--rule", "significance", "--q", "1e-9", "--null", "reversed", "--pairing", "OQ"]
    run = CliRunner().invoke(app, ["wiring", str(tmp_path / "r.safetensors"), *options])
    assert run.exit_code == 0
    assert "the smallest q is" in run.stderr


def test_asking_for_a_head_without_edges(scores: Scores) -> None:
    with pytest.raises(HeadspanError, match="on none of the 0 edges"):
        wiring(scores, k=0).node("L0H0")


# ------------------------------------------------------------------- exports


HOSTILE = 'a<b>&"c\x07\ud800'


@pytest.fixture
def labelled(scores: Scores) -> Wiring:
    return wiring(scores, k=6, labels=Labels.from_pairs([(h, HOSTILE) for h in scores.heads("O")]))


def test_graphml_is_the_same_graph_for_networkx(labelled: Wiring, tmp_path: Path) -> None:
    networkx = pytest.importorskip("networkx")
    labelled.to_graphml(tmp_path / "w.graphml")
    read, ours = networkx.read_graphml(tmp_path / "w.graphml"), labelled.to_networkx()
    assert read.is_directed()
    assert set(read.nodes) == set(ours.nodes)
    cleaned = HOSTILE.replace("\x07", "\ufffd").replace("\ud800", "\ufffd")
    for name, data in ours.nodes(data=True):
        assert read.nodes[name] == {**data, "labels": cleaned}
    edges = {(u, v, data["pairing"]): data for u, v, data in read.edges(data=True)}
    for u, v, pairing, data in ours.edges(keys=True, data=True):
        assert edges.pop((u, v, pairing)).items() >= data.items()
    assert not edges
    assert read.graph["metric"] == "pk"


def test_json_holds_everything(scores: Scores, tmp_path: Path) -> None:
    chosen = wiring(scores, k=6, labels=Labels.from_pairs([("L0H0", "<b>")]))
    chosen.to_json(tmp_path / "w.json")
    content = json.loads((tmp_path / "w.json").read_text())
    assert content["schema"] == 1
    assert [(e["source"], e["target"], e["score"], e["rank"]) for e in content["edges"]] == [
        (str(e.source), str(e.target), e.score, e.rank) for e in chosen.edges
    ]
    assert {n["head"]: n["labels"] for n in content["nodes"]} == {str(n.head): list(n.labels) for n in chosen.nodes}
    assert content["rule"] == "top 6 per pairing"


def test_csv_holds_every_edge_to_the_last_digit(scores: Scores, tmp_path: Path) -> None:
    chosen = wiring(scores, k=6)
    chosen.to_csv(tmp_path / "w.csv")
    with open(tmp_path / "w.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["score"]) for row in rows] == [e.score for e in chosen.edges]
    assert [(r["pairing"], r["source"], r["target"]) for r in rows] == [
        (str(e.pairing), str(e.source), str(e.target)) for e in chosen.edges
    ]


@pytest.mark.parametrize("method", ["to_graphml", "to_json", "to_csv"])
def test_a_failed_export_leaves_the_old_file(labelled: Wiring, tmp_path: Path, method: str) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "kept").write_text("old")
    with pytest.raises(HeadspanError, match="cannot write"):
        getattr(labelled, method)(target)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (target / "kept").read_text() == "old"


def test_a_notebook_shows_the_wiring(scores: Scores) -> None:
    chosen = wiring(scores, k=5)
    root = ElementTree.fromstring(chosen._repr_svg_())
    drawn = [element.get("id", "") for element in root.iter() if element.get("id", "").startswith("edge:")]
    assert sorted(drawn) == sorted(f"edge:{e.pairing}:{e.source}:{e.target}" for e in chosen.edges)


def test_the_command_lists_and_exports(tmp_path: Path, scores: Scores) -> None:
    scores.save(tmp_path / "r.safetensors")
    run = CliRunner().invoke(app, ["wiring", str(tmp_path / "r.safetensors"), "-k", "3", "--json"])
    assert run.exit_code == 0, run.output
    rows = json.loads(run.stdout)
    assert [(r["source"], r["target"]) for r in rows] == [
        (str(e.source), str(e.target)) for e in wiring(scores, k=3).edges
    ]
    files = [tmp_path / f"w{ending}" for ending in (".graphml", ".json", ".csv", ".png", ".svg")]
    options = [part for file in files for part in ("--out", str(file))]
    run = CliRunner().invoke(app, ["wiring", str(tmp_path / "r.safetensors"), *options])
    assert run.exit_code == 0, run.output
    assert all(file.stat().st_size > 100 for file in files)
    run = CliRunner().invoke(app, ["wiring", str(tmp_path / "r.safetensors"), "--out", "w.xyz"])
    assert isinstance(run.exception, HeadspanError)
    assert "must end in one of" in str(run.exception)


# ------------------------------------------------------------ the real GPT-2


@pytest.fixture(scope="module")
def gpt2_scores(gpt2_flow: Scores) -> Scores:
    return gpt2_flow


def edges_of(chosen: Wiring, pairing: str) -> set[tuple[str, str]]:
    return {(str(e.source), str(e.target)) for e in chosen.between(pairing)}


def test_gpt2_wiring_shows_what_the_paper_reports(gpt2_scores: Scores) -> None:
    labels = Labels.load("gpt2")
    chosen = wiring(gpt2_scores, labels=labels)
    assert len(chosen.edges) == 60
    assert {("L8H10", "L9H6"), ("L8H10", "L10H1"), ("L8H10", "L10H6")} <= edges_of(chosen, "OQ")
    induction = {str(head) for head in labels.heads("induction")}
    for source in ("L4H7", "L4H11"):
        assert induction <= {t for s, t in edges_of(chosen, "OK") if s == source}
    into = [target for _, target in edges_of(chosen, "OV")]
    assert into.count("L4H7") >= 3
    assert into.count("L11H3") >= 3
    degree = {str(n.head): sum(n.head in (e.source, e.target) for e in chosen.edges) for n in chosen.nodes}
    assert max(degree, key=degree.__getitem__) == "L4H7"
    assert chosen.node("L4H7").outlet["OK"] == pytest.approx(263.86, abs=0.01)


@pytest.mark.parametrize(("metric", "in_class", "out_of_class"), [("pk", 24, 28), ("cs", 16, 30)])
def test_gpt2_head_counts_are_the_published_ones(
    gpt2_scores: Scores, metric: str, in_class: int, out_of_class: int
) -> None:
    chosen = wiring(gpt2_scores, FLOW_PAIRINGS, metric, labels=Labels.load("gpt2"))
    assert chosen.head_counts() == (in_class, out_of_class)


def test_a_path_goes_through_a_shared_head_into_its_group(tmp_path: Path) -> None:
    """Layer 0 writes what the keys of L1KV1 read; L1H3 of its group writes what L2's queries read."""
    import networkx

    rng = np.random.default_rng(3)
    given = {role: rng.normal(size=(3, n, 64, 3)) for role, n in zip("QKVO", (4, 2, 2, 4), strict=True)}
    given["K"][1, 1] = given["O"][0, 2]
    given["Q"][2, 0] = given["O"][1, 3]
    scores = hs.score(given, "pk", "flow")
    drawn = hs.wiring(scores, k=1)
    assert {(str(a), str(b)) for a, b in drawn.serves()} >= {("L1KV1", "L1H3")}
    for graph in (drawn.to_networkx(), scores.to_networkx("pk", ["OK", "OQ"])):
        assert networkx.has_path(graph, "L0H2", "L2H0")
        assert graph["L1KV1"]["L1H3"]["serves"] is not None
    drawn.to_graphml(tmp_path / "w.graphml")
    read = networkx.read_graphml(tmp_path / "w.graphml")
    assert ["L0H2", "L1KV1", "L1H3", "L2H0"] in networkx.all_simple_paths(read, "L0H2", "L2H0")
    drawn.to_json(tmp_path / "w.json")
    assert {"source": "L1KV1", "target": "L1H3"} in json.loads((tmp_path / "w.json").read_text())["serves"]
    lines = hs.hubs(scores, "OK").rows()
    assert next(row for row in lines if row["head"] == "L1KV1")["serves"] == "L1H2;L1H3"
    assert hs.hubs(scores, "OK").inlet.of("L1H3") == hs.hubs(scores, "OK").inlet.of("L1KV1")
    assert scores["pk", "OK"].at("L0H2", "L1H3") == pytest.approx(3)
