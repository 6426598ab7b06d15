"""Paths: the composed map against its definition, all paths of small models, chance by simulation, real models."""

from __future__ import annotations

import itertools
import json
from pathlib import Path as File

import numpy as np
import pytest

import headspan as hs
from headspan.cli import _run
from headspan.graphs import chains, path_search
from headspan.graphs.chains import chance
from headspan.graphs.paths import Paths, strongest
from headspan.models.weights import AttentionWeights
from headspan.node_kinds.beside_heads import add_nodes
from headspan.node_kinds.node_sets import NodeSet, Place
from headspan.node_kinds.opening import node_sets
from headspan.subspaces.random_subspaces import moments, random_bases
from headspan.vocabulary.heads import Role, mlp_position

ROLES = "QKV"


def model(layers: int = 4, heads: int = 2, kv: int = 2, d: int = 24, m: int = 4, seed: int = 0) -> AttentionWeights:
    """Random weights whose maps are far from even, with one head of rank 2 and one whose values are 0."""
    rng = np.random.default_rng(seed)
    arrays = {r: rng.normal(size=(layers, kv if r in "KV" else heads, d, m)) for r in "QKVO"}
    for r in "QKVO":
        arrays[r] *= np.geomspace(1, 0.1, m)
    arrays["O"][1, 0, :, 2:] = 0
    arrays["V"][2, kv - 1] = 0
    return hs.open(arrays)


def basis(weight: np.ndarray) -> np.ndarray:
    left, values, _ = np.linalg.svd(np.asarray(weight, dtype=np.float64), full_matrices=False)
    return left[:, values > 1e-9 * max(values[0], 1e-300)]


def by_definition(weights: AttentionWeights, stations: list[str], role: str) -> float:
    """‖U_bᵀ · Π M̂ · U_s‖² with d×d matrices."""
    product = basis(weights.read_head(f"{stations[0]}.O"))
    for name in stations[1:-1]:
        out, value = (np.asarray(weights.read_head(f"{name}.{r}"), dtype=np.float64) for r in "OV")
        if not value.any():
            return 0.0
        product = out @ value.T @ product
        product *= np.sqrt(min(basis(out).shape[1], basis(value).shape[1])) / np.linalg.norm(out @ value.T)
    return float(np.square(basis(weights.read_head(f"{stations[-1]}.{role}")).T @ product).sum())


def every_path(weights: AttentionWeights, hops: int) -> dict[str, float]:
    """All paths of a small model with their scores, by the text of the path."""
    found = {}
    queries = [str(head) for head in weights.heads("O")]
    layer = {name: hs.Head.parse(name).layer for name in queries}
    for chain in itertools.product(queries, repeat=hops):
        if any(layer[a] >= layer[b] for a, b in itertools.pairwise(chain)):
            continue
        for role in ROLES:
            for target in weights.heads(role):
                if target.layer > layer[chain[-1]]:
                    text = " → ".join([*chain, f"{target}.{role}"])
                    found[text] = by_definition(weights, [*chain, str(target)], role)
    return found


def scores_of(found: Paths) -> dict[str, float]:
    return {str(path): path.score for path in found}


@pytest.mark.parametrize("kv", [2, 1])
@pytest.mark.parametrize("hops", [2, 3, 4])
def test_all_paths_of_a_small_model_are_found_with_their_scores(kv: int, hops: int) -> None:
    weights = model(layers=6, kv=kv)
    true = {text: score for text, score in every_path(weights, hops).items() if score > 1e-9}
    found = [path for path in hs.paths(weights, depth=hops, k=10**5) if path.hops == hops]
    assert len(found) == len(true) > 50
    for path in found:
        assert path.score == pytest.approx(true[str(path)], rel=2e-5, abs=1e-7)
    assert [path.rank for path in found] == list(range(1, len(found) + 1))
    assert sorted((path.score for path in found), reverse=True) == [path.score for path in found]


