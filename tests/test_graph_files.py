"""Graph files of EAP-IG: written and read back, shared keys and values, refusals; and EAP-IG itself if it is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headspan.results.tasks.edge_table import EdgeTable, block_node, mlp_node
from headspan.results.tasks.graph_files import read_graph, write_graph
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Head, Role
from headspan.vocabulary.ports import PortTable
from notices import noticed

SHAPES = {
    "own keys": (EdgeTable.regular(3, 4, 4), 4, False),
    "shared keys": (EdgeTable.regular(3, 4, 2), 4, False),
    "one key": (EdgeTable.regular(2, 8, 1), 8, False),
    "parallel": (EdgeTable.regular(3, 2, 2, parallel=True), 2, True),
    "parallel and shared": (EdgeTable.regular(2, 4, 2, parallel=True), 4, True),
}
GQA = SHAPES["shared keys"][0]


def some(table: EdgeTable, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Values of every size, exact in float32, and a circuit."""
    rng = np.random.default_rng(seed)
    values = np.where(table.mask, rng.normal(size=table.mask.shape), 0).astype(np.float32).astype(np.float64)
    return values, table.mask & (rng.random(table.mask.shape) < 0.2)


def n_layers(table: EdgeTable) -> int:
    return 1 + max(port.head.layer for port in table.writers)


def enumerated(layers: int, heads: int, parallel: bool) -> set[str]:
    """The names of all edges: every node reads what was written before it."""
    found, stream = set(), ["input"]
    for n in range(layers):
        attention, mlp = [f"a{n}.h{i}" for i in range(heads)], f"m{n}"
        found |= {f"{source}->{head}<{letter}>" for source in stream for head in attention for letter in "qkv"}
        before_mlp = stream if parallel else stream + attention
        found |= {f"{source}->{mlp}" for source in before_mlp}
        stream = [*stream, *attention, mlp]
    return found | {f"{source}->logits" for source in stream}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_edges_of_a_file_are_those_of_eap_ig(shape: str, tmp_path: Path) -> None:
    table, heads, parallel = SHAPES[shape]
    write_graph(tmp_path / "g.json", table, some(table)[0], d_model=16)
    content = json.loads((tmp_path / "g.json").read_text())
    assert set(content["edges"]) == enumerated(n_layers(table), heads, parallel)
    config = {"n_layers": n_layers(table), "n_heads": heads, "parallel_attn_mlp": parallel, "d_model": 16}
    assert content["cfg"] == config
    assert not any(edge["in_graph"] for edge in content["edges"].values())


