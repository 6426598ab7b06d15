"""Random subspaces: theory against simulation; z, p, q against oracles; both nulls on data where they hold."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.polynomial.legendre import leggauss
from scipy import stats
from typer.testing import CliRunner

import headspan as hs
from headspan.cli import app
from headspan.statistics.baseline import divergence, kl_divergence, summarise
from headspan.statistics.significance import benjamini_hochberg, significance, z_scores
from headspan.subspaces.random_subspaces import (
    entry_density,
    moments,
    random_bases,
    random_quantile,
    sample_pk,
    squared_entry_density,
)
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import PAIRINGS
from science_helpers import make_scores, random_scores

DIMENSIONS = [(12, 3, 3), (40, 10, 4), (64, 32, 32), (30, 29, 2), (200, 16, 16)]


@pytest.mark.parametrize(("d", "m", "m2"), DIMENSIONS)
def test_moments_are_those_of_simulated_subspaces(d: int, m: int, m2: int) -> None:
    draws = sample_pk(4000, d, m, m2, seed=1)
    mean, variance = moments(d, m, m2)
    assert abs(draws.mean() - mean) < 4 * np.sqrt(variance / len(draws))
    # The variance of a sample variance depends on the fourth moment, which is estimated from the draws.
    fourth = np.mean((draws - draws.mean()) ** 4)
    assert abs(draws.var() - variance) < 4 * np.sqrt((fourth - variance**2) / len(draws))


@pytest.mark.parametrize(("d", "m", "m2"), [(64, 32, 32), (40, 10, 4), (96, 8, 8)])
def test_tight_is_closer_to_simulation_than_loose(d: int, m: int, m2: int) -> None:
    draws = sample_pk(4000, d, m, m2, seed=2)
    distances = {}
    for name in ("tight", "loose"):
        random = moments(d, m, m2, name)
        distances[name] = stats.kstest(draws, stats.norm(random.mean, random.sd).cdf).statistic
    assert distances["tight"] < distances["loose"]


def test_a_subspace_that_fills_the_space_leaves_nothing_to_chance() -> None:
    assert moments(7, 7).variance == 0
    assert moments(1, 1).variance == 0
    np.testing.assert_allclose(sample_pk(5, 7, 7, 3), 3)
    np.testing.assert_allclose(sample_pk(5, 7, 1, 7), 1)
    assert squared_entry_density(0.0, 5) == np.inf


def test_moments_take_arrays_and_are_symmetric() -> None:
    mean, variance = moments(32, np.array([[2], [5]]), np.array([3, 4, 8]))
    assert mean.shape == variance.shape == (2, 3)
    assert variance[1, 2] == moments(32, 8, 5).variance
    np.testing.assert_allclose(mean[1], 5 * np.array([3, 4, 8]) / 32)


@pytest.mark.parametrize("bad", [(0, 0, 0), (4, 5, 1), (4, 1, 5), (4, -1, 1)])
def test_impossible_dimensions_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(HeadspanError, match="m ≤ d"):
        moments(*bad)


@pytest.mark.parametrize(("place", "bad"), [(0, 0), (0, 3), (1, -1), (1, 9), (2, -1), (2, 9)])
def test_one_impossible_dimension_among_many_is_refused(place: int, bad: int) -> None:
    given = [np.array([8, 8, 8]), np.array([4, 4, 4]), np.array([4, 4, 4])]
    moments(*given)
    given[place][1] = bad
    with pytest.raises(HeadspanError, match="m ≤ d"):
        moments(*given)
    with pytest.raises(HeadspanError, match="m ≤ d"):  # no subspace is too large for a space that is none
        moments(np.array([8, 0]), np.array([4, 0]), np.array([4, 0]))


def test_the_smallest_dimensions_there_are() -> None:
    """An empty subspace shares nothing, a line all of itself."""
    for m, m2 in ((0, 4), (4, 0), (0, 0)):
        assert [float(x) for x in moments(8, m, m2)[:2]] == [0.0, 0.0]
    assert [float(x) for x in moments(1, 1, 1)[:2]] == [1.0, 0.0]
    assert [float(x) for x in moments(1, 0, 1)[:2]] == [0.0, 0.0]


def test_fixing_one_subspace_changes_nothing() -> None:
    first, second = random_bases(2000, 20, 5, seed=3), random_bases(2000, 20, 4, seed=4)
    both_drawn = np.square(first.transpose(0, 2, 1) @ second).sum(axis=(1, 2))
    assert stats.ks_2samp(both_drawn, sample_pk(2000, 20, 5, 4, seed=5)).pvalue > 1e-3


@pytest.mark.parametrize("d", [3, 4, 10, 200])
def test_entries_follow_their_density(d: int) -> None:
    # The 2nd column, 3rd row: any entry has this density only if signs are drawn fairly too.
    entries = random_bases(3000, d, 2, seed=d)[:, 2, 1]
    nodes, weights = leggauss(200)

    def cdf(x: np.ndarray) -> np.ndarray:
        half = (x[:, None] + 1) / 2
        return (half * weights * entry_density(half * (nodes + 1) - 1, d)).sum(axis=1)

    assert cdf(np.array([1.0]))[0] == pytest.approx(1, abs=1e-6)
    assert stats.kstest(entries, cdf).pvalue > 1e-3
    assert stats.kstest(entries**2, stats.beta(0.5, (d - 1) / 2).cdf).pvalue > 1e-3
    y = np.linspace(0.01, 0.99, 37)
    np.testing.assert_allclose(squared_entry_density(y, d), stats.beta(0.5, (d - 1) / 2).pdf(y))
    assert entry_density(1.5, d) == squared_entry_density(-0.1, d) == 0


def test_sampling_is_seeded_and_frames_are_orthonormal() -> None:
    frames = random_bases(3, 9, 4, seed=6)
    np.testing.assert_allclose(frames.transpose(0, 2, 1) @ frames, np.broadcast_to(np.eye(4), (3, 4, 4)), atol=1e-12)
    assert np.array_equal(sample_pk(5, 9, 4, seed=6), sample_pk(5, 9, 4, seed=6))
    assert not np.array_equal(sample_pk(5, 9, 4, seed=6), sample_pk(5, 9, 4, seed=7))
    assert len(sample_pk(0, 9, 4)) == 0
    with pytest.raises(HeadspanError, match="1 ≤ m ≤ d"):
        sample_pk(2, 3, 4)
    with pytest.raises(HeadspanError, match="1 ≤ m ≤ d"):
        random_bases(2, 3, 4)
    with pytest.raises(HeadspanError, match="d ≥ 2, but d = 1"):
        entry_density(0.0, 1)


p_arrays = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(0, 1))


@given(p_arrays)
def test_benjamini_hochberg_is_scipys(p: np.ndarray) -> None:
    np.testing.assert_allclose(benjamini_hochberg(p), stats.false_discovery_control(p), atol=1e-15)


def test_benjamini_hochberg_leaves_missing_pairs_out() -> None:
    p = np.array([[np.nan, 0.01], [0.04, np.nan]])
    q = benjamini_hochberg(p)
    assert np.array_equal(np.isnan(q), np.isnan(p))
    np.testing.assert_allclose(q[~np.isnan(q)], [0.02, 0.04])


def test_p_values_of_random_subspaces_are_uniform() -> None:
    d, m, n = 256, 32, 50
    frames = random_bases(2 * n, d, m, seed=8).transpose(0, 2, 1).reshape(2, n * m, d)
    pk = np.square((frames[0] @ frames[1].T).reshape(n, m, n, m)).sum(axis=(1, 3))
    full = np.zeros((2 * n, 2 * n))
    full[:n, n:] = pk
    scores = make_scores({("pk", "OK"): full}, layers=2, heads=n, d_model=d, rank=m)
    result = significance(scores, "OK")
    p = result.p[~np.isnan(result.p)]
    assert len(p) == n * n
    assert stats.kstest(p, "uniform").pvalue > 1e-3
    assert result.count(0.05) == 0
    z = result.z[~np.isnan(result.z)]
    loose = significance(scores, "OK", approximation="loose")
    np.testing.assert_allclose(loose.p[~np.isnan(loose.p)], stats.norm.sf(loose.z[~np.isnan(loose.z)]))
    assert not np.allclose(p, stats.norm.sf(z), rtol=0.01)


def test_z_uses_each_heads_own_dimension() -> None:
    scores = make_scores({("pk", "OK"): np.full((4, 4), 2.0)}, layers=2, heads=2, d_model=32, rank=8)
    scores.role_ranks[hs.Role.K][3] = 5
    z = z_scores(scores, "OK")
    assert z[0, 2] == pytest.approx((2 - 8 * 8 / 32) / moments(32, 8).sd)
    assert z[0, 3] == pytest.approx((2 - 8 * 5 / 32) / moments(32, 8, 5).sd)
    assert np.isnan(z[2, 0])
    scores.role_ranks[hs.Role.K][3] = 32  # fills the space: PK is what it must be
    result = significance(scores, "OK")
    assert result.z[0, 3] == 0
    assert result.p[0, 3] == 1


def anisotropic_pk(seed: int, layers: int, heads: int, d: int = 48, m: int = 6) -> dict[tuple[str, str], np.ndarray]:
    """PK of heads that all prefer a few directions, some shared by both roles: like trained weights, but not wired."""
    rng = np.random.default_rng(seed)
    n = layers * heads
    scale = 1 / np.arange(1, d + 1) ** 0.7
    bases = {}
    for role in "OK":
        # Heads differ in how strongly they follow the common directions.
        strength = rng.uniform(0.3, 1.5, size=(n, 1, 1))
        bases[role] = np.linalg.qr(rng.normal(size=(n, d, m)) * scale[:, None] ** strength)[0]
    overlap = np.einsum("adi,bdj->abij", bases["O"], bases["K"])
    pk = np.square(overlap).sum(axis=(2, 3))
    return {("pk", "OK"): pk, ("pk", "KO"): pk.T}


def shuffled(arrays: dict[tuple[str, str], np.ndarray], order: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    return {key: values[np.ix_(order, order)] for key, values in arrays.items()}


def test_the_reversed_null_keeps_its_level_on_shuffled_heads_and_the_random_one_does_not() -> None:
    layers, heads = 6, 8
    arrays = anisotropic_pk(9, layers, heads)
    rng = np.random.default_rng(10)
    rates = {null: [] for null in ("random", "reversed")}
    for _ in range(60):
        order = rng.permutation(layers * heads)
        scores = make_scores(shuffled(arrays, order), layers=layers, heads=heads, d_model=48, rank=6)
        for null, rate in rates.items():
            p = significance(scores, "OK", null=null).p
            rate.append([np.nanmean(np.where(np.isnan(p), np.nan, p <= level)) for level in (0.01, 0.05, 0.2)])
    reversed_rate, spread = np.mean(rates["reversed"], axis=0), np.std(rates["reversed"], axis=0) / np.sqrt(60)
    assert (np.abs(reversed_rate - [0.01, 0.05, 0.2]) < 4 * spread).all()
    assert (reversed_rate < [0.015, 0.065, 0.23]).all()
    assert np.mean(rates["random"], axis=0)[1] > 0.5


def test_the_reversed_null_finds_planted_wiring() -> None:
    layers, heads = 6, 8
    arrays = anisotropic_pk(11, layers, heads)
    pk = arrays["pk", "OK"].copy()
    planted = np.zeros_like(pk, dtype=bool)
    planted[3:10, 30:36] = True  # forward: sources of layers 0 and 1, targets of layers 3 and 4
    pk[planted] += 4
    scores = make_scores({("pk", "OK"): pk, ("pk", "KO"): pk.T}, layers=layers, heads=heads, d_model=48, rank=6)
    result = significance(scores, "OK", null="reversed")
    assert (result.q[planted] < 0.05).all()
    assert result.count(0.05) < 1.2 * planted.sum()
    # The same pairs the other way round are controls, not discoveries.
    assert significance(scores, "KO", null="reversed").count(0.05) == 0


def test_reversed_z_is_counted_in_standard_deviations_of_the_reversed_pairs() -> None:
    scores = random_scores(5, ("OK", "KO"), layers=4, heads=3)
    control = scores["pk", "KO"].pairs()[2].astype(np.float64)
    rows, columns, values = scores["pk", "OK"].pairs()
    found = significance(scores, "OK", null="reversed")
    np.testing.assert_allclose(found.z[rows, columns], stats.zmap(values.astype(np.float64), control))
    assert np.isnan(found.z).sum() == found.z.size - len(values)


def test_reversed_pairs_that_never_vary_give_a_z_of_0() -> None:
    n = 6
    values = {("pk", "OK"): np.arange(float(n * n)).reshape(n, n), ("pk", "KO"): np.full((n, n), 0.5)}
    scores = make_scores(values, layers=3, heads=2)
    found = significance(scores, "OK", null="reversed")
    present = ~np.isnan(scores["pk", "OK"].values)
    assert (found.z[present] == 0).all() and np.isnan(found.z[~present]).all()


def test_five_per_cent_is_the_default_rate() -> None:
    scores = make_scores({("pk", "OK"): np.linspace(0.6, 2.4, 1600).reshape(40, 40)}, layers=2, heads=20)
    found = significance(scores, "OK")
    q = found.q[~np.isnan(found.q)]
    assert found.count() == np.count_nonzero(q <= 0.05) < np.count_nonzero(q <= 0.1)


def test_reversed_p_is_the_rank_among_reversed_pairs() -> None:
    scores = random_scores(12, ("OK", "KO"), layers=4, heads=3)
    result = significance(scores, "OK", null="reversed", metric="pk")
    control = scores["pk", "KO"].pairs()[2]
    for i, j, value in zip(*scores["pk", "OK"].pairs(), strict=True):
        assert result.p[i, j] == pytest.approx((1 + np.sum(control >= value)) / (1 + len(control)))


def test_the_reversed_null_keeps_its_level_on_shuffled_gpt2(gpt2_dir: Path) -> None:
    pk = hs.score(hs.open(gpt2_dir), "pk", "OK", pairs="all")["pk", "OK"].values
    rng = np.random.default_rng(13)
    rates, random_rates = [], []
    for _ in range(30):
        order = rng.permutation(144)
        arrays = shuffled({("pk", "OK"): pk, ("pk", "KO"): pk.T}, order)
        scores = make_scores(arrays, layers=12, heads=12, d_model=768, rank=64)
        p = significance(scores, "OK", null="reversed").p
        rates.append([np.sum(p <= level) / 9504 for level in (0.01, 0.05)])
        random_rates.append(np.sum(significance(scores, "OK").p <= 0.05) / 9504)
    np.testing.assert_allclose(np.mean(rates, axis=0), [0.01, 0.05], rtol=0.15)
    assert np.mean(random_rates) > 0.4  # what the paper warns of


def test_nulls_say_why_they_cannot_be_used() -> None:
    scores = random_scores(14, ("OK", "OV", "VO", "QQ"), layers=3, heads=2, metrics=("pk", "cs"))
    with pytest.raises(HeadspanError, match="needs the pk scores of KO"):
        significance(scores, "OK", null="reversed")
    with pytest.raises(HeadspanError, match="QQ has no reversed null"):
        significance(scores, "QQ", null="reversed")
    with pytest.raises(HeadspanError, match="for pk only, not for cs"):
        significance(scores, "OK", metric="cs")
    assert significance(scores, "OV", metric="cs", null="reversed").p.shape == (6, 6)
    with pytest.raises(HeadspanError, match=r"null.*random, reversed, within"):
        significance(scores, "OK", null="other")  # type: ignore[arg-type]
    with pytest.raises(HeadspanError, match="at least two layers"):
        significance(random_scores(0, ("OV", "VO"), layers=1, heads=3), "OV", null="reversed")
    with pytest.raises(HeadspanError, match="no forward pairs"):
        kl_divergence(random_scores(0, ("OV",), layers=1, heads=3), "OV")
    with pytest.raises(HeadspanError, match="needs pk scores"):
        summarise(random_scores(0, ("OV",), layers=2, heads=3, metrics=("cs",)))


def test_kl_is_small_for_random_values_and_large_for_shifted_ones() -> None:
    d, m, n = 64, 8, 60
    full = np.zeros((2 * n, 2 * n))
    full[:n, n:] = sample_pk(n * n, d, m, seed=15).reshape(n, n)
    by_chance = make_scores({("pk", "OK"): full}, layers=2, heads=n, d_model=d, rank=m)
    shifted = make_scores({("pk", "OK"): full + 0.3}, layers=2, heads=n, d_model=d, rank=m)
    assert 0 < kl_divergence(by_chance, "OK") < 0.03
    assert kl_divergence(shifted, "OK") > 0.2

    # The definition, bin by bin.
    values = by_chance["pk", "OK"].pairs()[2]
    edges, random = np.linspace(0, m, 256), moments(d, m)
    total = 0.0
    for low, high in pairwise(edges):
        observed = np.mean((values >= low) & (values < high))
        expected = stats.norm(random.mean, random.sd).cdf(high) - stats.norm(random.mean, random.sd).cdf(low)
        if observed > 0 and expected > 0:
            total += expected * np.log(expected / observed)
    assert kl_divergence(by_chance, "OK") == pytest.approx(total)


def unequal_scores(values: np.ndarray) -> tuple[hs.Scores, np.ndarray, np.ndarray]:
    """Two layers of three heads with subspaces of several dimensions, one more common; and those of every pair."""
    scores = make_scores({("pk", "OK"): values}, layers=2, heads=3, d_model=24, rank=8)
    scores.role_ranks[hs.Role.O][:3] = [8, 8, 2]
    scores.role_ranks[hs.Role.K][3:] = [6, 8, 3]
    first, second = np.meshgrid([8, 8, 2], [6, 8, 3], indexing="ij")
    return scores, first.ravel(), second.ravel()


def test_unequal_dimensions_in_the_spread_of_random_means_and_in_kl() -> None:
    values = np.zeros((6, 6))
    values[:3, 3:] = [[2.1, 2.7, 0.9], [1.3, 1.7, 0.6], [0.4, 0.7, 0.3]]
    scores, m, m2 = unequal_scores(values)
    (line,) = summarise(scores)
    means = m * m2 / 24
    variances = np.array([float(moments(24, a, b).variance) for a, b in zip(m, m2, strict=True)])
    assert line.random_mean == pytest.approx(means.mean())
    # The law of total variance over pairs drawn at random.
    assert line.random_sd == pytest.approx(np.sqrt(np.mean(variances + (means - means.mean()) ** 2)))
    observed = values[:3, 3:].ravel()
    assert line.shift == pytest.approx(np.mean((observed - means) / np.sqrt(variances)), rel=1e-5)
    points = [float(random_quantile(24, a, b)) for a, b in zip(m, m2, strict=True)]
    assert line.above == np.mean(observed > points)

    edges = np.linspace(0, 8, 256)
    masses = [np.diff(stats.norm(mean, np.sqrt(v)).cdf(edges)) for mean, v in zip(means, variances, strict=True)]
    expected, counts = np.mean(masses, axis=0), np.histogram(observed, edges)[0] / 9
    both = (expected > 0) & (counts > 0)
    total = np.sum(expected[both] * np.log(expected[both] / counts[both]))
    assert divergence(scores, "OK") == (pytest.approx(total), pytest.approx(expected[both].sum()))


def test_the_bins_of_kl_end_at_the_largest_pk_that_any_pair_can_have() -> None:
    values = np.zeros((6, 6))
    values[:3, 3:] = 1.5
    scores, _, _ = unequal_scores(values)
    scores.role_ranks[hs.Role.O][:] = 4
    expected, edges = 0.0, np.linspace(0, 4, 256)
    for rank in (6, 8, 3):
        random = moments(24, 4, rank)
        expected = expected + np.diff(stats.norm(random.mean, random.sd).cdf(edges)) / 3
    only = np.histogram(1.5, edges)[0] > 0
    assert kl_divergence(scores, "OK") == pytest.approx(float(expected[only][0] * np.log(expected[only][0])))


def test_one_head_that_fills_the_space_leaves_no_kl() -> None:
    scores, *_ = unequal_scores(np.full((6, 6), 0.5))
    divergence(scores, "OK")
    scores.role_ranks[hs.Role.O][0] = scores.d_model
    with pytest.raises(HeadspanError, match="fill the whole space"):
        divergence(scores, "OK")


def test_loose_variance_is_that_of_independent_entries() -> None:
    """PK as a sum of m·m' squares of independent normal entries of variance 1/d."""
    assert float(moments(50, 6, 4, "loose").variance) == pytest.approx(6 * 4 * 2 / 50**2)
    draws = np.square(np.random.default_rng(17).normal(scale=50**-0.5, size=(20_000, 6, 4))).sum(axis=(1, 2))
    assert draws.var() == pytest.approx(float(moments(50, 6, 4, "loose").variance), rel=0.05)
    assert float(moments(50, 6, 4, "loose").mean) == pytest.approx(24 / 50)
    with pytest.raises(HeadspanError, match="tight or loose"):
        moments(50, 6, 4, "other")  # type: ignore[arg-type]