@pytest.mark.parametrize(("to", "source"), [("L4H1", None), ("L4H0.K", None), (None, "L0H1"), ("L3H1.V", "L0H0.O")])
def test_the_best_are_those_of_a_full_search(to: str | None, source: str | None) -> None:
    weights = model(layers=5, seed=3)
    for hops in (2, 3, 4):
        true = every_path(weights, hops)
        if to is not None:
            head, _, role = to.partition(".")
            true = {t: s for t, s in true.items() if f"→ {head}." in t and t.endswith(role)}
        if source is not None:
            true = {t: s for t, s in true.items() if t.startswith(f"{source.partition('.')[0]} ")}
        best = sorted(true.values(), reverse=True)[:5]
        found = [path for path in hs.paths(weights, to, source, depth=4, k=5) if path.hops == hops]
        assert [path.score for path in found] == pytest.approx([s for s in best if s > 1e-9], rel=2e-5)
        assert set(map(str, found)) <= set(true)


def test_one_hop_is_the_projection_kernel() -> None:
    weights = model()
    matrix = hs.score(weights, ["pk"], ["OK"])["pk", "OK"]
    found = hs.paths(weights, to="L3H1.K", depth=1, k=100)
    assert {str(path.source): path.score for path in found} == pytest.approx(
        {str(source): matrix.at(source, "L3H1") for source in matrix.sources if source.layer < 3}, rel=1e-5
    )
    assert all(path.product == pytest.approx(path.score) for path in found)
    forward = hs.paths(weights, from_="L0H1", depth=1, k=100, pairing="OK")
    assert {str(path.target): path.score for path in forward} == pytest.approx(
        {str(target): matrix.at("L0H1", target) for target in matrix.targets if target.layer > 0}, rel=1e-5
    )


def test_a_planted_path_of_three_hops_comes_first() -> None:
    rng = np.random.default_rng(7)
    arrays = {role: rng.normal(size=(5, 4, 96, 6)) for role in "QKVO"}
    arrays["V"][1, 2] = arrays["O"][0, 1] @ rng.normal(size=(6, 6)) + 0.1 * rng.normal(size=(96, 6))
    arrays["V"][3, 0] = arrays["O"][1, 2] @ rng.normal(size=(6, 6)) + 0.1 * rng.normal(size=(96, 6))
    arrays["K"][4, 3] = arrays["O"][3, 0] @ rng.normal(size=(6, 6)) + 0.1 * rng.normal(size=(96, 6))
    for asked in ({"to": "L4H3"}, {"from_": "L0H1"}, {}):
        found = [path for path in hs.paths(hs.open(arrays), **asked, k=2) if path.hops == 3]
        assert str(found[0]) == "L0H1 → L1H2 → L3H0 → L4H3.K"
        assert found[0].score > 5 * found[1].score and found[0].z is not None and found[0].z > 100


def test_what_flows_past_each_other_inside_a_head_makes_no_path() -> None:
    """Two hops of large PK whose directions do not meet in the head in between: the product is 1, the score 0."""
    d, m = 32, 4
    axes = np.eye(d)
    rng = np.random.default_rng(0)
    arrays = {role: rng.normal(size=(3, 1, d, m)) for role in "QKVO"}
    arrays["O"][0, 0] = axes[:, :4]
    arrays["V"][1, 0] = axes[:, [0, 1, 8, 9]] + 0.01 * rng.normal(size=(d, m))
    arrays["O"][1, 0] = axes[:, 16:20]
    arrays["K"][2, 0] = axes[:, [18, 19, 24, 25]]
    weights = hs.open(arrays)
    best = next(p for p in hs.paths(weights, to="L2H0.K", depth=2) if str(p.source) == "L0H0")
    assert best.pks == pytest.approx((2.0, 2.0), rel=1e-2)
    assert best.product == pytest.approx(1.0, rel=1e-2)
    assert 0 < best.score < 1e-2


