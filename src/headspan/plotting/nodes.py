"""Shared by the wiring diagrams: a head as a box in its label colours, an edge as an arrow, and the legend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headspan.graphs.graph import Wiring, WiringNode
from headspan.plotting import style
from headspan.results.matrix import Edge
from headspan.vocabulary.heads import Head, Pairing, Role

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

Point = tuple[float, float]


def draw_box(axes: Axes, node: WiringNode, centre: Point, size: Point, colours: Mapping[str, str]) -> Patch:
    """A rounded box, striped if a head has several labels. Other nodes have the outline of their kind."""
    from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

    (x, y), (width, height) = centre, size
    if not isinstance(node.head, Head):
        corners = [(x + width * a, y + height * b) for a, b in node_shape(node.head.kind)]
        outline = {"facecolor": style.NODE_FILL, "edgecolor": style.INK, "linewidth": 0.9}
        return axes.add_patch(Polygon(corners, closed=True, zorder=3, gid=f"node:{node.head}", **outline))
    corner = f"round,pad=0,rounding_size={min(0.28 * height, 0.1 * width)}"
    left, bottom = x - width / 2, y - height / 2
    fills = [colours[name] for name in node.labels] or [style.UNLABELLED]
    box = FancyBboxPatch(
        (left, bottom), width, height, boxstyle=corner, facecolor=fills[0], edgecolor=style.MUTED,
        linewidth=0.8, zorder=3, gid=f"node:{node.head}",
    )  # fmt: skip
    axes.add_patch(box)
    for i, fill in enumerate(fills[1:], start=1):
        corner_of_stripe = (left + width * i / len(fills), bottom)
        stripe = Rectangle(corner_of_stripe, width / len(fills), height, facecolor=fill, zorder=3.1)
        axes.add_patch(stripe)
        stripe.set_clip_path(box)
    if len(fills) > 1:  # the stripes covered the outline
        outline = FancyBboxPatch(
            (left, bottom), width, height, boxstyle=corner, facecolor="none", edgecolor=style.MUTED,
            linewidth=0.8, zorder=3.2,
        )  # fmt: skip
        axes.add_patch(outline)
    return box


def draw_name(axes: Axes, node: WiringNode, where: Point, fontsize: float, **options: Any) -> None:
    """The head's name, bold if it has a label. Names of other nodes are cut to fit."""
    options = {"ha": "center", "va": "center_baseline", **options}
    weight = "bold" if node.labels else "normal"
    text = str(node.head) if isinstance(node.head, Head) else shortened(str(node.head))
    name = axes.text(*where, text, fontsize=fontsize, fontweight=weight, zorder=4, **options)
    name.set_gid(f"name:{node.head}")


def node_shape(kind: str) -> Sequence[Point]:
    """The outline of a kind of node, in a box from −½ to ½. Neurons of experts look like other neurons."""
    return style.NODE_SHAPES.get(kind.rpartition(" ")[2], style.OTHER_SHAPE)


def shortened(name: str, most: int = 12) -> str:
    """A name that fits into a box.

    >>> shortened("refusal"), shortened("layer 14, sycophancy")
    ('refusal', 'layer 14, s…')
    """
    return name if len(name) <= most else name[: most - 1] + "…"


def kind_handles(*wirings: Wiring) -> list[Artist]:
    """Legend entries for the kinds of nodes other than heads."""
    from matplotlib.lines import Line2D

    kinds = sorted({n.head.kind for wiring in wirings for n in wiring.nodes if not isinstance(n.head, Head)})
    look: dict[str, Any] = {"linestyle": "", "markersize": 9, "markeredgewidth": 0.9}
    look |= {"markerfacecolor": style.NODE_FILL, "markeredgecolor": style.INK}
    outlines: dict[str, Any] = {kind: [*node_shape(kind), node_shape(kind)[0]] for kind in kinds}
    return [Line2D([], [], marker=outline, label=kind, **look) for kind, outline in outlines.items()]


def edge_look(edge: Edge, strength: float, passes: bool) -> dict[str, Any]:
    """Colour, dashes, width and id of an edge; ``strength`` and ``passes`` come from `Wiring`."""
    return {
        "color": style.pairing_colour(edge.pairing) if passes else style.EDGE_REST,
        "linestyle": style.SOURCE_DASHES[edge.pairing.source],
        "linewidth": style.FIGURE_SCALE * style.edge_width(strength, passes),
        "gid": f"edge:{edge.pairing}:{edge.source}:{edge.target}",
    }


def by_strength(wiring: Wiring) -> Iterator[tuple[Edge, float, bool]]:
    """Edges with their strengths and whether they have evidence, the strongest last so that they are drawn on top."""
    passes = [bool(bits) for bits in wiring.evidence()]
    edges = zip(wiring.edges, wiring.strengths(), passes, strict=True)
    return iter(sorted(edges, key=lambda edge: (edge[2], edge[1])))


def pairing_handles(pairings: Sequence[Pairing]) -> list[Artist]:
    """Legend entries for edges."""
    from matplotlib.lines import Line2D

    reads = {Role.Q: "queries", Role.K: "keys", Role.V: "values", Role.R: "nodes"}
    writes = {Role.O: "read by", Role.W: "nodes to"}
    flow = all(pairing.flow for pairing in pairings)
    handles: list[Artist] = []
    for pairing in pairings:
        label = f"{pairing} – {writes[pairing.source]} {reads[pairing.target]}" if flow else str(pairing)
        line = Line2D([], [], color=style.pairing_colour(pairing), linewidth=2, label=label)
        line.set_linestyle(style.SOURCE_DASHES[pairing.source])
        handles.append(line)
    return handles


def label_handles(names: Sequence[str], colours: Mapping[str, str]) -> list[Artist]:
    """Legend entries for head classes, and one for heads without a class."""
    from matplotlib.patches import Patch

    handles: list[Artist] = [
        Patch(facecolor=colours[name], edgecolor=style.MUTED, linewidth=0.6, label=style.label_title(name))
        for name in names
    ]
    if names:
        handles.append(Patch(facecolor=style.UNLABELLED, edgecolor=style.MUTED, linewidth=0.6, label="no label"))
    return handles


def shown_labels(*wirings: Wiring) -> list[str]:
    """The labels that at least one head of these wirings has, in their usual order."""
    present = {name for wiring in wirings for node in wiring.nodes for name in node.labels}
    return [name for name in dict.fromkeys(n for wiring in wirings for n in wiring.label_names) if name in present]