@pytest.mark.parametrize("suffix", [".json", ".pt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back(shape: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".pt":
        pytest.importorskip("torch")
    table, _, _ = SHAPES[shape]
    values, kept = some(table)
    write_graph(tmp_path / f"g{suffix}", table, values, kept, d_model=16)
    with noticed() as said:
        found, inside = read_graph(tmp_path / f"g{suffix}", table)
    assert np.array_equal(found, values) and np.array_equal(inside, kept) and not said


def test_a_shared_edge_has_a_part_for_every_query_head(tmp_path: Path) -> None:
    values, kept = some(GQA)
    place = GQA.place("L0H1.O", "L2KV1.V")
    values[place], kept[:] = 6.0, False
    kept[place] = True
    write_graph(tmp_path / "g.json", GQA, values, kept, d_model=16)
    content = json.loads((tmp_path / "g.json").read_text())
    inside = {name for name, edge in content["edges"].items() if edge["in_graph"]}
    assert inside == {"a0.h1->a2.h2<v>", "a0.h1->a2.h3<v>"}
    assert all(content["edges"][name]["score"] == 3.0 for name in inside)
    assert content["edges"]["a0.h1->a2.h1<q>"]["score"] == values[GQA.place("L0H1.O", "L2H1.Q")]

    content["edges"]["a0.h1->a2.h2<v>"] = {"score": -1.0, "in_graph": False}
    content["edges"]["a0.h1->a2.h3<v>"]["score"] = 5.5
    (tmp_path / "theirs.json").write_text(json.dumps(content))
    with noticed() as said:
        found, kept = read_graph(tmp_path / "theirs.json", GQA)
    assert found[place] == 4.5 and kept[place] and kept.sum() == 1
    assert len(said) == 1 and "has 1 edge to shared keys or values for some query heads only" in said[0]


def test_which_nodes_are_in_the_circuit(tmp_path: Path) -> None:
    kept = np.zeros_like(GQA.mask)
    for source, target in [("embedding.W", "L0H1.Q"), ("L0H1.O", "logits.R"), ("L0H2.O", "logits.R")]:
        kept[GQA.place(source, target)] = True
    write_graph(tmp_path / "g.json", GQA, np.zeros(GQA.mask.shape), kept, d_model=16)
    nodes = json.loads((tmp_path / "g.json").read_text())["nodes"]
    assert [name for name, node in nodes.items() if node["in_graph"]] == ["input", "a0.h1", "logits"]


def test_scores_alone_and_circuits_alone(tmp_path: Path) -> None:
    values, kept = some(GQA)
    write_graph(tmp_path / "g.json", GQA, values, kept, d_model=16)
    absent = GQA.place("L0MLP.W", "L1MLP.R")
    for left_out in ("score", "in_graph"):
        content = json.loads((tmp_path / "g.json").read_text())
        for edge in content["edges"].values():
            del edge[left_out]
        del content["edges"]["m0->m1"]
        (tmp_path / "part.json").write_text(json.dumps(content))
        found, inside = read_graph(tmp_path / "part.json", GQA)
        expected, circuit = (
            (np.zeros_like(values), kept.copy()) if left_out == "score" else (values.copy(), kept & False)
        )
        expected[absent], circuit[absent] = 0, False
        assert np.array_equal(found, expected) and np.array_equal(inside, circuit)


def heads_per_layer(*counts: int) -> EdgeTable:
    ports = PortTable.of_counts({n: (count, count) for n, count in enumerate(counts)})
    return EdgeTable.of(ports, [mlp_node(n) for n in range(len(counts))])


UNNAMED: dict[str, tuple[Callable[[], EdgeTable], str]] = {
    "a block": (
        lambda: EdgeTable.of(PortTable.regular(range(1), 2, 2), [mlp_node(0), block_node(1)]),
        "no name for L1BLOCK.W",
    ),
    "a rotary key": (
        lambda: EdgeTable.of(
            PortTable({role: (Head(0, 0),) + (Head(0, 0, "KR"),) * (role is Role.K) for role in (*Role,)[:4]}),
            [mlp_node(0)],
        ),
        "no name for L0KR.K",
    ),
    "other numbers of heads": (lambda: heads_per_layer(2, 3), "This model has no L0H2.O"),
    "a layer without an MLP": (
        lambda: EdgeTable.of(PortTable.regular(range(2), 2, 2), [mlp_node(0)]), "This model has no L1MLP.W",
    ),
    "keys of another layer": (
        lambda: EdgeTable.of(
            PortTable.of_counts({0: (4, 2), 1: (4, 0)}, {1: 0}), [mlp_node(0), mlp_node(1)]
        ),
        "This model has no L1H0.K",
    ),
    "both kinds of blocks": (
        lambda: EdgeTable.of(PortTable.regular(range(2), 2, 2), [mlp_node(0), mlp_node(1, parallel=True)]),
        "this model has both kinds",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNNAMED)
def test_models_that_eap_ig_cannot_express(what: str, tmp_path: Path) -> None:
    make, words = UNNAMED[what]
    table = make()
    with pytest.raises(HeadspanError, match=words):
        write_graph(tmp_path / "g.json", table, *some(table), d_model=16)
    assert not list(tmp_path.iterdir())


def changed(**parts: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | parts


def edge(name: str, facts: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {"edges": {**content["edges"], name: facts}}


def config(**parts: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {"cfg": {**content["cfg"], **parts}}


def node(name: str, facts: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {"nodes": {**content["nodes"], name: facts}}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda content: [content], "holds no named parts"),
    "no edges": (lambda content: {key: content[key] for key in ("cfg", "nodes")}, "has no edges"),
    "no cfg": (lambda content: {key: content[key] for key in ("edges", "nodes")}, "has no cfg"),
    "a cfg of words": (changed(cfg="gpt2"), "must have n_layers"),
    "layers in words": (config(n_layers="3"), "must have n_layers"),
    "other layers": (config(n_layers=12), "has n_layers 12, and this model has 3"),
    "other heads": (config(n_heads=2), "has n_heads 2, and this model has 4"),
    "parallel blocks": (config(parallel_attn_mlp=True), "has parallel_attn_mlp True, and this model has False"),
    "another node": (node("a9.h0", {"in_graph": True}), "has the node 'a9.h0'"),
    "nodes of no object": (changed(nodes=[]), "the nodes of"),
    "edges of no object": (changed(edges=[]), "the edges of"),
    "another edge": (edge("a0.h0->a1.h9<q>", {"score": 1.0, "in_graph": True}), "which this model does not have"),
    "no letter": (edge("a0.h0->a1.h0", {"score": 1.0, "in_graph": True}), "which this model does not have"),
    "backwards": (edge("a1.h0->a0.h0<q>", {"score": 1.0, "in_graph": True}), "which this model does not have"),
    "NaN": (edge("m0->m1", {"score": float("nan"), "in_graph": True}), "must be a finite number"),
    "infinity": (edge("m0->m1", {"score": float("inf"), "in_graph": True}), "must be a finite number"),
    "a huge integer": (edge("m0->m1", {"score": 10**400, "in_graph": True}), "must be a finite number"),
    "a true score": (edge("m0->m1", {"score": True, "in_graph": True}), "must be a finite number"),
    "an edge of nothing": (edge("m0->m1", {}), "must be a finite number"),
    "membership in words": (edge("m0->m1", {"score": 1.0, "in_graph": "yes"}), "must be true or false"),
    "neurons": (node("m0", {"in_graph": True, "neurons": [True] * 16}), "single neurons"),
    "neurons apart": (changed(neurons={"m0": [True]}), "single neurons"),
    "scores of nodes": (
        lambda content: node("m0", {"in_graph": True, "score": 1.0})(content) | {"edges": {}}, "level of edges",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_one_message(what: str, tmp_path: Path) -> None:
    change, words = WRONG[what]
    write_graph(tmp_path / "g.json", GQA, *some(GQA), d_model=16)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(change(json.loads((tmp_path / "g.json").read_text()))))
    with pytest.raises(HeadspanError) as caught:
        read_graph(path, GQA)
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_other_files_are_refused(tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(HeadspanError, match="too many for a graph file"):
        read_graph(huge, GQA)
    for text in ("{", "[" * 100_000):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(HeadspanError, match="cannot be read as a graph file in JSON"):
            read_graph(tmp_path / "x.json", GQA)
    with pytest.raises(HeadspanError, match="there is no file"):
        read_graph(tmp_path / "nowhere.pt", GQA)
    with pytest.raises(HeadspanError, match=r"must end in \.json or \.pt"):
        read_graph(tmp_path / "g.csv", GQA)
    with pytest.raises(HeadspanError, match=r"must end in \.json or \.pt"):
        write_graph(tmp_path / "g.csv", GQA, some(GQA)[0], d_model=16)
    with pytest.raises(HeadspanError, match="finite numbers"):
        write_graph(tmp_path / "g.json", GQA, np.full(GQA.mask.shape, np.nan), d_model=16)
    assert not (tmp_path / "g.json").exists()


@pytest.mark.parametrize("suffix", [".json", ".pt"])
def test_only_our_own_files_are_replaced(suffix: str, tmp_path: Path) -> None:
    if suffix == ".pt":
        pytest.importorskip("torch")
    path = tmp_path / f"g{suffix}"
    path.write_bytes(b"PK\x03\x04 or whatever")
    with pytest.raises(HeadspanError, match="is not a headspan"):
        write_graph(path, GQA, some(GQA)[0], d_model=16)
    write_graph(path, GQA, some(GQA)[0], d_model=16, force=True)
    write_graph(path, GQA, some(GQA, 1)[0], d_model=16)
    assert np.array_equal(read_graph(path, GQA)[0], some(GQA, 1)[0])


# -- files of torch --------------------------------------------------------------------------------------------


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this ran",))


def pt_changes(torch: Any) -> dict[str, tuple[dict[str, Any], str]]:
    wide = torch.zeros(1, 1).expand(10**6, 10**6)
    rows, columns = GQA.mask.shape[0], 3 * 4 * 3 + 3 + 1
    return {
        "code": ({"cfg": Runs()}, "a pickle can run any code"),
        "other layers": ({"cfg": {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False}}, "has n_layers 2"),
        "an enormous tensor": ({"edges_scores": wide}, "has the shape [1000000, 1000000]"),
        "a flat tensor": ({"edges_in_graph": torch.zeros(3, dtype=torch.bool)}, "has the shape [3]"),
        "whole numbers": ({"edges_scores": torch.zeros(rows, columns, dtype=torch.int64)}, "tensor of numbers"),
        "membership by numbers": ({"edges_in_graph": torch.zeros(rows, columns)}, "tensor of truth values"),
        "no tensor": ({"edges_scores": [1.0]}, "must be a dense tensor"),
        "a sparse tensor": ({"edges_scores": torch.zeros(rows, columns).to_sparse()}, "must be a dense tensor"),
        "NaN": ({"edges_scores": torch.full((rows, columns), float("nan"))}, "not finite numbers"),
        "names of nothing": ({"src_nodes": None}, "must list its 16 nodes"),
        "another name": ({"src_nodes": ["embed"] + [""] * 15}, "has the node 'embed' in the place of input"),
        "neurons": ({"neurons_scores": torch.zeros(rows, 16)}, "single neurons"),
    }


def test_a_wrong_torch_file_is_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "g.pt"
    write_graph(path, GQA, *some(GQA), d_model=16)
    content = torch.load(path, weights_only=True)
    for what, (change, words) in pt_changes(torch).items():
        torch.save(content | change, tmp_path / "wrong.pt")
        with pytest.raises(HeadspanError) as caught:
            read_graph(tmp_path / "wrong.pt", GQA)
        assert words in str(caught.value), what
    for key in ("cfg", "src_nodes", "dst_nodes"):
        torch.save({name: part for name, part in content.items() if name != key}, tmp_path / "wrong.pt")
        with pytest.raises(HeadspanError, match=f"has no {key}"):
            read_graph(tmp_path / "wrong.pt", GQA)
    torch.save({key: content[key] for key in ("cfg", "src_nodes", "dst_nodes")}, tmp_path / "wrong.pt")
    with pytest.raises(HeadspanError, match="has neither edges_scores nor edges_in_graph"):
        read_graph(tmp_path / "wrong.pt", GQA)
    with (tmp_path / "huge.pt").open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(HeadspanError, match="too many for a graph"):
        read_graph(tmp_path / "huge.pt", GQA)
    assert "this ran" not in capfd.readouterr().out


# -- EAP-IG itself ---------------------------------------------------------------------------------------------


def port_of(name: str, letter: str | None, table: EdgeTable) -> str:
    """A node of EAP-IG as a port: one that writes without a letter."""
    plain = {"input": "embedding.W", "logits": "logits.R"}
    if name in plain:
        return plain[name]
    if name.startswith("m"):
        return f"L{name[1:]}MLP." + ("W" if letter is None else "R")
    layer, head = name[1:].split(".h")
    role = "O" if letter is None else letter.upper()
    return f"{table.ports.resolve(f'L{layer}H{head}', role)}.{role}"


@pytest.mark.parametrize("suffix", ["json", "pt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_eap_ig_reads_our_files_and_we_read_its(shape: str, suffix: str, tmp_path: Path) -> None:
    eap = pytest.importorskip("eap.graph", exc_type=ImportError)
    table, heads, parallel = SHAPES[shape]
    values, kept = some(table)
    ours, theirs = tmp_path / f"ours.{suffix}", tmp_path / f"theirs.{suffix}"
    write_graph(ours, table, values, kept, d_model=16)
    graph = getattr(eap.Graph, f"from_{suffix}")(str(ours))
    copies: dict[tuple[int, int], list[Any]] = {}
    for one in graph.edges.values():
        place = table.place(port_of(one.parent.name, None, table), port_of(one.child.name, one.qkv or "", table))
        copies.setdefault(place, []).append(one)
    assert len(copies) == table.n_edges == int(table.mask.sum())
    assert len(graph.edges) == int(graph.real_edge_mask.sum())
    for place, same in copies.items():
        assert all(bool(one.in_graph) == kept[place] for one in same)
        assert all(float(one.score) == np.float32(values[place] / len(same)) for one in same)
    assert graph.count_included_edges() == sum(len(same) for place, same in copies.items() if kept[place])

    shape_of = {"n_layers": n_layers(table), "n_heads": heads, "parallel_attn_mlp": parallel, "d_model": 16}
    made = eap.Graph.from_model(shape_of)
    rng = np.random.default_rng(1)
    for one in made.edges.values():
        one.score = float(np.float32(rng.normal()))
    made.apply_topn(len(made.edges) // 3)
    getattr(made, f"to_{suffix}")(str(theirs))
    with noticed():
        found, inside = read_graph(theirs, table)
    for place, same in copies.items():
        mine = [made.edges[one.name] for one in same]
        assert found[place] == pytest.approx(sum(float(one.score) for one in mine), abs=1e-12)
        assert inside[place] == any(bool(one.in_graph) for one in mine)
    assert not found[~table.mask].any() and not inside[~table.mask].any()
