"""``headspan report``: one interactive HTML file; and ``headspan site``: a gallery of several results."""

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
from headspan.vocabulary.words import counted

Tokens = Annotated[
    int | None, typer.Option("--tokens", min=0, help="Tokens to list per head and role; 0 for none. [default: 10]")
]


def register(app: typer.Typer) -> None:
    app.command("report")(report)
    app.command("site")(site)


def report(
    scores: ResultRef,
    out: Annotated[Path, out_option("The HTML file to write.")] = Path("report.html"),
    labels: LabelsOption = None,
    fold: Fold = False,
    metric: Metrics = None,
    pairing: Pairings = None,
    model: WeightsOption = None,
    behaviour: BehaviourOption = None,
    tokens: Tokens = None,
    task: Annotated[
        list[Path] | None, typer.Option(help="A task circuit from headspan task, for a tab; may be repeated.")
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
      headspan report gpt2.safetensors --task ioi.safetensors --out gpt2.html
    """
    from headspan.explorer.report import report as make
    from headspan.results.head_scores import BehaviourScores
    from headspan.results.labels import Labels
    from headspan.results.scores import Scores, is_result
    from headspan.results.tasks.task_result import Task
    from headspan.subspaces.metrics import DEFAULT_METRICS
    from headspan.system.outputs import check_output

    check_output(out, "page", inputs=[scores, labels, model, behaviour, *(task or [])], force=force)
    if labels is not None and labels != "behaviour":
        Labels.load(labels)  # report a wrong name before scoring
    habits = BehaviourScores.load(behaviour) if behaviour else None
    tasks = [Task.load(path) for path in task or []]
    if is_result(scores):
        result, opened = Scores.load(scores), model
        refuse_ignored("on a saved result, which has its own", metric=metric, pairing=pairing)
        if fold and result.provenance.get("folding", "none") == "none":
            raise HeadspanError(
                "--fold cannot change a saved result. Give a model instead, or score it again with --fold"
            )
    else:
        from headspan.scoring.run import score

        opened = open_model(scores, fold)  # reports a missing file first
        refuse_ignored(f"on a model, and {scores} is one", model=model)
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
            task=tasks,
            force=force,
            progress=update,
        )
    for remark in page.payload["notes"]:
        note(remark)
    note(f"{out}: {len(page.html.encode()) / 1e6:.1f} MB. Open it in a browser")
    if show:
        typer.launch(str(out.resolve()))


def site(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder, or an existing gallery.")],
    scores: Annotated[
        list[str], typer.Argument(metavar="RESULT|MODEL…", help="Saved results, or models to score now.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option("--weights", help="The model of a RESULT, for tokens and angles; may be repeated, in any order."),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the index page.")] = "headspan gallery",
    tokens: Tokens = None,
    force: Force = False,
) -> None:
    """Build a static gallery: an index with pictures and key facts, and one page per model.

    The gallery needs no server: copy the folder anywhere.

    \b
    Examples:
      headspan site gallery gpt2.safetensors smollm2.safetensors
      headspan site gallery demo gpt2.safetensors --weights openai-community/gpt2
    """
    from headspan.explorer.site import site as make

    with progress("making the gallery") as update:
        made = make(folder, scores, model=model or [], title=title, tokens=tokens, force=force, progress=update)
    note(f"{made.folder / 'index.html'}: {counted(len(made.pages), 'model')}. Open it in a browser")
