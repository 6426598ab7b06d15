"""Figures without global state: the theme, creating a figure, writing it to a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from headspan.plotting import style
from headspan.system.outputs import writing
from headspan.vocabulary.errors import HeadspanError, visible

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

FORMATS = ("png", "pdf", "svg")
DPI = 160
MAX_PIXELS = 12_000  # on the longer side of a PNG; many viewers cannot open larger images

# Fonts with East Asian scripts, in case a token needs one; only those installed are used.
_WIDE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans",
    "WenQuanYi Micro Hei",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Arial Unicode MS",
)


@lru_cache(maxsize=1)
def _theme() -> dict[str, Any]:
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return {
        "font.family": ["DejaVu Sans", *(name for name in _WIDE_FONTS if name in installed)],
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "axes.labelcolor": style.INK,
        "axes.edgecolor": style.MUTED,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": style.INK,
        "text.parse_math": False,  # a token or a model name may contain a dollar sign
        "xtick.color": style.MUTED,
        "ytick.color": style.MUTED,
        "xtick.labelcolor": style.INK,
        "ytick.labelcolor": style.INK,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "savefig.facecolor": style.PAPER,
        "pdf.fonttype": 42,  # keep text as text, as publishers ask
        "svg.fonttype": "none",
        "svg.hashsalt": "headspan",  # the same figure gives the same bytes
    }


@contextmanager
def theme() -> Iterator[None]:
    """Apply headspan's theme inside the block, independent of the caller's matplotlib settings."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_theme())  # pyright: ignore[reportCallIssue, reportArgumentType]
        yield


def new_figure(width: float, height: float, **layout: Any) -> Figure:
    """A figure of this size in inches, created without pyplot: nothing to close, safe in threads."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), **layout)


def save(figure: Figure, path: str | os.PathLike[str], dpi: float = DPI, *, force: bool = False) -> None:
    """Write a figure in the format given by the file name; the file appears only when complete.

    force: replace a file that is not a headspan figure.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower().lstrip(".")
    if suffix not in FORMATS:
        raise HeadspanError(f"cannot draw {os.fspath(path)!r}. Its name must end in one of {', '.join(FORMATS)}")
    with writing(path, suffix, force=force) as temporary:
        temporary.write_bytes(_drawn(figure, suffix, dpi))


def to_svg(figure: Figure) -> str:
    """The figure as SVG text."""
    return _drawn(figure, "svg", DPI).decode("utf-8")


def _drawn(figure: Figure, suffix: str, dpi: float) -> bytes:
    """The bytes of the file, rendered in memory so that headspan rather than matplotlib reports a full disk."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # names may contain undecodable bytes, which fonts cannot draw
        shown = text.get_text()
        if not shown.isprintable():
            text.set_text("\n".join(map(visible, shown.split("\n"))))
    buffer = BytesIO()
    figure.savefig(buffer, **_options(figure, suffix, dpi))
    return buffer.getvalue()


def _options(figure: Figure, suffix: str, dpi: float) -> dict[str, Any]:
    metadata: dict[str, Any] = {"Software": "headspan"} if suffix == "png" else {"Creator": "headspan"}
    if suffix == "pdf":
        metadata["CreationDate"] = None
    elif suffix == "svg":
        metadata["Date"] = None
    dpi = min(dpi, MAX_PIXELS / max(figure.get_size_inches()))
    return {"format": suffix, "dpi": dpi, "metadata": metadata}


def heat_map(axes: Axes, values: Any, **options: Any) -> AxesImage:
    """A matrix as equal cells in the shared colour scale."""
    image = axes.imshow(values, cmap=style.SEQUENTIAL, interpolation="nearest", **options)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


def thinned(count: int, most: int = 16) -> list[int]:
    """At most about ``most`` evenly spaced positions of ``count``, for tick labels that do not overlap.

    >>> thinned(6), thinned(32)
    ([0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30])
    """
    step = 1
    while count > most * step:
        step = {1: 2, 2: 4, 4: 5}.get(step, step * 2)
    return list(range(0, count, step))


def legend_below(figure: Figure, handles: Sequence[Artist], top: float, most: int) -> None:
    """One legend centred under the axes, in even rows of at most ``most``; ``top`` is inches from the bottom."""
    if handles:
        figure.legend(
            handles=list(handles),
            loc="upper center",
            bbox_to_anchor=(0.5, top / figure.get_figheight()),
            ncols=-(-len(handles) // legend_rows(handles, most)),
            handlelength=1.6,
            columnspacing=1.4,
        )


def legends_below(figure: Figure, groups: Sequence[Sequence[Artist]], top: float, most: int) -> None:
    """One legend for every group of entries, each below the one before."""
    for handles in groups:
        legend_below(figure, handles, top, most)
        top -= legends_height([handles], most)


def legends_height(groups: Sequence[Sequence[Artist]], most: int) -> float:
    """How many inches `legends_below` takes."""
    return sum(0.22 * legend_rows(handles, most) for handles in groups)


def legend_rows(handles: Sequence[Artist], most: int) -> int:
    """How many rows `legend_below` takes."""
    return -(-len(handles) // max(most, 1))
