"""Chance between random subspaces: how p-values are distributed, and in how many dimensions folded weights meet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import headspan as hs
from families import FAMILIES, Run
from headspan.graphs.chains import chance
from headspan.models.folding import FoldedWeights, fold
from headspan.reading.overlap import CENTRED_NOTE
from headspan.reading.pair import pair
from headspan.results.scores import Scores
from headspan.statistics.dimension import centred, dimension_at, pair_dimension, pair_dimension_of
from headspan.statistics.significance import significance
from headspan.subspaces.random_subspaces import (
    bounded_law,
    expected_squares,
    moments,
    random_bases,
    random_law,
    random_quantile,
)
from headspan.vocabulary.heads import ROLES, Pairing, Role
from science_helpers import make_scores

OK = Pairing.parse("OK")


def drawn(n: int, d: int, m: int, m2: int, seed: int = 0) -> np.ndarray:
    """n draws of PK: tr A(A + B)⁻¹ of two Wishart matrices, whose factors are drawn (Bartlett); no d-vectors needed."""
    rng, p, q = np.random.default_rng(seed), min(m, m2), max(m, m2)

    def wishart(count: int, freedom: int) -> np.ndarray:
        if freedom < p:
            factor = rng.standard_normal((count, p, freedom))
        else:
            factor = np.tril(rng.standard_normal((count, p, p)), -1)
            factor[:, np.arange(p), np.arange(p)] = np.sqrt(rng.chisquare(freedom - np.arange(p), size=(count, p)))
        return factor @ factor.transpose(0, 2, 1)

    found, step = [], max(1, 2**21 // p**2)
    for start in range(0, n, step):
        count = min(step, n - start)
        first, rest = wishart(count, q), wishart(count, d - q)
        found.append(np.trace(np.linalg.solve(first + rest, first), axis1=1, axis2=2))
    return np.concatenate(found)


# -- the law ---------------------------------------------------------------------------------------------------


def test_the_draws_of_these_tests_are_those_of_random_subspaces() -> None:
    frames = random_bases(3000, 20, 5, seed=1)
    assert stats.ks_2samp(drawn(3000, 20, 5, 4), np.square(frames[:, :4]).sum(axis=(1, 2))).pvalue > 1e-3


@pytest.mark.parametrize(("d", "m"), [(2, 1), (3, 2), (24, 1), (24, 5), (96, 48), (96, 95), (768, 64)])
def test_the_law_of_a_line_is_exact(d: int, m: int) -> None:
    exact = stats.beta(m / 2, (d - m) / 2)
    x = np.array([0.0, 0.01, 0.2, 0.5, 0.9, 0.999999, 1.0])
    for law in (random_law(d, 1, m), random_law(d, m, 1)):
        np.testing.assert_allclose(law.upper_tail(x), exact.sf(x), rtol=1e-9, atol=1e-300)
    without = random_law(d, d - 1, m)  # PK with the complement of a line is m less the share of the line
    np.testing.assert_allclose(without.upper_tail(m - x), exact.cdf(x), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("d", "m", "m2"), [(12, 2, 3), (24, 4, 9), (24, 20, 7), (16, 10, 12), (60, 8, 8)])
def test_the_law_has_the_moments_of_random_subspaces(d: int, m: int, m2: int) -> None:
    law, random = random_law(d, m, m2), moments(d, m, m2)
    beta = stats.beta(law.a, law.b, loc=law.low, scale=law.high - law.low)
    mean, variance, skewness = (float(x) for x in beta.stats("mvs"))
    assert (mean, variance) == (pytest.approx(float(random.mean)), pytest.approx(float(random.variance)))
    assert float(law.high) == min(m, m2)
    draws = drawn(40_000, d, m, m2, seed=2)
    assert skewness == pytest.approx(stats.skew(draws), abs=5 * np.sqrt(6 / len(draws)) + 0.01)


def test_there_is_a_law_for_every_dimension() -> None:
    for d in (*range(1, 40), 127, 768, 8192):
        m = np.unique(np.linspace(0, d, 40).astype(int))
        law = random_law(d, m[:, None], m)
        assert ((law.a > 0) & (law.b > 0) & (law.low <= law.high)).all()
        varies = moments(d, m[:, None], m).variance > 0
        assert np.array_equal(law.high > law.low, varies)
        middle = law.upper_tail(moments(d, m[:, None], m).mean)
        assert ((middle > 0.05) & (middle < 0.95))[varies].all() and (middle[~varies] == 1).all()
        assert (law.quantile(0.999)[~varies] == law.high[~varies]).all()


def test_the_far_tail_is_not_lost() -> None:
    law = random_law(768, 64, 64)
    x = np.array([5.4, 6.0, 7.0, 8.0, 9.0])
    logs = stats.beta(law.a, law.b, loc=law.low, scale=law.high - law.low).logsf(x)
    np.testing.assert_allclose(np.log(law.upper_tail(x)), logs, rtol=1e-6)
    assert 0 < law.upper_tail(9.0) < 1e-100
    assert law.upper_tail([64.0, 64.1]).tolist() == [0, 0] and np.isnan(law.upper_tail(np.nan))
    for level in (0.5, 0.999, 1 - 1e-9):
        assert float(law.upper_tail(random_quantile(768, 64, 64, level))) == pytest.approx(1 - level, rel=1e-6)


# Ranks 1 to 64 in d from 24 to 768, equal and unequal. Of every kind p ≤ 0.05, 0.01 and 0.001 is counted.
DIMENSIONS = [
    (24, 1, 1), (24, 1, 12), (24, 2, 2), (24, 2, 8), (24, 3, 3), (24, 3, 12), (24, 5, 20), (24, 12, 12), (24, 16, 16),
    (96, 1, 9), (96, 2, 2), (96, 3, 5), (96, 9, 3), (96, 12, 5), (96, 12, 12), (96, 32, 2),
    (768, 1, 64), (768, 2, 2), (768, 3, 64), (768, 8, 8),
]  # fmt: skip


@pytest.mark.parametrize(("d", "m", "m2"), DIMENSIONS)
def test_p_values_are_uniform(d: int, m: int, m2: int) -> None:
    n = 100_000 if min(m, m2) <= 3 else 30_000
    p = random_law(d, m, m2).upper_tail(drawn(n, d, m, m2, seed=3))
    # The law is not exact, so a rate may differ by a fifth in the smallest space, and by less in larger ones.
    room = {24: 0.2, 96: 0.05, 768: 0.02}[d] if min(m, m2) > 1 else 0.0
    for level in (0.5, 0.05, 0.01, 0.001):
        expected = level * n
        assert abs(np.count_nonzero(p <= level) - expected) < room * expected + 4 * np.sqrt(expected)
    assert stats.kstest(p[:20_000], "uniform").statistic < 0.015


def test_p_values_of_wide_heads_are_uniform() -> None:
    p = random_law(768, 64, 64).upper_tail(drawn(1500, 768, 64, 64, seed=4))
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert abs(np.count_nonzero(p <= 0.01) - 15) < 4 * np.sqrt(15)


def random_model(seed: int, d: int, ranks: dict[str, int], layers: int, heads: int) -> dict[str, np.ndarray]:
    """Heads that span uniformly random subspaces, of another rank for every role."""
    rng, wide = np.random.default_rng(seed), max(ranks.values())
    shape = (layers, heads, d)
    return {
        role: rng.standard_normal((*shape, rank)) @ rng.standard_normal((layers, heads, rank, wide))
        for role, rank in ranks.items()
    }


def test_random_models_have_no_discoveries() -> None:
    """Ranks 12, 5, 3 and 9 in 96 dimensions, 25 models: a normal tail has p ≤ 0.001 six times as often as it should,
    and a false discovery in half of the runs."""
    small = pairs = wrong = normal = wrong_normal = 0
    for seed in range(25):
        model = random_model(seed, 96, {"Q": 12, "K": 5, "V": 3, "O": 9}, layers=6, heads=4)
        scores = hs.score(hs.open(model), "pk", ["KV", "VV"])
        for pairing in ("KV", "VV"):
            found = significance(scores, pairing)
            present = ~np.isnan(found.p)
            tail = stats.norm.sf(found.z[present])
            pairs, small = pairs + int(present.sum()), small + int((found.p[present] <= 0.001).sum())
            normal += int((tail <= 0.001).sum())
            wrong += found.count(0.05) > 0
            wrong_normal += bool((stats.false_discovery_control(tail) <= 0.05).any())
    assert pairs == 12_900
    assert small < 13 + 3 * np.sqrt(13) < 60 < normal
    assert wrong <= 2.5 + 3 * np.sqrt(2.5) < 20 < wrong_normal


def test_pairs_inside_a_latent_have_a_law_with_their_own_mean_and_spread() -> None:
    """Heads of one layer in a latent of 16 dimensions: PK has the mean m·m'/16 of that latent, and p is uniform."""
    heads, r = 60, 16
    rng = np.random.default_rng(5)
    latent = np.linalg.qr(rng.standard_normal((96, r)))[0]
    bases = np.linalg.qr(latent @ rng.standard_normal((2 * heads, r, 4)))[0]
    pk = np.square(np.einsum("adm,bdn->abmn", bases, bases, optimize=True)).sum(axis=(2, 3))
    scores = make_scores({("pk", "KK"): pk}, layers=2, heads=heads, d_model=96, rank=4)
    inside = moments(r, 4)
    scores.provenance["same_layer_chance"] = {"KK": {str(n): [float(inside.mean), float(inside.sd)] for n in (0, 1)}}
    found = significance(scores, "KK")
    layer = np.arange(2 * heads) // heads
    same = (layer[:, None] == layer) & ~np.isnan(found.p)
    law = bounded_law(0, 4, inside.mean, inside.variance)
    np.testing.assert_allclose(found.p[same], law.upper_tail(pk[same]), rtol=1e-3)
    assert abs(found.z[same].mean()) < 0.15 and abs((found.p[same] <= 0.05).mean() - 0.05) < 0.015
    other = ~same & ~np.isnan(found.p)  # the same subspaces across layers are far above chance of the stream
    assert found.p[other].max() < 0.5 and np.median(found.p[other]) < 1e-4


