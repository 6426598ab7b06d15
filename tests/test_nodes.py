"""`headspan.nodes`: shares against plain formulas for every kind of node, exact p, and the empirical null."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from headspan.cli import _run
from headspan.node_kinds.adapters import adapter_sets
from headspan.node_kinds.opening import node_sets
from headspan.node_kinds.search import Search
from headspan.reading.node_overlaps import NodeReport
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import EMBEDDING_POSITION, UNEMBEDDING_POSITION, Role

LAYERS, HEADS, D, M = 4, 3, 40, 5


def arrays(seed: int = 0, **more) -> dict:
    rng = np.random.default_rng(seed)
    return {role: rng.normal(size=(LAYERS, HEADS, D, M)).astype(np.float32) for role in "QKVO"} | more


def share(weight: np.ndarray, basis: np.ndarray) -> float:
    """PK/r by the plain formula."""
    u, _ = np.linalg.qr(np.asarray(weight, np.float64))
    x, _ = np.linalg.qr(np.asarray(basis, np.float64).reshape(len(weight), -1))
    return float(np.square(u.T @ x).sum() / x.shape[1])


def check_against_formula(weights, report, vectors: dict[tuple[str, str], np.ndarray]) -> int:
    """Every row whose partner is a head has the share of the plain formula; and the best comes first."""
    checked = 0
    for row in report.rows():
        if row["partner"].rpartition(".")[2] in "RW":
            continue
        role = "R" if row["side"] == "written by" else "W"
        expected = share(weights.read_head(row["partner"]), vectors[row["node"], role])
        assert row["share"] == pytest.approx(expected, abs=2e-5)
        checked += 1
    return checked


# ------------------------------------------------------------------------------------------ planted and random


def test_planted_directions_come_first_with_the_right_p() -> None:
    from scipy.stats import beta

    model, rng = arrays(), np.random.default_rng(5)
    hidden = model["O"][1, 2] @ rng.normal(size=M) + 0.3 * rng.normal(size=D)
    seen = model["K"][3, 0] @ rng.normal(size=M) + 0.3 * rng.normal(size=D)
    report = hs.nodes(model, [hs.Node(hidden, "written", 3), hs.Node(seen, "read", 2)], k=4)
    written, read = report.of("written")[0], next(row for row in report.of("read") if row["side"] == "read by")
    assert (written["partner"], written["rank"]) == ("L1H2.O", 1) and read["partner"] == "L3H0.K"
    for row, weight, vector in ((written, model["O"][1, 2], hidden), (read, model["K"][3, 0], seen)):
        exact = share(weight, vector)
        assert row["share"] == pytest.approx(exact, abs=1e-5) and exact > 0.5
        assert row["p"] == pytest.approx(beta(M / 2, (D - M) / 2).sf(exact), rel=1e-3)
    writers = [row for row in report.of("written") if row["side"] == "written by"]
    assert [row["share"] for row in writers] == sorted((row["share"] for row in writers), reverse=True)
    assert "2 nodes and the ports" in repr(report)
    assert "1 node and the ports" in repr(hs.nodes(model, hs.Node(hidden, "written", 3)))


def test_only_earlier_heads_write_and_later_ones_read() -> None:
    report = hs.nodes(arrays(), hs.Node(np.ones(D), "u", 2), k=100)
    writers = [row["partner"] for row in report.rows() if row["side"] == "written by"]
    readers = [row["partner"] for row in report.rows() if row["side"] == "read by"]
    assert sorted(writers) == sorted(f"L{layer}H{head}.O" for layer in (0, 1) for head in range(HEADS))
    assert sorted(readers) == sorted(
        f"L{layer}H{head}.{role}" for layer in (2, 3) for head in range(HEADS) for role in "QKV"
    )


def test_p_is_uniform_for_random_directions() -> None:
    from scipy.stats import kstest

    vectors = np.random.default_rng(11).normal(size=(4000, D))
    report = hs.nodes(arrays(1), _as_set(vectors), k=LAYERS * HEADS)
    rows = [row for row in report.by_node() if row["partner"] == "L2H1.O"]
    assert len(rows) == 4000
    assert kstest([row["p"] for row in rows], "uniform").pvalue > 0.01
    z = np.array([row["z"] for row in rows])
    assert abs(z.mean()) < 0.05 and abs(z.std() - 1) < 0.05


def _as_set(vectors: np.ndarray, name: str = "v"):
    """Vectors in memory as the set of a file's."""
    from headspan.node_kinds.files import FileNodes

    class Memory:
        def names(self):
            return [name]

        def shape(self, tensor):
            return vectors.shape

        def read(self, tensor, rows=None, columns=None):
            return vectors if rows is None else vectors[rows]

    found = FileNodes(hs.open(arrays(1)), Path("memory"), Memory(), name, LAYERS)
    found.places = {Role.R: found.places[Role.R]}
    return found


def test_z_of_subspaces_is_standard_and_their_p_uniform(tmp_path: Path) -> None:
    from scipy.stats import kstest

    bases = np.random.default_rng(12).normal(size=(3000, D, 4)).astype(np.float32)
    np.save(tmp_path / "bases.npy", bases)
    report = hs.nodes(arrays(1), f"{tmp_path}/bases.npy@{LAYERS}", k=LAYERS * HEADS)
    rows = [row for row in report.by_node() if row["partner"] == "L1H0.O"]
    z = np.array([row["z"] for row in rows])
    assert len(rows) == 3000
    assert abs(z.mean()) < 0.06 and abs(z.std() - 1) < 0.06
    assert kstest([row["p"] for row in rows], "uniform").pvalue > 0.01


def test_empirical_null_is_calibrated_on_held_out_nodes_of_one_kind(tmp_path: Path) -> None:
    """Directions of one kind that favour some heads: p is far too small, p_kind is not."""
    from scipy.stats import kstest

    model, rng = arrays(2), np.random.default_rng(3)
    kind = rng.normal(size=(1400, D)) + 2 * rng.normal(size=(1400, M)) @ model["O"][0, 0].T
    save_file({"kind": kind.astype(np.float32)}, tmp_path / "kind.safetensors")
    (everyone,) = node_sets(hs.open(model), f"{tmp_path}/kind.safetensors@2")
    held_out = np.sort(rng.choice(1400, 400, replace=False))
    everyone.ids = held_out
    report = hs.nodes(model, everyone, k=100)
    rows = [row for row in report.by_node() if row["partner"] == "L0H0.O"]
    assert len(rows) == 400
    assert np.median([row["p"] for row in rows]) < 1e-6
    own = np.array([row["p_kind"] for row in rows])
    assert kstest(own, "uniform").pvalue > 0.01 and 0.02 < np.mean(own <= 0.05) < 0.09


