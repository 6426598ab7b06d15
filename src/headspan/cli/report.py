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
from headspan.vocabulary.errors import HeadspanError, refuse_ignored


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    scores: ResultRef,
    out: Annotated[Path, out_option("The HTML file to write.")] = Path("report.html"),
    labels: LabelsOption = None,
    fold: Fold = False,
    metric: Metrics = None,
    pairing: Pairings = None,
    model: WeightsOption = None,
    behaviour: BehaviourOption = None,
    tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens to list per head and role; 0 for none. [default: 10]")
    ] = None,
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

    check_output(out, "page", inputs=[scores, labels, model, behaviour], force=force)
    if labels is not None and labels != "behaviour":
        Labels.load(labels)  # report a wrong name before scoring
    habits = BehaviourScores.load(behaviour) if behaviour else None
    if is_result(scores):
        result, opened = Scores.load(scores), model
        refuse_ignored("on a saved result, which has its own", metric=metric, pairing=pairing)
        if fold and result.provenance.get("folding", "none") == "none":
            raise HeadspanError(
                "--fold cannot change a saved result. Give a model instead, or score it again with --fold"
            )
    else:
        refuse_ignored(f"on a model, and {scores} is one", model=model)
        from headspan.scoring.run import score

        opened = open_model(scores, fold)
        check_output(out, "page", force=force)  # again, now that the files of a hub model are known
        with progress("scoring") as update:
            result = score(opened, metric or DEFAULT_METRICS, pairing or "all", progress=update)
    with progress("making the page") as update:
        page = make(
            result,
            opened,
            out,
            labels=labels,
            behaviour=habits,
            tokens=tokens,
            force=force,
            progress=update,
        )
    for remark in page.payload["notes"]:
        note(remark)
    note(f"{out}: {len(page.html.encode()) / 1e6:.1f} MB. Open it in a browser")
    if show:
        typer.launch(str(out.resolve()))
