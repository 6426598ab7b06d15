"""The palette of all figures and pages: colours of roles, pairings, labels and groups, safe for colour-blind readers.

Roles and groups use the Okabe–Ito colours, which remain distinct under every common colour deficiency, as lines and
as points. Labels have light fills for black text, distinct from each other and from the role colours in the same way.
This module does not import matplotlib, so that the report can use the same colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, sin, tau
from typing import Any
from zlib import crc32

from headspan.subspaces.metrics import metric_of
from headspan.vocabulary.heads import Pairing, Role
from headspan.vocabulary.words import class_words

ROLE_COLOURS: dict[Role, str] = {
    Role.Q: "#0072B2", Role.K: "#D55E00", Role.V: "#009E73", Role.O: "#CC79A7", Role.R: "#663311", Role.W: "#7711DD",
}  # fmt: skip
# The colour of an edge shows what the target reads; its dashes show which weight of the source is compared.
SOURCE_DASHES: dict[Role, Any] = {
    Role.O: "-", Role.Q: "--", Role.K: ":", Role.V: "-.", Role.W: (0, (3.2, 1.2)), Role.R: (0, (3, 1, 1, 1, 1, 1)),
}  # fmt: skip

# An edge with evidence (:mod:`headspan.statistics.evidence`) has the colour of its pairing and a width linear in its
# score above chance; every other edge is grey and thin. Widths and radii are pixels of the page, and the area of a dot
# is proportional to the effect.
EDGE_REST = "#8F98A3"
EDGE_LOOKS = {"rest": 1.0, "least": 1.4, "most": 7.0, "dot": 8.0, "most_dot": 10.0}
FIGURE_SCALE = 0.6  # points of a figure per pixel of the page

# Each kind of node other than heads has its own outline: corners in a box from −½ to ½, in order around it.
NODE_SHAPES: dict[str, tuple[tuple[float, float], ...]] = {
    "direction": ((-0.5, -0.5), (0.3, -0.5), (0.5, 0.0), (0.3, 0.5), (-0.5, 0.5)),
    "basis": ((-0.5, -0.5), (0.36, -0.5), (0.5, 0.5), (-0.36, 0.5)),
    "feature": ((-0.5, 0.0), (-0.34, -0.5), (0.34, -0.5), (0.5, 0.0), (0.34, 0.5), (-0.34, 0.5)),
    "adapter": ((-0.5, -0.5), (0.5, -0.5), (0.34, 0.5), (-0.34, 0.5)),
    "neuron": tuple((0.5 * cos(t), 0.5 * sin(t)) for t in (tau * i / 32 for i in range(32))),
    "token": ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)),
}
OTHER_SHAPE = (
    (-0.5, -0.2), (-0.35, -0.5), (0.35, -0.5), (0.5, -0.2), (0.5, 0.2), (0.35, 0.5), (-0.35, 0.5), (-0.5, 0.2),
)  # fmt: skip
NODE_FILL = "#FFFFFF"

# A class has the same colour in every figure and page. Unknown names share the remaining colours.
CLASS_COLOURS = {
    "previous_token": "#DDDD77",
    "induction": "#BB99FF",
    "duplicate_token": "#77EEFF",
    "identity": "#88BBCC",
    "name_mover": "#AAEE99",
    "backup_name_mover": "#99BB66",
    "negative_name_mover": "#FFCCBB",
    "s_inhibition": "#DDAA44",
}
LABEL_COLOURS = (*CLASS_COLOURS.values(), "#BBAA88", "#BBBBFF")
UNLABELLED = "#F4F4F4"
INK, MUTED, FAINT, GROUND, PAPER = "#1A1A1A", "#5F6368", "#D9DCE0", "#FBFAF5", "#FFFFFF"

GROUP_COLOURS = {"both": "#CC79A7", "first only": "#0072B2", "second only": "#D55E00", "neither": "#B8BCC2"}
SEQUENTIAL = "cividis"  # perceptually uniform, also for readers with a colour deficiency
HISTOGRAM, DENSITY, SECOND_DENSITY = "#A9C4DE", "#D55E00", "#1A1A1A"


def pairing_colour(pairing: Pairing) -> str:
    """The colour of a pairing's edges and points.

    >>> pairing_colour(Pairing.parse("OK"))
    '#D55E00'
    """
    return ROLE_COLOURS[pairing.target]


def edge_width(strength: float, passes: bool) -> float:
    """The width of an edge in pixels of the page; ``strength`` is its excess over chance, from 0 to 1.

    >>> round(edge_width(0.5, True), 6), edge_width(0.5, False)
    (4.2, 1.0)
    """
    looks = EDGE_LOOKS
    return looks["least"] + (looks["most"] - looks["least"]) * strength if passes else looks["rest"]


def label_colours(names: Sequence[str]) -> dict[str, str]:
    """A fill for every label, determined by its name unless another label of the list already has that colour.

    A name that is not in the table starts at a position derived from its letters and takes the next free colour; after
    the tenth label colours repeat. The order of the list does not matter.

    >>> label_colours(["induction", "poetry"])["induction"] == label_colours(["induction"])["induction"]
    True
    """
    keys = {name: "_".join(name.lower().replace("-", " ").replace("_", " ").split()) for name in names}
    found = {name: CLASS_COLOURS[key] for name, key in keys.items() if key in CLASS_COLOURS}
    for name in sorted(set(names) - set(found)):
        first = crc32(keys[name].encode("utf-8", "replace"))
        order = [LABEL_COLOURS[(first + i) % len(LABEL_COLOURS)] for i in range(len(LABEL_COLOURS))]
        taken = list(found.values())
        found[name] = min(order, key=taken.count)
    return {name: found[name] for name in names}


def label_title(name: str) -> str:
    """A label as a readable title.

    >>> label_title("backup_name_mover")
    'Backup name mover'
    >>> label_title("S-inhibition")
    'S-inhibition head'
    """
    words = class_words(name)
    return words[:1].upper() + words[1:]


def metric_short(metric: str) -> str:
    """The short name of a similarity in titles and axis labels."""
    return metric_of(metric).short
