"""Figures for papers: every data figure of the paper, for any model, as PNG, PDF or SVG.

>>> list(FIGURES)[:3]
['wiring', 'grid', 'two-layer']
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headspan.plotting.canvas import DPI, FORMATS, save, theme, to_svg
from headspan.plotting.context import Context
from headspan.results.tabular import html_table, text_table
from headspan.subspaces.metrics import DEFAULT_METRICS, PK
from headspan.system.deprecation import warn_renamed
from headspan.system.memory import FEWER_SCORES, check_room
from headspan.system.outputs import check_folder
from headspan.vocabulary.errors import HeadspanError, inform

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headspan.graphs.graph import Wiring

__all__ = [
    "FIGURES",
    "FORMATS",
    "Context",
    "Drawn",
    "draw",
    "parse_formats",
    "parse_names",
    "save_wiring",
    "wiring_svg",
]

Named = Iterator[tuple[str, "Figure"]]


def _wiring(context: Context) -> Named:
    from headspan.plotting.ellipse import ellipse_figure

    context.need_forward_pairs()
    yield "wiring", ellipse_figure([context.wiring(metric) for metric in context.metrics])


def _grid(context: Context) -> Named:
    from headspan.plotting.grid import fits_tokens, grid_figure

    context.need_forward_pairs()
    for metric in context.metrics:
        for k in _sizes(context.k):
            wiring = context.wiring(metric, k)
            if not fits_tokens(wiring):
                context.notes.append("grids are drawn without tokens: this model has too many heads for them")
            yield f"grid-{metric}-top{k}", grid_figure(wiring, context.tokens if fits_tokens(wiring) else None)


def _two_layer(context: Context) -> Named:
    from headspan.plotting.twolayer import two_layer_figure

    layers = {head.layer for head in context.scores.ports.query}
    if len(layers) != 2:
        raise HeadspanError(f"it needs a model with two attention layers, and this one has {len(layers)}")
    why = "it compares scores with those of random weights, and influence needs a run of the model"
    metrics = context.metrics_of_weights("two-layer", why)
    try:
        behaviour = context.behaviour
    except HeadspanError as reason:
        context.notes.append(f"two-layer is drawn without shading heads: {reason}")
        behaviour = None
    yield "two-layer", two_layer_figure(context.scores, metrics, context.flow, behaviour)


def _scatter(context: Context) -> Named:
    from headspan.plotting.scatter import scatter_figure

    context.need_metrics(*DEFAULT_METRICS)
    context.need_forward_pairs()
    yield "scatter", scatter_figure(context.scores, context.flow)


def _effects(context: Context) -> Named:
    from headspan.plotting.scatter import effects_figure
    from headspan.results.effects import effects_of

    measured = effects_of(context.scores)
    pairings = [pairing for pairing in context.flow if pairing in measured.pairings]
    for metric in context.metrics:
        yield f"effects-{metric}", effects_figure(context.scores, measured, pairings, metric)


def _identity(context: Context) -> Named:
    yield "identity", _head_scores_of(context, ["identity"])


def _head_scores(context: Context) -> Named:
    yield "head-scores", _head_scores_of(context, ["duplicate_token", "previous_token", "induction"])


def _head_scores_of(context: Context, kinds: list[str]) -> Figure:
    from headspan.plotting.headscores import head_score_figure

    scores = context.behaviour
    measured = [kind for kind in kinds if kind in scores and scores.top(kind, 1)]
    if not measured:
        raise HeadspanError(f"these head scores have no values for {', '.join(kinds)}. Measure them on a longer text")
    if measured != kinds:
        left_out = ", ".join(kind for kind in kinds if kind not in measured)
        context.notes.append(f"head scores are drawn without {left_out}: they could not be measured on that text")
    try:
        patterns = context.patterns
    except HeadspanError as reason:
        context.notes.append(f"head scores are drawn without attention patterns: {reason}")
        patterns = None
    return head_score_figure(scores, measured, patterns)


def _kl(context: Context) -> Named:
    from headspan.plotting.distributions import kl_figure

    context.need_metrics(PK)
    context.need_forward_pairs()
    context.need_all_pairings()
    yield "kl", kl_figure(context.scores)


def _norms(context: Context) -> Named:
    from headspan.plotting.weights import norms_figure

    yield "norms", norms_figure(context.need_weights())


def _unembedding(context: Context) -> Named:
    from headspan.plotting.weights import norm_figure, normalised_figure

    weights = context.need_weights()
    yield "unembedding-norm", norm_figure(weights)
    yield "unembedding-normalised", normalised_figure(weights)


def _random(context: Context) -> Named:
    from headspan.plotting.distributions import random_figure

    yield "random", random_figure(*context.dimensions())


def _folded_wiring(context: Context) -> Named:
    from headspan.change.compare import shared_edges
    from headspan.plotting.grid import grid_figure, grid_title

    context.need_forward_pairs()
    folded = context.folded_scores
    for metric in context.compared_with_folded:
        wiring = context.wiring(metric, scores=folded)
        shared = sum(
            shared_edges(context.scores[metric, p].forward(), folded[metric, p].forward(), context.k)
            for p in context.flow
        )
        title = f"{grid_title(wiring)}, folded weights; {shared} edges as in the original"
        yield f"folded-wiring-{metric}", grid_figure(wiring, title=title)


def _mse(context: Context) -> Named:
    from headspan.change.compare import compare
    from headspan.plotting.change import mse_figure

    context.need_all_pairings()
    yield "mse", mse_figure(compare(context.scores, context.folded_scores, metric=context.compared_with_folded))


class FigureKind(NamedTuple):
    """A name for ``--only``, what it shows, and how to make it."""

    title: str
    make: Callable[[Context], Named]


FIGURES: dict[str, FigureKind] = {
    "wiring": FigureKind("the strongest edges, labelled heads inside an ellipse", _wiring),
    "grid": FigureKind("the strongest edges on the layer × head grid, with tokens", _grid),
    "two-layer": FigureKind("all pairs of a two-layer model", _two_layer),
    "scatter": FigureKind("PK against CS", _scatter),
    "effects": FigureKind("score against measured effect of every edge", _effects),
    "identity": FigureKind("identity scores and the best head's attention", _identity),
    "head-scores": FigureKind("the other head scores and the best heads' attention", _head_scores),
    "kl": FigureKind("distance of PK from chance, by pairing", _kl),
    "norms": FigureKind("norms of the QK and OV matrices, by layer", _norms),
    "unembedding": FigureKind("unembedding vectors against the bias of the final norm", _unembedding),
    "random": FigureKind("random draws against their densities", _random),
    "folded-wiring": FigureKind("the strongest edges after folding", _folded_wiring),
    "mse": FigureKind("how much folding changes the similarities", _mse),
}


@dataclass(frozen=True, repr=False)
class Drawn:
    """The files written, why other figures were not drawn, and what was left out of those that were."""

    files: list[Path]
    skipped: dict[str, str]
    notes: list[str]

    def rows(self) -> list[dict[str, Any]]:
        """One record per figure: its name, its file, and why it was not drawn."""
        drawn = [{"figure": file.stem, "file": str(file), "skipped": None} for file in self.files]
        return drawn + [{"figure": name, "file": None, "skipped": why} for name, why in self.skipped.items()]

    def __repr__(self) -> str:
        return text_table(self._headline(), self.rows())

    def _repr_html_(self) -> str:
        return html_table(self._headline(), self.rows())

    def _headline(self) -> str:
        return f"{len(self.files)} figures drawn, {len(self.skipped)} left out"


_PAIR_BYTES, _COPY_BYTES = 45, 8  # measured: memory per pair of the largest matrix, and per pair of all matrices


def draw(
    names: str | Iterable[str],
    context: Context,
    out: str | os.PathLike[str],
    formats: str | Iterable[str] = "png",
    dpi: float = DPI,
    force: bool = False,
) -> Drawn:
    """Draw figures into a directory. Figures whose inputs are missing are left out, and the reason is returned.

    names: of `FIGURES`, or ``"all"``. formats: of png, pdf and svg. dpi: pixels per inch of png files, and of the
    dense clouds of points inside the other two.
    force: overwrite files of these names that are not such figures.
    """
    chosen, endings = parse_names(names), parse_formats(formats)
    sizes = [values.size for values in context.scores.arrays.values()]
    needed = _PAIR_BYTES * max(sizes, default=0) + _COPY_BYTES * sum(sizes)
    check_room(f"a drawing of {len(context.scores.ports.query):,} heads", needed, FEWER_SCORES)
    check_folder(out, file_names(chosen, context.k, endings), force=force)
    files: list[Path] = []
    skipped: dict[str, str] = {}
    for name in chosen:
        with theme():
            try:
                made = list(FIGURES[name].make(context))
            except HeadspanError as reason:
                skipped[name] = str(reason)
                continue
            for path, figure in ((Path(out) / f"{file}.{ending}", f) for file, f in made for ending in endings):
                save(figure, path, dpi, force=force)
                files.append(path)
                inform(str(path))
    return Drawn(files, skipped, list(dict.fromkeys(context.notes)))


def file_names(names: Iterable[str], k: int, endings: Iterable[str]) -> dict[str, str]:
    """Every file that drawing these figures may write, with its format.

    >>> list(file_names(["scatter", "unembedding"], 20, ["png"]))
    ['scatter.png', 'unembedding-norm.png', 'unembedding-normalised.png']
    """
    from headspan.subspaces.metrics import METRICS

    several = {
        "grid": [f"grid-{metric}-top{size}" for metric in METRICS for size in _sizes(k)],
        "effects": [f"effects-{metric}" for metric in METRICS],
        "unembedding": ["unembedding-norm", "unembedding-normalised"],
        "folded-wiring": [f"folded-wiring-{metric}" for metric in METRICS],
    }
    files = [file for name in names for file in several.get(name, [name])]
    return {f"{file}.{ending}": ending for file in files for ending in endings}


def _sizes(k: int) -> list[int]:
    """The numbers of edges that the grids show."""
    return sorted({k // 2, k, k + k // 2} - {0})


def parse_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Figure names from ``"all"``, ``"wiring,scatter"`` or a list, without duplicates, in the order of `FIGURES`."""
    words = [names] if isinstance(names, str) else list(names)
    if any(word.strip().lower() == "use" for text in words for word in text.split(",")):
        warn_renamed("the figure use", "effects")
        words = [re.sub(r"\buse\b", "effects", text, flags=re.IGNORECASE) for text in words]
    return _parse(words, tuple(FIGURES), "figure")


