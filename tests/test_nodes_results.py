"""Nodes in a result: scored like heads, kept in its file, and known to everything that reads results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import beta, kstest

import definitions
import headspan as hs
from headspan.models.arrays import ArrayWeights
from headspan.node_kinds.beside_heads import MOST_NODES, AddedNodes, WithNodes
from headspan.plotting import save_wiring
from headspan.plotting.nodes import node_shape
from headspan.plotting.style import NODE_SHAPES
from headspan.results.scores import Scores
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import NODE_PAIRINGS, Head, Node, Pairing, Role, check_node_name, other_node
from notices import noticed

D, M, LAYERS, HEADS = 24, 4, 3, 4
RNG = np.random.default_rng(7)


def model(kv_heads: int = HEADS, seed: int = 0, **more: Any) -> ArrayWeights:
    random = np.random.default_rng(seed)
    counts = {"Q": HEADS, "K": kv_heads, "V": kv_heads, "O": HEADS}
    return ArrayWeights({role: random.standard_normal((LAYERS, n, D, M)) for role, n in counts.items()} | more)


def some_nodes() -> list[Any]:
    random = np.random.default_rng(1)
    return [
        hs.Node(random.standard_normal(D), name="probe", layer=2, writes=False),
        hs.Node(random.standard_normal(D), name="steer, hard", layer=1, reads=False),
        hs.Node(random.standard_normal((D, 3)), name="plane.3", layer=2),
        hs.Node(random.standard_normal(D), name="everywhere"),
    ]


@pytest.fixture(scope="module")
def scores() -> Scores:
    return hs.score(model(), ["pk", "cs", "simple_cs"], "all", nodes=some_nodes())


def weight_of(weights: Any, port: Any, role: Role) -> np.ndarray:
    span = weights.ports.span(role, port.layer)
    place = weights.ports.of(role)[span].index(port)
    found = np.asarray(weights.read(role, port.layer)[place], dtype=np.float64)
    return found[:, found.any(axis=0)]


def by_definition(metric: str, weights: Any, pairing: Pairing, source: Any, target: Any) -> float:
    a, b = weight_of(weights, source, pairing.source), weight_of(weights, target, pairing.target)
    if metric != "cs":
        return getattr(definitions, metric)(a, b)

    def circuit(port: Any, role: Role, own: np.ndarray) -> np.ndarray:
        """X of what writes, Xᵀ of what reads, d×d; a direction without a second weight has itself, which cancels.

        The partners of a shared K or V are the stacked Q or O of its query heads: d × (d · group).
        """
        if isinstance(port, Head) and port.kv:
            return own @ np.vstack([weight_of(weights, h, role.partner) for h in weights.ports.group_of(port)]).T
        try:
            other = weight_of(weights, weights.ports.resolve(port, role.partner), role.partner)
        except HeadspanError:
            other = own
        return own @ other.T

    return definitions.frobenius_ratio(circuit(target, pairing.target, b).T, circuit(source, pairing.source, a))


# ------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_scores_of_nodes_are_those_of_the_definitions(kv_heads: int) -> None:
    weights = model(kv_heads)
    found = hs.score(weights, ["pk", "cs", "simple_cs"], "flow", nodes=some_nodes())
    whole = WithNodes(weights, added(weights, some_nodes()))
    checked = 0
    for metric in ("pk", "cs", "simple_cs"):
        for pairing in NODE_PAIRINGS:
            matrix = found[metric, pairing]
            for i, source in enumerate(matrix.sources):
                for j, target in enumerate(matrix.targets):
                    forward = source.position < target.position and str(source) != str(target)
                    assert np.isnan(matrix.values[i, j]) == (not forward)
                    if forward:
                        expected = by_definition(metric, whole, pairing, source, target)
                        assert matrix.values[i, j] == pytest.approx(expected, abs=2e-6)
                        checked += 1
    assert checked > 100


def added(weights: Any, nodes: list[Any]) -> AddedNodes:
    from headspan.node_kinds.beside_heads import add_nodes
    from headspan.node_kinds.opening import node_sets

    return add_nodes(weights, node_sets(weights, nodes)).added


def test_heads_score_the_same_with_and_without_nodes(scores: Scores) -> None:
    plain = hs.score(model(), ["pk", "cs", "simple_cs"], "all")
    for key, values in plain.arrays.items():
        np.testing.assert_array_equal(values, scores.arrays[key])
    assert scores.ports.same_heads(plain.ports) and scores != plain
    first, second = hs.hubs(plain, "OK"), hs.hubs(scores, "OK")
    np.testing.assert_array_equal(first.inlet_corrected.values, second.inlet_corrected.values)
    lines = {row["pairing"]: row for row in hs.baseline(scores, kl=True).rows()}
    for row in hs.baseline(plain, kl=True).rows():
        assert json.dumps(row) == json.dumps(lines[row["pairing"]])
    assert "OR" in lines


def pair_of(widths: tuple[int, int]) -> WithNodes:
    """A node with different weights for reading and writing, and a second one after it."""
    random, weights = np.random.default_rng(3), model()
    nodes = {role: (Node.at(1, 0, "unit", "neuron"), Node.at(3, 1, "next", "neuron")) for role in (Role.R, Role.W)}
    bases = {
        role: tuple(random.standard_normal((D, w)) for _ in range(2)) for role, w in zip(nodes, widths, strict=True)
    }
    return WithNodes(weights, AddedNodes(nodes, bases))


def test_composition_of_nodes_takes_both_of_their_weights() -> None:
    weights = pair_of((M, M))
    found = hs.score(weights, "all", "nodes")
    for metric in ("pk", "cs", "simple_cs", "linear_cka", "procrustes"):
        for pairing in NODE_PAIRINGS:
            for i, j, value in zip(*found[metric, pairing].pairs(), strict=True):
                ends = found.heads(pairing.source)[i], found.heads(pairing.target)[j]
                assert value == pytest.approx(by_definition(metric, weights, pairing, *ends), abs=3e-6)


def test_a_similarity_undefined_for_nodes_is_left_out_with_a_message() -> None:
    with noticed() as said:
        found = hs.score(pair_of((2, 3)), "all", "all")
    assert [m for m in found.metrics if (m, "OR") in found] == ["pk", "simple_cs"]
    assert all((metric, "OK") in found for metric in found.metrics)
    assert said == found.provenance["left_out"] and len(said) == 3
    assert all(fact in said[0] for fact in ("cs", "OR, WQ, WK, WV, WR", "unit"))
    assert "2 to 3 columns" in said[1]
    for width, words in ((1, "the nodes have 1 column"), (2, "the nodes have 2 columns")):
        assert hs.score(pair_of((width, width)), "procrustes", ["OK"]).provenance["left_out"][0].endswith(words)
    with pytest.raises(HeadspanError, match=r"cs scores for OR.* cs for .*OV"):
        found["cs", "OR"]


def test_padding_is_not_a_rank_defect_and_a_deficient_basis_is() -> None:
    random = np.random.default_rng(0)
    flat = random.standard_normal((D, 2)) @ np.ones((2, 3))
    nodes = [hs.Node(random.standard_normal(D), "line", 1), hs.Node(random.standard_normal((D, 5)), "five", 1)]
    with noticed() as said:
        found = hs.score(model(), "pk", "OK", nodes=[*nodes, hs.Node(flat, "flat", 1)])
    assert [text for text in said if "rank" in text] == found.provenance["rank_deficient"]
    read = [f"the basis of {name} of shape {shape} was read as" for name, shape in (("five", (D, 5)), ("flat", (D, 3)))]
    assert [text.rpartition(" as")[0] + " as" for text in said[:-2]] == read  # each once
    assert found.ranks("R").tolist() == [1, 5, 1]
    assert found.provenance["rank_deficient"] == [
        "flat.R (layer 1) has rank 1 of 3",
        "flat.W (layer 1) has rank 1 of 3",
    ]


def test_pairings_of_nodes_come_with_nodes_and_same_type_ones_on_request() -> None:
    nodes = some_nodes()
    names = [str(p) for p in hs.score(model(), "pk", "OK", nodes=nodes).pairings]
    assert names == ["OK", "OR", "WQ", "WK", "WV", "WR"]
    assert [str(p) for p in hs.score(model(), "pk", "nodes", nodes=nodes).pairings] == names[1:]
    assert [str(p) for p in hs.score(model(), "pk", "OK", nodes=nodes[:1]).pairings] == [
        "OK",
        "OR",
    ]  # it writes nothing
    both = hs.score(model(), "pk", "RR,WW", nodes=nodes)
    assert len(both["pk", "RR"].pairs()[2]) == 3 == len(both["pk", "WW"].pairs()[2])
    for asked, given, sentence in (
        ("WK", nodes[:1], "WK has no pairs: none has that role"),
        ("OR", None, "OR compares nodes: give some"),
        ("WQ", [hs.Node(np.ones(D), "late", LAYERS, reads=False)], "WQ has no pairs: the nodes come after"),
    ):
        with pytest.raises(HeadspanError, match=sentence):
            hs.score(model(), "pk", asked, nodes=given)


def test_a_node_is_not_compared_with_itself(scores: Scores) -> None:
    matrix = scores["pk", "WR"]
    assert np.isnan(matrix.at("plane.3", "plane.3")) and np.isnan(matrix.at("everywhere", "everywhere"))
    assert matrix.at("everywhere", "plane.3") > 0
    assert other_node(matrix.sources, matrix.targets).sum() == matrix.values.size - 2


def test_too_many_nodes_are_refused_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "many.npy", RNG.standard_normal((MOST_NODES + 1, D)))
    weights = model()
    monkeypatch.setattr(ArrayWeights, "read", lambda *a: pytest.fail("a weight was read"))
    with pytest.raises(HeadspanError, match=r"2,001 nodes are too many.*at most 2,000.*hs\.nodes"):
        hs.score(weights, "pk", nodes=[str(tmp_path / "many.npy")])


def test_small_memory_gives_the_same_in_tiles() -> None:
    whole = hs.score(model(), "pk", "all", nodes=some_nodes(), route="gram")
    weights = WithNodes(model(), added(model(), some_nodes()))
    from headspan.scoring.plan import make_plan
    from headspan.scoring.run import Assembly
    from headspan.scoring.tile import compute_tile
    from headspan.vocabulary.heads import parse_pairings

    plan = make_plan(weights, ("pk",), parse_pairings(["all", "nodes"]), "default", 300 * 10**6, "gram")
    plan.blocks["pk"] = [(place,) for place in weights.places]
    from headspan.scoring import plan as planning

    pairs = planning._tile_pairs(plan, "pk", plan.blocks["pk"], plan.groupings["pk"])
    plan.tiles = [planning.Tile("pk", i, p) for i, p in enumerate(pairs)]
    plan.identity = {"model": weights.provenance, "device": "cpu"}
    assert len(plan.tiles) > 3
    result = Assembly(weights, plan)
    for tile in plan.tiles:
        result.add(tile, compute_tile(weights, plan, tile))
    for key, values in result.scores().arrays.items():
        np.testing.assert_allclose(values, whole.arrays[key], atol=1e-5)


def test_an_unfinished_run_continues_only_with_the_same_nodes(tmp_path: Path) -> None:
    out, said = tmp_path / "r.safetensors", list[str]()

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done >= total / 2:
            raise Stop

    def run(nodes: list[Any], **options: Any) -> Scores:
        with noticed() as told:
            found = hs.score(model(), "procrustes,pk", "OK", nodes=nodes, out=out, memory="1GB", **options)
        said.extend(told)
        return found

    with pytest.raises(Stop):
        run(some_nodes(), progress=stop)
    other = [hs.Node(np.ones(D), "probe", 2), *some_nodes()[1:]]
    run(other)
    assert any("another plan or model" in line for line in said)
    with pytest.raises(Stop):
        run(some_nodes(), progress=stop, force=True)
    said.clear()
    assert run(some_nodes(), force=True) == hs.score(model(), "procrustes,pk", "OK", nodes=some_nodes())
    assert any("continuing an unfinished run" in line for line in said)


def test_a_cluster_gets_the_nodes_too() -> None:
    pytest.importorskip("distributed")
    nodes = [hs.Node(np.random.default_rng(0).standard_normal(256), "x", 1)]
    here = hs.score("demo", "pk", "OK", nodes=nodes)
    assert hs.score("demo", "pk", "OK", nodes=nodes, dask="local") == here


def test_folded_nodes_with_folded_heads() -> None:
    random = np.random.default_rng(5)
    weights = model(norm="layer", gain=1 + 0.3 * random.standard_normal((LAYERS, D)))
    vector = random.standard_normal(D)
    node = hs.Node(vector, "probe", 2, writes=True)
    found = hs.score(hs.fold(weights), "pk", "flow", nodes=[node])
    assert found.provenance["folding"] == "folded"
    centred = (vector - vector.mean())[:, None]
    key = hs.fold(weights).read("K", 2)[1]
    assert found["pk", "WK"].at("probe", "L2H1") == pytest.approx(definitions.pk(centred, key), abs=2e-6)
    with pytest.raises(HeadspanError, match="fold the model first"):
        hs.fold(WithNodes(weights, added(weights, [node])))


# -------------------------------------------------------------------------------------------------- names, files


@pytest.mark.parametrize(
    "name", ["L3H1", "l0kv2", "L3H1.O", " L2H2 ", "", "  ", "x" * 201, "a\nb", "\x1b[31m", "\ud800"]
)
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(HeadspanError):
        check_node_name(name)


HOSTILE = ["a,b", "a.b.R", "$x_1$ <b>&\"'", "]]>--", "名前", "../../etc", "L3", "x" * 200]


def test_odd_names_are_right_everywhere(tmp_path: Path) -> None:
    nodes = [hs.Node(RNG.standard_normal(D), name, 1 + i % 2) for i, name in enumerate(HOSTILE)]
    found = hs.score(model(), "pk", "flow", nodes=nodes)
    found.save(tmp_path / "r.safetensors")
    found = hs.load(tmp_path / "r.safetensors")
    for name in HOSTILE:
        assert str(found.around(name).head) == name == str(found.around(name.upper()).head)
        assert {str(edge.target) for edge in hs.around(found, f"{name}.R").incoming} == {name}
    chosen = hs.wiring(found, k=40)
    chosen.to_graphml(tmp_path / "w.graphml")
    tree = ElementTree.parse(tmp_path / "w.graphml")
    ids = {element.get("id") for element in tree.iter("{http://graphml.graphdrawing.org/xmlns}node")}
    assert set(HOSTILE) <= ids
    chosen.to_json(tmp_path / "w.json")
    chosen.to_csv(tmp_path / "w.csv")
    assert {node["head"] for node in json.loads((tmp_path / "w.json").read_text())["nodes"]} >= set(HOSTILE)
    for ellipse in (False, True):
        save_wiring(chosen, tmp_path / f"{ellipse}.svg", ellipse=ellipse)
        drawing = "".join(ElementTree.parse(tmp_path / f"{ellipse}.svg").getroot().itertext())
        assert "$x_1$ <b>&" in drawing and "名前" in drawing
    page = hs.report(found)
    assert "<b>&" not in page.html.split('id="payload"')[1].split("</script>")[0]
    assert {node["name"] for node in page.payload["nodes"]} == set(HOSTILE)


def test_names_that_differ_in_case_are_two_nodes() -> None:
    nodes = {
        Role.R: tuple(Node.at(2, 1, name) for name in ("Paris", "paris", "Rome")),
    }
    weights = WithNodes(model(), AddedNodes(nodes, {Role.R: tuple(RNG.standard_normal((3, D, 1)))}))
    matrix = hs.score(weights, "pk", "OK")["pk", "OR"]
    assert matrix.find("L0H0", "paris")[1] == 1 and matrix.find("L0H0", "ROME")[1] == 2
    with pytest.raises(HeadspanError, match="may mean 'Paris' or 'paris'"):
        matrix.find("L0H0", "PARIS")


def test_two_nodes_of_one_name_are_refused() -> None:
    twice = [hs.Node(np.ones(D), "same", 1), hs.Node(np.arange(D), "same", 2)]
    with pytest.raises(HeadspanError, match="same"):
        hs.score(model(), "pk", nodes=twice)


def test_a_saved_result_is_the_same_again(scores: Scores, tmp_path: Path) -> None:
    scores.save(tmp_path / "r.safetensors")
    again = hs.load(tmp_path / "r.safetensors")
    assert again == scores and again.provenance == scores.provenance
    for role in (Role.R, Role.W):
        assert [(n.position, n.kind) for n in again.heads(role)] == [(n.position, n.kind) for n in scores.heads(role)]
        np.testing.assert_array_equal(again.ranks(role), scores.ranks(role))


def damaged(change: Callable[[dict[str, Any]], None], path: Path, scores: Scores) -> None:
    from safetensors.numpy import load_file, save_file

    scores.save(path)
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        head = json.loads(file.metadata()["headspan"])
    assert head["schema"] == 4
    change(head)
    save_file(load_file(path), path, {"headspan": json.dumps(head)})


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head["nodes"]["R"][0].__setitem__(0, "L0H0"),
        lambda head: head["nodes"]["R"][0].__setitem__(0, "\x1b]0;title"),
        lambda head: head["nodes"]["R"][0].__setitem__(3, "first"),
        lambda head: head["nodes"]["R"][0].__setitem__(3, 2**70),
        lambda head: head["nodes"]["R"].reverse(),
        lambda head: head["nodes"]["R"].append(head["nodes"]["R"][0]),
        lambda head: head["nodes"]["R"][0].__setitem__(1, ["kind"]),
        lambda head: head["nodes"].update(Q=head["nodes"].pop("R")),
        lambda head: head.update(nodes=[1, 2]),
    ],
)
def test_a_damaged_list_of_nodes_is_refused(change: Any, scores: Scores, tmp_path: Path) -> None:
    damaged(change, tmp_path / "r.safetensors", scores)
    with pytest.raises(HeadspanError, match=r"damaged|needs"):
        hs.load(tmp_path / "r.safetensors")


def test_provenance_names_files_without_folders(tmp_path: Path) -> None:
    np.save(tmp_path / "probe.npy", RNG.standard_normal(D))
    found = hs.score(model(), "pk", "OK", nodes=[f"{tmp_path / 'probe.npy'}@2"])
    (line,) = found.provenance["nodes"]
    assert line.startswith("probe.npy: 1 of kind direction, sha256 ")
    assert str(tmp_path) not in json.dumps(found.provenance)
    np.save(tmp_path / "probe.npy", RNG.standard_normal(D))
    other = hs.score(model(), "pk", "OK", nodes=[f"{tmp_path / 'probe.npy'}@2"])
    assert other.provenance["nodes_hash"] != found.provenance["nodes_hash"]
    assert other.provenance["fingerprint"] == found.provenance["fingerprint"]


# ------------------------------------------------------------------------------------------ what results are for


def planted() -> Scores:
    weights = model(seed=4)
    what = weights.read("O", 0)[3] @ np.ones((M, 1))
    others = RNG.standard_normal((20, D))
    nodes = [hs.Node(v, f"random {i}", 2) for i, v in enumerate(others)]
    return hs.score(weights, "pk", "flow", nodes=[*nodes, hs.Node(what, "planted", 2)])


def test_a_planted_direction_comes_first() -> None:
    found = planted()
    chosen = hs.wiring(found, k=3)
    best = chosen.between("OR")[0]
    assert (str(best.source), str(best.target)) == ("L0H3", "planted") and best.score == pytest.approx(1, abs=1e-5)
    significant = hs.wiring(found, "OR", rule="significance", q=1e-6)
    assert [str(e.target) for e in significant.edges] == ["planted"]
    assert hs.top(found, "OR", k=1)[0].target == found.ports.node("planted")
    assert str(hs.hubs(found, "OR").inlet.top(1)[0].head) == "planted"
    row = hs.significance(found, "OR").rows(1)[0]
    assert row["p"] < 1e-12 and row["target"] == "planted"


def test_p_of_random_directions_is_exact_and_uniform() -> None:
    nodes = [hs.Node(v, f"n{i}", 2) for i, v in enumerate(np.random.default_rng(11).standard_normal((400, D)))]
    found = hs.score(model(), "pk", "nodes", nodes=nodes)
    against = hs.significance(found, "OR")
    values, p = found["pk", "OR"].values[0].astype(np.float64), against.p[0]
    np.testing.assert_allclose(p, beta.sf(values, M / 2, (D - M) / 2), rtol=1e-6)
    for row in against.p[:2]:
        assert kstest(row, "uniform").pvalue > 1e-3
    lines = [line for line in hs.baseline(found) if str(line.pairing) == "OR"]
    assert lines[0].random_mean == pytest.approx(M / D) and abs(lines[0].above - 0.001) < 0.004


def test_neighbours_by_name_and_by_role(scores: Scores) -> None:
    found = hs.around(scores, "plane.3", k=2)
    assert {str(e.pairing) for e in found.incoming} == {"OR", "WR"}
    assert {str(e.pairing) for e in found.outgoing} == {"WQ", "WK", "WV", "WR"}
    assert not hs.around(scores, "plane.3.R").outgoing and not hs.around(scores, "PLANE.3.w").incoming
    of_head = hs.around(scores, "L1H0", k=1)
    assert {str(e.pairing) for e in of_head.outgoing} == {"OQ", "OK", "OV", "OR"}
    assert {str(e.pairing) for e in of_head.incoming} == {"OQ", "OK", "OV", "WQ", "WK", "WV"}
    assert {e.target.layer for e in hs.top(scores, "OR", layer=LAYERS)} == {LAYERS}
    for wrong, sentence in (
        ("nobody", "no head or node 'nobody'"),
        ("plane.3.K", "is a node"),
        ("L9H9", "no head L9H9"),
    ):
        with pytest.raises(HeadspanError, match=sentence):
            hs.around(scores, wrong)


def test_wiring_with_nodes_in_files(scores: Scores, tmp_path: Path) -> None:
    pytest.importorskip("networkx")
    import networkx

    chosen = hs.wiring(scores, k=9)
    assert "heads and 4 nodes" in repr(chosen)
    for edge in chosen.between("OR"):
        assert isinstance(edge.source, Head) and isinstance(edge.target, Node)
    assert chosen.head_counts().out_of_class == sum(isinstance(n.head, Head) for n in chosen.nodes)
    chosen.to_graphml(tmp_path / "w.graphml")
    graph = networkx.read_graphml(tmp_path / "w.graphml")
    assert graph.nodes["probe"]["kind"] == "direction" and graph.nodes["probe"]["position"] == 4
    assert graph.nodes["plane.3"]["kind"] == "basis" and graph.nodes["L0H0"]["kind"] == "H"
    # What writes at the start and reads at the end are two places of one name.
    assert graph.nodes["everywhere.W"]["layer"] == -1 and graph.nodes["everywhere.R"]["layer"] == LAYERS
    assert networkx.is_directed_acyclic_graph(graph)
    assert chosen.to_networkx().number_of_edges() == len(chosen.edges)
    assert str(chosen.node("PROBE").head) == "probe"


def test_figures_place_nodes_between_layers(scores: Scores, tmp_path: Path) -> None:
    from headspan.plotting.grid import _Cells

    chosen = hs.wiring(scores, k=9)
    cells = _Cells.of(chosen, False)
    place = {(str(n.head), n.head.layer): cells.place(n.head)[0] for n in chosen.nodes}
    layers = [cells.columns.index(layer) * cells.cell[0] for layer in cells.layers]
    assert place["everywhere", -1] < layers[0] < place["steer, hard", 1] < layers[1] < place["probe", 2] < layers[2]
    assert layers[2] < place["everywhere", LAYERS]
    assert len({tuple(node_shape(kind)) for kind in (*NODE_SHAPES, "else")}) == len(NODE_SHAPES) + 1
    drawn = [p for name in ("wiring", "grid") for p in drawn_files(scores, name, tmp_path)]
    assert drawn


def drawn_files(scores: Scores, name: str, folder: Path) -> list[Path]:
    from headspan.plotting import Context, draw

    return draw(name, Context(scores, k=6), folder / name, "svg").files


def test_compare_with_other_nodes_compares_heads(scores: Scores) -> None:
    plain, fewer = (hs.score(model(), ["pk"], "flow", nodes=n) for n in (None, some_nodes()[:1]))
    assert {str(line.pairing) for line in hs.compare(scores, plain)} == {"OQ", "OK", "OV"}
    assert {str(line.pairing) for line in hs.compare(scores, fewer)} == {"OQ", "OK", "OV"}
    same = hs.compare(scores, scores, metric="pk")
    assert {"OR", "WK"} <= {str(line.pairing) for line in same} and all(line.mse == 0 for line in same)


def test_the_page_has_every_node_and_its_weights_are_those_of_the_model(scores: Scores) -> None:
    page = hs.report(scores, model(), tokens=0)
    data = page.payload
    found = {(n["name"], n["kind"], n["layer"], n["position"]) for n in data["nodes"]}
    assert ("probe", "direction", 2, 4) in found and ("steer, hard", "direction", 1, 1) in found
    assert data["ports"]["R"] == [str(n) for n in scores.heads("R")]
    assert {"pk/OR", "cs/WK"} <= set(data["edges"]) and "OR" in data["default_pairings"]
    assert not any(pairing[0] in "RW" or pairing[1] in "RW" for pairing in data["distributions"])
    plain = hs.report(hs.score(model(), ["pk", "cs", "simple_cs"], "all"), model(), tokens=0).payload
    assert data["findings"] == plain["findings"] and data["distributions"] == plain["distributions"]


def test_evaluation_is_about_heads(scores: Scores) -> None:
    labels = hs.Labels.from_pairs([("L0H0", "a"), ("L1H1", "a"), ("L2H2", "b"), ("L2H3", "b")])
    plain = hs.score(model(), ["pk", "cs", "simple_cs"], "all")
    first, second = (hs.evaluate(s, labels, bootstrap=0).rows() for s in (scores, plain))
    assert json.dumps(first) == json.dumps(second)
    rows = hs.wiring(scores, k=5, labels=labels).rows()
    assert all(row["target_labels"] == "" for row in rows if row["pairing"] == "OR")


# --------------------------------------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of the demo model with a direction that L0H3 writes, one that no head writes, and a plane."""
    place = tmp_path_factory.mktemp("nodes")
    random = np.random.default_rng(2)
    what = hs.open("demo").read("O", 0)[3] @ random.standard_normal((32, 1))
    np.savez(place / "mine.npz", written=what[:, 0], other=random.standard_normal(256))
    np.save(place / "plane.npy", random.standard_normal((1, 256, 2)))
    words = (
        f"score demo --pairing flow --out {place}/r.safetensors --nodes {place}/mine.npz@1 --nodes {place}/plane.npy@1"
    )
    assert invoked(words).exit_code == 0
    return place


