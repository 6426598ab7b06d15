"""The one palette: colours of roles, pairings, labels and groups, safe for colour-blind readers.

Roles and groups use the Okabe–Ito colours, which stay apart under every common colour deficiency, as lines and points.
Labels use Paul Tol's light scheme, made for filled cells under black text, and one violet more.
No matplotlib here, so that the report can take its colours from the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headspan.heads import Pairing, Role
from headspan.scoring.metrics import metric_of

ROLE_COLOURS: dict[Role, str] = {Role.Q: "#0072B2", Role.K: "#D55E00", Role.V: "#009E73", Role.O: "#CC79A7"}
# The colour of an edge says what the target reads; its dashes say what the source is compared with.
SOURCE_DASHES: dict[Role, Literal["-", "--", ":", "-."]] = {Role.O: "-", Role.Q: "--", Role.K: ":", Role.V: "-."}

LABEL_COLOURS = (
    "#EEDD88", "#77AADD", "#EE8866", "#BBCC33", "#FFAABB", "#99DDFF", "#44BB99", "#CAB2D6",
)  # fmt: skip
UNLABELLED = "#F4F4F4"
INK, MUTED, FAINT, GROUND, PAPER = "#1A1A1A", "#5F6368", "#D9DCE0", "#FBFAF5", "#FFFFFF"

GROUP_COLOURS = {"both": "#CC79A7", "first only": "#0072B2", "second only": "#D55E00", "neither": "#B8BCC2"}
SEQUENTIAL = "cividis"  # perceptually even, and the same for readers with and without colour deficiency
HISTOGRAM, DENSITY, SECOND_DENSITY = "#A9C4DE", "#D55E00", "#1A1A1A"


def pairing_colour(pairing: Pairing) -> str:
    """The colour of a pairing's edges and points.

    >>> pairing_colour(Pairing.parse("OK"))
    '#D55E00'
    """
    return ROLE_COLOURS[pairing.target]


def label_colours(names: Sequence[str]) -> dict[str, str]:
    """A fill for every label in the order given; after the eighth the colours come round again."""
    return {name: LABEL_COLOURS[i % len(LABEL_COLOURS)] for i, name in enumerate(names)}


def label_title(name: str) -> str:
    """A label as people write it.

    >>> label_title("backup_name_mover")
    'Backup name mover'
    >>> label_title("S-inhibition")
    'S-inhibition'
    """
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def metric_short(metric: str) -> str:
    """The short name of a similarity in titles and axis labels."""
    return metric_of(metric).short