@pytest.mark.parametrize("links", [0, 1, 2, 3])
def test_chance_by_simulation(links: int) -> None:
    """Fixed maps of uneven spectra, random rotations between all of them: mean and variance of 20,000 draws."""
    d, m, n = 12, 3, 20_000
    rng = np.random.default_rng(links)
    spectra = [np.array([2.0, 1.0, 0.3]), np.array([1.0, 1.0, 0.1]), np.array([3.0, 0.2, 0.2])][:links]
    spectra = [values * np.sqrt(m / np.square(values).sum()) for values in spectra]
    state = random_bases(n, d, m, rng)[:, :, :2]
    for values in spectra:
        turned = np.matmul(random_bases(n, d, d, rng), state)
        state = np.concatenate([turned[:, :m] * values[:, None], np.zeros((n, d - m, 2))], axis=1)
    draws = np.square(np.matmul(random_bases(n, d, d, rng), state)[:, :m]).sum(axis=(1, 2))
    sizes = np.array([[np.square(values).sum() for values in spectra]]).reshape(1, links)
    fourths = np.array([[(values**4).sum() for values in spectra]]).reshape(1, links)
    found = chance(d, 2, m, sizes, fourths)
    assert draws.mean() == pytest.approx(found.mean[0], abs=4 * found.sd[0] / np.sqrt(n))
    squares = (draws - found.mean[0]) ** 2
    assert squares.mean() == pytest.approx(found.sd[0] ** 2, abs=4 * squares.std() / np.sqrt(n))


@pytest.mark.parametrize(("d", "m", "m2"), [(1, 1, 1), (2, 1, 1), (2, 1, 2), (3, 2, 1), (12, 3, 5)])
def test_chance_of_one_hop_is_that_of_random_subspaces(d: int, m: int, m2: int) -> None:
    none = np.zeros((1, 0))
    found, expected = chance(d, m, m2, none, none), moments(d, m, m2)
    assert (found.mean[0], found.sd[0]) == pytest.approx((float(expected.mean), float(expected.variance) ** 0.5))


@pytest.mark.parametrize("ends", [{}, {"from_": "L1H0"}, {"to": "L3H1"}])
def test_chance_counts_the_rank_of_every_weight_of_a_path(ends: dict[str, str]) -> None:
    """What L1H0 writes has two dimensions of four."""
    weights = model()
    ranks = {f"{h}.{r}": basis(weights.read_head(f"{h}.{r}")).shape[1] for r in "QKVO" for h in weights.heads(r)}
    found = hs.paths(weights, depth=3, k=10**5, **ends)
    assert {path.hops for path in found} >= {2} and any(str(path.source) == "L1H0" for path in found)
    for path in found:
        carried = np.prod([min(ranks[f"{via}.O"], ranks[f"{via}.V"]) for via in path.via])
        both = ranks[f"{path.source}.O"] * ranks[f"{path.target}.{path.pairing.target}"]
        assert path.chance == pytest.approx(both * carried / 24**path.hops)


def test_z_of_paths_through_random_weights() -> None:
    """Heads of independent random weights: z has mean 0 and sd 1."""
    rng = np.random.default_rng(1)
    weights = hs.open({role: rng.normal(size=(6, 4, 80, 5)) for role in "QKVO"})
    found = hs.paths(weights, depth=3, k=10**6)
    for hops in (2, 3):
        z = np.array([path.z for path in found if path.hops == hops], dtype=float)
        assert len(z) > 2000
        assert abs(z.mean()) < 0.15 and 0.9 < z.std() < 1.1


def test_paths_between_ports_that_fill_the_space_have_no_z() -> None:
    """Turning a subspace of all dimensions changes nothing, so there is no spread to count in."""
    rng = np.random.default_rng(2)
    weights = hs.open({role: rng.normal(size=(3, 1, 5, 5)) for role in "QKVO"})
    one_hop = hs.paths(weights, depth=1, k=100)
    assert len(one_hop) == 9 and all(path.z is None and path.sd == 0 for path in one_hop)
    assert all(path.chance == pytest.approx(5) and path.score == pytest.approx(5) for path in one_hop)
    narrow = hs.paths(model(), depth=1, k=1)[0]
    assert narrow.z == pytest.approx((narrow.score - narrow.chance) / narrow.sd)


