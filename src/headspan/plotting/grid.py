"""The wiring on the layer × head grid, each head with its class and its tokens (figure 6 of the paper).

Layers run from left to right, heads from top to bottom, with shared key/value heads below the query heads. Other nodes
are drawn between the layers, where they read and write: nodes of the embedding before the first layer, nodes that the
unembedding reads after the last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headspan.graphs.graph import Wiring, WiringNode
from headspan.plotting import style
from headspan.plotting.canvas import legends_below, legends_height, new_figure
from headspan.plotting.nodes import (
    Point,
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
from headspan.results.matrix import Edge
from headspan.vocabulary.heads import Head, HeadOrNode, Node, attention_position

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Tokens = Mapping[Head, Sequence[str]]
_MANY = 16  # with more layers or heads than this, cells get smaller
_TOO_MANY = 500  # with more cells than this, boxes with tokens would make the names too small to read


@dataclass(frozen=True)
class _Cells:
    """Where every head goes, in inches, and how large its box is."""

    wiring: Wiring
    layers: tuple[int, ...]
    columns: tuple[float, ...]  # the layers, and the gaps between them for nodes: 2.5 is after layer 2
    rows: tuple[Head, ...]  # one head per row, as a head of layer 0: only index and kv matter
    levels: Mapping[Node, float]  # the row of every node in its gap
    cell: Point
    box: Point
    token_columns: int
    fontsize: float

    @classmethod
    def of(cls, wiring: Wiring, with_tokens: bool) -> _Cells:
        table = wiring.scores.ports
        wired = [node.head for node in wiring.nodes if isinstance(node.head, Head)]
        nodes = [node.head for node in wiring.nodes if isinstance(node.head, Node)]
        kv_used = any(head.kv for head in wired)
        everyone = [head for head in table.heads if kv_used or not head.kv]
        layers, rows = {head.layer for head in everyone}, {_row(head) for head in everyone}
        small = len(layers) > _MANY or len(rows) > _MANY
        if len(layers) > _MANY:  # a large model: layers and heads without an edge are left out
            layers = {head.layer for head in wired} or layers
        if len(rows) > _MANY:
            rows = {_row(head) for head in wired} or rows
        if with_tokens:
            box, gap, fontsize = ((0.56, 0.68), (0.3, 0.13), 6.2) if small else ((0.98, 0.74), (0.4, 0.17), 7.0)
        else:
            box, gap, fontsize = ((0.46, 0.19), (0.22, 0.12), 6.2) if small else ((0.52, 0.27), (0.42, 0.21), 7.5)
        columns = tuple(sorted({*layers, *(gap_of(node, layers) for node in nodes)}))
        across = max(gap[0], min(2.2, 6.5 / len(columns) - box[0]))  # few layers: give the edges room
        in_order = tuple(sorted(rows, key=lambda h: (h.kv, h.index)))
        return cls(
            wiring, tuple(sorted(layers)), columns, in_order, _levels(nodes, wiring, layers, in_order),
            (box[0] + across, box[1] + gap[1]), box, 1 if small else 2, fontsize,
        )  # fmt: skip

    @property
    def apart(self) -> float:
        """The gap between query heads and shared heads, in rows."""
        return 0.6 if len({head.kv for head in self.rows}) > 1 else 0.0

    def place(self, head: HeadOrNode) -> Point:
        if isinstance(head, Node):
            return self.columns.index(gap_of(head, self.layers)) * self.cell[0], -self.levels[head] * self.cell[1]
        row = self.rows.index(_row(head)) + (self.apart if head.kv else 0.0)
        return self.columns.index(head.layer) * self.cell[0], -row * self.cell[1]

    def box_of(self, node: WiringNode, tokens: Tokens) -> Point:
        """Heads without tokens get a low box even if others have tokens."""
        return self.box if not tokens or (isinstance(node.head, Head) and node.head in tokens) else (self.box[0], 0.27)

    @property
    def size(self) -> Point:
        deepest = max((level + 1 for level in self.levels.values()), default=0.0)
        return len(self.columns) * self.cell[0], max(len(self.rows) + self.apart, deepest) * self.cell[1]

    def unwired(self) -> list[Point]:
        """Positions of the heads on the grid that have no edge."""
        table = self.wiring.scores.ports
        wired = {node.head for node in self.wiring.nodes}
        rest = [head for head in table.heads if head not in wired]
        return [self.place(head) for head in rest if head.layer in self.layers and _row(head) in self.rows]


def fits_tokens(wiring: Wiring) -> bool:
    """Whether the grid of this model is small enough for boxes with tokens."""
    cells = _Cells.of(wiring, True)
    return len(cells.layers) * len(cells.rows) <= _TOO_MANY


def _row(head: Head) -> Head:
    return Head(0, head.index, head.kind)


def gap_of(node: Node, layers: Collection[int]) -> float:
    """The position between layers where a node is drawn: half a layer after the last attention that precedes it.

    A node at the input of a layer has the position of its attention (reading) or the one before (writing).

    >>> [gap_of(Node.at(position, 0, "n"), range(3)) for position in (-1, 0, 1, 2, 3, 2**31)]
    [-0.5, -0.5, 0.5, 0.5, 1.5, 2.5]
    """
    before = [layer for layer in layers if attention_position(layer) < node.position]
    return max(before) + 0.5 if before else min(layers) - 0.5


def _levels(nodes: Sequence[Node], wiring: Wiring, layers: Collection[int], rows: Sequence[Head]) -> dict[Node, float]:
    """A row for every node: the nodes of one gap are stacked in the middle, in the order of the heads they lead to."""
    heights: dict[Node, list[int]] = {node: [] for node in nodes}
    place = {row: i for i, row in enumerate(rows)}
    for edge in wiring.edges:
        for end, other in ((edge.source, edge.target), (edge.target, edge.source)):
            if isinstance(end, Node) and isinstance(other, Head):
                heights[end].append(place[_row(other)])
    gaps: dict[float, list[Node]] = {}
    for node in sorted(nodes, key=lambda node: sum(heights[node]) / max(len(heights[node]), 1)):
        gaps.setdefault(gap_of(node, layers), []).append(node)
    return {node: max(0.0, (len(rows) - len(here)) / 2) + i for here in gaps.values() for i, node in enumerate(here)}


def grid_figure(wiring: Wiring, tokens: Tokens | None = None, title: str | None = None) -> Figure:
    """One wiring on the grid; ``tokens`` gives the strings to print inside the box of a head."""
    tokens = tokens or {}
    cells = _Cells.of(wiring, bool(tokens))
    width, height = cells.size
    names = shown_labels(wiring)
    colours = style.label_colours(wiring.label_names)
    classes = [*label_handles(names, colours), *kind_handles(wiring)]
    legends = [pairing_handles(wiring.pairings), scale_handles([wiring]), classes]
    columns = max(3, int((width + 0.6) // 1.5))
    left, below, above = 0.62, 0.53 + legends_height(legends, columns), 0.42
    total = (max(width + left + 0.15, 5.6), height + below + above)
    figure = new_figure(*total)
    axes = figure.add_axes((left / total[0], below / total[1], width / total[0], height / total[1]))
    _frame(axes, cells)
    for node in wiring.nodes:
        where = cells.place(node.head)
        draw_box(axes, node, where, cells.box_of(node, tokens), colours)
        _write(axes, node, where, cells, tokens.get(node.head, ()) if isinstance(node.head, Head) else ())
    heights = {node.head: cells.box_of(node, tokens)[1] for node in wiring.nodes}
    for edge, strength, passes in by_strength(wiring):
        _draw_edge(axes, cells, edge, edge_look(edge, strength, passes), heights)
    axes.set_title(title or grid_title(wiring), loc="left", pad=10, fontsize=11)
    legends_below(figure, legends, below - 0.42, columns)
    return figure


def _frame(axes: Axes, cells: _Cells) -> None:
    """Axis limits, names of layers and heads along the sides, and a dot for every head without an edge."""
    (cell_x, cell_y), (width, height) = cells.cell, cells.size
    axes.set(xlim=(-cell_x / 2, width - cell_x / 2), ylim=(cell_y / 2 - height, cell_y / 2))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=min(8.0, cells.fontsize + 1))
    ticks = [cells.columns.index(layer) * cell_x for layer in cells.layers]
    axes.set_xticks(ticks, [str(layer) for layer in cells.layers])
    row_names = [f"{head.kind}{head.index}" for head in cells.rows]
    axes.set_yticks([cells.place(Head(cells.layers[0], h.index, h.kind))[1] for h in cells.rows], row_names)
    axes.set_xlabel("layer")
    if points := cells.unwired():
        axes.scatter(*zip(*points, strict=True), s=5, color=style.FAINT, linewidths=0, zorder=1, gid="unwired")


def _write(axes: Axes, node: WiringNode, where: Point, cells: _Cells, tokens: Sequence[str]) -> None:
    """The name of a head in the middle of its box, or above its tokens."""
    if not tokens:
        fits = cells.fontsize if len(str(node.head)) < 6 else cells.fontsize - (1 if isinstance(node.head, Head) else 2)
        draw_name(axes, node, where, fits)
        return
    x, y = where
    top, line = y + cells.box[1] / 2, cells.box[1] / 6.4
    draw_name(axes, node, (x, top - 0.62 * line), cells.fontsize)
    for i, token in enumerate(tokens[: 5 * cells.token_columns]):
        column, row = divmod(i, 5)
        left = x - cells.box[0] / 2 + 0.04 + column * cells.box[0] / 2
        text = axes.text(left, top - (1.75 + row) * line, _cut(token), fontsize=cells.fontsize - 2.2, va="center")
        text.set(zorder=4, gid=f"token:{node.head}:{i}")


def _cut(token: str, most: int = 10) -> str:
    return token if len(token) <= most else token[: most - 1] + "…"


def _draw_edge(
    axes: Axes, cells: _Cells, edge: Edge, look: Mapping[str, Any], heights: Mapping[HeadOrNode, float]
) -> None:
    """A curve from the right side of the source to the left side of the target, level at both ends.

    Every pairing arrives at its own height, so that parallel edges stay apart.
    """
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    (x0, y0), (x1, y1) = cells.place(edge.source), cells.place(edge.target)
    pairings = cells.wiring.pairings
    port = 0.62 * (0.5 - (pairings.index(edge.pairing) + 0.5) / len(pairings))
    x0, y0 = x0 + cells.box[0] / 2, y0 + 0.6 * port * heights[edge.source]
    x1, y1 = x1 - cells.box[0] / 2, y1 + port * heights[edge.target]
    reach = max((x1 - x0) * 0.45, 0.14)
    bow = 0.0
    if abs(y1 - y0) < cells.cell[1] / 2 and x1 - x0 > cells.cell[0]:  # a straight line would run behind heads
        bow = 0.72 * cells.cell[1] * (1 if port >= 0 else -1)
    curve = Path(
        [(x0, y0), (x0 + reach, y0 + bow), (x1 - reach, y1 + bow), (x1, y1)],
        [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4],
    )
    axes.add_patch(
        FancyArrowPatch(
            path=curve, arrowstyle="-|>,head_length=3,head_width=1.5", zorder=2, **look,
        )
    )  # fmt: skip


def grid_title(wiring: Wiring) -> str:
    return f"{style.metric_short(wiring.metric)}, {wiring.rule}: {len(wiring.edges)} edges, {wiring.counted}"