def test_a_node_among_the_others_does_not_count_itself(tmp_path: Path) -> None:
    model = arrays(2)
    vectors = np.random.default_rng(0).normal(size=(30, D)).astype(np.float32)
    np.save(tmp_path / "v.npy", vectors)
    report = hs.nodes(model, f"{tmp_path}/v.npy@4", k=50)
    shares = np.array([share(model["O"][1, 1], vector) for vector in vectors])
    for row in report.rows():
        if row["partner"] == "L1H1.O":
            mine = share(model["O"][1, 1], vectors[int(row["node"][2:-1])])
            assert row["p_kind"] == pytest.approx((1 + np.sum(shares > mine)) / 30)


@pytest.mark.parametrize("count", [5, 19, 20])
def test_few_nodes_have_no_empirical_p(tmp_path: Path, count: int) -> None:
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=(count, D)))
    report = hs.nodes(arrays(), f"{tmp_path}/v.npy@2")
    assert {row["p_kind"] is None for row in report.rows()} == {count < 20}
    assert any("no empirical p" in note for note in report.notes) == (count < 20)


@pytest.mark.parametrize(("asked", "compared_with"), [(1, 39), (20, 20), (21, 19), (22, 39), (40, 39)])
def test_the_null_is_of_nodes_not_asked_for_while_there_are_nineteen(
    tmp_path: Path, asked: int, compared_with: int
) -> None:
    model, vectors = arrays(2), np.random.default_rng(0).normal(size=(40, D)).astype(np.float32)
    np.save(tmp_path / "v.npy", vectors)
    (found,) = node_sets(hs.open(model), f"{tmp_path}/v.npy@4")
    found.ids = np.arange(asked)
    shares = np.array([share(model["O"][1, 1], vector) for vector in vectors])
    others = shares[asked:] if compared_with == 40 - asked else shares
    rows = [row for row in hs.nodes(model, found, k=50).rows() if row["partner"] == "L1H1.O"]
    assert len(rows) == asked
    for row in rows:
        larger = np.sum(others > shares[int(row["node"][2:-1])])
        assert row["p_kind"] == pytest.approx((1 + larger) / (1 + compared_with))


def test_a_null_has_at_most_999_others(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=(1100, D)).astype(np.float32))
    (found,) = node_sets(hs.open(arrays()), f"{tmp_path}/v.npy@4")
    found.ids = np.arange(2)
    search = Search(hs.open(arrays()), [found], 1, 2**20, 0, None)
    for side in search.sides:
        assert len(side.others[0]) == 999 and min(side.others[0]) >= 2
        assert list(side.others[0]) == sorted(set(side.others[0]))


# ----------------------------------------------------------------------------------------------- what is kept


def test_blocks_stacks_and_small_memory_change_nothing(tmp_path: Path) -> None:
    vectors = np.random.default_rng(4).normal(size=(1100, D)).astype(np.float32)  # more than are listed at once
    np.save(tmp_path / "v.npy", vectors)
    model = arrays(3)
    whole = hs.nodes(model, f"{tmp_path}/v.npy@3", k=3)
    pieces = hs.nodes(model, f"{tmp_path}/v.npy@3", k=3, memory="1MB")
    import headspan.node_kinds.search as search

    before = search.PRODUCT
    try:
        search.PRODUCT = 2000
        tiny = hs.nodes(model, f"{tmp_path}/v.npy@3", k=3)
    finally:
        search.PRODUCT = before
    for other in (pieces, tiny):
        for mine, theirs in zip(whole.by_node(), other.by_node(), strict=True):
            assert mine["node"] == theirs["node"] and mine["share"] == pytest.approx(theirs["share"], rel=1e-5)
        for mine, theirs in zip(whole.by_head(), other.by_head(), strict=True):
            assert mine["partner"] == theirs["partner"] and mine["share"] == pytest.approx(theirs["share"], rel=1e-5)


def test_one_layer_at_a_time_where_memory_is_less_than_a_layer(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.random.default_rng(4).normal(size=(40, D)).astype(np.float32))
    weights, found = hs.open(arrays(3)), []
    for memory in (2**30, 100):
        search = Search(weights, node_sets(weights, f"{tmp_path}/v.npy@3"), 3, memory, 0, None)
        search.run()
        found.append(list(NodeReport.of_search(search).by_node()))
    assert [row["partner"] for row in found[0]] == [row["partner"] for row in found[1]]
    assert [row["p_kind"] for row in found[0]] == [row["p_kind"] for row in found[1]]


def test_best_nodes_of_every_head() -> None:
    vectors = np.random.default_rng(4).normal(size=(200, D)).astype(np.float32)
    model = arrays(3)
    report = hs.nodes(model, _as_set(vectors), k=2)
    for head in ("L0H0", "L3H2"):
        rows = [row for row in report.by_head() if row["partner"] == f"{head}.O"]
        weight = hs.open(model).read_head(f"{head}.O")
        expected = sorted(range(200), key=lambda i: -share(weight, vectors[i]))[:2]
        assert [row["node"] for row in rows] == [f"v[{i}]" for i in expected]
        assert [row["rank"] for row in rows] == [1, 2]


def test_best_nodes_of_every_head_of_two_sets_and_on_both_sides(tmp_path: Path) -> None:
    """The list by head has, for each port, the best of both files, with the numbers of the list by node."""
    rng, model = np.random.default_rng(4), arrays(3)
    vectors = {name: rng.normal(size=(count, D)).astype(np.float32) for name, count in (("v", 40), ("w", 70))}
    for name, array in vectors.items():
        np.save(tmp_path / f"{name}.npy", array)
    files = [f"{tmp_path}/{name}.npy@2" for name in vectors]
    report, by_share = hs.nodes(model, files, k=500), hs.nodes(model, files, k=500, sort="share")
    by_node = {(row["node"], row["partner"]): row for row in report.by_node()}
    rows = list(report.by_head())
    ports = [f"L{i}H{h}.{role}" for role, layers in (("O", (0, 1)), *((r, (2, 3)) for r in "QKV")) for i in layers
             for h in range(HEADS)]  # fmt: skip
    assert list(dict.fromkeys(row["partner"] for row in rows)) == ports and len(rows) == 110 * len(ports)
    for port in ("L0H1.O", "L2H0.Q", "L3H2.K", "L2H1.V"):
        mine, weight = [row for row in rows if row["partner"] == port], hs.open(model).read_head(port)
        shares = {f"{name}[{i}]": share(weight, v) for name, some in vectors.items() for i, v in enumerate(some)}
        assert [row["rank"] for row in mine] == list(range(1, 111))
        chance = {row["node"]: row["p_kind"] for row in mine}
        assert [row["node"] for row in mine] == sorted(shares, key=lambda name: (chance[name], -shares[name]))
        listed = [row["node"] for row in by_share.by_head() if row["partner"] == port]
        assert listed == sorted(shares, key=lambda name: -shares[name])
        for row in mine:
            assert row | {"rank": 0} == by_node[row["node"], port] | {"rank": 0}


