"""One self-contained HTML file to explore the scores of a model.

>>> import headspan as hs
>>> page = hs.report(hs.score(hs.open("demo")))
>>> page.html.startswith("<!doctype html>"), page.payload["model"]["name"]
(True, 'demo')
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from html import escape
from typing import Any

from headspan.analysis.labels import Labels
from headspan.explorer.data import HeadScores, Progress, collect
from headspan.explorer.page import render
from headspan.models.weights import AttentionWeights
from headspan.scores import Scores
from headspan.system.outputs import check_output, writing

FRAME_HEIGHT = 820  # pixels of a notebook cell


@dataclass(frozen=True)
class Report:
    """A finished page: ``save`` writes it, a notebook shows it."""

    payload: dict[str, Any] = field(repr=False)
    html: str = field(repr=False)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the page; the file appears only when complete. force: replace a file that is not such a page."""
        with writing(path, "page", force=force) as temporary:
            temporary.write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        # Without allow-same-origin the page cannot reach the notebook around it.
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{FRAME_HEIGHT}px;border:1px solid #ccc;border-radius:6px" '
            'title="headspan report"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Report of {self.payload['model']['name']}, {len(self.html) / 1e6:.1f} MB"


def report(
    scores: Scores,
    weights: AttentionWeights | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    labels: Labels | str | os.PathLike[str] | None = None,
    behaviour: HeadScores | None = None,
    tokens: int = 10,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """A page with the wiring diagram, heat maps, hubs and everything else that the scores tell.

    weights: the weights the scores were made from; with them the page also has tokens and principal angles.
    path: where to write it; without, the page is only returned (a notebook shows it).
    labels: head classes, or the name or CSV file of some; they colour the heads and are evaluated.
    behaviour: head scores by kind and head (``headspan.head_scores``); those kept with the result by default.
    tokens: how many tokens to list for every head and role; 0 for none.
    force: replace a file that is not such a page; one that is read is never replaced.
    progress: called with what is being done, and how much of it is.
    """
    if path is not None:
        check_output(path, "page", force=force)
    if labels is not None and not isinstance(labels, Labels):
        labels = Labels.load(labels)
    payload = collect(scores, weights, labels=labels, behaviour=behaviour, tokens=tokens, progress=progress)
    page = Report(payload, render(payload))
    if path is not None:
        page.save(path, force=force)
    return page