@pytest.mark.parametrize("with_nodes", [False, True])
def test_bases_that_do_not_fit_are_refused_before_they_are_made(
    with_nodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bases are held twice while they are put together, the maps between them twice in float64."""
    weights, rng = model(heads=4, kv=2), np.random.default_rng(0)
    if with_nodes:
        probe = hs.Node(rng.normal(size=(24, 7)), "probe", layer=2)
        weights = add_nodes(weights, node_sets(weights, [Neurons(*rng.normal(size=(2, 2, 24))), probe]))
    stock = chains.chains(weights)
    width = stock.writers.bases.shape[2]
    assert width == (7 if with_nodes else 4)
    bases = stock.writers.bases.nbytes + stock.carriers.bases.nbytes
    needed = 2 * bases + 2 * 8 * len(weights.heads("O")) * width**2
    monkeypatch.setattr(chains, "available_memory", lambda: needed)
    assert len(chains.chains(weights).links.ports) == len(stock.links.ports) > 0
    monkeypatch.setattr(chains, "available_memory", lambda: needed - 1)
    with pytest.raises(hs.HeadspanError, match="memory"):
        chains.chains(weights)


def test_paths_dropped_for_lack_of_memory_are_reported_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = model(layers=6, heads=3, kv=3)
    monkeypatch.setattr(path_search, "_QUICK", 4)
    whole = hs.paths(weights, depth=4, k=300)
    assert not whole.notes
    for found in (hs.paths(weights), strongest(weights)):  # ten of every length, where no number is given
        assert [path.hops for path in found] == [2] * 10 + [3] * 10
    some = hs.paths(weights, depth=4, k=300, memory=1)
    assert some.notes and "memory was too small" in some.notes[0]
    for note in some.notes:
        hops, bound = int(note.split("paths of ")[1].split()[0]), float(note.split("less than ")[1].split()[0])
        expected = {str(p) for p in whole if p.hops == hops and p.score > bound * 1.01}
        assert expected <= {str(p) for p in some}


def test_progress_goes_twice_over_the_ends() -> None:
    told: list[tuple[int, int]] = []
    hs.paths(model(), to="L3H1", progress=lambda done, total: told.append((done, total)))  # its Q, K and V
    assert told[:6] == [(done, 6) for done in range(6)] and {total for _, total in told} == {6}


def layered(second: int) -> AttentionWeights:
    """Six heads of layer 0 and of layer 1, which reach the end through some heads of layer 2 alone."""
    rng = np.random.default_rng(3)
    arrays = {role: np.zeros((4, 6, 24, 2)) for role in "QKVO"}
    for role, layer, heads, first, last in (
        ("O", 0, 6, 0, 12), ("V", 1, 6, 0, 12), ("O", 1, 6, 12, 18), ("V", 2, second, 12, 18),
        ("O", 2, second, 18, 24), ("Q", 3, 6, 18, 24),
    ):  # fmt: skip
        arrays[role][layer, :heads, first:last] = rng.normal(size=(heads, last - first, 2))
    return hs.open(arrays)


@pytest.mark.parametrize(("second", "partial", "left"), [(1, 4, 24), (1, 5, 30), (2, 8, 48), (2, 11, 66)])
def test_what_there_is_no_room_for_is_reported(
    second: int, partial: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for some of the partial paths from layer 1; each continues to the six heads of layer 0."""
    monkeypatch.setattr(path_search, "_QUICK", 4)
    weights = layered(second)
    # Half of the memory is for partial paths, 12 bytes for each number of their 2×2 matrices.
    whole, some = (hs.paths(weights, "L3H0.Q", k=100, memory=2 * 12 * 2**2 * count) for count in (6 * second, partial))
    assert [sum(p.hops == 3 and p.score > 1e-9 for p in found) for found in (whole, some)] == [36 * second, left]
    assert not whole.notes and len(some.notes) == 1 and "all paths of 3 hops" in some.notes[0]
    bound = float(some.notes[0].split("less than ")[1].split()[0])
    assert {str(p) for p in whole if p.score > bound * 1.01} <= {str(p) for p in some}


def test_folded_weights_and_results(tmp_path: File) -> None:
    weights = hs.open("demo")
    folded = hs.fold(weights)
    plain, other = hs.paths(weights, to="L1H2", depth=1), hs.paths(folded, to="L1H2", depth=1)
    assert scores_of(plain) != scores_of(other)
    file = tmp_path / "folded.safetensors"
    hs.score(folded, ["pk"], "flow").save(file)
    assert scores_of(hs.paths(file, to="L1H2", depth=1, model="demo")) == scores_of(other)
    for given in (str(file), hs.load(file)):
        with pytest.raises(hs.HeadspanError, match="`model`"):
            hs.paths(given, to="L1H2")
    hs.score("demo", ["pk"], "flow").save(file)
    with pytest.raises(hs.HeadspanError, match="not the model of this"):
        hs.paths(file, to="L1H2", model=model())


@pytest.mark.parametrize("name", ["probe", "probe.R"])
def test_the_nodes_of_a_result_must_be_given_again(name: str) -> None:
    weights, probe = model(), hs.Node(np.arange(24.0), "probe", layer=2)
    scores = hs.score(weights, ["pk"], "flow", nodes=[probe])
    with pytest.raises(hs.HeadspanError, match=r"probe.*nodes="):
        hs.paths(scores, to=name, depth=1, model=weights)
    found = hs.paths(scores, to=name, depth=1, model=weights, nodes=[probe])
    assert {str(path.target) for path in found} == {"probe"}


def test_the_demo_has_its_induction_circuit() -> None:
    best = hs.paths("demo", to="L1H2", depth=1, k=1)[0]
    assert str(best) == "L0H3 → L1H2.K" and str(best.pairing) == "OK"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"to": "L9H0"}, "L9H0"),
        ({"to": "L1H0.O"}, "L1H0.K"),
        ({"from_": "L1H0.K"}, "L1H0.O"),
        ({"to": "L1H0", "depth": 5}, "from 1 to 4"),
        ({"to": "L1H0", "depth": 0}, "from 1 to 4"),
        ({"to": "L1H0", "k": 0}, "1 or more"),
        ({"to": "L1H0", "pairing": "QK"}, "QK.*OQ, OK or OV"),
        ({"to": "L1H0.Q", "pairing": "OK"}, "Q.*OK"),
        ({"to": "nonsense"}, "'nonsense'"),
        ({"to": "L1H0", "memory": "much"}, "'much'"),
        ({"to": "L1H0", "model": "demo"}, "`model`"),
    ],
)
def test_impossible_requests_are_refused(asked: dict[str, object], words: str) -> None:
    with pytest.raises(hs.HeadspanError, match=words):
        hs.paths(model(), **asked)


