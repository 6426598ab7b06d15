"""One similarity one object, ranks of every head, tensors read once, memory that is counted before it is used."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import definitions
import headspan as hs
from headspan.heads import ROLES, Pairing, Role
from headspan.models.weights import AttentionWeights
from headspan.scoring import metrics, plan
from headspan.scoring.metrics import METRICS, LayerWeight, Metric, metric_of
from headspan.scoring.run import score


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


def test_a_similarity_says_its_largest_value() -> None:
    assert METRICS["pk"].largest(3, 5) == 3.0
    assert all(metric.largest(3, 5) == 1.0 for key, metric in METRICS.items() if key != "pk")
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
    """Queries large just where keys are small, and outputs where values are: the product is of ordinary size."""
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
    score(weights, ["pk", "cs"], "all")
    assert len(reads) == 24 and set(reads.values()) == {1}, reads.most_common(3)


def test_blocks_are_not_read_again_for_their_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks in too little memory for all of them: the block that two tiles share is kept between them."""
    weights = hs.open(arrays())
    monkeypatch.setattr(plan, "_even_blocks", lambda layers, largest: [(layer,) for layer in layers])
    made = plan.make_plan(weights, ("pk",), (Pairing.parse("OK"),), "default", 2**30)
    made.together = False
    from headspan.scoring.factors import FactorStore

    reads, store = counted(weights, monkeypatch), FactorStore(weights, made)
    for tile in made.tiles:
        store.of(tile)
    assert len(made.tiles) == 6
    assert reads[Role.O, 0] == 1 and reads[Role.O, 1] == 1


# --------------------------------------------------------------------------------------------------- memory


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
    with pytest.raises(hs.HeadspanError, match=r"too little for this model: the scores .* need about 0\.\d+ GB"):
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
    assert "too little for this model" in too_little.stderr