@pytest.mark.parametrize(("d", "m", "m2"), [(40, 6, 1), (40, 10, 4), (30, 20, 15), (96, 8, 8), (12, 3, 3), (30, 29, 2)])
def test_one_random_pair_in_a_thousand_lies_above_the_high_point(d: int, m: int, m2: int) -> None:
    draws = sample_pk(60_000 if m * d < 400 else 20_000, d, m, m2, seed=18)
    above = np.count_nonzero(draws > random_quantile(d, m, m2))
    expected = len(draws) / 1000
    assert abs(above - expected) < 4 * np.sqrt(expected) + 0.2 * expected
    if m2 == 1:  # the law itself
        assert float(random_quantile(d, m, 1)) == pytest.approx(stats.beta(m / 2, (d - m) / 2).ppf(0.999))
    assert float(random_quantile(d, m, m2, 0.5)) == pytest.approx(np.median(draws), rel=0.02)


def test_a_subspace_that_fills_the_space_is_never_above_chance() -> None:
    assert float(random_quantile(6, 6, 2)) == 2
    values = np.full((4, 4), 3.0 + 1e-6)  # what rounding makes of 3
    scores = make_scores({("pk", "OK"): values}, layers=2, heads=2, d_model=3, rank=3)
    (line,) = summarise(scores)
    assert (line.above, line.shift, line.random_significant) == (0.0, 0.0, 0)
    assert np.isnan(line.kl)


