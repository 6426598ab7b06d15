"""The legend of line widths in pictures of a wiring: which score a line of this width has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headspan.graphs.graph import Wiring
from headspan.plotting import style
from headspan.statistics.dimension import usual_dimension
from headspan.subspaces.metrics import metric_of
from headspan.vocabulary.heads import Pairing

if TYPE_CHECKING:
    from matplotlib.artist import Artist

STEPS = (0.0, 0.25, 0.5, 1.0)  # of the way from the start of the scale to the largest possible score; as on the page


def scale_handles(wirings: Sequence[Wiring]) -> list[Artist]:
    """Legend entries for widths with their scores, and for edges without evidence, as far as they are drawn."""
    from matplotlib.lines import Line2D

    passing = [[bool(bits) for bits in wiring.evidence()] for wiring in wirings]
    handles: list[Artist] = []
    scaled = [wiring for wiring, passes in zip(wirings, passing, strict=True) if any(passes)]
    for step in STEPS if scaled else ():
        label = ", ".join(f"{style.metric_short(wiring.metric)} {_score(wiring, step)}" for wiring in scaled)
        width = style.FIGURE_SCALE * style.edge_width(step, True)
        handles.append(Line2D([], [], color=style.INK, linewidth=width, label=label))
    if not all(map(all, passing)):
        width = style.FIGURE_SCALE * style.edge_width(0, False)
        handles.append(Line2D([], [], color=style.EDGE_REST, linewidth=width, label="no evidence above chance"))
    return handles


def _score(wiring: Wiring, step: float) -> str:
    """The score at a step of the scale, for the widest heads of the pairing of the strongest edge."""
    strongest = max(zip(wiring.strengths(), wiring.edges, strict=True), key=lambda pair: pair[0])[1]
    chance, start, most = _ends(wiring, strongest.pairing)
    value = start + step * (most - start)
    if metric_of(wiring.metric).observed:
        return f"{value / chance:.0f} × expected"
    return f"{value:.0f}" if most > 1 else f"{value:.2f}"


def _ends(wiring: Wiring, pairing: Pairing) -> tuple[float, float, float]:
    """Mean of random weights, start of the scale and largest possible score; influence in units of its expectation."""
    scores, metric = wiring.scores, metric_of(wiring.metric)
    first, second = (np.asarray(scores.ranks(role).max(initial=1)) for role in pairing)
    d = usual_dimension(scores, pairing)
    mean, sd = (float(level) for level in metric.chance(d, first, second, np.asarray(1.0)))
    return mean, mean + 3 * sd, metric.largest(float(first), float(second))
