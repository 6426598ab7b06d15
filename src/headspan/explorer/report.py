"""One self-contained HTML file to explore the scores of a model.

>>> import headspan as hs
>>> page = hs.report(hs.score(hs.open("demo")))
>>> page.html.startswith("<!doctype html>"), page.payload["model"]["name"]
(True, 'demo')
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from headspan.change.diff import Diff
from headspan.change.series import Series
from headspan.explorer.data import collect
from headspan.explorer.demo_measurements import shipped_tasks, with_shipped
from headspan.explorer.head_values import HeadScores
from headspan.explorer.page import Report, render
from headspan.explorer.tasks import TaskFiles, given_tasks
from headspan.plotting.preview import small_picture
from headspan.results.choices import given_behaviour, given_labels
from headspan.results.head_scores import BehaviourScores
from headspan.results.labels import LabelsLike
from headspan.results.scores import Scores, is_result
from headspan.scoring.inputs import ScoresLike, given_scores, given_weights
from headspan.scoring.model_of_result import weights_of
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.outputs import check_output
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.errors import refuse_ignored

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike


@renamed(weights="model", path="out")
@checked
def report(
    scores: ScoresLike | Diff | Series,
    model: ModelLike | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    labels: LabelsLike | None = None,
    behaviour: BehaviourScores | HeadScores | str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    task: TaskFiles | None = None,
    force: bool = False,
    progress: Update | None = None,
) -> Report:
    """A page with the wiring diagram, heat maps, hubs and everything else in the scores.

    scores: scores, the file of a result, or a model to score now (its weights are then used too); or what
        ``headspan.diff`` or ``headspan.track`` gave, which have pages of their own.
    model: the model that the scores were made from; with it the page has tokens and principal angles.
    out: where to write it; without, the page is only returned. A notebook shows a preview, and ``.show()`` the page.
    labels: head classes, or the name or CSV file of some (``"behaviour"``: by their head scores); they colour the
        heads and are evaluated. The demo model has those of its head scores by default.
    behaviour: head scores (``headspan.behaviour``) or their file; those kept with the result by default.
    tokens: how many tokens to list for every head and role, where there is a model; 10 by default, 0 for none.
    task: task circuits of the model (``headspan.task``), or their files: each gets a tab.
    force: overwrite a file that is not such a page (never an input).
    progress: called with (done, total); by default a bar in a terminal or notebook.
    """
    if out is not None:
        check_output(out, "page", force=force)
    if isinstance(scores, (Diff, Series)):
        from headspan.explorer.change import change_page

        given = {"model": model, "labels": labels, "behaviour": behaviour, "tokens": tokens, "task": task}
        refuse_ignored("on the page of a change", **given)
        page = change_page(scores)
        if out is not None:
            page.save(out, force=force)
        return page
    if model is None and not isinstance(scores, Scores) and not is_result(scores):
        model = scores = given_weights(scores)
    scores = given_scores(scores, whole="the page")
    weights = None if model is None else weights_of(scores, model)
    if weights is None:
        refuse_ignored("without the model of the result (`model`)", tokens=tokens or None)
    habits = given_behaviour(behaviour, scores)
    told = None if habits is None else habits.to_dict()
    if told is not None:
        scores = replace(scores, annotations={**scores.annotations, "behaviour": told})
    known = with_shipped(scores)
    if labels is None and known is not scores and told is None:
        labels = "behaviour"
    scores = known
    classes = given_labels(labels, scores)
    tasks = given_tasks(task) or shipped_tasks(scores)
    with progress_bar("making the page", progress) as update:
        listed = 10 if tokens is None else tokens
        payload = collect(scores, weights, labels=classes, behaviour=told, tokens=listed, tasks=tasks, progress=update)
    page = Report(payload, render(payload), partial(small_picture, scores, classes))
    if out is not None:
        page.save(out, force=force)
    return page
