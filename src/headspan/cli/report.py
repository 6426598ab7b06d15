"""``headspan report``: one HTML file to explore."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headspan.cli.common import Force, ResultRef, note, progress

if TYPE_CHECKING:
    from headspan.analysis.behaviour import BehaviourScores
    from headspan.models.weights import AttentionWeights


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    reference: ResultRef,
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    labels: Annotated[str | None, typer.Option(help="Head classes: gpt2-ioi, or a CSV file with head,label.")] = None,
    fold: Annotated[bool, typer.Option("--fold", help="Fold the norms into the weights first.")] = False,
    metrics: Annotated[str, typer.Option(help="Similarities to compute, comma-separated, or all.")] = "pk,cs",
    pairings: Annotated[str, typer.Option(help="Pairings to compute: all, flow, or a list like OQ,OK.")] = "all",
    weights: Annotated[
        str | None, typer.Option(help="With a RESULT: the model it was made from, for tokens and angles.")
    ] = None,
    behaviour: Annotated[
        Path | None, typer.Option(help="Head scores, as headspan behaviour --out writes them.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to list per head and role; 0 for none.")] = 10,
    force: Force = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser when it is ready.")] = False,
) -> None:
    """Write one self-contained HTML file: wiring diagram, heat maps, hubs, tokens and all numbers to explore.

    \b
    headspan report demo --out demo.html
    headspan report openai-community/gpt2 --labels gpt2-ioi --out gpt2.html --open
    headspan report gpt2.safetensors --weights openai-community/gpt2 --out gpt2.html
    """
    from headspan.analysis.labels import Labels
    from headspan.analysis.origin import weights_of
    from headspan.errors import HeadspanError
    from headspan.explorer import report as make
    from headspan.scores import Scores, is_result
    from headspan.system.outputs import check_output

    check_output(out, "page", inputs=[reference, labels, weights, behaviour], force=force)
    classes = Labels.load(labels) if labels else None  # a wrong name must not wait for the scores
    habits = _read_behaviour(behaviour) if behaviour else None
    with progress("score") as update:
        if is_result(reference):
            scores = Scores.load(reference)
            if fold and scores.provenance.get("folding", "none") == "none":
                raise HeadspanError(
                    "a saved result is folded or not already: give --fold with a model, or score it anew"
                )
            opened = weights_of(scores, weights) if weights else None
        else:
            from headspan.scoring.run import score

            opened = _open(reference, fold)
            scores = score(opened, metrics, pairings, progress=update)
    if habits is not None and (doubt := habits.doubt(scores)):
        note(doubt)
    with progress("report") as update:
        page = make(
            scores,
            opened,
            out,
            labels=classes,
            behaviour=None if habits is None else habits.to_dict(),
            tokens=tokens,
            force=force,
            progress=lambda what, done, total: update(done, total),
        )
    for remark in page.payload["notes"]:
        note(remark)
    note(f"{out}: {len(page.html.encode()) / 1e6:.1f} MB, open it in any browser")
    if show:
        typer.launch(str(out.resolve()))


def _open(reference: str, fold: bool) -> AttentionWeights:
    from headspan.models.folding import fold as folded
    from headspan.models.weights import open

    opened = open(reference)
    return folded(opened) if fold else opened


def _read_behaviour(path: Path) -> BehaviourScores:
    import json

    from headspan.analysis.behaviour import BehaviourScores
    from headspan.errors import HeadspanError

    try:
        return BehaviourScores.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise HeadspanError(
            f"{path} cannot be read as head scores ({error}): make it with headspan behaviour"
        ) from error
