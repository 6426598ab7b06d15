"""``headspan.figures``: the paper's figures of a result or a model, as files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from headspan.plotting import Drawn, draw, file_names, parse_formats, parse_names
from headspan.plotting.canvas import DPI
from headspan.plotting.context import Context
from headspan.results.choices import given_behaviour, given_labels
from headspan.results.head_scores import BehaviourScores
from headspan.results.labels import LabelsLike
from headspan.results.scores import Scores, is_result
from headspan.scoring.inputs import ScoresLike, given_scores, given_weights
from headspan.scoring.model_of_result import weights_of
from headspan.system.arguments import checked
from headspan.system.outputs import check_folder
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.errors import HeadspanError, refuse_ignored

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike

EDGES = 20  # per pairing in wiring diagrams
_USED_BY = {  # the figures that an argument changes
    "k": ("wiring", "grid", "folded-wiring"),
    "labels": ("wiring", "grid", "folded-wiring"),
    "run": ("two-layer", "identity", "head-scores"),
    "text": ("identity", "head-scores"),
    "behaviour": ("two-layer", "identity", "head-scores"),
}


@checked
def figures(
    scores: ScoresLike,
    out: str | os.PathLike[str],
    only: str | Iterable[str] = "all",
    format: str | Iterable[str] = "png",
    *,
    k: int | None = None,
    labels: LabelsLike | None = None,
    model: ModelLike | None = None,
    behaviour: BehaviourScores | Mapping[str, Mapping[str, float | None]] | str | os.PathLike[str] | None = None,
    run: bool = False,
    text: str | None = None,
    dpi: float = DPI,
    force: bool = False,
    progress: Update | None = None,
) -> Drawn:
    """Draw the paper's figures into a directory; what cannot be drawn is in ``skipped``, with the reason.

    Parameters
    ----------
    scores : a result, its file, or a model to score now.
    out : the directory for the figures.
    only : names of figures (``"wiring,scatter"`` or a list); all by default. format : of png, pdf and svg.
    k : edges per pairing in wiring diagrams, 20 by default.
    labels : head classes, or the name or CSV file of some; ``"behaviour"`` for those by head scores.
    model : with a result, the model that it was made from; some figures need its weights.
    behaviour : head scores (``headspan.behaviour``), or their file.
    run : run the model to measure head scores. text : for the attention patterns.
    dpi : pixels per inch of png files. force : overwrite files of these names that are not such figures.
    """
    names, endings = parse_names(only), parse_formats(format)
    if not 20 <= dpi <= 1200:
        raise HeadspanError(f"dpi must be from 20 to 1200, not {dpi:g}")
    given = {"k": k, "labels": labels, "run": run, "text": text, "behaviour": behaviour}
    for name, value in given.items():
        if not set(_USED_BY[name]) & set(names) and not (name in ("run", "behaviour") and labels == "behaviour"):
            refuse_ignored(f"on {' and '.join(names)}", **{name: value})
    k = EDGES if k is None else k
    inputs = [one for one in (scores, labels, model, behaviour) if isinstance(one, (str, os.PathLike))]
    check_folder(out, file_names(names, k, endings), inputs=inputs, force=force)
    if isinstance(scores, Scores) or is_result(scores):
        result = given_scores(scores)
        weights = None if model is None else weights_of(result, model)
    else:
        refuse_ignored("on a model, only on a saved result", model=model)
        weights = given_weights(scores)
        result = given_scores(weights, progress=progress)
    habits = given_behaviour(behaviour, result)
    if habits is not None:
        result.annotations["behaviour"] = habits.to_dict()
    with progress_bar("drawing", progress) as update:
        context = Context(result, weights, k=k, run=run, progress=update)
        context.text = text or context.text
        if labels == "behaviour" and run and "behaviour" not in result.annotations:
            result.annotations["behaviour"] = context.behaviour.to_dict()
        context.labels = given_labels(labels, result)
        drawn = draw(names, context, out, endings, dpi, force=force)
    if not drawn.files:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in drawn.skipped.items())
        raise HeadspanError(f"no figure could be drawn. {reasons}")
    return drawn