def test_a_share_of_nothing_is_listed_too() -> None:
    axes = np.eye(12)
    model = {role: axes[None, None, :, :3] * np.ones((2, 1, 1, 1)) for role in "QKVO"}
    report = hs.nodes(model, hs.Node(axes[:, 7], "u", 1), k=5)
    for rows in (list(report.by_node()), list(report.by_head())):
        assert [(row["partner"], row["share"]) for row in rows] == [
            ("L0H0.O", 0), ("L1H0.Q", 0), ("L1H0.K", 0), ("L1H0.V", 0)
        ]  # fmt: skip
    assert all(row["p"] == 1 for row in report.rows())


@pytest.mark.parametrize(("k", "by_node"), [(1000, True), (1001, False)])
def test_fifty_thousand_rows_are_the_most_of_a_list_by_node(tmp_path: Path, k: int, by_node: bool) -> None:
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=(25, D)))
    report = hs.nodes(arrays(), f"{tmp_path}/v.npy@2", k=k)
    assert report.listed_by_node == by_node
    assert report.rows() == list(report.by_node() if by_node else report.by_head())
    assert list(report.by_node()) != list(report.by_head())


def test_many_nodes_are_listed_by_head(tmp_path: Path) -> None:
    save_file({"v": np.random.default_rng(0).normal(size=(6000, D)).astype(np.float32)}, tmp_path / "v.safetensors")
    report = hs.nodes(arrays(), f"{tmp_path}/v.safetensors@2", k=5)
    assert not report.listed_by_node and len(report.rows()) == (2 + 2 * 3) * HEADS * 5
    assert len(report.of("v[5999]")) == 10


def test_nodes_write_what_other_nodes_read() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=D), rng.normal(size=(D, 2))
    report = hs.nodes(arrays(), [hs.Node(first, "a", 1, reads=False), hs.Node(second, "b", 3, writes=False)], k=50)
    (row,) = [row for row in report.of("b") if row["partner"] == "a.W"]
    (other,) = [row for row in report.of("a") if row["partner"] == "b.R"]
    x, _ = np.linalg.qr(second)
    pk = np.square(x.T @ first).sum() / np.square(first).sum()
    assert row["share"] == pytest.approx(pk / 2, abs=1e-6)  # of b's two dimensions
    assert other["share"] == pytest.approx(pk, abs=1e-6)
    single = [hs.Node(first, "a", 1, reads=False), hs.Node(second[:, 0], "b", 3, writes=False)]
    assert [row for row in hs.nodes(arrays(), single, k=50).of("b") if row["partner"] == "a.W"]  # one pair in all
    alone = hs.nodes(arrays(), hs.Node(first, "a", 1))
    assert not [row for row in alone.rows() if row["partner"].startswith("a.")]
    late = hs.nodes(arrays(), [hs.Node(first, "a", 3, reads=False), hs.Node(second, "b", 1, writes=False)], k=50)
    assert not [row for row in late.rows() if row["partner"] in ("a.W", "b.R")]


@pytest.mark.parametrize(("layers", "pairs"), [((1, 1), []), ((1, 1, 2), [("c[0]", "a[0].W"), ("c[0]", "b[0].W")])])
def test_nodes_at_one_position_are_not_compared(tmp_path: Path, layers: tuple[int, ...], pairs: list) -> None:
    """Transcoders of one MLP read before any of them writes."""
    folders = []
    for i, layer in enumerate(layers):
        hooks = {"hook_name": f"blocks.{layer}.ln2.hook_normalized", "hook_name_out": f"blocks.{layer}.hook_mlp_out"}
        config = {"architecture": "transcoder", **hooks}
        folders.append(write_sae(tmp_path / "abc"[i], config, **sae_tensors(1, seed=i)))
    rows = hs.nodes(arrays(), sae=folders, k=100).rows()
    written, read = ([row for row in rows if row["partner"].endswith(end)] for end in (".W", ".R"))
    assert sorted((row["node"], row["partner"]) for row in written) == pairs
    assert sorted((row["partner"].removesuffix(".R"), f"{row['node']}.W") for row in read) == pairs


def test_a_port_that_fills_the_space_has_no_z() -> None:
    """Its share is 1 for every direction: nothing varies."""
    rng = np.random.default_rng(0)
    model = {role: rng.normal(size=(3, 2, 6, 6)) for role in "QKVO"}
    model["O"][0, 0, :, 5] = 0
    rows = hs.nodes(model, hs.Node(rng.normal(size=6), "u", 2), k=50).rows()
    assert {row["partner"] for row in rows if row["z"] is not None} == {"L0H0.O"}
    assert all(row["share"] == pytest.approx(1) and row["p"] == 1 for row in rows if row["z"] is None)


def test_too_many_pairs_of_nodes_are_left_out(tmp_path: Path, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    for name in ("v", "w"):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(30, D)))
    files = [f"{tmp_path}/v.npy@1", f"{tmp_path}/w.npy@3"]
    assert [row for row in hs.nodes(arrays(), files).rows() if row["partner"].startswith("v[")]
    monkeypatch.setattr("headspan.node_kinds.search.MOST_NODE_PAIRS", 100)
    report = hs.nodes(arrays(), files)
    assert any("heads only" in note for note in report.notes)
    assert not [row for row in report.rows() if row["partner"].startswith("v[")]


