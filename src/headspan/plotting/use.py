"""The score of every edge against its measured effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headspan.plotting import style
from headspan.plotting.canvas import legend_below, new_figure
from headspan.results.effects import Effects
from headspan.results.scores import Scores
from headspan.subspaces.metrics import PK
from headspan.vocabulary.heads import Pairing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def use_figure(scores: Scores, effects: Effects, pairings: Sequence[Pairing], metric: str = PK) -> Figure:
    """One panel per pairing; edges with a large effect are marked."""
    from matplotlib.lines import Line2D
    from scipy.stats import spearmanr

    figure = new_figure(3.3 * len(pairings) + 0.35, 3.9)
    figure.subplots_adjust(left=0.62 / figure.get_figwidth(), right=0.985, top=0.84, bottom=0.235, wspace=0.26)
    panels = figure.subplots(1, len(pairings), squeeze=False)[0]
    colours = {False: style.GROUP_COLOURS["neither"], True: style.GROUP_COLOURS["both"]}
    for axes, pairing in zip(panels, pairings, strict=True):
        values, measured = scores[metric, pairing].forward().values, effects.of(pairing)
        present = ~np.isnan(values) & ~np.isnan(measured)
        x, y, large = values[present], measured[present], effects.large(pairing)[present]
        for group in (False, True):
            axes.scatter(
                x[large == group], y[large == group], s=13 if group else 4, color=colours[group], linewidths=0,
                alpha=0.75 if group else 0.5, rasterized=True, gid=f"points:{pairing}:{'large' if group else 'rest'}",
            )  # fmt: skip
        agreement = f"ρ = {spearmanr(x, y)[0]:.2f}" if len(x) > 2 else "too few edges for ρ"
        count = f"{large.sum()} of {len(x):,} effects are large" if effects.compared else f"{len(x):,} edges"
        axes.set_title(f"{pairing}:  {agreement}\n{count}".replace("-", "−"))
        axes.set_xlabel(style.metric_short(metric))
        axes.set_ylabel(f"effect ({effects.unit(pairing)})")
    handles = [
        Line2D([], [], linestyle="", marker="o", color=colours[group], markersize=5, label=label)
        for group, label in (
            (True, "large effect: above the floor, and above a random output's effect"),
            (False, "other edges"),
        )
    ]
    legend_below(figure, handles, 0.36, 2)
    return figure
