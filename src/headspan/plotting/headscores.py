"""Head scores as heat maps, each with the attention of its best head (figure 7 of the paper and following)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headspan.plotting import style
from headspan.plotting.canvas import heat_map, new_figure, thinned
from headspan.results.head_scores import KIND_TITLES, BehaviourScores
from headspan.running.behaviour import AttentionPatterns
from headspan.vocabulary.heads import Head

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def head_score_figure(scores: BehaviourScores, kinds: Sequence[str], patterns: AttentionPatterns | None) -> Figure:
    """One row per kind: all heads on the left, the attention of the best one on the right if known."""
    columns = 1 if patterns is None else 2
    figure = new_figure(4.6 * columns + 0.2, 4.1 * len(kinds))
    height = figure.get_figheight()
    for row, kind in enumerate(kinds):
        bottom = (4.1 * (len(kinds) - row - 1) + 0.62) / height
        best, value = scores.top(kind, 1)[0]
        axes = figure.add_axes((0.52 / figure.get_figwidth(), bottom, 3.6 / figure.get_figwidth(), 3.1 / height))
        _heat(figure, axes, scores, kind)
        axes.set_title(f"{KIND_TITLES.get(kind, kind)} scores", loc="left")
        if patterns is not None:
            left = 5.75 / figure.get_figwidth()
            axes = figure.add_axes((left, bottom + 0.25 / height, 3.0 / figure.get_figwidth(), 2.85 / height))
            _pattern(axes, patterns, Head.parse(best))
            axes.set_title(f"{best}, score {value:.3f}", loc="left")
    return figure


def _heat(figure: Figure, axes: Axes, scores: BehaviourScores, kind: str) -> None:
    grid = scores.grid(kind)
    layers = sorted({head.layer for head in scores.heads})
    image = heat_map(axes, grid, vmin=0, vmax=1, aspect="auto")
    image.set_gid(f"scores:{kind}")
    rows, columns = thinned(len(layers)), thinned(grid.shape[1])
    axes.set_yticks(rows, [str(layers[i]) for i in rows])
    axes.set_xticks(columns, [str(i) for i in columns])
    axes.set(xlabel="head", ylabel="layer")
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(length=0)


def _pattern(axes: Axes, patterns: AttentionPatterns, head: Head) -> None:
    pattern = patterns.patterns[head]
    shown = np.where(np.triu(np.ones_like(pattern, dtype=bool), 1) & (pattern == 0), np.nan, pattern)
    heat_map(axes, shown, vmin=0, vmax=1).set_gid(f"pattern:{head}")
    at = thinned(len(patterns.tokens), 26)
    size = 7.0 if len(at) <= 20 else 5.5
    names = [patterns.tokens[i] for i in at]
    axes.set_xticks(at, names, rotation=90, fontsize=size)
    axes.set_yticks(at, names, fontsize=size)
    axes.spines[["left", "bottom"]].set(visible=True, color=style.FAINT)