def test_the_pairing_farthest_from_chance_has_no_kl_of_0_and_the_largest_shift() -> None:
    """64 pairs of the demo model lie where random subspaces never do, so the paper's sum has no terms."""
    scores = hs.score(hs.open("demo"), "pk")
    assert kl_divergence(scores, "VO") == pytest.approx(0, abs=1e-3)
    lines = {str(line.pairing): line for line in summarise(scores, kl=True)}
    assert max(lines, key=lambda name: abs(lines[name].shift)) == "VO"
    assert lines["VO"].above == 1
    assert np.isnan(lines["VO"].kl)
    far = [line for line in lines.values() if abs(line.shift) > 3]
    assert all(np.isnan(line.kl) or line.kl > 1 for line in far)
    assert all(np.isnan(line.kl) for line in summarise(scores))
    shifted = CliRunner().invoke(app, ["baseline", "demo"])
    assert "+21.7" in shifted.stdout
    assert " kl " not in shifted.stdout


def test_baseline_command(tmp_path: Path) -> None:
    scores = random_scores(16, tuple(map(str, PAIRINGS)), layers=3, heads=4)
    path = tmp_path / "result.safetensors"
    scores.save(path)
    run = CliRunner().invoke(app, ["baseline", str(path), "--json"])
    assert run.exit_code == 0, run.output
    found = {row["pairing"]: row for row in json.loads(run.stdout)}
    line = next(line for line in summarise(scores) if str(line.pairing) == "OK")
    assert found["OK"] == {k: v for k, v in line._asdict().items() if k != "kl"} | {"pairing": "OK"}
    assert found["OK"]["random_mean"] == 1.0
    assert found["QQ"]["reversed_significant"] is None
    asked = CliRunner().invoke(app, ["baseline", str(path), "--json", "--kl"])
    shown = {row["pairing"]: row["kl"] for row in json.loads(asked.stdout)}
    for pairing in PAIRINGS:
        kl, seen = divergence(scores, pairing)
        assert shown[str(pairing)] == (None if seen < 0.5 else pytest.approx(kl))
    for options, told in (
        (["--null", "random"], "needs --pairing"),
        (["--kl", "--pairing", "OK"], "Leave out --pairing"),
    ):
        refused = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["baseline", str(path), *options])
        assert isinstance(refused.exception, HeadspanError)
        assert told in str(refused.exception)
    listed = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["baseline", str(path), "--pairing", "OK", "--null", "reversed", "--top", "0", "--csv"]
    )
    lines = listed.stdout.splitlines()
    assert lines[0] == "pairing,rank,source,target,score,z,p,q,q_within"
    assert len(lines) == 1 + len(scores["pk", "OK"].pairs()[2])
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["baseline", str(path)])
    assert " reversed " in shown.stdout