def invoked(words: str) -> Any:
    from typer.testing import CliRunner

    from headspan.cli import app

    return CliRunner().invoke(app, words.split())


def listed(words: str) -> list[dict[str, Any]]:
    answer = invoked(words + " --json")
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


def test_commands_on_a_result_with_nodes(folder: Path) -> None:
    result = f"{folder}/r.safetensors"
    names = [str(node) for node in hs.load(result).heads("R")]
    written = next(name for name in names if "written" in name)
    best = next(row for row in listed(f"top {result} -k 1") if row["pairing"] == "OR")
    assert best["source"] == "L0H3" and (best["target"] == written or best["score"] > 0.99)
    rows = listed(f"top {result} --head {written} -k 1")
    assert {row["direction"] for row in rows} == {"in", "out"}
    assert any(row["source"] == "L0H3" and row["score"] == pytest.approx(1, abs=1e-4) for row in rows)
    assert {"OR", "WK"} <= {row["pairing"] for row in listed(f"hubs {result} -k 2")}
    assert {"OR", "WK"} <= {row["pairing"] for row in listed(f"baseline {result}")}
    first = min(listed(f"baseline {result} --pairing OR -k 0"), key=lambda row: row["p"])
    assert (first["source"], first["target"]) == ("L0H3", written) and first["p"] < 1e-100
    out = f"--out {folder}/w.graphml --out {folder}/w.csv --out {folder}/w.json --out {folder}/w.svg"
    assert {"OR", "WQ"} <= {row["pairing"] for row in listed(f"wiring {result} -k 2 {out}")}
    assert len(listed(f"compare {result} {result} --metric pk")) == len(hs.load(result).pairings)
    assert invoked(f"report {result} --weights demo --out {folder}/p.html").exit_code == 0
    assert written in (folder / "p.html").read_text(encoding="utf-8")


def test_a_result_never_replaces_the_nodes_it_is_made_of(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    save_file({"v": np.ones(256, np.float32)}, folder / "v.safetensors")
    for words in ("", " --force"):
        given = f"--nodes {folder}/v.safetensors@1 --out {folder}/v.safetensors"
        assert isinstance(invoked(f"score demo {given}{words}").exception, HeadspanError)
    assert list(load_file(folder / "v.safetensors")) == ["v"]
