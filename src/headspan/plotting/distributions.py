"""PK against chance: KL by pairing (figure 8 of the paper), and random draws against their densities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from headspan.plotting import style
from headspan.plotting.canvas import heat_map, new_figure
from headspan.results.scores import Scores
from headspan.statistics.baseline import PairingSummary, summarise
from headspan.statistics.dimension import dimension_at
from headspan.subspaces.metrics import PK
from headspan.subspaces.random_subspaces import entry_density, moments, sample_pk, squared_entry_density
from headspan.vocabulary.heads import ROLES, Pairing
from headspan.vocabulary.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def kl_figure(scores: Scores) -> Figure:
    """KL(random ‖ observed) of all pairings, and the pairings farthest from and nearest to chance.

    Each KL is accompanied by the shift of the mean in random standard deviations. With few pairs the KL leaves out most
    of the random mass; it is then not shown, and the shift selects the histograms.
    """
    found = {line.pairing: line for line in summarise(scores, kl=True)}
    figure = new_figure(8.6, 3.9)
    left = figure.add_axes((0.065, 0.13, 0.36, 0.74))
    _kl_map(left, found)
    everywhere = all(np.isfinite(line.kl) for line in found.values())
    ordered = sorted(found.values(), key=lambda line: line.kl if everywhere else abs(line.shift))
    measure = "KL" if everywhere else "shift"
    for line, bottom, word in ((ordered[-1], 0.59, "largest"), (ordered[0], 0.13, "smallest")):
        axes = figure.add_axes((0.54, bottom, 0.44, 0.3))
        _observed(axes, scores, line.pairing)
        kl = f", {line.kl:.3f}" if everywhere else ""
        axes.set_title(
            f"{line.pairing}: {word} {measure}{kl}; mean {line.shift:+.1f} sd, {line.above:.0%} above random 99.9 %",
            loc="left",
            fontsize="small",
        )
        if line is ordered[-1]:
            axes.legend(loc="upper right")
        else:
            axes.set_xlabel("PK of forward pairs")
    return figure


def _kl_map(axes: Axes, found: dict[Pairing, PairingSummary]) -> None:
    lines = [[found[Pairing(a, b)] for b in ROLES] for a in ROLES]
    values = np.array([[line.kl for line in row] for row in lines])
    shown = np.isfinite(values)
    heat_map(axes, values).set_gid("kl")
    middle = (values[shown].min() + values[shown].max()) / 2 if shown.any() else 0.0
    for (row, column), value in np.ndenumerate(values):
        line = lines[row][column]
        ink = style.PAPER if shown[row, column] and value < middle else style.INK
        kl = f"{value:.3f}" if shown[row, column] else "–"
        text = axes.text(column, row, kl, ha="center", va="bottom", color=ink)
        text.set_gid(f"kl:{line.pairing}")
        shift = axes.text(column, row + 0.08, f"{line.shift:+.1f} sd", ha="center", va="top", color=ink, fontsize=7)
        shift.set_gid(f"shift:{line.pairing}")
    axes.set_xticks(range(4), list(map(str, ROLES)))
    axes.set_yticks(range(4), list(map(str, ROLES)))
    axes.set(xlabel="target", ylabel="source", title="KL(random ‖ observed) of PK, and shift of its mean")


def _observed(axes: Axes, scores: Scores, pairing: Pairing) -> None:
    """Histogram of the observed PK with the density expected between random subspaces."""
    rows, columns, values = scores[PK, pairing].forward().pairs()
    ranks, ranks2 = scores.ranks(pairing.source)[rows], scores.ranks(pairing.target)[columns]
    d = dimension_at(scores, pairing, rows, columns)
    mean, variance = (float(np.mean(moment)) for moment in moments(d, ranks, ranks2))
    # Use the bins of the KL divergence, so that the histogram shows what the number measures.
    bins = np.linspace(0, int(np.minimum(ranks, ranks2).max()), 256)
    density = np.full(len(values), 1 / (len(values) * bins[1]))
    axes.hist(
        values,
        bins=bins.tolist(),
        weights=density,
        histtype="stepfilled",
        color=style.HISTOGRAM,
        label="observed",
        gid=f"histogram:{pairing}",
    )
    usual = min(max(float(np.quantile(values, 0.999)), mean + 5 * variance**0.5), float(bins[-1]))
    right = _last_bin(axes, scores, pairing, values, float(bins[np.searchsorted(bins, usual)]), float(bins[1]))
    x = np.linspace(max(0.0, mean - 6 * variance**0.5), mean + 6 * variance**0.5, 400)
    axes.plot(x, _normal(x, mean, variance), color=style.DENSITY, linewidth=1.3, label="random subspaces")
    axes.set(xlim=(min(float(values.min()), x[0]) * 0.95, right), ylabel="density")


def _last_bin(axes: Axes, scores: Scores, pairing: Pairing, values: np.ndarray, end: float, width: float) -> float:
    """One bar for all pairs beyond the axis, with the best of them; the right end of the axis.

    The bar has four times the width of a bin, and the right area. It is often very low, so a triangle marks it.
    """
    best = scores[PK, pairing].forward().top(1)[0]
    beyond = int(np.count_nonzero(values > end))
    name = f"best: {best.source} → {best.target}, {best.score:.1f}"
    if not beyond:
        axes.annotate(
            name, (best.score, 0), (best.score, 0.3), ("data", "axes fraction"), fontsize="x-small", ha="right",
            arrowprops={"arrowstyle": "-", "color": style.MUTED, "linewidth": 0.6}, gid=f"best:{pairing}",
        )  # fmt: skip
        return end * 1.02
    left = end + 2 * width
    axes.bar(
        left, beyond / (len(values) * 4 * width), 4 * width, align="edge", color=style.HISTOGRAM,
        edgecolor=style.MUTED, linewidth=0.7, gid=f"beyond:{pairing}",
    )  # fmt: skip
    axes.plot(left + 2 * width, 0, "^", color=style.INK, markersize=3.5, clip_on=False, gid=f"beyond-mark:{pairing}")
    axes.annotate(
        f"{counted(beyond, 'pair')} above {end:.1f}\n{name}", (left + 2 * width, 0), (left + 6 * width, 0.3),
        ("data", "axes fraction"), fontsize="x-small", ha="right", gid=f"best:{pairing}",
        arrowprops={"arrowstyle": "-", "color": style.MUTED, "linewidth": 0.6},
    )  # fmt: skip
    return left + 6 * width


def random_figure(d: int, m: int, draws: int = 20_000, seed: int = 0) -> Figure:
    """Entries of random orthogonal matrices, their squares, and PK of random subspaces, against their densities."""
    random = np.random.default_rng(seed)
    # One entry of a random orthogonal matrix is one coordinate of a random direction.
    first, rest = random.standard_normal(draws), random.chisquare(d - 1, draws)
    entries = first / np.sqrt(first**2 + rest)
    pk = sample_pk(draws // 10, d, m, seed=random)
    figure = new_figure(10.2, 3.2)
    figure.subplots_adjust(left=0.055, right=0.99, bottom=0.15, top=0.89, wspace=0.22)
    panels = figure.subplots(1, 3)
    mean, tight = (float(moment) for moment in moments(d, m))
    loose = float(moments(d, m, approximation="loose").variance)
    _compare(
        panels[0], entries, "entry",
        {"density": lambda x: entry_density(x, d), "normal, d → ∞": lambda x: _normal(x, 0, 1 / d)},
    )  # fmt: skip
    _compare(
        panels[1], entries**2, "squared entry",
        {"density": lambda y: squared_entry_density(y, d), "chi-squared, d → ∞": lambda y: _scaled_chi(y, d)},
    )  # fmt: skip
    panels[1].set_yscale("log")
    panels[1].yaxis.set_major_formatter("{x:g}")
    _compare(
        panels[2], pk, "PK",
        {"tight": lambda x: _normal(x, mean, tight), "loose": lambda x: _normal(x, mean, loose)},
    )  # fmt: skip
    panels[0].set_title(f"Random orthogonal entry, d = {d}", loc="left")
    panels[1].set_title("Its square", loc="left")
    panels[2].set_title(f"PK of random subspaces, m = {m}", loc="left")
    panels[0].set_ylabel("density")
    return figure


def _compare(
    axes: Axes, sample: np.ndarray, name: str, densities: dict[str, Callable[[np.ndarray], np.ndarray]]
) -> None:
    low, high = float(sample.min()), float(sample.max())
    axes.hist(
        sample,
        bins=50,
        density=True,
        histtype="stepfilled",
        color=style.HISTOGRAM,
        label=f"{len(sample):,} draws",
        gid=f"histogram:{name}",
    )
    x = np.linspace(low, high, 600)[1:-1]
    looks = ((style.DENSITY, "-", 1.8), (style.SECOND_DENSITY, "--", 1.1))
    for (label, density), (colour, dashes, width) in zip(densities.items(), looks, strict=True):
        axes.plot(
            x, density(x), color=colour, linestyle=dashes, linewidth=width, label=label, gid=f"density:{name}:{label}"
        )
    axes.margins(y=0.32)  # room for the legend
    axes.legend(loc="upper right")
    axes.set_xlabel(name)


def _normal(x: np.ndarray, mean: float, variance: float) -> np.ndarray:
    return np.exp(-((x - mean) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)


def _scaled_chi(y: np.ndarray, d: int) -> np.ndarray:
    """Density of a squared standard normal variable divided by d."""
    return np.sqrt(d / (2 * np.pi * y)) * np.exp(-d * y / 2)
