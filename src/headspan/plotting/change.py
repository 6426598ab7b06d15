"""Change figures: drift of every head and role as a heat map, a training run, original against folded weights."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headspan.change.compare import PairingComparison
from headspan.change.diff import Diff
from headspan.change.series import Series
from headspan.plotting import style
from headspan.plotting.canvas import heat_map, new_figure, save, theme, thinned
from headspan.results.head_scores import KIND_TITLES
from headspan.subspaces.metrics import metric_of
from headspan.vocabulary.heads import FLOW_PAIRINGS, PAIRINGS, ROLES, Role

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BOLD = 4  # edges per panel drawn in colour and named


def save_change(change: Diff | Series, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Draw a comparison or a series in the format given by the file name."""
    with theme():
        save(drift_figure(change) if isinstance(change, Diff) else series_figure(change), path, force=force)


# -- two models ----------------------------------------------------------------------------------------------


def drift_figure(change: Diff) -> Figure:
    """One heat map per layer, heads in rows and roles in columns. Drift within rounding is left empty."""
    layers = sorted({line.head.layer for line in change.drift})
    rows = max(line.head.index for line in change.drift) + 1
    columns = min(len(layers), 12)
    lines = math.ceil(len(layers) / columns)
    width, height = 1.05 * columns + 1.3, lines * (0.2 * rows + 0.75) + 0.45
    figure = new_figure(max(width, 5.2), height)
    largest = max((line.drift for line in change.drift if line.moved), default=1.0)
    image = None
    for place, layer in enumerate(layers):
        row, column = divmod(place, columns)
        left, top = 0.55 + 1.05 * column, 0.75 + row * (0.2 * rows + 0.75)
        box = (left / figure.get_figwidth(), 1 - (top + 0.2 * rows + 0.2) / height, 0.85 / figure.get_figwidth())
        axes = figure.add_axes((*box, 0.2 * rows / height))
        image = heat_map(axes, _layer_grid(change, layer, rows), vmin=0, vmax=largest, aspect="auto")
        image.set_gid(f"drift:{layer}")
        axes.set_facecolor(style.UNLABELLED)
        axes.set_title(f"layer {layer}", fontsize=8)
        axes.set_xticks(range(len(ROLES)), [str(role) for role in ROLES])
        ticks = thinned(rows) if column == 0 else []
        axes.set_yticks(ticks, [str(i) for i in ticks])
        if column == 0:
            axes.set_ylabel("head")
    if image is not None:
        bar_axes = figure.add_axes((1 - 0.55 / figure.get_figwidth(), 0.45 / height, 0.12 / figure.get_figwidth(),
                                    max(0.6, height - 1.75) / height))  # fmt: skip
        bar = figure.colorbar(image, cax=bar_axes)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        bar.ax.tick_params(length=0)
        bar.ax.set_title("drift", fontsize=8)
    figure.text(0.12 / figure.get_figwidth(), 1 - 0.22 / height, _short(change.base, change.other), fontsize=10)
    figure.text(0.12 / figure.get_figwidth(), 1 - 0.42 / height, _moved(change), fontsize=8, color=style.MUTED)
    return figure


def _moved(change: Diff) -> str:
    moved, count = sum(line.moved for line in change.drift), len(change.drift)
    if any(math.isnan(line.floor) for line in change.drift):
        return f"{moved} of {count} weights moved; the share due to rounding is unknown"
    return f"{moved} of {count} weights moved by more than rounding" + ("; the others are left empty" * (moved < count))


def _layer_grid(change: Diff, layer: int, rows: int) -> np.ndarray:
    grid = np.full((rows, len(ROLES)), np.nan)
    for line in change.drift:
        if line.head.layer == layer and line.moved:
            grid[line.head.index, ROLES.index(line.role)] = line.drift
    return grid


def _short(*names: str) -> str:
    """Two references for a title, each cut from the front if it is long."""
    return " → ".join(name if len(name) <= 34 else f"…{name[-33:]}" for name in names)


# -- a training run ------------------------------------------------------------------------------------------


def series_figure(series: Series) -> Figure:
    """Small multiples over steps: edges by pairing, drift by role, and head scores if measured."""
    kinds = [kind for kind in ("previous_token", "induction") if kind in series.head_scores]
    panels = len(FLOW_PAIRINGS) + 1 + len(kinds)
    columns = 3 if panels > 4 else 2
    figure = new_figure(3.5 * columns, 2.5 * math.ceil(panels / columns) + 0.2, layout="constrained")
    grid = np.atleast_1d(figure.subplots(math.ceil(panels / columns), columns, sharex=True)).ravel()
    for axes, pairing in zip(grid, FLOW_PAIRINGS, strict=False):
        _edges(axes, series, str(pairing))
    _drift(grid[3], series)
    for axes, kind in zip(grid[4:], kinds, strict=False):
        _head_scores(axes, series, kind)
    for axes in grid[panels:]:
        axes.set_visible(False)
    for axes in grid[:panels]:
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)
        if len(series.steps) > 2 and series.numbers[-1] > 200 * max(1, series.numbers[1]):
            axes.set_xscale("symlog", linthresh=max(1, series.numbers[1]))
            axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
        axes.set_xlim(series.numbers[0], series.numbers[-1])
    return figure