def parse_formats(formats: str | Iterable[str]) -> tuple[str, ...]:
    """File formats from ``"png,pdf"`` or a list, without duplicates."""
    return _parse(formats, FORMATS, "format")


def _parse(texts: str | Iterable[str], known: tuple[str, ...], what: str) -> tuple[str, ...]:
    words = [
        word.strip().lower() for text in ([texts] if isinstance(texts, str) else texts) for word in text.split(",")
    ]
    unknown = [word for word in words if word and word not in (*known, "all")]
    if unknown or not any(words):
        asked = f"unknown {what} {unknown[0]!r}" if unknown else f"no {what} was named"
        raise HeadspanError(f"{asked}. Choose from {', '.join(known)}, or all")
    return known if "all" in words else tuple(word for word in known if word in words)


def save_wiring(
    wiring: Wiring, path: str | os.PathLike[str], *, ellipse: bool = False, dpi: float = DPI, force: bool = False
) -> None:
    """Draw one wiring, on the layer × head grid or with labelled heads in an ellipse, to a png, pdf or svg file."""
    from headspan.plotting.ellipse import ellipse_figure
    from headspan.plotting.grid import grid_figure

    if not wiring.edges:
        raise HeadspanError(f"{path} would be an empty drawing: {'; '.join(wiring.notes) or 'there are no edges'}")
    with theme():
        save(ellipse_figure([wiring]) if ellipse else grid_figure(wiring), path, dpi, force=force)


def wiring_svg(wiring: Wiring) -> str:
    """A wiring on the layer × head grid as SVG text, for notebooks."""
    from headspan.plotting.grid import grid_figure

    with theme():
        return to_svg(grid_figure(wiring))