def test_pairs_of_nodes_count_columns_and_not_those_within_a_set(tmp_path: Path, monkeypatch) -> None:
    """30 vectors write before 20 planes read, which makes 30·20·2; the probe reads before both."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "v.npy", rng.normal(size=(30, D)))
    np.save(tmp_path / "w.npy", rng.normal(size=(20, D, 2)))
    nodes = [f"{tmp_path}/v.npy@1", f"{tmp_path}/w.npy@3", hs.Node(rng.normal(size=D), "early", 0, writes=False)]
    for most, compared in ((1200, True), (1199, False)):
        monkeypatch.setattr("headspan.node_kinds.search.MOST_NODE_PAIRS", most)
        report = hs.nodes(arrays(), nodes, k=100)
        pairs = [row for row in report.rows() if row["side"] == "written by" and row["partner"].startswith("v[")]
        assert len(pairs) == (600 if compared else 0)
        assert [note for note in report.notes if "1,200 pairs" in note] == [
            note for note in report.notes if "heads only" in note
        ]
        assert any("heads only" in note for note in report.notes) != compared


@pytest.mark.parametrize("others", [True, False])
def test_progress_ends_with_all_pairs(tmp_path: Path, others: bool, monkeypatch) -> None:
    """Each node counts once for every port of its side: 12 heads, of which three kinds read, and the other nodes."""
    monkeypatch.setattr("headspan.node_kinds.search.MOST_NODE_PAIRS", 10**9 if others else 1)
    rng, told = np.random.default_rng(0), []
    np.save(tmp_path / "v.npy", rng.normal(size=(30, D)))
    nodes = [f"{tmp_path}/v.npy@1", hs.Node(rng.normal(size=D), "probe", 3, writes=False)]
    report = hs.nodes(arrays(), nodes, progress=lambda done, total: told.append((done, total)))
    heads, writing, reading = LAYERS * HEADS, 30 * others, 31 * others
    total = 31 * (heads + writing) + 30 * (3 * heads + reading)
    assert told[0][0] == 30 * heads and told[-1] == (total, total) and {one for _, one in told} == {total}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert report.ports == 4 * heads + writing + reading


@pytest.mark.parametrize(("numbers", "expected"), [(0, 99), (2 * 36 * 500, 500), (2 * 36 * 5000, 999)])
def test_nulls_keep_to_their_memory(tmp_path: Path, monkeypatch, numbers: int, expected: int) -> None:
    """36 ports read: fewer others where they would be too many numbers on two sides, but never fewer than 99."""
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=(1100, D)).astype(np.float32))
    (found,) = node_sets(hs.open(arrays()), f"{tmp_path}/v.npy@2")
    monkeypatch.setattr("headspan.node_kinds.search._NULL_NUMBERS", numbers)
    search = Search(hs.open(arrays()), [found], 1, 2**20, 0, None)
    assert {len(side.others[0]) for side in search.sides} == {expected}


def test_rank_of_a_port_and_of_a_basis_counts() -> None:
    model = arrays()
    model["O"][0, 0, :, 2:] = model["O"][0, 0, :, :2] @ np.random.default_rng(1).normal(size=(2, 3))
    direction = np.random.default_rng(2).normal(size=D)
    basis = np.stack([direction, 2 * direction, np.arange(D)], axis=1)
    report = hs.nodes(model, [hs.Node(direction, "u", 2), hs.Node(basis, "flat", 2)], k=50)
    from scipy.stats import beta

    row = next(row for row in report.of("u") if row["partner"] == "L0H0.O")
    assert row["p"] == pytest.approx(beta(1, (D - 2) / 2).sf(row["share"]), rel=1e-4)
    row = next(row for row in report.of("flat") if row["partner"] == "L1H0.O")
    assert row["share"] == pytest.approx(share(model["O"][1, 0], basis[:, [0, 2]]), abs=1e-5)


def test_folded_layer_norm_has_one_dimension_less() -> None:
    from scipy.stats import beta

    rng = np.random.default_rng(0)
    model = arrays(norm="layer", gain=rng.uniform(0.5, 2, size=(LAYERS, D)))
    report = hs.nodes(model, hs.Node(rng.normal(size=D), "u", 1), fold=True, k=3)
    assert "folded" in repr(report) and "folded" not in repr(hs.nodes(model, hs.Node(np.ones(D), "u", 1)))
    for row in report.rows():
        d = D - 1 if row["side"] == "read by" else D  # what is written is centred, what a probe reads is not
        assert row["p"] == pytest.approx(beta(M / 2, (d - M) / 2).sf(row["share"]), rel=1e-3)


# -------------------------------------------------------------------------------------------------- the kinds


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random GPT-2 and a small gated model, with adapters made by PEFT."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=60, n_positions=20, n_inner=48)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("fold", [False, True])
def test_neurons_against_formulas(gpt2: Path, fold: bool) -> None:
    weights = hs.fold(hs.open(gpt2)) if fold else hs.open(gpt2)
    source = hs.open(gpt2).source
    report = hs.nodes(weights, neurons="L0:3,L1:*", k=6)
    vectors = {}
    for layer in (0, 1):
        start = f"transformer.h.{layer}."
        rows, columns = (source.read(f"{start}mlp.{name}.weight") for name in ("c_fc", "c_proj"))
        for i in range(48):
            reads, writes = rows[:, i], columns[i]
            if fold:
                reads = reads * source.read(f"{start}ln_2.weight")
                reads, writes = reads - reads.mean(), writes - writes.mean()
            vectors[f"L{layer}N{i}", "R"], vectors[f"L{layer}N{i}", "W"] = reads, writes
    assert check_against_formula(weights, report, vectors) > 300
    own = [row for row in report.of("L1N5") if row["side"] == "written by"]
    assert {row["partner"][:2] for row in own} <= {"L0", "L1"}  # the attention of its own layer wrote already
    assert all(row["partner"][:2] == "L2" for row in report.of("L1N5") if row["side"] == "read by")


def test_neurons_are_named_in_many_ways(gpt2: Path) -> None:
    def names(text):
        return [node.name for found in node_sets(hs.open(gpt2), neurons=text) for node in found.nodes(Role.R)]

    assert names("L0:1,L2:4-6") == ["L0N1", "L2N4", "L2N5", "L2N6"]
    assert names("0:1, 5, 7-8") == ["L0N1", "L0N5", "L0N7", "L0N8"]
    assert names("L1:3,L1:3,L1:2-4") == ["L1N2", "L1N3", "L1N4"]
    assert len(names("*")) == 3 * 48 == len(names("L*:*")) and names(["L1:0", "L2:0"]) == ["L1N0", "L2N0"]
    for wrong in ("", "L1", "L1:", "L1:x", "L9:0", "L1:48", "L1:5-2", "17", "L1E0:3", "L1S:3", "L1:1.5", "L1:-3"):
        with pytest.raises(HeadspanError):
            names(wrong)


def test_experts_one_by_one(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen2_moe", hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
        num_experts=3, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=10,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = hs.open(tmp_path)
    source = weights.source
    report = hs.nodes(weights, neurons="L1E2:5,L0S:3", k=3)
    start = "model.layers.1.mlp.experts.2."
    gate, up = (source.read(f"{start}{name}.weight")[5] for name in ("gate_proj", "up_proj"))
    shared = "model.layers.0.mlp.shared_expert."
    vectors = {
        ("L1E2N5", "R"): np.stack([gate, up], 1), ("L1E2N5", "W"): source.read(f"{start}down_proj.weight")[:, 5],
        ("L0SN3", "R"): np.stack([source.read(f"{shared}{n}_proj.weight")[3] for n in ("gate", "up")], 1),
        ("L0SN3", "W"): source.read(f"{shared}down_proj.weight")[:, 3],
    }  # fmt: skip
    assert check_against_formula(weights, report, vectors) == 9  # nothing reads behind the last layer
    assert {row["kind"] for row in report.of("L1E2N5")} == {"expert neuron"}
    sets = node_sets(weights, neurons="L1:*")
    assert [len(found) for found in sets] == [24, 10] and len(node_sets(weights, neurons="L1E1:*")[0]) == 8
    with pytest.raises(HeadspanError, match=r"L1E0:17 .* L1S:17"):
        node_sets(weights, neurons="L1:3")
    with pytest.raises(HeadspanError, match="experts 0 to 2"):
        node_sets(weights, neurons="L1E3:0")


@pytest.mark.parametrize("fold", [False, True])
def test_tokens_and_unembedding_against_formulas(fold: bool) -> None:
    weights = hs.open("demo")
    raw, norm = weights.unembedding(), weights.final_norm()
    weights = hs.fold(weights) if fold else weights
    rows, embedding = raw, weights.embedding()
    if fold:
        rows = raw * norm.gain
        rows = rows - rows.mean(axis=1, keepdims=True)
        rows, embedding = rows - rows.mean(axis=0), embedding - embedding.mean(axis=1, keepdims=True)
    report = hs.nodes(weights, tokens=["<id 5>", "<id 70>"], k=5)
    names = [weights.vocabulary().readable(i) if weights.vocabulary() else f"<id {i}>" for i in (5, 70)]
    vectors = {(n, r): m[i] for n, i in zip(names, (5, 70), strict=True) for r, m in (("R", rows), ("W", embedding))}
    assert check_against_formula(weights, report, vectors) >= 16
    (found,) = node_sets(weights, unembedding=True)
    assert len(found) == weights.vocab_size and found.places[Role.R].position == UNEMBEDDING_POSITION
    np.testing.assert_allclose(np.concatenate([b for _, b in found.blocks(Role.R, 37)])[:, :, 0], rows, atol=1e-5)
    (both,) = node_sets(weights, embedding=True, unembedding=True)
    assert both.places[Role.W].position == EMBEDDING_POSITION and set(both.places) == {Role.R, Role.W}


def test_words_by_their_text(real_smollm2) -> None:
    weights = hs.open(real_smollm2)
    (found,) = node_sets(weights, tokens=" Paris, London")
    assert [node.name for node in found.nodes(Role.R)] == ["_Paris", "_London"]
    with pytest.raises(HeadspanError, match=r"is not one token .* it consists of"):
        node_sets(weights, tokens=" Parisianly")
    with pytest.raises(HeadspanError, match="is not a token"):
        node_sets(weights, tokens=" Paris,")


@pytest.fixture(scope="module")
def real_smollm2() -> str:
    import os

    path = os.environ.get("HEADSPAN_SMOLLM2_GGUF", "")
    if not path:
        pytest.skip("needs SmolLM2 as a GGUF file")
    return path


# --------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("rslora", [False, True])
def test_adapter_made_by_peft(gpt2: Path, tmp_path: Path, rslora: bool) -> None:
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    from transformers import GPT2LMHeadModel

    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=3, lora_alpha=12, target_modules=r".*h\.[01]\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)",
        fan_in_fan_out=True, use_rslora=rslora, modules_to_save=["ln_f"],
    )  # fmt: skip
    adapted = peft.get_peft_model(GPT2LMHeadModel.from_pretrained(gpt2), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    adapted.save_pretrained(tmp_path / "lora")
    weights = hs.open(gpt2)
    report = hs.nodes(weights, adapter=tmp_path / "lora", k=3)
    state = {k: v.detach().numpy() for k, v in adapted.state_dict().items() if "lora_" in k}
    vectors = {}
    for layer in (0, 1):
        start = f"base_model.model.transformer.h.{layer}."
        vectors[f"lora/L{layer}.attn.c_attn", "R"] = state[f"{start}attn.c_attn.lora_A.default.weight"].T
        vectors[f"lora/L{layer}.mlp.c_fc", "R"] = state[f"{start}mlp.c_fc.lora_A.default.weight"].T
    names = {row["node"] for row in report.rows()}
    for layer in (0, 1):
        for module in ("attn", "mlp"):
            stored = state[f"base_model.model.transformer.h.{layer}.{module}.c_proj.lora_B.default.weight"]
            vectors[f"lora/L{layer}.{module}.c_proj", "W"] = stored
    assert len(names) == 7  # of 8: nothing writes what layer 0's attention reads
    assert check_against_formula(weights, report, vectors) > 15
    assert all(0 <= row["p"] <= 1 and row["kind"] == "adapter" for row in report.rows())
    scaling = 12 / np.sqrt(3) if rslora else 4
    assert any(f"scales B·A by {scaling:g}" in note for note in report.notes)
    assert any("modules_to_save" in note for note in report.notes)


def write_lora(folder: Path, factors: dict[str, tuple[np.ndarray, np.ndarray]], **config) -> Path:
    """An adapter as PEFT saves it: A (r, in) and B (out, r) of some modules."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2, **config}))
    tensors = {}
    for module, (a, b) in factors.items():
        stem = f"base_model.model.{module}.lora_"
        embedding = module.endswith(("wte", "wpe", "embed_tokens"))
        names = ("embedding_A", "embedding_B") if embedding else ("A.weight", "B.weight")
        tensors |= {f"{stem}{name}": value.astype(np.float32) for name, value in zip(names, (a, b), strict=True)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


LORA_PLACES = {  # the port of a module of layer 1, and the layers whose heads it meets there, of three
    "attn": ("R", "L0"), "mlp_in": ("R", "L0 L1"), "out": ("W", "L2"), "mlp_out": ("W", "L2"),
    "embedding": ("W", "L0 L1 L2"), "unembedding": ("R", "L0 L1 L2"),
}  # fmt: skip


def check_lora(weights, folder: Path, modules: dict[str, str], sizes: dict[str, tuple[int, int]], seen) -> list[str]:
    """Every module of an adapter beside the heads of its side; ``seen`` says what a basis is in the stream."""
    rng = np.random.default_rng(0)
    factors = {m: (rng.normal(size=(2, sizes[w][0])), rng.normal(size=(sizes[w][1], 2))) for w, m in modules.items()}
    report = hs.nodes(weights, adapter=write_lora(folder, factors), k=100)
    vectors = {}
    for what, module in modules.items():
        name = "lora/" + module.replace("transformer.h.1.", "L1.").replace("model.layers.1.", "L1.")
        role, layers = LORA_PLACES[what]
        partners = {row["partner"][:2] for row in report.of(name) if row["partner"][-1] in "QKVO"}
        assert partners == set(layers.split()), what
        a, b = factors[module]
        vectors[name, role] = seen(what, a.T if role == "R" else b)
    assert {row["node"] for row in report.rows()} == {name for name, _ in vectors}
    assert check_against_formula(weights, report, vectors) > 50
    return report.notes


@pytest.mark.parametrize("fold", [False, True])
def test_modules_of_an_adapter_behind_layer_norms(gpt2: Path, tmp_path: Path, fold: bool) -> None:
    weights, source = hs.open(gpt2), hs.open(gpt2).source
    start = "transformer.h.1."
    modules = {
        "attn": f"{start}attn.c_attn", "out": f"{start}attn.c_proj", "mlp_in": f"{start}mlp.c_fc",
        "mlp_out": f"{start}mlp.c_proj", "embedding": "transformer.wte",
    }  # fmt: skip
    sizes = {"attn": (32, 96), "out": (32, 32), "mlp_in": (32, 48), "mlp_out": (48, 32), "embedding": (60, 32)}

    def seen(what: str, basis: np.ndarray) -> np.ndarray:
        norms = {"attn": f"{start}ln_1.weight", "mlp_in": f"{start}ln_2.weight"}
        basis = basis * source.read(norms[what])[:, None] if what in norms else basis
        return basis - basis.mean(axis=0)

    plain = check_lora(
        hs.fold(weights) if fold else weights, tmp_path / "lora", modules, sizes, seen if fold else lambda _, b: b
    )
    assert not any("inside" in note for note in plain) and any("scales B·A by 1," in note for note in plain)
    rng = np.random.default_rng(0)
    shapes = {f"{start}attn.c_attn": (32, 96), "transformer.wpe": (source.read("transformer.wpe.weight").shape[0], 32)}
    factors = {name: (rng.normal(size=(2, i)), rng.normal(size=(o, 2))) for name, (i, o) in shapes.items()}
    report = hs.nodes(weights, adapter=write_lora(tmp_path / "positions", factors), k=1)
    assert report.count == 1 and any(note.startswith("1 modules") and "wpe.weight" in note for note in report.notes)


@pytest.mark.parametrize("fold", [False, True])
def test_modules_of_an_adapter_behind_rms_norms_and_an_unembedding_of_its_own(tmp_path: Path, fold: bool) -> None:
    rng, layers = np.random.default_rng(3), "model.layers.{}."
    shapes = {"model.embed_tokens.weight": (30, 16), "lm_head.weight": (30, 16), "model.norm.weight": (16,)}
    for i in range(3):
        at = layers.format(i)
        shapes |= {f"{at}self_attn.{n}_proj.weight": (16, 16) for n in "qkvo"}
        shapes |= {f"{at}mlp.{n}_proj.weight": (20, 16) for n in ("gate", "up")} | {
            f"{at}mlp.down_proj.weight": (16, 20)
        }
        shapes |= {f"{at}{n}_layernorm.weight": (16,) for n in ("input", "post_attention")}
    tensors = {name: rng.uniform(0.5, 2, size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = {name: t - (1.2 if t.ndim == 2 else 0) for name, t in tensors.items()}
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
              "vocab_size": 30, "tie_word_embeddings": False, "intermediate_size": 20}  # fmt: skip
    weights, start = hs.open((tensors, config)), layers.format(1)
    modules = {
        "attn": f"{start}self_attn.v_proj", "out": f"{start}self_attn.o_proj", "mlp_in": f"{start}mlp.gate_proj",
        "mlp_out": f"{start}mlp.down_proj", "embedding": "model.embed_tokens", "unembedding": "lm_head",
    }  # fmt: skip
    sizes = {"attn": (16, 16), "out": (16, 16), "mlp_in": (16, 20), "mlp_out": (20, 16), "embedding": (30, 16),
             "unembedding": (16, 30)}  # fmt: skip

    def seen(what: str, basis: np.ndarray) -> np.ndarray:
        norms = {"attn": f"{start}input_layernorm.weight", "mlp_in": f"{start}post_attention_layernorm.weight",
                 "unembedding": "model.norm.weight"}  # fmt: skip
        return basis * tensors[norms[what]][:, None] if what in norms else basis

    check_lora(
        hs.fold(weights) if fold else weights, tmp_path / "lora", modules, sizes, seen if fold else lambda _, b: b
    )


def lora_of(tensors: dict[str, np.ndarray], modules: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Random factors of rank 2 that fit some modules of a model."""
    rng = np.random.default_rng(1)
    shapes = {module: tensors[f"{module}.weight"].shape for module in modules}
    return {name: (rng.normal(size=(2, inputs)), rng.normal(size=(outputs, 2)))
            for name, (outputs, inputs) in shapes.items()}  # fmt: skip


def test_modules_of_an_adapter_on_one_expert(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    shapes = {"model.embed_tokens.weight": (30, 16)}
    for at in (f"model.layers.{i}." for i in range(3)):
        shapes |= {f"{at}self_attn.{n}_proj.weight": (16, 16) for n in "qkvo"}
        shapes |= {f"{at}mlp.experts.{j}.{n}_proj.weight": (8, 16) for j in range(3) for n in ("gate", "up")}
        shapes |= {f"{at}mlp.experts.{j}.down_proj.weight": (16, 8) for j in range(3)} | {
            f"{at}mlp.gate.weight": (3, 16)
        }
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    config = {"model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
              "vocab_size": 30, "num_experts": 3, "head_dim": 4, "num_key_value_heads": 4}  # fmt: skip
    weights = hs.open((tensors, config))
    factors = lora_of(tensors, [f"model.layers.0.mlp.experts.2.{n}_proj" for n in ("up", "down")])
    folder = write_lora(tmp_path / "lora", factors)
    assert [found.width(role) for found in adapter_sets(weights, folder) for role in found.places] == [2, 2]
    report = hs.nodes(weights, adapter=folder, k=100)
    vectors = {}
    for module, role, layers in (("up", "R", {"L0"}), ("down", "W", {"L1", "L2"})):
        name, (a, b) = f"lora/L0.mlp.experts.2.{module}_proj", factors[f"model.layers.0.mlp.experts.2.{module}_proj"]
        vectors[name, role] = a.T if role == "R" else b
        assert {row["partner"][:2] for row in report.of(name)} == layers
    assert check_against_formula(weights, report, vectors) == 4 + 2 * 3 * 4
    assert not any("inside" in note for note in report.notes)
    alone = hs.nodes(weights, adapter=write_lora(tmp_path / "one", dict([*factors.items()][:1])), k=1)
    assert alone.count == 1 and any("one scales B·A by 1," in note for note in alone.notes)
    routed = write_lora(tmp_path / "routed", factors | lora_of(tensors, ["model.layers.0.mlp.gate"]))
    notes = hs.nodes(weights, adapter=routed, k=1).notes
    assert any(note.startswith("1 modules of routed") and "layers.0.mlp.gate.weight" in note for note in notes)


def test_modules_of_an_adapter_behind_a_latent(tmp_path: Path) -> None:
    """The maps into a latent read the stream. Those from a latent to the heads lie inside their block."""
    pytest.importorskip("transformers")
    from families import LATENT, build

    model = build(LATENT["youtu"])
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    start = "model.layers.1.self_attn."
    inside = ["q_b_proj", "kv_b_proj"]
    factors = lora_of(tensors, [start + module for module in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj", *inside)])
    weights, folder = hs.open((tensors, model.config.to_dict())), write_lora(tmp_path / "lora", factors)
    report = hs.nodes(weights, adapter=folder, k=100)
    reads = {
        (f"lora/L1.self_attn.{name}", "R"): factors[start + name][0].T for name in ("q_a_proj", "kv_a_proj_with_mqa")
    }
    assert {row["node"] for row in report.rows()} == {name for name, _ in reads}  # nothing reads after the last layer
    assert check_against_formula(weights, report, reads) == 2 * 4
    note = next(note for note in report.notes if "inside" in note)
    assert note.startswith("2 modules of lora") and any(f"{start}{module}.weight" in note for module in inside)
    only = write_lora(tmp_path / "only", {name: pair for name, pair in factors.items() if name.endswith("b_proj")})
    with pytest.raises(HeadspanError, match="only has no LoRA"):
        hs.nodes(weights, adapter=only)


def test_an_adapter_of_another_model_is_refused(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadspanError, match="is not an adapter"):
        hs.nodes(gpt2, adapter=tmp_path)
    with pytest.raises(HeadspanError, match="open the model itself"):
        hs.nodes(arrays(), adapter=tmp_path)


# ------------------------------------------------------------------------------------------------- SAEs


def write_sae(folder: Path, config: dict, **tensors: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(config))
    save_file({k: np.ascontiguousarray(v, np.float32) for k, v in tensors.items()}, folder / "sae_weights.safetensors")
    return folder


def sae_tensors(features: int = 50, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "W_enc": rng.normal(size=(D, features)),
        "W_dec": rng.normal(size=(features, D)),
        "b_enc": np.ones(features),
    }


@pytest.mark.parametrize(
    ("config", "reads", "writes"),
    [
        ({"metadata": {"hook_name": "blocks.2.hook_resid_pre"}}, 4, 3),
        ({"hook_name": "blocks.2.hook_resid_mid", "hook_layer": 2}, 5, 4),
        ({"hook_point": "blocks.2.hook_resid_post", "hook_point_layer": 2}, 6, 5),
        ({"hook_name": "blocks.2.hook_mlp_out"}, None, 5),
        ({"hook_name": "blocks.2.hook_attn_out"}, None, 4),
        ({"hook_name": "model.layers.1"}, 4, 3),
        ({"architecture": "transcoder", "d_out": D, "hook_name": "blocks.1.ln2.hook_normalized",
          "hook_name_out": "blocks.1.hook_mlp_out"}, 3, 3),
        ({"metadata": {"hook_name": "blocks.1.hook_mlp_in", "hook_name_out": "blocks.1.hook_mlp_out"},
          "architecture": "skip_transcoder"}, 3, 3),
    ],
)  # fmt: skip
def test_the_position_of_a_feature(tmp_path: Path, config: dict, reads: int | None, writes: int) -> None:
    tensors = sae_tensors()
    (found,) = node_sets(hs.open(arrays()), sae=write_sae(tmp_path / "sae", config, **tensors))
    assert {role: place.position for role, place in found.places.items()} == (
        {Role.W: writes} if reads is None else {Role.R: reads, Role.W: writes}
    )
    assert found.nodes(Role.W)[7].name == "sae[7]" and len(found) == 50
    for role, expected in ((Role.R, tensors["W_enc"].T), (Role.W, tensors["W_dec"])):
        if role in found.places:
            blocks = np.concatenate([block for _, block in found.blocks(role, 8)])[:, :, 0]
            np.testing.assert_allclose(blocks, expected, rtol=1e-6)


def test_features_against_formulas(tmp_path: Path) -> None:
    tensors = sae_tensors()
    folder = write_sae(tmp_path / "sae", {"hook_name": "blocks.2.hook_resid_pre"}, **tensors)
    weights = hs.open(arrays())
    report = hs.nodes(weights, sae=f"{folder}:0,5,10-12", k=4)
    vectors = {(f"sae[{i}]", "R"): tensors["W_enc"][:, i] for i in range(50)}
    vectors |= {(f"sae[{i}]", "W"): tensors["W_dec"][i] for i in range(50)}
    assert check_against_formula(weights, report, vectors) == 5 * 8
    assert {row["node"] for row in report.rows()} == {f"sae[{i}]" for i in (0, 5, 10, 11, 12)}
    assert all(row["p_kind"] is not None for row in report.rows())  # the other 45 features


def test_features_that_are_not_directions_of_the_stream(tmp_path: Path) -> None:
    weights = hs.open(arrays())

    def refused(sentence: str, config: dict, chosen: str = "", **tensors: np.ndarray) -> None:
        folder = write_sae(tmp_path / "sae", config, **{**sae_tensors(), **tensors})
        with pytest.raises(HeadspanError, match=sentence):
            node_sets(weights, sae=f"{folder}{chosen}")

    good = {"hook_name": "blocks.2.hook_resid_pre"}
    refused("not in the residual stream", {"hook_name": "blocks.2.attn.hook_z"})
    refused("not in the residual stream", {"hook_name": "blocks.2.mlp.hook_post"})
    refused("which has the layers 0 to 3", {"hook_name": "blocks.7.hook_resid_pre"})
    refused("unknown hook 'somewhere'", {"hook_name": "somewhere"})
    refused("does not name one hook", {"hook_name": 5})
    refused("does not name one hook", {})
    refused("one head", good | {"hook_head_index": 2})
    refused("does not name its hook_name_out", good | {"architecture": "transcoder"})
    refused("no axis is of d_model", good, W_enc=np.ones((D + 1, 50)))
    refused("50 features in W_enc and 49", good, W_dec=np.ones((49, D)))
    refused("go from 0 to 49", good, ":50")
    refused("does not name features", good, ":a")
    for name in ("cfg.json", "sae_weights.safetensors"):
        (write_sae(tmp_path / "sae", good, **sae_tensors()) / name).unlink()
        with pytest.raises(HeadspanError, match=r"needs cfg\.json"):
            node_sets(weights, sae=tmp_path / "sae")
    with pytest.raises(HeadspanError, match="no such directory"):
        node_sets(weights, sae=tmp_path / "nowhere")


def test_dead_features_are_left_out(tmp_path: Path) -> None:
    tensors = sae_tensors()
    tensors["W_dec"][3] = 0
    folder = write_sae(tmp_path / "sae", {"hook_name": "blocks.2.hook_resid_pre"}, **tensors)
    report = hs.nodes(arrays(), sae=folder, k=2)
    assert {row["side"] for row in report.of("sae[3]")} == {"written by"}
    assert any("1 ports of nodes have length 0" in note for note in report.notes)


# ------------------------------------------------------------------------------------------- TransformerLens


def test_transformer_lens_neurons_and_unembedding(gpt2: Path) -> None:
    """W_in, W_out, W_U and W_E as TransformerLens has them."""
    bridge = pytest.importorskip("transformer_lens.model_bridge")
    model = bridge.TransformerBridge.boot_transformers(str(gpt2))
    weights = hs.open(gpt2)
    report = hs.nodes(weights, neurons="*", tokens=["<id 3>"], k=3)
    vectors = {("<id 3>", "R"): model.W_U[:, 3].detach().numpy(), ("<id 3>", "W"): model.W_E[3].detach().numpy()}
    for layer in range(3):
        for i in range(48):
            vectors[f"L{layer}N{i}", "R"] = model.W_in[layer, :, i].detach().numpy()
            vectors[f"L{layer}N{i}", "W"] = model.W_out[layer, i].detach().numpy()
    assert check_against_formula(weights, report, vectors) > 200


def test_transformer_lens_unembedding_of_the_demo_model() -> None:
    """W_U and W_E of some tokens; the demo model has no neurons."""
    bridge = pytest.importorskip("transformer_lens.model_bridge")
    weights = hs.open("demo")
    folder = weights.source.files()[0].parent  # type: ignore[attr-defined]
    model = bridge.TransformerBridge.boot_transformers(str(folder))
    ids = (3, 40, 700)
    report = hs.nodes(weights, tokens=[f"<id {i}>" for i in ids], k=4)
    vectors = {}
    for i in ids:
        name = next(row["node"] for row in hs.nodes(weights, tokens=[f"<id {i}>"], k=1).rows())
        vectors[name, "R"], vectors[name, "W"] = model.W_U[:, i].detach().numpy(), model.W_E[i].detach().numpy()
    assert check_against_formula(weights, report, vectors) >= 24


def test_state_dict_of_hooked_transformer_has_neurons() -> None:
    """The names of HookedTransformer's tensors, with W_in (d, neurons) and W_out (neurons, d), gated or not."""
    rng = np.random.default_rng(0)
    state = {"embed.W_E": (30, 16), "unembed.W_U": (16, 30)}
    for layer in range(2):
        start = f"blocks.{layer}."
        state |= {f"{start}attn.W_{role}": (4, 16, 4) for role in "QKV"} | {f"{start}attn.W_O": (4, 4, 16)}
        state |= {f"{start}mlp.W_in": (16, 20), f"{start}mlp.W_gate": (16, 20), f"{start}mlp.W_out": (20, 16)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in state.items()}
    config = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 4, "d_vocab": 30, "normalization_type": None}
    weights = hs.open((tensors, config))
    report = hs.nodes(weights, neurons="L1:7", tokens=["<id 3>"], k=3)
    both = np.stack([tensors["blocks.1.mlp.W_gate"][:, 7], tensors["blocks.1.mlp.W_in"][:, 7]], axis=1)
    vectors = {("L1N7", "R"): both, ("L1N7", "W"): tensors["blocks.1.mlp.W_out"][7]}
    vectors |= {("<id 3>", "R"): tensors["unembed.W_U"][:, 3], ("<id 3>", "W"): tensors["embed.W_E"][3]}
    assert check_against_formula(weights, report, vectors) >= 6


def test_no_nodes_and_wrong_arguments() -> None:
    for wrong in ({}, {"nodes": []}, {"neurons": "L0:1"}, {"tokens": "a"}, {"embedding": True}, {"k": 0, "nodes": "x"}):
        with pytest.raises(HeadspanError):
            hs.nodes(arrays(), **wrong)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_of_many_arrays(tmp_path: Path, suffix: str) -> None:
    """One note, time that does not grow with the square of the arrays, and every share that of the plain formula."""
    import time

    model, rng = arrays(), np.random.default_rng(8)
    vectors = {f"a{i}": rng.normal(size=(3, D) if i % 3 == 0 else D).astype(np.float32) for i in range(600)}
    path = tmp_path / f"many{suffix}"
    np.savez(path, **vectors) if suffix == ".npz" else save_file(vectors, path)
    began = time.process_time()
    report = hs.nodes(model, f"{path}@2", k=3)
    assert time.process_time() - began < 10
    assert sum("read as" in note for note in report.notes) == 1
    both = {(row["node"], role): vectors[row["node"].partition("[")[0]] for row in report.rows() for role in "RW"}
    single = {key: vector for key, vector in both.items() if vector.ndim == 1}
    rows = [row for row in report.rows() if (row["node"], "R") in single]
    assert len(rows) == 2400
    for row in rows[::400]:  # the best of all heads and all other arrays, never the array itself
        mine = vectors[row["node"]] / np.linalg.norm(vectors[row["node"]])
        others = np.concatenate([vector.reshape(-1, D) for name, vector in vectors.items() if name != row["node"]])
        cosines = np.square(others @ mine) / np.square(others).sum(axis=1)
        roles = "O" if row["side"] == "written by" else "QKV"
        layers = range(2) if roles == "O" else range(2, LAYERS)
        heads = [share(model[role][i, h], mine) for role in roles for i in layers for h in range(HEADS)]
        assert row["share"] == pytest.approx(np.sort([*cosines, *heads])[-row["rank"]], abs=2e-5)


def test_many_nodes_made_in_python_have_one_note() -> None:
    rng = np.random.default_rng(1)
    given = [hs.Node(rng.normal(size=D), f"n{i}") for i in range(50)]
    notes = hs.nodes(arrays(), given, k=1).notes
    assert len(notes) == 2 and "n0 and 49 other nodes" in notes[0]


# ------------------------------------------------------------------------------------------------------- ranking


def common_and_own(rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Thirty directions with a common part. L0H0 writes the common part, L1H1 what the last of them has of its own."""
    model, common = arrays(3), rng.normal(size=D)
    vectors = 4 * common / np.linalg.norm(common) + rng.normal(size=(30, D)) / np.sqrt(D) * 2
    own = vectors[-1] - common * (vectors[-1] @ common) / (common @ common)
    model["O"][0, 0, :, 0] = 20 * common
    model["O"][1, 1, :, 0] = 20 * own
    return model, vectors.astype(np.float32)


def test_what_all_nodes_share_does_not_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, vectors = common_and_own(np.random.default_rng(0))
    np.save(tmp_path / "v.npy", vectors)
    found = {
        sort: [row for row in hs.nodes(model, f"{tmp_path}/v.npy@2", k=8, sort=sort).of("v[29]") if row["side"] ==
               "written by"] for sort in ("p_kind", "p", "share")
    }  # fmt: skip
    assert found["share"][0]["partner"] == found["p"][0]["partner"] == "L0H0.O"
    assert found["p_kind"][0]["partner"] == "L1H1.O" and found["p_kind"][0]["p_kind"] == pytest.approx(1 / 30)
    assert {row["partner"] for row in found["p_kind"]} == {row["partner"] for row in found["share"]}
    for sort, rows in found.items():
        keys = [(row[sort] if sort != "share" else 0, -row["share"]) for row in rows]
        assert keys == sorted(keys) and [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    assert hs.nodes(model, f"{tmp_path}/v.npy@2", k=8).of("v[29]")[: len(rows)] == found["p_kind"]
    alone = hs.nodes(model, hs.Node(vectors[29], "alone", 2), k=8)  # without others of its kind, by share
    assert alone.rows()[0]["partner"] == "L0H0.O" and alone.rows()[0]["p_kind"] is None
    with pytest.raises(HeadspanError, match="sort must be one of p_kind, p, share"):
        hs.nodes(model, hs.Node(vectors[0], "n", 2), sort="z")  # type: ignore[arg-type]


def test_who_writes_paris(smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The heads of layer 0 write what all tokens share: by share they lead, by p_kind they do not."""
    pytest.importorskip("gguf")
    for sort, first in ((["--sort", "share"], True), ([], False)):
        assert _run(["nodes", str(smollm2_gguf), "--tokens", " Paris", "-k", "5", "--json", *sort]) == 0
        rows = [row for row in json.loads(capsys.readouterr().out) if row["side"] == "written by"]
        assert all(row["partner"].startswith("L0H") == first for row in rows), rows
