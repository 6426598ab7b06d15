"""The upper tail of a control group as a generalised Pareto distribution, for p-values beyond its largest member.

Counting how many controls reach a score cannot give a p-value below 1 / (1 + number of controls). Above a high
threshold the excesses of almost every distribution are close to generalised Pareto (Balkema & de Haan 1974, Pickands
1975), which extrapolates beyond the largest control (as Knijnenburg et al. 2009 do for permutation tests).

Conservative choices:

* Threshold: the largest 5 % of the controls are the tail, at least 50 and at most 500 of them.
* Fit: by L-moments (Hosking & Wallis 1987), which have a closed form and are stable in small samples. The shape is
  never negative: that would imply a largest possible score, and p = 0 beyond it. The exponential is used instead.
* Check: Anderson–Darling against refitted draws from the fit itself. Below ``LEAST_FIT`` the fit is not used. A caller
  may accept an exponential that fails because the controls have a lighter tail (``lighter``), which is conservative.
* Uncertainty: the tail probability is averaged over the fits to those draws (the bootstrap predictive distribution,
  Harris 1989). A single fit to 50 values gives p-values that are too small far out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TAIL_SHARE, LEAST_TAIL, MOST_TAIL = 0.05, 50, 500
LEAST_CONTROLS = 4 * LEAST_TAIL  # with fewer, LEAST_TAIL values would no longer be a tail
LEAST_FIT = 0.05
_DRAWS = 200
_SEED = 0  # makes p-values reproducible


@dataclass(frozen=True)
class Tail:
    """A fitted tail: excesses over ``threshold``, which ``count`` of ``total`` controls exceed.

    fit: p-value of the Anderson–Darling check; shapes, scales: of the fits to draws from this one.
    """

    threshold: float
    count: int
    total: int
    shape: float
    scale: float
    fit: float
    shapes: np.ndarray
    scales: np.ndarray

    def p_values(self, values: np.ndarray) -> np.ndarray:
        """Probability of a control at least this large, for values above the threshold."""
        from scipy.stats import genpareto

        excess = np.asarray(values, dtype=np.float64)[:, None] - self.threshold
        beyond = genpareto.sf(excess, self.shapes, scale=self.scales).mean(axis=1)
        return beyond * (1 + self.count) / (1 + self.total)


def fit_tail(controls: np.ndarray, *, lighter: bool = False) -> Tail | str:
    """The tail of a control group, or a message on why it cannot be used.

    >>> tail = fit_tail(np.random.default_rng(0).exponential(size=4000))
    >>> tail.count, bool(tail.shape < 0.15)
    (200, True)
    >>> fit_tail(np.arange(30.0))
    'only 30 reversed pairs, too few to fit their tail (200 are needed)'
    """
    from scipy.stats import genpareto

    ordered = np.sort(np.asarray(controls, dtype=np.float64))
    if len(ordered) < LEAST_CONTROLS:
        return f"only {len(ordered)} reversed pairs, too few to fit their tail ({LEAST_CONTROLS} are needed)"
    wanted = int(np.clip(round(TAIL_SHARE * len(ordered)), LEAST_TAIL, MOST_TAIL))
    threshold = ordered[-wanted - 1]
    excess = ordered[ordered > threshold] - threshold
    if len(excess) < LEAST_TAIL:
        return f"too many equal scores among the {len(ordered):,} reversed pairs to fit their tail"
    shape, scale = _l_moment_fit(excess)
    uniform = np.random.default_rng(_SEED).random((_DRAWS, len(excess)))
    draws = genpareto.ppf(np.sort(uniform, axis=1), shape, scale=scale)
    shapes, scales = _l_moment_fit(draws)
    distance = _anderson_darling(excess, shape, scale)
    # Count the fit itself as one of the draws, so that the p-value is never 0.
    fit = float((1 + np.count_nonzero(_anderson_darling(draws, shapes, scales) >= distance)) / (1 + _DRAWS))
    if fit < LEAST_FIT and not (lighter and shape == 0):
        return (
            f"the largest {len(excess)} of {len(ordered):,} reversed pairs do not follow a generalised Pareto "
            f"distribution (Anderson–Darling p = {fit:.2g})"
        )
    return Tail(float(threshold), len(excess), len(ordered), float(shape), float(scale), fit, shapes, scales)


def _l_moment_fit(excess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shape ≥ 0 and scale of generalised Pareto distributions, from ascending excesses along the last axis."""
    n = excess.shape[-1]
    mean = excess.mean(axis=-1)
    second = (excess * ((n - 1 - np.arange(n)) / (n - 1))).mean(axis=-1)  # E[x·(1 − F(x))]
    gap = mean - 2 * second  # the second L-moment, positive unless all excesses are equal
    with np.errstate(divide="ignore", invalid="ignore"):
        shape = 2 - mean / gap
    exponential = ~(shape > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(exponential, mean, 2 * mean * second / gap)
    return np.where(exponential, 0.0, shape), scale


def _anderson_darling(excess: np.ndarray, shape: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Anderson–Darling distance between ascending excesses and a distribution, weighted towards the far tail."""
    from scipy.stats import genpareto

    n = excess.shape[-1]
    below = genpareto.cdf(excess, np.asarray(shape)[..., None], scale=np.asarray(scale)[..., None])
    below = np.clip(below, 1e-300, 1 - 1e-16)
    weights = (2 * np.arange(1, n + 1) - 1) / n
    return -n - (weights * (np.log(below) + np.log1p(-below[..., ::-1]))).sum(axis=-1)


def p_among(
    control: np.ndarray, values: np.ndarray, fitted: Tail | str, what: str
) -> tuple[np.ndarray, Tail | None, str]:
    """p-values from ascending controls, shaped like the values; the tail that gave the smallest, and a note.

    They are counted up to the threshold of the fitted tail and come from the tail beyond it. ``what`` names the values
    in the note.
    """
    present = ~np.isnan(values)
    p = np.full(values.shape, np.nan)
    # Ties count against the value.
    p[present] = (1 + _reached(control, values[present])) / (1 + len(control))
    if isinstance(fitted, str):
        return p, None, f"{fitted}: p-values are counted and cannot be below {1 / (1 + len(control)):.2g}"
    with np.errstate(invalid="ignore"):
        beyond = values > fitted.threshold
    p[beyond] = fitted.p_values(values[beyond])
    note = (
        f"p-values of {what} above {fitted.threshold:.4g} come from a generalised Pareto distribution fitted to the "
        f"{fitted.count} reversed pairs above it (shape {fitted.shape:.2f}, Anderson–Darling p = {fitted.fit:.2g})"
    )
    return p, fitted, note


def _reached(control: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How many of the ascending controls are at least as large as each value. Sorted lookups are faster."""
    order = np.argsort(values)
    found = np.empty(len(values), dtype=np.int64)
    found[order] = len(control) - np.searchsorted(control, values[order], side="left")
    return found