def test_shared_heads_by_any_name() -> None:
    weights = model(layers=4, heads=4, kv=2)
    by_query, by_kv = hs.paths(weights, to="L3H3.K"), hs.paths(weights, to="L3KV1.K")
    assert scores_of(by_query) == scores_of(by_kv) and len(by_kv)
    assert "L3H3.K is L3KV1.K" in by_query.notes[0] and not by_kv.notes
    group = hs.paths(weights, from_="L0KV0", depth=2, k=10**4)
    assert {str(path.source) for path in group} == {"L0H0", "L0H1"}
    assert all(path.via[0].kind == "H" for path in group)


class Neurons(NodeSet):
    """Two neurons after the attention of layer 1."""

    kind, label, notes, strict = "neuron", "some neurons", [], False

    def __init__(self, reads: np.ndarray, writes: np.ndarray) -> None:
        self._weights = {Role.R: reads, Role.W: writes}
        self.places = {role: Place(mlp_position(1), 1) for role in (Role.R, Role.W)}
        self.ids, self.population, self.d_model = range(len(reads)), len(reads), reads.shape[1]

    def name(self, number: int) -> str:
        return f"L1.N{number}"

    def width(self, role: Role) -> int:
        return self._weights[role][0].size // self.d_model

    def _read(self, role: Role, ids: np.ndarray) -> np.ndarray:
        return self._weights[role][ids].reshape(len(ids), self.d_model, -1)