def test_heads_that_fill_their_latent_cannot_vary() -> None:
    scores = make_scores({("pk", "KK"): np.full((8, 8), 4 + 1e-6)}, layers=1, heads=8, d_model=32, rank=4)
    scores.provenance["same_layer_chance"] = {"KK": {"0": [4.0, 1e-15]}}
    found = significance(scores, "KK")
    present = ~np.isnan(found.p)
    assert present.any() and (found.p[present] == 1).all() and (found.z[present] == 0).all()


# -- the dimensions of folded weights --------------------------------------------------------------------------


def folded_model(seed: int, d: int, m: int, norm: str = "layer", layers: int = 6, heads: int = 6) -> FoldedWeights:
    rng = np.random.default_rng(seed)
    return fold(hs.open({**{str(r): rng.standard_normal((layers, heads, d, m)) for r in ROLES}, "norm": norm}))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("d", [32, 64])
def test_folded_random_models_are_at_chance(d: int, norm: str) -> None:
    """Folded LayerNorm: with d dimensions instead of d − 1 the mean z would be +0.74 at d = 32 and +0.24 at d = 64."""
    z, p, above = list[np.ndarray](), list[np.ndarray](), list[float]()
    for seed in range(4):
        scores = hs.score(folded_model(seed, d, 16, norm), "pk", ["OQ", "OK", "OV", "QQ", "QO"])
        for line in hs.baseline(scores):
            found = significance(scores, line.pairing)
            z.append(found.z[~np.isnan(found.z)])
            p.append(found.p[~np.isnan(found.p)])
            above.append(line.above)
            assert line.random_mean == pytest.approx(256 / (d - (norm == "layer")))
    everything = np.concatenate(z)
    assert abs(everything.mean()) < 0.06 and abs(everything.std() - 1) < 0.03
    assert abs((np.concatenate(p) <= 0.05).mean() - 0.05) < 0.006 and np.mean(above) < 0.002


