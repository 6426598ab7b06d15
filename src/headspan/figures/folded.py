"""How far folding the norms into the weights moves the similarities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headspan.figures import style
from headspan.figures.canvas import new_figure
from headspan.heads import PAIRINGS, Pairing
from headspan.scores import Scores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

_BARS = (style.GROUP_COLOURS["first only"], style.GROUP_COLOURS["second only"])


def mse_figure(errors: Mapping[str, Mapping[Pairing, float]]) -> Figure:
    """Bars of the mean squared difference between original and folded weights, by pairing and similarity."""
    figure = new_figure(8.4, 3.1)
    axes = figure.add_axes((0.085, 0.15, 0.9, 0.75))
    width = 0.8 / len(errors)
    for i, (metric, by_pairing) in enumerate(errors.items()):
        name = "PK / d_head" if metric == "pk" else style.metric_short(metric)
        x = np.arange(len(PAIRINGS)) + (i - (len(errors) - 1) / 2) * width
        bars = axes.bar(x, [by_pairing[p] for p in PAIRINGS], width * 0.92, color=_BARS[i % 2], label=name)
        for pairing, bar in zip(PAIRINGS, bars, strict=True):
            bar.set_gid(f"bar:{metric}:{pairing}")
    axes.set_xticks(range(len(PAIRINGS)), [str(pairing) for pairing in PAIRINGS])
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel="mean squared difference", xlim=(-0.6, len(PAIRINGS) - 0.4))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_title("Original against folded weights, forward pairs", loc="left")
    axes.legend()
    return figure


def shared_edges(first: Scores, second: Scores, metric: str, pairings: Sequence[Pairing], k: int) -> int:
    """How many of the k best forward pairs of each pairing the two results have in common."""
    common = 0
    for pairing in pairings:
        tops = [{(e.source, e.target) for e in scores[metric, pairing].forward().top(k)} for scores in (first, second)]
        common += len(tops[0] & tops[1])
    return common


def mean_squared_difference(first: Scores, second: Scores, metric: str, pairing: Pairing) -> float:
    """Over forward pairs; PK is divided by the smaller subspace dimension, which puts it on the scale of CS."""
    a, b = (scores[metric, pairing].forward() for scores in (first, second))
    difference = a.values.astype(np.float64) - b.values
    if metric == "pk":
        difference /= np.minimum(first.ranks(pairing.source)[:, None], first.ranks(pairing.target)[None, :])
    return float(np.nanmean(difference**2))
