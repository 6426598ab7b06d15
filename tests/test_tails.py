"""The fitted tail: against known distributions, kept to its level on exchangeable heads, and better than counting."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from headspan.statistics.significance import benjamini_hochberg, significance
from headspan.statistics.tails import LEAST_FIT, Tail, _anderson_darling, _l_moment_fit, fit_tail
from science_helpers import make_scores


@pytest.mark.parametrize("shape", [0.05, 0.2, 0.4])
def test_the_fit_finds_the_parameters_that_made_the_sample(shape: float) -> None:
    rng = np.random.default_rng(1)
    draws = np.sort(stats.genpareto.rvs(shape, scale=2.5, size=(300, 500), random_state=rng), axis=1)
    shapes, scales = _l_moment_fit(draws)
    error = np.std(shapes) / np.sqrt(300)
    # The shape is cut at 0, which lifts its mean a little where it is near 0.
    assert abs(np.mean(shapes) - shape) < 4 * error + 0.02
    assert np.mean(scales) == pytest.approx(2.5, rel=0.02)
    by_likelihood = stats.genpareto.fit(draws[0], floc=0)
    assert shapes[0] == pytest.approx(by_likelihood[0], abs=0.12)
    assert scales[0] == pytest.approx(by_likelihood[2], rel=0.12)


def test_a_bounded_tail_is_never_assumed() -> None:
    shape, scale = _l_moment_fit(np.sort(np.random.default_rng(2).uniform(size=400)))
    assert shape == 0
    assert scale == pytest.approx(0.5, abs=0.05)  # the mean, as the exponential has it


@pytest.mark.filterwarnings("ignore::FutureWarning")  # scipy asks for a method of p-values, which are not used
def test_anderson_darling_is_scipys() -> None:
    excess = np.sort(np.random.default_rng(3).exponential(size=80))
    ours = _anderson_darling(excess, np.array(0.0), np.array(excess.mean()))
    assert ours == pytest.approx(stats.anderson(excess, "expon").statistic)


def test_the_fit_of_a_small_sample_has_its_unbiased_l_moments() -> None:
    """Second L-moment of n numbers: half the mean distance of two of them; shape 2 − λ₁/λ₂, scale λ₁(λ₁/λ₂ − 1)."""
    excess = np.array([1.0, 2.0, 4.0, 30.0])
    first = excess.mean()
    second = np.mean([abs(a - b) for a, b in combinations(excess, 2)]) / 2
    shape, scale = _l_moment_fit(excess)
    assert shape == pytest.approx(2 - first / second) and shape > 0
    assert scale == pytest.approx(first * (first / second - 1))


def test_a_number_that_a_distribution_excludes_is_far_and_not_infinitely_far() -> None:
    """A cumulative probability of 1, or one that float64 cannot tell from it, would make the distance NaN or inf."""
    near, far = (_anderson_darling(np.array([0.5, 1.0, x]), np.array(-0.5), np.array(1.0)) for x in (1.9, 2.5))
    assert np.isfinite([near, far]).all() and far > near + 5


def test_a_perfect_sample_fits_with_p_1() -> None:
    """No draw is nearer to its distribution than the quantiles themselves; the fit counts as one of the draws."""
    quantiles = (np.arange(4000) + 0.5) / 4000
    tail = fit_tail(stats.genpareto.ppf(quantiles, 0.0))
    assert isinstance(tail, Tail) and tail.fit == 1.0


def fits(draw, times: int = 80) -> float:
    """Share of control groups whose tail was used."""
    return float(np.mean([isinstance(fit_tail(draw(np.random.default_rng(i))), Tail) for i in range(times)]))


def test_the_check_passes_what_fits_and_stops_what_does_not() -> None:
    good = fits(lambda rng: rng.exponential(size=2000))
    assert abs(good - (1 - LEAST_FIT)) < 4 * np.sqrt(LEAST_FIT / 80)

    def two_kinds(rng: np.random.Generator) -> np.ndarray:  # a clump of pairs of another kind far out
        return np.concatenate([rng.exponential(size=1980), rng.normal(12, 0.2, size=20)])

    assert fits(two_kinds) < 0.1


def test_without_a_tail_a_message_says_why() -> None:
    assert "only 199 reversed pairs" in str(fit_tail(np.arange(199.0)))
    assert isinstance(fit_tail(np.random.default_rng(0).exponential(size=200)), (Tail, str))
    assert "too many equal scores" in str(fit_tail(np.repeat([1.0, 2.0], [970, 30])))
    assert "do not follow" in str(fit_tail(np.concatenate([np.linspace(0, 1, 1000), np.full(30, 50.0)])))


def test_the_tail_holds_a_twentieth_within_limits_and_joins_the_count() -> None:
    rng = np.random.default_rng(4)
    for total, count in ((400, 50), (2000, 100), (40_000, 500)):
        tail = fit_tail(controls := rng.exponential(size=total))
        assert isinstance(tail, Tail)
        assert (tail.count, tail.total) == (count, total)
        assert np.count_nonzero(controls > tail.threshold) == count
        # At the threshold every excess is reached: the fitted and the counted p agree.
        assert tail.p_values(np.array([tail.threshold]))[0] == pytest.approx((1 + count) / (1 + total))
        p = tail.p_values(tail.threshold + np.linspace(0, 40, 50))
        assert (np.diff(p) < 0).all()
        assert p[-1] > 0


def test_fitted_p_values_average_over_what_the_fit_does_not_know() -> None:
    tail = fit_tail(np.random.default_rng(5).exponential(size=1000))
    assert isinstance(tail, Tail)
    far = np.array([tail.threshold + 12.0])
    at_its_word = stats.genpareto.sf(12.0, tail.shape, scale=tail.scale) * 51 / 1001
    assert tail.p_values(far)[0] > 1.5 * at_its_word
    assert np.array_equal(tail.p_values(far), fit_tail(np.random.default_rng(5).exponential(size=1000)).p_values(far))


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, n: rng.exponential(size=n),
        lambda rng, n: rng.normal(size=n),
        lambda rng, n: rng.beta(2, 5, size=n),
        lambda rng, n: rng.standard_t(6, size=n),
    ],
    ids=["exponential", "normal", "bounded", "heavy"],
)
def test_small_p_values_come_as_often_as_they_say(draw) -> None:
    """Independent scores: p ≤ α in a share α of forward pairs, down to where counting cannot go; never more."""
    rng = np.random.default_rng(6)
    layers, heads, times = 8, 6, 60
    n = layers * heads
    levels, hits, discoveries, pairs = np.array([0.05, 0.01, 1e-3, 1e-4]), np.zeros(4), 0, 0
    for _ in range(times):
        values = draw(rng, n * n).reshape(n, n)
        scores = make_scores({("pk", "OK"): values, ("pk", "KO"): values.T}, layers=layers, heads=heads)
        result = significance(scores, "OK", null="reversed")
        p = result.p[~np.isnan(result.p)]
        hits += (p[:, None] <= levels).sum(axis=0)
        pairs += len(p)
        discoveries += result.count(0.05) > 0
    # Independent pairs, but all of one result share their controls: twice the binomial error at 0.05 and 0.01.
    expected, error = levels * pairs, np.sqrt(levels * pairs)
    assert (np.abs(hits - expected)[:2] < 8 * error[:2]).all()
    assert (hits[2:] < expected[2:] + 4 * error[2:]).all()
    assert hits[2] > 0.3 * expected[2]
    assert discoveries <= 9  # of 60 at a rate of 0.05: more has a chance below 0.001


def few_edges(planted: int) -> np.ndarray:
    values = np.random.default_rng(7).exponential(size=(48, 48))
    for i in range(planted):
        values[i, 40 + i] = 40.0 + i
    return values


def test_a_few_outstanding_edges_count() -> None:
    values = few_edges(3)
    scores = make_scores({("pk", "OK"): values, ("pk", "KO"): values.T}, layers=8, heads=6)
    result = significance(scores, "OK", null="reversed")
    assert result.tail is not None
    assert {tuple(at) for at in np.argwhere(result.q <= 0.05)} == {(0, 40), (1, 41), (2, 42)}
    assert "generalised Pareto" in result.note
    # By counting, three pairs above every control are not enough.
    control = np.sort(scores["pk", "KO"].pairs()[2])
    forward = scores["pk", "OK"].pairs()[2]
    counted = (1 + len(control) - np.searchsorted(control, forward)) / (1 + len(control))
    assert benjamini_hochberg(counted).min() > 0.05


def test_below_the_threshold_and_without_a_tail_p_is_counted_and_ties_count_against_the_pair() -> None:
    values = np.full((4, 4), 1.0)
    values[0, 3] = 2.0
    scores = make_scores({("pk", "OK"): values, ("pk", "KO"): values}, layers=2, heads=2)
    result = significance(scores, "OK", null="reversed")
    assert result.tail is None
    assert "cannot be below 0.2" in result.note
    # Four controls, one of them as high as the pair: it has reached the pair.
    assert result.p[0, 3] == pytest.approx(2 / 5)
    assert result.p[0, 2] == pytest.approx(5 / 5)
    large = np.random.default_rng(8).exponential(size=(48, 48))
    scores = make_scores({("pk", "OK"): large, ("pk", "KO"): large.T}, layers=8, heads=6)
    result = significance(scores, "OK", null="reversed")
    assert result.tail is not None
    control, forward = scores["pk", "KO"].pairs()[2], scores["pk", "OK"].values
    low = forward <= result.tail.threshold
    assert low.any()
    counted = [(1 + np.sum(control >= value)) / (1 + len(control)) for value in forward[low]]
    np.testing.assert_allclose(result.p[low], counted)


def test_nothing_found_reports_the_smallest_q() -> None:
    values = few_edges(0)
    scores = make_scores({("pk", "OK"): values, ("pk", "KO"): values.T}, layers=8, heads=6)
    result = significance(scores, "OK", null="reversed")
    assert result.count(0.05) == 0
    assert result.smallest_q == np.nanmin(result.q)
    count = result.count(result.smallest_q)
    assert count > 0
    assert f"the smallest q is {result.smallest_q:.3g}" in result.nothing(0.05)
    assert ("one pair has" if count == 1 else f"{count:,} pairs have") in result.nothing(0.05)
