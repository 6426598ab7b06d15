"""All heads of a two-layer model and the strength between each pair of them (figure 4 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headspan.models.arrays import ArrayWeights
from headspan.plotting import style
from headspan.plotting.canvas import new_figure
from headspan.results.scores import Scores
from headspan.statistics.dimension import usual_dimension
from headspan.subspaces.metrics import metric_of
from headspan.system.memory import check_room
from headspan.vocabulary.heads import ROLES, Head, Pairing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headspan.results.head_scores import BehaviourScores

_SHADE = {0: "previous_token", 1: "induction"}


def random_level(scores: Scores, metric: str, pairing: Pairing, pairs: int = 8, seed: int = 0) -> float:
    """Mean score over ``pairs``² pairs of heads with standard normal weights."""
    from headspan.scoring.run import score

    random = np.random.default_rng(seed)
    # Roles that the result does not compare are needed only to build a model, so any width will do.
    known = scores.role_ranks
    widths = {role: max(int(max(known.get(r, [1]))) for r in (role, role.partner)) for role in ROLES}
    d = usual_dimension(scores, pairing)
    check_room("drawing random weights", 64 * pairs * d * sum(widths.values()))
    arrays = {role.value: random.standard_normal((2, pairs, d, widths[role])) for role in ROLES}
    level = score(ArrayWeights(arrays), metric, [pairing], "forward")
    return float(level[metric, pairing].pairs()[2].mean())


def strengths(scores: Scores, metric: str, pairing: Pairing) -> tuple[np.ndarray, float, float]:
    """Scores above the random level, clipped at 0 and divided by the largest: (heads of layer 0, heads of layer 1).

    Also the random level and the largest score, which the thinnest and the widest line stand for.
    """
    matrix = scores[metric, pairing].forward()
    layers = sorted({head.layer for head in matrix.sources})
    rows = [i for i, head in enumerate(matrix.sources) if head.layer == layers[0]]
    columns = [j for j, head in enumerate(matrix.targets) if head.layer == layers[1]]
    values, level = matrix.values[np.ix_(rows, columns)], random_level(scores, metric, pairing)
    above = np.clip(np.nan_to_num(values - level), 0, None)  # a pair without a score has no line
    return above / above.max() if above.max() > 0 else above, level, level + float(above.max())


def two_layer_figure(
    scores: Scores, metrics: Sequence[str], pairings: Sequence[Pairing], behaviour: BehaviourScores | None
) -> Figure:
    """One row per similarity, one panel per pairing; the best previous-token and induction heads are shaded."""
    shades = _shades(behaviour)
    most = max(sum(head.layer == layer for head in scores.ports.query) for layer in _layers(scores))
    width = max(2.4, 0.36 * most)
    figure = new_figure(width * len(pairings) + 0.9, 2.2 * len(metrics) + (0.55 if shades else 0.1))
    bottom = 0.6 if shades else 0.1
    figure.subplots_adjust(left=0.85 / figure.get_figwidth(), right=0.99, bottom=bottom / figure.get_figheight(),
                           top=1 - 0.3 / figure.get_figheight(), hspace=0.28, wspace=0.06)  # fmt: skip
    panels = figure.subplots(len(metrics), len(pairings), squeeze=False)
    for row, metric in enumerate(metrics):
        for axes, pairing in zip(panels[row], pairings, strict=True):
            level, most = _draw(axes, scores, metric, pairing, shades)
            digits = 1 if metric_of(metric).grows_with_rank else 3
            axes.set_title(
                f"{pairing}: lines from {style.metric_short(metric)} {level:.{digits}f} to {most:.{digits}f}"
            )
        first, second = _layers(scores)
        panels[row][0].set_yticks([0, 1], [f"layer {first}", f"layer {second}"])
    if shades:
        _scale(figure)
    return figure


def _layers(scores: Scores) -> list[int]:
    return sorted({head.layer for head in scores.ports.query})


def _shades(behaviour: BehaviourScores | None) -> dict[Head, float]:
    """The two best previous-token heads of layer one and induction heads of layer two, with their scores."""
    if behaviour is None:
        return {}
    layers = sorted({head.layer for head in behaviour.heads})
    shades: dict[Head, float] = {}
    for place, kind in _SHADE.items():
        ranked = [(Head.parse(name), value) for name, value in behaviour.top(kind, len(behaviour.heads))]
        shades |= dict([(head, value) for head, value in ranked if head.layer == layers[place]][:2])
    return shades


def _draw(
    axes: Axes, scores: Scores, metric: str, pairing: Pairing, shades: Mapping[Head, float]
) -> tuple[float, float]:
    """Heads of the first layer below, of the second above, and a line for every pair above chance; the scale."""
    strength, level, most = strengths(scores, metric, pairing)
    sides = zip(pairing, _layers(scores), strict=True)
    rows = [[head for head in scores.heads(role) if head.layer == layer] for role, layer in sides]
    places = [np.linspace(0, 1, 2 * len(heads) + 1)[1::2] for heads in rows]
    colour = style.pairing_colour(pairing)
    for i, j in zip(*np.nonzero(strength > 0), strict=True):
        value = float(strength[i, j])
        (line,) = axes.plot((places[0][i], places[1][j]), (0, 1), color=colour, linewidth=3.2 * value, alpha=value)
        line.set(solid_capstyle="round", zorder=1, gid=f"edge:{pairing}:{rows[0][i]}:{rows[1][j]}")
    for level, (heads, xs) in enumerate(zip(rows, places, strict=True)):
        for head, x in zip(heads, xs, strict=True):
            _head(axes, head, (float(x), level), shades.get(head))
    axes.set(xlim=(0, 1), ylim=(-0.22, 1.22), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return level, most


def _head(axes: Axes, head: Head, where: tuple[float, float], shade: float | None) -> None:
    from matplotlib import colormaps

    fill = style.UNLABELLED if shade is None else colormaps[style.SEQUENTIAL](shade)
    box = {"boxstyle": "round,pad=0.35", "facecolor": fill, "edgecolor": style.MUTED, "linewidth": 0.7}
    name = f"{head.kind}{head.index}"
    text = axes.text(*where, name, ha="center", va="center", fontsize=6.5, zorder=3, gid=f"node:{head}", bbox=box)
    if shade is not None:
        text.set(fontweight="bold", color=style.PAPER if shade < 0.5 else style.INK)


def _scale(figure: Figure) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    width, height = figure.get_size_inches()
    axes = figure.add_axes(((width / 2 - 1.2) / width, 0.34 / height, 2.4 / width, 0.1 / height))
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), style.SEQUENTIAL), cax=axes, orientation="horizontal")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    axes.tick_params(length=0, labelsize=7, pad=2)
    axes.set_title("previous-token score (first layer), induction score (second layer)", fontsize=7.5, pad=3)
