"""Scatter plots of pairs: two similarities (figure 5 of the paper), and scores against measured effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.paper.evaluation import common_pairs, metric_agreement
from headspan.plotting import style
from headspan.plotting.canvas import legend_below, new_figure
from headspan.results.effects import Effects
from headspan.results.scores import Scores
from headspan.subspaces.metrics import CS, PK
from headspan.system.ordering import spearman
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Pairing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = {"neither": ".", "both": "s", "first only": "D", "second only": "^"}


def groups(x: np.ndarray, y: np.ndarray, share: float = 0.03) -> dict[str, np.ndarray]:
    """Which pairs are in the top share of both similarities, of one of them, or of neither.

    >>> {name: mask.tolist() for name, mask in groups(np.array([1, 2, 9]), np.array([5, 1, 9]), 0.5).items()}
    {'neither': [False, False, False], 'both': [False, False, True], 'first only': [False, True, False], \
'second only': [True, False, False]}
    """
    high_x, high_y = x >= np.quantile(x, 1 - share), y >= np.quantile(y, 1 - share)
    return {
        "neither": ~high_x & ~high_y,
        "both": high_x & high_y,
        "first only": high_x & ~high_y,
        "second only": ~high_x & high_y,
    }


def scatter_figure(
    scores: Scores, pairings: Sequence[Pairing], first: str = PK, second: str = CS, share: float = 0.03
) -> Figure:
    """One panel per pairing, with every pair inside the axes."""
    if not all(common_pairs(scores, pairing, first, second)[0].size for pairing in pairings):
        raise HeadspanError("it needs pairs of heads in different layers, and this model has none")
    figure, panels = _panels(len(pairings))
    name_x, name_y = style.metric_short(first), style.metric_short(second)
    for axes, pairing in zip(panels, pairings, strict=True):
        x, y = common_pairs(scores, pairing, first, second)
        for group, mask in groups(x, y, share).items():
            quiet = group == "neither"
            axes.scatter(
                x[mask], y[mask], s=3 if quiet else 13, marker=_MARKERS[group], color=style.GROUP_COLOURS[group],
                linewidths=0, alpha=0.6 if quiet else 0.75, rasterized=True, gid=f"points:{pairing}:{group}",
            )  # fmt: skip
        for values, limit in ((x, axes.set_xlim), (y, axes.set_ylim)):
            low, high = float(values.min()), float(values.max())
            room = 0.04 * (high - low) or 0.5
            limit(low - room, high + room)
        everywhere, at_top = metric_agreement(scores, pairing, first, second, 1 - share)
        numbers = f"{pairing}:  ρ = {everywhere:.3f} over all pairs\n{at_top:.3f} over the top {share:.0%} of either"
        axes.set_title(numbers.replace("-", "−"))
        axes.set_xlabel(name_x)
    panels[0].set_ylabel(name_y)
    top = f"top {share:.0%} of"
    captions = {
        "both": f"{top} both", "first only": f"{top} {name_x} only", "second only": f"{top} {name_y} only",
        "neither": f"{top} neither",
    }  # fmt: skip
    _legend(figure, [(_MARKERS[group], style.GROUP_COLOURS[group], text) for group, text in captions.items()])
    return figure


def effects_figure(scores: Scores, effects: Effects, pairings: Sequence[Pairing], metric: str = PK) -> Figure:
    """The score of every edge against its effect, one panel per pairing; edges with a large effect are marked."""
    figure, panels = _panels(len(pairings))
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
        agreement = f"ρ = {spearman(x, y):.2f}" if len(x) > 2 else "too few edges for ρ"
        count = f"{large.sum()} of {len(x):,} effects are large" if effects.compared else f"{len(x):,} edges"
        axes.set_title(f"{pairing}:  {agreement}\n{count}".replace("-", "−"))
        axes.set_xlabel(style.metric_short(metric))
        axes.set_ylabel(f"effect ({effects.unit(pairing)})")
    large_text = "large effect: above the floor, and above a random output's effect"
    _legend(figure, [("o", colours[True], large_text), ("o", colours[False], "other edges")])
    return figure


def _panels(count: int) -> tuple[Figure, Any]:
    """A figure with one panel per pairing and room for a legend below."""
    figure = new_figure(3.3 * count + 0.35, 3.9)
    figure.subplots_adjust(left=0.62 / figure.get_figwidth(), right=0.985, top=0.84, bottom=0.235, wspace=0.26)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _legend(figure: Figure, entries: Sequence[tuple[str, str, str]]) -> None:
    """The marker, colour and text of each group of points, below the panels."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="", marker=m, color=c, markersize=5, label=text) for m, c, text in entries]
    legend_below(figure, handles, 0.36, len(entries))