def test_one_centred_side_has_the_chance_of_all_dimensions() -> None:
    """A subspace in the hyperplane against uniform ones of R^d: exactly the law of d dimensions, not of d − 1."""
    rng, d, m = np.random.default_rng(6), 8, 3
    inside = rng.standard_normal((400, d, m))
    inside = np.linalg.qr(inside - inside.mean(axis=1, keepdims=True))[0]
    anywhere = random_bases(400, d, m, seed=7)
    pk = np.square(np.einsum("adm,bdn->abmn", inside, anywhere, optimize=True)).sum(axis=(2, 3))
    both = np.square(np.einsum("adm,bdn->abmn", inside[:200], inside[200:], optimize=True)).sum(axis=(2, 3))
    for values, dimensions in ((pk, d), (both, d - 1)):
        random = moments(dimensions, m)
        assert values.mean() == pytest.approx(float(random.mean), abs=0.01)
        assert values.var() == pytest.approx(float(random.variance), rel=0.05)


def test_everything_that_asks_for_chance_uses_the_same_dimensions(tmp_path: Path) -> None:
    d, m = 24, 6
    weights = folded_model(8, d, m, layers=3, heads=2)
    scores = hs.score(weights, "pk", "all")
    assert (pair_dimension(scores, OK) == d - 1).all()
    assert pair_dimension_of(weights, "L0H0.O", "L1H0.K") == d - 1
    report = pair(weights, "L0H0.O", "L1H0.K")
    assert report.random_mean == pytest.approx(m * m / (d - 1)) and CENTRED_NOTE.format(d - 1) in report.notes
    assert report.z == pytest.approx(float(significance(scores, "OK").z[0, 2]), rel=1e-4)
    path = hs.paths(weights, to="L2H0.K", depth=2, k=1)[0]
    assert path.chance == pytest.approx(m * m * m / (d - 1) ** 2)
    assert hs.baseline(scores)[0].random_mean == pytest.approx(m * m / (d - 1))
    payload = hs.report(scores, weights).payload
    assert payload["centred"] == {str(role): True for role in ROLES}
    assert list(payload["angles_by_chance"]) == [f"{m},{m},{d - 1}"]
    raw = hs.score(weights.inner, "pk", "all")
    assert (pair_dimension(raw, OK) == d).all() and pair_dimension_of(weights.inner, "L0H0.O", "L1H0.K") == d
    assert not any("centred" in note for note in pair(weights.inner, "L0H0.O", "L1H0.K").notes)
    assert hs.baseline(raw)[0].random_mean == pytest.approx(m * m / d)


