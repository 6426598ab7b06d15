"""One object per similarity, ranks of every head, tensors read once, memory estimated before use."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import definitions
import headspan as hs
from headspan.models.weights import AttentionWeights
from headspan.scoring import plan, run
from headspan.scoring.arrangement import Job
from headspan.scoring.contraction import route_cost
from headspan.scoring.plan import Panel
from headspan.scoring.run import score
from headspan.subspaces import bases as subspaces
from headspan.subspaces import metrics, weight_factors
from headspan.subspaces.metrics import METRICS, WEIGHT_METRICS, Metric, metric_of
from headspan.subspaces.weight_factors import LayerWeight
from headspan.system.threads import parallel_map, scratch
from headspan.vocabulary.heads import ROLES, Pairing, PairSet, Role, pair_mask, parse_pairings
from headspan.vocabulary.ports import PortTable


def arrays(layers: int = 4, heads: int = 3, kv: int | None = None, d: int = 24, m: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(layers + heads + d + m)
    counts = {"Q": heads, "K": kv or heads, "V": kv or heads, "O": heads}
    return {role: rng.normal(size=(layers, n, d, m)).astype(np.float32) for role, n in counts.items()}


# ------------------------------------------------------------------------------ one similarity, one object


def partner_factor(weight: LayerWeight) -> np.ndarray:
    """A circuit-like similarity: A·(PᵀP) with nothing of cs but that it reads the partner."""
    assert weight.partner is not None
    grams = np.matmul(weight.partner.transpose(0, 2, 1), weight.partner)
    product = np.matmul(weight.own, grams)
    return product / np.linalg.norm(product, axis=(1, 2), keepdims=True)


def test_a_new_similarity_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "circuit", Metric("circuit", "Circuit", "Circuit", partner_factor, reads_partner=True))
    given = arrays()
    scores = score(hs.open(given), ["pk", "circuit"], "flow")
    matrix = scores["circuit", "OK"]
    for i, j, value in zip(*matrix.pairs(), strict=True):
        source, target = matrix.sources[i], matrix.targets[j]
        o, v, k, q = (
            given[role][head.layer, head.index].astype(np.float64)
            for role, head in (("O", source), ("V", source), ("K", target), ("Q", target))
        )
        a, b = o @ (v.T @ v), k @ (q.T @ q)
        expected = np.linalg.norm(a.T @ b) ** 2 / (np.linalg.norm(a) * np.linalg.norm(b)) ** 2
        assert value == pytest.approx(expected, rel=1e-5)


def test_a_similarity_has_its_largest_value() -> None:
    assert METRICS["pk"].grows_with_rank
    for metric in METRICS.values():
        assert metric.largest(3, 5) == (3.0 if metric.grows_with_rank else 1.0)
    scores = score(hs.open(arrays(d=6)), "all", "all")
    for (name, pairing), values in scores.arrays.items():
        most = metric_of(name).largest(scores.ranks(pairing.source).max(), scores.ranks(pairing.target).max())
        assert np.nanmax(values) <= most * (1 + 1e-6)


def test_a_factor_that_needs_no_partner_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def spy(weight: LayerWeight) -> np.ndarray:
        seen.append(weight.partner is None)
        return metrics.plain_factor(weight)

    monkeypatch.setitem(METRICS, "simple_cs", replace(METRICS["simple_cs"], factor=spy))
    score(hs.open(arrays()), "simple_cs", "OK")
    assert seen and all(seen)


# --------------------------------------------------------------------------------------- Composition Score


@pytest.mark.parametrize("condition", [1e2, 1e5, 1e8, 1e10])
@pytest.mark.parametrize("kv", [3, 1])
def test_cs_is_right_where_own_and_partner_cancel(condition: float, kv: int) -> None:
    """Queries are large exactly where keys are small, and outputs where values are: the product is of ordinary size."""
    rng = np.random.default_rng(int(condition))
    heads, d, m = 3, 30, 5
    given = {role: np.zeros((2, kv if role in "KV" else heads, d, m)) for role in "QKVO"}
    sizes = np.geomspace(1, 1 / condition, m)
    for layer in range(2):
        for shared, own in (("K", "Q"), ("V", "O")):
            turns = [np.linalg.qr(rng.normal(size=(m, m)))[0] for _ in range(kv)]
            for i in range(kv):
                given[shared][layer, i] = np.linalg.qr(rng.normal(size=(d, m)))[0] * sizes @ turns[i].T
            for i in range(heads):
                turn = turns[i * kv // heads]
                given[own][layer, i] = np.linalg.qr(rng.normal(size=(d, m)))[0] / sizes @ turn.T
    scores = score(hs.open(given), "cs", ["OQ", "OO", "QQ"])
    for pairing in scores.pairings:
        matrix = scores["cs", pairing]
        for i, j, value in zip(*matrix.pairs(), strict=True):
            parts = [
                {r: given[r][h.layer, h.index * kv // heads if r in "KV" else h.index] for r in "QKVO"}
                for h in (matrix.sources[i], matrix.targets[j])
            ]
            assert value == pytest.approx(definitions.cs(*parts, str(pairing)), abs=1e-5)


# ---------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("per_block", [1, 2, 4])
@pytest.mark.parametrize("metric", ["pk", "cs", "linear_cka", "procrustes"])
@pytest.mark.parametrize("pairing", ["OK", "all"])
def test_ranks_are_true_for_every_head(
    per_block: int, metric: str, pairing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arrays()
    given["O"][3, 1] = 0  # the last layer writes for nobody: in no tile of OK when blocks are small
    given["K"][0, 2] = 0  # the first layer's keys read from nobody
    given["K"][2, 0, :, 1] = given["K"][2, 0, :, 0]
    blocks = lambda layers, largest: [tuple(layers[i : i + per_block]) for i in range(0, len(layers), per_block)]  # noqa: E731
    monkeypatch.setattr(plan, "_even_blocks", blocks)
    scores = score(hs.open(given), metric, pairing)
    for role in scores.role_ranks:
        for head, rank in zip(scores.heads(role), scores.ranks(role), strict=True):
            assert rank == np.linalg.matrix_rank(given[role.value][head.layer, head.index]), f"{head}.{role}"
    named = " ".join(scores.provenance["rank_deficient"])
    assert all(text in named for text in ("L3H1.O", "L0H2.K", "L2H0.K (layer 2) has rank 4 of 5"))


def test_ranks_of_roles_that_are_not_compared_are_not_invented() -> None:
    scores = score(hs.open(arrays()), "pk", "OK")
    assert set(scores.role_ranks) == {Role.O, Role.K}
    with pytest.raises(hs.HeadspanError, match="no pairing with the role V"):
        scores.ranks("V")


@pytest.mark.parametrize("metric", ["pk", "cs"])
def test_each_rank_is_found_once_when_work_is_done_tile_by_tile(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where factors do not fit they are made again for every tile, ranks are not."""
    found: Counter = Counter()
    real = weight_factors.subspace_ranks
    count = lambda own, dtype: (found.update([own.tobytes()]), real(own, dtype))[1]  # noqa: E731
    monkeypatch.setattr(weight_factors, "subspace_ranks", count)
    monkeypatch.setattr(plan, "_even_blocks", lambda layers, largest: [(layer,) for layer in layers])
    made = plan.make_plan(hs.open(arrays()), (metric,), parse_pairings("all"), "default", 2**30)
    made.together = False
    monkeypatch.setattr(run, "make_plan", lambda *given: made)
    scores = score(hs.open(arrays()), metric)
    assert len(made.tiles) > 3 and all((scores.ranks(role) == 5).all() for role in ROLES)
    assert set(found.values()) <= {1} and len(found) == (16 if metric == "cs" else 0)