def _edges(axes: Axes, series: Series, pairing: str) -> None:
    """PK of the edges of one pairing; the strongest at the last step are coloured and named."""
    mine = [i for i, edge in enumerate(series.edges) if str(edge.pairing) == pairing]
    order = sorted(mine, key=lambda i: -np.nan_to_num(series.scores[-1, i], nan=-1.0))
    colour = style.ROLE_COLOURS[Role(pairing[1])]
    for place, i in reversed(list(enumerate(order))):
        bold = place < BOLD
        (line,) = axes.plot(series.numbers, series.scores[:, i], color=colour if bold else style.FAINT,
                            lw=1.4 if bold else 0.6, zorder=2 + bold)  # fmt: skip
        line.set_gid(f"edge:{series.edges[i].source}-{series.edges[i].target}:{pairing}")
    names = "\n".join(f"{series.edges[i].source} → {series.edges[i].target}" for i in order[:BOLD])
    axes.text(0.03, 0.97, names, transform=axes.transAxes, va="top", fontsize=6.5, color=style.INK)
    axes.set_title(f"{pairing}: edges in the top {series.k} at some step", loc="left", fontsize=9)
    axes.set_ylabel("PK")


def _drift(axes: Axes, series: Series) -> None:
    """Drift of each role's heads from the last step: mean and interquartile range."""
    for role in ROLES:
        values = series.from_last[role]
        low, high = np.nanpercentile(values, [25, 75], axis=1)
        axes.fill_between(series.numbers, low, high, color=style.ROLE_COLOURS[role], alpha=0.15, lw=0)
        axes.plot(series.numbers, np.nanmean(values, axis=1), color=style.ROLE_COLOURS[role], lw=1.4, label=str(role))
    axes.legend(loc="upper right", ncols=2)
    axes.set_title("drift from the last step: mean, interquartile range", loc="left", fontsize=9)
    axes.set_ylabel("1 − PK/rank")
    axes.set_ylim(bottom=0)


def _head_scores(axes: Axes, series: Series, kind: str) -> None:
    """One kind of head score; the best heads at the last step are highlighted and named."""
    values = series.head_scores[kind]
    order = np.argsort(-values[-1], kind="stable")
    for place, i in reversed(list(enumerate(order))):
        bold = place < BOLD
        axes.plot(series.numbers, values[:, i], color=style.INK if bold else style.FAINT, lw=1.4 if bold else 0.6,
                  zorder=2 + bold)  # fmt: skip
    names = "\n".join(str(series.heads[Role.Q][i]) for i in order[:BOLD])
    axes.text(0.03, 0.97, names, transform=axes.transAxes, va="top", fontsize=6.5)
    axes.set_title(f"{KIND_TITLES.get(kind, kind)} scores", loc="left", fontsize=9)
    axes.set_ylabel("mean attention")
    axes.set_ylim(0, 1)


# -- original and folded weights -----------------------------------------------------------------------------


def mse_figure(lines: Sequence[PairingComparison]) -> Figure:
    """Bars of the mean squared difference between original and folded weights, by pairing and similarity."""
    metrics = dict.fromkeys(line.metric for line in lines)
    errors = {metric: {line.pairing: line.mse for line in lines if line.metric == metric} for metric in metrics}
    colours = style.GROUP_COLOURS["first only"], style.GROUP_COLOURS["second only"]
    figure = new_figure(8.4, 3.1)
    axes = figure.add_axes((0.085, 0.12, 0.9, 0.7))
    width = 0.8 / len(errors)
    for i, (metric, by_pairing) in enumerate(errors.items()):
        name = style.metric_short(metric) + (" / d_head" if metric_of(metric).grows_with_rank else "")
        x = np.arange(len(PAIRINGS)) + (i - (len(errors) - 1) / 2) * width
        bars = axes.bar(x, [by_pairing[p] for p in PAIRINGS], width * 0.92, color=colours[i % 2], label=name)
        for pairing, bar in zip(PAIRINGS, bars, strict=True):
            bar.set_gid(f"bar:{metric}:{pairing}")
    axes.set_xticks(range(len(PAIRINGS)), [str(pairing) for pairing in PAIRINGS])
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel="mean squared difference", xlim=(-0.6, len(PAIRINGS) - 0.4))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_title("Original against folded weights, forward pairs", loc="left")
    axes.legend()
    return figure