@pytest.mark.parametrize("probe_writes", [False, True])
def test_a_wide_probe_beside_neurons_changes_no_path_through_them(probe_writes: bool) -> None:
    """All that reads is as wide as the probe then; what writes is not, where the probe only reads."""
    rng = np.random.default_rng(6)
    weights = hs.open({role: rng.normal(size=(4, 2, 24, 2)) for role in "QKVO"})
    neurons = Neurons(rng.normal(size=(2, 24)), rng.normal(size=(2, 24)))
    probe = hs.Node(rng.normal(size=(24, 5)), "probe", layer=3, writes=probe_writes)
    alone, beside = (hs.paths(weights, nodes=nodes, depth=3, k=10**5) for nodes in ([neurons], [neurons, probe]))
    both = [path for path in beside if "probe" not in str(path)]
    assert len(both) == len(alone) and any("N1" in str(path.via) for path in alone)
    assert scores_of(Paths(both)) == pytest.approx(scores_of(alone), rel=1e-5)


@pytest.mark.parametrize("probe", [False, True])
def test_a_gated_neuron_reads_two_directions_and_passes_none_on(probe: bool) -> None:
    rng = np.random.default_rng(7)
    weights = hs.open({role: rng.normal(size=(4, 2, 24, 4)) for role in "QKVO"})
    gated = Neurons(rng.normal(size=(2, 24, 2)), rng.normal(size=(2, 24)))
    nodes = [gated, hs.Node(rng.normal(size=(24, 5)), "probe", layer=3)] if probe else [gated]
    found = hs.paths(weights, nodes=nodes, depth=2, k=10**5)
    assert {"L1.N0", "L1.N1"} <= {str(path.source) for path in found} & {str(path.target) for path in found}
    assert all(isinstance(station, hs.Head) for path in found for station in path.via)


def test_neurons_carry_on_and_directions_are_ends() -> None:
    rng = np.random.default_rng(5)
    arrays = {role: rng.normal(size=(4, 2, 24, 4)) for role in "QKVO"}
    reads, writes, probe = rng.normal(size=(2, 24)), rng.normal(size=(2, 24)), rng.normal(size=(24, 3))
    weights = hs.open(arrays)
    nodes = [Neurons(reads, writes), hs.Node(probe, "probe", layer=3)]
    found = hs.paths(weights, nodes=nodes, depth=2, k=10**5)
    assert {str(via) for path in found for via in path.via if not isinstance(via, hs.Head)} == {"L1.N0", "L1.N1"}
    assert {str(path.target) for path in found} >= {"probe", "L1.N0"}
    assert {str(p.target) for p in hs.paths(weights, nodes=nodes, from_="probe", depth=1)} == {"L3H0", "L3H1"}

    def score(source: np.ndarray, reads: np.ndarray, writes: np.ndarray, target: np.ndarray) -> float:
        middle = np.outer(writes, reads) / np.linalg.norm(writes) / np.linalg.norm(reads)
        return float(np.square(basis(target).T @ middle @ basis(source)).sum())

    by_name = {str(path): path for path in found}
    through = by_name["L0H1 → L1.N1 → L3H0.K"]
    assert through.score == pytest.approx(score(arrays["O"][0, 1], reads[1], writes[1], arrays["K"][3, 0]), rel=1e-5)
    assert str(through.pairing) == "WK"
    into = by_name["L1H0 → L1.N0 → probe.R"]
    assert into.score == pytest.approx(score(arrays["O"][1, 0], reads[0], writes[0], probe), rel=1e-5)
    assert str(hs.paths(weights, nodes=nodes, to="probe", depth=1, k=1)[0].target) == "probe"
    assert {str(p.source) for p in hs.paths(weights, nodes=nodes, from_="L1.N0", depth=2)} == {"L1.N0"}
    for ends in ({"to": "L3H0"}, {"from_": "L0H1"}, {}):  # each asks for its own way through the model
        some = hs.paths(weights, nodes=nodes, pairing=["OQ", "WK"], depth=2, k=10**5, **ends)
        assert {str(path.pairing) for path in some} == {"OQ", "WK"}
    edges = {(edge.source, edge.target) for edge in found.to_circuit().edges}
    assert {("L0H1.O", "L1.N1.R"), ("L1.N1.W", "L3H0.K")} <= edges


