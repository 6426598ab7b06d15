"""How far folding the norms into the weights moves the similarities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headspan.change.compare import PairingComparison
from headspan.plotting import style
from headspan.plotting.canvas import new_figure
from headspan.subspaces.metrics import metric_of
from headspan.vocabulary.heads import PAIRINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BARS = (style.GROUP_COLOURS["first only"], style.GROUP_COLOURS["second only"])


def mse_figure(lines: Sequence[PairingComparison]) -> Figure:
    """Bars of the mean squared difference between original and folded weights, by pairing and similarity."""
    errors = {metric: {line.pairing: line.mse for line in lines if line.metric == metric} for metric in _metrics(lines)}
    figure = new_figure(8.4, 3.1)
    axes = figure.add_axes((0.085, 0.12, 0.9, 0.7))
    width = 0.8 / len(errors)
    for i, (metric, by_pairing) in enumerate(errors.items()):
        name = style.metric_short(metric) + (" / d_head" if metric_of(metric).grows_with_rank else "")
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


def _metrics(lines: Sequence[PairingComparison]) -> list[str]:
    return list(dict.fromkeys(line.metric for line in lines))