def test_nodes_count_their_dimensions_by_both_sides() -> None:
    """What a node writes is centred with what heads read; what a probe reads is not, though heads' outputs are."""
    d, m = 24, 6
    weights = folded_model(9, d, m, layers=3, heads=2)
    node = hs.Node(np.random.default_rng(10).standard_normal((d, 2)), "u", 1)
    scores = hs.score(weights, "pk", ["OK", "OR", "WK"], nodes=node)
    assert [str(role) for role in (Role.R, Role.W) if centred(scores, role).any()] == ["W"]
    assert scores.provenance["centred"] == ["Q", "K", "V", "O", "W"] and scores.provenance["not_centred"] == []
    rows = hs.nodes(weights, node, k=50).rows()
    for pairing, side, dimensions in (("OR", "written by", d), ("WK", "read by", d - 1)):
        found = significance(scores, pairing)
        assert (pair_dimension(scores, found.matrix.pairing) == dimensions).all()
        for i, j in np.argwhere(~np.isnan(found.p)):
            partner = f"{found.matrix.sources[i]}.O" if pairing == "OR" else f"{found.matrix.targets[j]}.K"
            row = next(row for row in rows if row["partner"] == partner and row["side"] == side)
            assert row["p"] == pytest.approx(found.p[i, j], rel=1e-3)
            assert row["z"] == pytest.approx(found.z[i, j], rel=1e-3, abs=1e-3)


