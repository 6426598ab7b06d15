"""``headspan report``: one interactive HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headspan.cli.common import (
    BehaviourOption,
    Fold,
    Force,
    LabelsOption,
    Metrics,
    Pairings,
    ResultRef,
    WeightsOption,
    note,
    open_model,
    out_option,
    progress,
)
from headspan.vocabulary.errors import HeadspanError


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    reference: ResultRef,
    out: Annotated[Path, out_option("The HTML file to write.")] = Path("report.html"),
    labels: LabelsOption = None,
    fold: Fold = False,
    metric: Metrics = None,
    pairing: Pairings = None,
    weights: WeightsOption = None,
    behaviour: BehaviourOption = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to list per head and role; 0 for none.")] = 10,
    force: Force = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one self-contained interactive HTML file: wiring diagram, heat maps, hubs, tokens and all scores.

    \b
    Examples:
      headspan report demo --out demo.html
      headspan report openai-community/gpt2 --labels gpt2-ioi --out gpt2.html --open
      headspan report gpt2.safetensors --weights openai-community/gpt2 --out gpt2.html
    """
    from headspan.explorer.report import report as make
    from headspan.results.head_scores import BehaviourScores
    from headspan.results.labels import Labels
    from headspan.results.scores import Scores, is_result
    from headspan.subspaces.metrics import DEFAULT_METRICS
    from headspan.system.outputs import check_output

    check_output(out, "page", inputs=[reference, labels, weights, behaviour], force=force)
    if labels is not None and labels != "behaviour":
        Labels.load(labels)  # report a wrong name before scoring
    habits = BehaviourScores.load(behaviour) if behaviour else None
    if is_result(reference):
        scores, opened = Scores.load(reference), weights
        if fold and scores.provenance.get("folding", "none") == "none":
            raise HeadspanError(
                "--fold cannot change a saved result. Give a model instead, or score it again with --fold"
            )
    else:
        if weights is not None:
            raise HeadspanError(
                f"--weights is only for a saved result, and {reference} is a model. Leave out --weights"
            )
        from headspan.scoring.run import score

        opened = open_model(reference, fold)
        check_output(out, "page", force=force)  # again, now that the files of a hub model are known
        with progress("scoring") as update:
            scores = score(opened, metric or DEFAULT_METRICS, pairing or "all", progress=update)
    if habits is not None and (doubt := habits.doubt(scores)):
        note(doubt)
    with progress("making the page") as update:
        page = make(
            scores,
            opened,
            out,
            labels=labels,
            behaviour=None if habits is None else habits.to_dict(),
            tokens=tokens,
            force=force,
            progress=update,
        )
    for remark in page.payload["notes"]:
        note(remark)
    note(f"{out}: {len(page.html.encode()) / 1e6:.1f} MB. Open it in a browser")
    if show:
        typer.launch(str(out.resolve()))