# ---------------------------------------------------------------------------------------------------- reads


def counted(weights: AttentionWeights, monkeypatch: pytest.MonkeyPatch) -> Counter:
    reads: Counter = Counter()
    real = weights.read
    monkeypatch.setattr(
        weights, "read", lambda role, layer: (reads.update([(Role(role), layer)]), real(role, layer))[1]
    )
    return reads


def test_each_weight_is_read_once_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = hs.open(arrays(kv=1))
    reads = counted(weights, monkeypatch)
    score(weights, "all", "all")
    assert reads == {(role, layer): 1 for role in ROLES for layer in range(4)}


def test_each_tensor_of_gpt2_is_read_once(gpt2_dir, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = hs.open(gpt2_dir)
    reads: Counter = Counter()
    source = weights.source  # type: ignore[attr-defined]
    real = source.read
    monkeypatch.setattr(source, "read", lambda name, *rest: (reads.update([name]), real(name, *rest))[1])
    score(weights, ["pk", "cs"], "flow")  # which need all four weights
    assert len(reads) == 24 and set(reads.values()) == {1}, reads.most_common(3)


def test_blocks_are_not_read_again_for_their_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks in too little memory for all of them: the block that two tiles share is kept between them."""
    weights = hs.open(arrays())
    monkeypatch.setattr(plan, "_even_blocks", lambda layers, largest: [(layer,) for layer in layers])
    monkeypatch.setattr(plan, "_GROUPINGS", {"blocks": plan._GROUPINGS["blocks"]})
    made = plan.make_plan(weights, ("pk",), (Pairing.parse("OK"),), "default", 2**30)
    made.together = False
    from headspan.scoring.factors import FactorStore

    reads, store = counted(weights, monkeypatch), FactorStore(weights, made)
    for tile in made.tiles:
        store.of(tile)
        assert {item.panel for item in store._kept} == set(tile.panels)  # and nothing that only other tiles need
    assert len(made.tiles) == 6
    assert reads[Role.O, 0] == 1 and reads[Role.O, 1] == 1


class Shape:
    """The sizes of a large model, without its weights: all that a plan asks for."""

    d_model, held_bytes = 4096, 0
    places = tuple(range(32))
    ports = PortTable.regular(range(32), 32, 32)

    def d_head(self, role: Role) -> int:
        return 128

    def heads_in(self, role: Role, layer: int) -> tuple[hs.Head, ...]:
        return self.ports.of(role)[self.ports.span(role, layer)]


def made_twice(memory: int, pairings: str) -> tuple[plan.Plan, float]:
    """The plan of a 7B shape, and the Gram matrices that its tiles make over the ones there are."""
    made = plan.make_plan(Shape(), ("pk",), parse_pairings(pairings), "default", memory)  # type: ignore[arg-type]
    rows = [made.rows("pk", panel) for tile in made.tiles for panel in tile.panels]
    return made, sum(r.stop - r.start for r in rows) / sum(len(made.ports.of(role)) for role in made.roles)


def test_the_plan_makes_little_twice_in_the_memory_it_is_given() -> None:
    made, ratio = made_twice(9 * 10**9, "flow")
    assert made.groupings == {"pk": "before"} and ratio < 1.2
    assert made_twice(16 * 10**9, "all")[1] == 1.0
    less = [made_twice(memory * 10**9, "all")[1] for memory in (3, 5, 9, 12, 16)]
    assert less == sorted(less, reverse=True)


def test_tiles_have_two_layers_where_pairs_are_compared_one_by_one() -> None:
    made = plan.make_plan(hs.open(arrays(layers=6)), ("procrustes",), parse_pairings("OK"), "default", 2**30)
    assert made.blocks == {"procrustes": [(0, 1), (2, 3), (4, 5)]}


@pytest.mark.parametrize("pairs", ["default", "forward", "same-type", "all"])
@pytest.mark.parametrize("grouping", plan._GROUPINGS)
def test_tiles_hold_every_pair_once_and_nothing_else(
    pairs: PairSet, grouping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_even_blocks", lambda layers, largest: [(layer,) for layer in layers])
    monkeypatch.setattr(plan, "_GROUPINGS", {"blocks": plan._GROUPINGS[grouping]})
    for heads, name in itertools.product((1, 2), ("QK", "OK", "QQ")):
        weights = hs.open(arrays(layers=3, heads=heads))
        if pairs == "same-type" and name != "QQ":
            continue
        pairing = Pairing.parse(name)
        made = plan.make_plan(weights, ("pk",), (pairing,), pairs, 2**30)
        jobs = [job for tile in made.tiles for job in made.jobs(tile)]
        assert all(job.needed.any() for job in jobs)
        asked = pair_mask(pairing, weights.heads(name[0]), weights.heads(name[1]), pairs)
        once = np.triu(asked | asked.T) if pairing.same_type else asked
        assert sum(int(job.needed.sum()) for job in jobs) == once.sum()


def test_making_counts_gram_matrices_of_every_tile_and_new_factors() -> None:
    """By hand: d²·m for the Gram matrix of a head in a tile, 12·d·m² for a factor that the tile before had not."""
    weights = hs.open(arrays(layers=3, heads=2, d=24, m=5))
    made = plan.make_plan(weights, ("pk",), parse_pairings("OK"), "default", 2**30)
    single = [(0,), (1,), (2,)]
    tiles = plan._tile_pairs(made, "pk", single, "blocks")
    panels = [{panel for pair in pairs for panel in pair} for pairs in tiles]  # O0 K1, then O0 K2, then O1 K2
    assert [sorted((str(p.role), p.block) for p in tile) for tile in panels] == [
        [("K", 1), ("O", 0)],
        [("K", 2), ("O", 0)],
        [("K", 2), ("O", 1)],
    ]
    shapes = {Panel(role, 0): (6, 24, 5) for role in (Role.O, Role.K)}
    costs = route_cost(shapes, [Job(*shapes, np.kron(np.triu(np.ones((3, 3)), 1), np.ones((2, 2))) > 0)])
    assert made.operations == min(costs.values())
    expected = 2 * (6 * 24**2 * 5 + 4 * 12 * 24 * 5**2)
    assert plan._making_cost(weights, made, METRICS["pk"], single, "blocks") == expected


# --------------------------------------------------------------------------------------------------- memory


class Uneven(Shape):
    """Roles that differ in the number of heads and of columns."""

    d_model, held_bytes = 256, 0
    places = tuple(range(16))
    ports = PortTable.regular(range(16), 8, 2)

    def d_head(self, role: Role) -> int:
        return 64 if role in (Role.Q, Role.K) else 32


class Many(Shape):
    """So many heads, and so small, that their scores are most of the work."""

    d_model, held_bytes = 8, 0
    ports = PortTable.regular(range(32), 64, 64)

    def d_head(self, role: Role) -> int:
        return 1


@pytest.mark.parametrize(
    ("weights", "pairings", "most", "workers", "together"),
    [
        (Uneven(), "flow", 300, {1, 2, 3}, {True, False}),
        (Uneven(), "all", 300, {1, 2, 3}, {True, False}),
        (Many(), "OK", 360, {3}, {True}),
    ],
)
def test_what_a_plan_holds_at_once_fits_into_its_memory(
    weights: Shape, pairings: str, most: int, workers: set[int], together: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by hand: the interpreter, the scores, what makes factors, the largest tile, and space to work in."""
    monkeypatch.setattr(plan, "cores", lambda: 3)
    chosen, d = parse_pairings(pairings), weights.d_model
    heads = {role: len(weights.ports.of(role)) for role in ROLES if any(role in pairing for pairing in chosen)}
    layer = [8 * heads[role] // len(weights.places) * d * weights.d_head(role) for role in heads]
    held = 200 * 10**6 + sum(4 * heads[p.source] * heads[p.target] for p in chosen) + sum(layer)
    plans: list[plan.Plan] = []
    refused = 0
    for memory in (*range(207_000_000, 231_000_000, 700_000), *range(231_000_000, most * 10**6, 6_000_000)):
        try:
            made = plan.make_plan(weights, ("pk",), chosen, "default", memory)  # type: ignore[arg-type]
        except hs.HeadspanError:
            assert not plans, "what fits into less memory fits"
            refused += 1
            continue
        plans.append(made)
        size = {
            panel: (made.rows("pk", panel).stop - made.rows("pk", panel).start, 4 * d * weights.d_head(panel.role))
            for tile in made.tiles
            for panel in tile.panels
        }
        values = [sum(17 * size[a][0] * size[b][0] for a, b in tile.pairs) for tile in made.tiles]
        tiles = [sum(n * bytes for n, bytes in map(size.__getitem__, tile.panels)) for tile in made.tiles]
        whole = sum(n * bytes for n, bytes in size.values()) + max(values)
        largest = whole if made.together else max(map(sum, zip(values, tiles, strict=True)))
        assert held + made.workers * 6 * max(layer) + made.work_bytes + largest <= memory
        if not made.together:
            assert held + made.workers * 6 * max(layer) + made.work_bytes + whole > memory
    assert {made.together for made in plans} == together
    assert {made.workers for made in plans} == workers
    assert len({len(made.tiles) for made in plans}) > 2 and refused


def test_files_written_in_pieces_are_what_the_library_writes(tmp_path) -> None:
    from safetensors.numpy import load_file

    from headspan.system.atomic import write_safetensors

    rng = np.random.default_rng(0)
    kinds = (np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_)
    tensors = {f"{kind.__name__}/é": rng.normal(size=(3, 4)).astype(kind) for kind in kinds}
    tensors |= {
        "empty": np.zeros((0, 2), np.float32),
        "one": np.float32(3).reshape(()),
        "turned": tensors["float64/é"].T,
    }
    write_safetensors(tmp_path / "x.safetensors", tensors, {"note": "ü"})
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_the_result_counts_as_memory() -> None:
    weights = hs.open(arrays(layers=32, heads=32, d=8, m=1))
    with pytest.raises(hs.HeadspanError, match=r"memory.*0\.\d+ GB"):
        score(weights, "pk", "all", memory=200_000_000 + 60_000_000)  # 16 matrices of 1,024 × 1,024 are 67 MB


CHILD = """
import sys
import numpy as np
import headspan as hs
rng = np.random.default_rng(0)
weights = hs.open({r: rng.normal(size=(24, 64, 16, 1)).astype(np.float32) for r in "QKVO"})
hs.score(weights, ["pk", "simple_cs"], "all", memory=sys.argv[1], out=sys.argv[2])
# not ru_maxrss, which begins with the size of the process that started this one
print(next(int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('VmHWM')))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_measured_from_outside_stays_within_what_was_given(tmp_path) -> None:
    """1,536 heads: two similarities of 16 matrices are 302 MB, more than the interpreter itself."""
    run = subprocess.run(
        [sys.executable, "-c", CHILD, "700MB", str(tmp_path / "r.safetensors")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 700e6
    too_little = subprocess.run(
        [sys.executable, "-c", CHILD, "450MB", str(tmp_path / "s.safetensors")], capture_output=True, text=True
    )
    assert "too little memory for this model" in too_little.stderr


# ------------------------------------------------------------------------------ how factors are made


@pytest.mark.parametrize("shape", [(12, 12), (8, 2), (2, 8), (3, 3), (1, 4)])
@pytest.mark.parametrize("metric", WEIGHT_METRICS)
def test_factors_do_not_depend_on_how_many_heads_are_made_at_once(
    shape: tuple[int, int], metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    own, partner = (rng.normal(size=(n, 20, 4)).astype(np.float32) for n in shape)
    weight = LayerWeight(own, partner, "float32")
    whole = METRICS[metric].factor(weight)
    for numbers in (1, 250, 10**6):
        monkeypatch.setattr(subspaces, "_PART", numbers)
        cut = list(LayerWeight(own, partner, "float32").parts())
        assert [i for heads, _ in cut for i in range(heads.start, heads.stop)] == list(range(len(own)))
        assert numbers == 250 or len(cut) == (min(shape) if numbers == 1 else 1)
        found = np.concatenate([METRICS[metric].factor(part) for _, part in cut])
        for ours, theirs in zip(found, whole, strict=True):  # a factor is determined up to a rotation of its columns
            np.testing.assert_allclose(ours @ ours.T, theirs @ theirs.T, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.concatenate([part.ranks for _, part in cut]), weight.ranks)


def test_factors_of_several_layers_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads inside the factor of one similarity at the same time: neither waits for a lock of the other."""
    both = threading.Barrier(2, timeout=20)

    def meet(weights: np.ndarray, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
        both.wait()  # raises BrokenBarrierError if nobody comes
        return orthonormal_bases(weights, *rest)

    orthonormal_bases = weight_factors.orthonormal_bases
    monkeypatch.setattr(weight_factors, "orthonormal_bases", meet)
    weights = [LayerWeight(np.random.default_rng(i).normal(size=(2, 8, 3)), None, "float64") for i in range(2)]
    found = list(parallel_map(lambda weight: weight.bases[1].tolist(), weights, workers=2))
    assert found == [[3, 3], [3, 3]]


def test_scratch_memory_is_used_again_and_belongs_to_one_thread() -> None:
    first = scratch("test", (3, 4))
    first[:] = 7
    assert np.shares_memory(first, scratch("test", (2, 5))) and (scratch("test", (12,)) == 7).all()
    assert not np.shares_memory(first, scratch("another", (3, 4)))
    assert scratch("test", (5, 5)).shape == (5, 5)
    with ThreadPoolExecutor(1) as pool:
        assert not np.shares_memory(scratch("test", (3, 4)), pool.submit(scratch, "test", (3, 4)).result())


@pytest.mark.parametrize("m", [1, 3, 16, 17, 40, 64, 100])
def test_triangular_inverses_and_products(m: int) -> None:
    rng = np.random.default_rng(m)
    lower = np.tril(rng.normal(size=(3, m, m)), -1) / m + np.eye(m)
    inverse = subspaces.lower_inverse(lower)
    np.testing.assert_allclose(inverse, np.linalg.inv(lower), atol=1e-12)
    right = rng.normal(size=(3, m, 9))
    np.testing.assert_allclose(
        subspaces._lower_product(inverse, right, np.empty_like(right)), inverse @ right, atol=1e-12
    )
