"""The wiring with labelled heads inside an ellipse and the rest around it (figure 1 of the paper)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headspan.graphs.graph import Wiring
from headspan.plotting import style
from headspan.plotting.canvas import legends_below, legends_height, new_figure
from headspan.plotting.layout import EllipseLayout, ellipse_layout
from headspan.plotting.nodes import (
    by_strength,
    draw_box,
    draw_name,
    edge_look,
    kind_handles,
    label_handles,
    pairing_handles,
    shown_labels,
)
from headspan.plotting.scale import scale_handles
from headspan.vocabulary.heads import Head

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCH = 0.5  # width of a head's box on paper
BOX = (0.94, 0.52)


def ellipse_figure(wirings: Sequence[Wiring]) -> Figure:
    """Wirings side by side, one per similarity, with the numbers of heads in the titles."""
    layouts = [ellipse_layout(wiring) for wiring in wirings]
    widths = [2 * layout.extent[0] for layout in layouts]
    height = 2 * max(layout.extent[1] for layout in layouts) * INCH
    names = shown_labels(*wirings)
    colours = style.label_colours(wirings[0].label_names)
    classes = [*label_handles(names, colours), *kind_handles(*wirings)]
    legends = [pairing_handles(wirings[0].pairings), scale_handles(wirings), classes]
    columns = max(2, int(sum(widths) * INCH // 1.5))
    below = 0.13 + legends_height(legends, columns)
    total = (sum(widths) * INCH + 0.3 * len(wirings), height + 0.55 + below)
    figure = new_figure(*total)
    left = 0.15
    for wiring, layout, width in zip(wirings, layouts, widths, strict=True):
        axes = figure.add_axes((left / total[0], below / total[1], width * INCH / total[0], height / total[1]))
        left += width * INCH + 0.3
        _draw(axes, wiring, layout, colours)
    legends_below(figure, legends, below, columns)
    return figure


def _draw(axes: Axes, wiring: Wiring, layout: EllipseLayout, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Ellipse, FancyArrowPatch

    half_width, half_height = layout.extent
    axes.set(xlim=(-half_width, half_width), ylim=(-half_height, half_height), aspect="equal", xticks=[], yticks=[])
    axes.axis("off")
    counts = wiring.head_counts()
    if counts.in_class:
        width, height = (2 * h for h in layout.half_axes)
        axes.add_patch(
            Ellipse(
                (0, 0), width, height, facecolor=style.GROUND, edgecolor=style.MUTED, linewidth=0.9,
                linestyle=(0, (4, 3)), zorder=0, gid="ellipse",
            )
        )  # fmt: skip
    boxes = {node.head: draw_box(axes, node, layout.places[node.head], BOX, colours) for node in wiring.nodes}
    for node in wiring.nodes:
        letters = 6.2 if len(str(node.head)) < 6 else 5.4
        draw_name(axes, node, layout.places[node.head], letters if isinstance(node.head, Head) else 4.8)
    for edge, strength, passes in by_strength(wiring):
        # Parallel edges of different pairings bend by different amounts, so that all are visible.
        bend = 0.07 + 0.1 * wiring.pairings.index(edge.pairing) if len(wiring.pairings) <= 4 else 0.1
        axes.add_patch(
            FancyArrowPatch(
                layout.places[edge.source], layout.places[edge.target], patchA=boxes[edge.source],
                patchB=boxes[edge.target], shrinkA=0, shrinkB=1, connectionstyle=f"arc3,rad={bend}",
                arrowstyle="-|>,head_length=3.2,head_width=1.5", zorder=2, **edge_look(edge, strength, passes),
            )
        )  # fmt: skip
    axes.set_title(_title(wiring), pad=6)


def _title(wiring: Wiring) -> str:
    counts = wiring.head_counts()
    name = style.metric_short(wiring.metric)
    if not wiring.label_names:
        return f"{name}, {wiring.rule}: {wiring.counted}"
    nodes = wiring.counted.partition(" and ")[2]
    others = f"{counts.out_of_class} others" + (f", {nodes}" if nodes else "")
    return f"{name}, {wiring.rule}: {counts.in_class} labelled heads, {others}"