def test_a_layer_without_a_norm_is_not_centred(tmp_path: Path) -> None:
    """ModernBERT reads the embedding without a norm in layer 0: its Q, K and V there lie in all d dimensions."""
    folded = fold(Run(FAMILIES["modernbert"], tmp_path).weights)
    scores = hs.score(folded, "pk", ["QQ", "OK", "QO"])
    n = len(folded.heads_in("Q", 0))
    assert scores.provenance["centred"] == ["Q", "K", "V", "O"]
    assert f"{folded.heads('Q')[0]}.Q" in scores.provenance["not_centred"]
    assert centred(scores, "Q").tolist() == [False] * n + [True] * (len(folded.heads("Q")) - n)
    qq = Pairing.parse("QQ")
    assert dimension_at(scores, qq, [0, n], [n, n]).tolist() == [folded.d_model, folded.d_model - 1]
    first, second = folded.heads("Q")[0], folded.heads("Q")[n]
    assert pair_dimension_of(folded, f"{first}.Q", f"{second}.Q") == folded.d_model
    old = Scores(scores.arrays, scores.ports, scores.d_model, scores.role_ranks, _of_version_3(scores.provenance))
    for role in "QKO":
        assert np.array_equal(centred(old, role), centred(scores, role))


def _of_version_3(provenance: dict) -> dict:
    return {key: value for key, value in provenance.items() if key not in ("centred", "not_centred")}


@pytest.mark.parametrize("family", ["gpt2", "llama", "olmo2", "cohere"])
def test_results_of_earlier_versions_have_the_dimensions_of_their_family(family: str, tmp_path: Path) -> None:
    weights = Run(FAMILIES[family], tmp_path).weights
    for opened in (weights, fold(weights)):
        scores = hs.score(opened, "pk", ["OQ"])
        scores.save(tmp_path / "new.safetensors")
        before = Scores(
            scores.arrays, scores.ports, scores.d_model, scores.role_ranks, _of_version_3(scores.provenance)
        )
        before.save(tmp_path / "old.safetensors")
        new, old = (Scores.load(tmp_path / f"{name}.safetensors") for name in ("new", "old"))
        oq = Pairing.parse("OQ")
        less = opened.folding == "folded" and opened.norm_kind == "layer"
        assert (pair_dimension(new, oq) == scores.d_model - less).all()
        assert np.array_equal(pair_dimension(old, oq), pair_dimension(new, oq))
        assert np.array_equal(significance(old, oq).p, significance(new, oq).p, equal_nan=True)


def test_a_provenance_that_makes_no_sense_is_refused() -> None:
    scores = make_scores({("pk", "OK"): np.ones((4, 4))}, layers=2, heads=2)
    scores.provenance["centred"] = "all"
    with pytest.raises(hs.HeadspanError, match="which of its weights are centred"):
        significance(scores, "OK")


def test_a_subspace_that_fills_the_space_is_not_in_the_hyperplane() -> None:
    scores = make_scores({("pk", "OK"): np.full((4, 4), 8.0)}, layers=2, heads=2, d_model=8, rank=8)
    scores.provenance |= {"centred": ["O", "K"], "not_centred": []}
    assert (pair_dimension(scores, OK) == 8).all() and np.nanmin(significance(scores, "OK").p) == 1


def test_chance_of_paths_takes_the_dimensions_of_every_hop() -> None:
    none = np.zeros((1, 0))
    one = chance(23, 6, 4, none, none)
    assert np.allclose([one.mean[0], one.sd[0]], [moments(23, 6, 4).mean, moments(23, 6, 4).sd])
    rng, d, m = np.random.default_rng(11), 12, 3
    ends = rng.standard_normal((3000, 2, d, m))
    ends -= ends.mean(axis=2, keepdims=True)  # both ends are centred; the map between reads and writes everything
    first, last = (np.linalg.qr(ends[:, i])[0] for i in (0, 1))
    read, write = random_bases(3000, d, m, seed=12), random_bases(3000, d, m, seed=13)
    write = np.linalg.qr(write - write.mean(axis=1, keepdims=True))[0]
    product = last.transpose(0, 2, 1) @ write @ (read.transpose(0, 2, 1) @ first)
    found = np.square(product).sum(axis=(1, 2))
    exact = chance(np.array([[d, d - 1]]), m, m, np.full((1, 1), float(m)), np.full((1, 1), float(m)))
    assert found.mean() == pytest.approx(float(exact.mean[0]), rel=0.02)
    assert found.std() == pytest.approx(float(exact.sd[0]), rel=0.05)


def test_the_expected_curve_of_centred_weights_adds_up() -> None:
    assert sum(expected_squares(23, 6, 4)) == pytest.approx(24 / 23)