def test_the_command_and_its_circuit(tmp_path: File, capfd: pytest.CaptureFixture[str]) -> None:
    gpt2 = hs.open(_tiny_gpt2(tmp_path / "m"))
    assert _run(["paths", str(tmp_path / "m"), "--to", "L3H1", "-k", "2", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert rows == hs.paths(gpt2, to="L3H1", k=2).rows() and {row["hops"] for row in rows} == {2, 3}
    circuit = tmp_path / "c.json"
    assert _run(["paths", str(tmp_path / "m"), "--to", "L3H1", "-k", "2", "--out", str(circuit)]) == 0
    saved = json.loads(circuit.read_text())
    assert (saved["format"], saved["version"], saved["model"]) == ("headspan circuit", 1, "m")
    assert _run(["wiring", str(tmp_path / "m"), "--circuit", str(circuit), "--json"]) == 0
    shown = capfd.readouterr()
    edges = {(e["source"], e["target"], e["pairing"]): e["score"] for e in json.loads(shown.out)}
    assert len(edges) == len(saved["edges"]) and "other scores" not in shown.err
    matrix = hs.score(gpt2, ["pk"], "flow")
    assert all(matrix["pk", p].at(s, t) == pytest.approx(score) for (s, t, p), score in edges.items())


def _tiny_gpt2(folder: File) -> str:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    folder.mkdir()
    shapes = {"c_attn": (16, 48), "c_proj": (16, 16)}
    save_file(
        {f"h.{i}.attn.{n}.weight": rng.normal(size=s).astype(np.float32) for n, s in shapes.items() for i in range(4)},
        folder / "model.safetensors",
    )
    config = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 16, "vocab_size": 10}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# ------------------------------------------------------------------------------------------------- real models


def _two_hops(weights: AttentionWeights, target: str, role: str) -> dict[str, float]:
    """Every path of two hops into one port, in float64."""
    end = basis(weights.read_head(f"{target}.{role}"))
    layer = hs.Head.parse(target).layer
    outs = {
        str(h): np.asarray(weights.read_head(f"{h}.O"), dtype=np.float64) for h in weights.heads("O") if h.layer < layer
    }
    bases = {name: basis(out) for name, out in outs.items()}
    found = {}
    for middle, out in outs.items():
        value = np.asarray(weights.read_head(f"{middle}.V"), dtype=np.float64)
        seen = (end.T @ out) @ value.T / np.linalg.norm(out @ value.T) * np.sqrt(out.shape[1])
        for source, written in bases.items():
            if hs.Head.parse(source).layer < hs.Head.parse(middle).layer:
                found[f"{source} → {middle} → {target}.{role}"] = float(np.square(seen @ written).sum())
    return found


def test_gpt2_against_every_path_of_two_hops(gpt2_dir: File) -> None:
    weights = hs.open(gpt2_dir)
    true = sorted(_two_hops(weights, "L4H7", "V").items(), key=lambda item: -item[1])[:10]
    found = hs.paths(weights, to="L4H7.V", depth=2, k=10)
    assert [str(path) for path in found] == [text for text, _ in true]
    assert [path.score for path in found] == pytest.approx([score for _, score in true], rel=1e-5)


def test_gpt2_into_an_induction_head(gpt2_dir: File) -> None:
    weights = hs.open(gpt2_dir)
    found = strongest(weights, "L5H1", depth=3, k=10)
    assert not found.notes
    two = [path for path in found if path.hops == 2]
    assert all(str(path.pairing) == "OK" for path in two)  # keys of an induction head read what was moved
    assert {str(path.via[0]) for path in two} <= {"L4H7", "L4H11"}
