"""Commands that draw: wiring and figures."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headspan.cli.common import Csv, Force, Json, ResultRef, note, print_table, progress
from headspan.cli.results import Pairings
from headspan.errors import HeadspanError

if TYPE_CHECKING:
    from headspan.analysis.behaviour import BehaviourScores
    from headspan.analysis.labels import Labels
    from headspan.analysis.wiring import Wiring
    from headspan.figures import Context
    from headspan.models.weights import AttentionWeights

LabelsOption = Annotated[
    str | None,
    typer.Option(
        "--labels",
        help="Head classes: gpt2, gpt2-ioi, gpt2-identity, a CSV file head,label, or behaviour for head scores ≥ 0.3.",
    ),
]
WeightsOption = Annotated[
    str | None, typer.Option("--weights", help="With a RESULT: the model it was made from, for tokens and norms.")
]
BehaviourOption = Annotated[
    Path | None, typer.Option("--behaviour", help="Head scores written by headspan behaviour --out.")
]
DpiOption = Annotated[float, typer.Option(min=20, max=1200, help="Pixels per inch of PNG files.")]
_BEHAVES = 0.3  # a head score from which --labels behaviour gives the label


def register(app: typer.Typer) -> None:
    app.command("wiring")(wiring)
    app.command("figures")(figures)


def wiring(
    reference: ResultRef,
    pairing: Pairings = None,
    metric: Annotated[str, typer.Option("--metric", "-m", help="Similarity.")] = "pk",
    k: Annotated[int, typer.Option("-k", "--top", min=0, help="Edges per pairing, or per target.")] = 20,
    rule: Annotated[str, typer.Option(help="top, top-per-target, significance or threshold.")] = "top",
    q: Annotated[float | None, typer.Option(help="Largest q-value, for the rule significance. [default: 0.05]")] = None,
    null: Annotated[
        str | None, typer.Option(help="random or reversed, for the rule significance. [default: random]")
    ] = None,
    minimum: Annotated[float | None, typer.Option(help="Leave out pairs that score less than this.")] = None,
    labels: LabelsOption = None,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", help="Write to .graphml, .json, .csv, .png, .pdf or .svg; may be repeated."),
    ] = None,
    ellipse: Annotated[
        bool, typer.Option("--ellipse", help="Draw labelled heads in an ellipse, not the grid.")
    ] = False,
    dpi: DpiOption = 160,
    force: Force = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Choose the strongest edges between heads; list, export or draw them.

    \b
    headspan wiring demo
    headspan wiring gpt2.safetensors --labels gpt2 --out wiring.png --out wiring.graphml
    headspan wiring gpt2.safetensors --rule significance --null reversed --q 0.05 --out edges.csv
    """
    from headspan.analysis.wiring import wiring as choose
    from headspan.figures import Context
    from headspan.scoring.run import scores_of
    from headspan.system.outputs import check_outputs

    check_outputs([(path, _kind(path)) for path in out or []], inputs=[reference, labels], force=force)
    with progress("scoring") as update:
        scores = scores_of(reference, [metric], pairing or "flow", progress=update)
    classes = _labels(labels, Context(scores))
    chosen = choose(scores, pairing or "flow", metric, k, rule, q, null, minimum, classes)  # type: ignore[arg-type]
    for sentence in chosen.notes:
        note(sentence)
    for path in out or []:
        _export(chosen, path, ellipse, dpi, force)
        note(f"{path}: {len(chosen.edges)} edges between {len(chosen.nodes)} heads")
    if out and not (as_json or as_csv):
        return
    labelled = {node.head: " ".join(node.labels) for node in chosen.nodes}
    rows = [
        {"pairing": str(e.pairing), "rank": e.rank, "source": str(e.source), "target": str(e.target), "score": e.score}
        | ({"source labels": labelled[e.source], "target labels": labelled[e.target]} if classes else {})
        for e in chosen.edges
    ]
    title = f"{metric}, {chosen.rule}: {len(chosen.edges)} edges between {len(chosen.nodes)} heads"
    print_table(rows, title=title, formats={"score": ".4f"}, as_json=as_json, as_csv=as_csv)


def figures(
    reference: ResultRef,
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the figures.")],
    only: Annotated[
        str,
        typer.Option(
            help="Comma-separated: wiring, grid, two-layer, scatter, identity, head-scores, kl, norms, "
            "unembedding, random, folded-wiring, mse."
        ),
    ] = "all",
    formats: Annotated[str, typer.Option("--format", help="png, pdf, svg or a list of them.")] = "png",
    k: Annotated[int, typer.Option("-k", "--top", min=1, help="Edges per pairing in wiring diagrams.")] = 20,
    labels: LabelsOption = None,
    weights: WeightsOption = None,
    behaviour: BehaviourOption = None,
    run: Annotated[bool, typer.Option("--run", help="Run the model for head scores (needs headspan[torch]).")] = False,
    text: Annotated[str | None, typer.Option(help="The text for attention patterns.")] = None,
    dpi: DpiOption = 160,
    force: Force = False,
) -> None:
    """Draw the paper's figures for any model; what cannot be drawn is left out, with the reason.

    \b
    headspan figures demo --out figures --run
    headspan figures gpt2 --labels gpt2 --out figures --format pdf,png
    headspan figures gpt2.safetensors --weights gpt2 --only wiring,scatter --out figures
    """  # fmt: skip
    from headspan.figures import draw, file_names, parse_formats, parse_names
    from headspan.system.outputs import check_folder

    names, endings = parse_names(only), parse_formats(formats)  # a wrong name must not wait for the scores
    check_folder(out, file_names(names, k, endings), inputs=[reference, labels, weights, behaviour], force=force)
    context = _context(reference, weights, behaviour, labels, run)
    context.k = k
    context.text = text or context.text
    with progress("drawing") as update:
        context.progress = update
        drawn = draw(names, context, out, endings, dpi, say=note, force=force)
    for name, reason in drawn.skipped.items():
        note(f"{name} was not drawn: {reason}")
    for remark in drawn.notes:
        note(remark)
    if not drawn.files:
        raise HeadspanError(f"none of the figures could be drawn ({', '.join(drawn.skipped)}): the reasons are above")


def _context(reference: str, weights: str | None, behaviour: Path | None, labels: str | None, run: bool) -> Context:
    """Scores, weights, head scores and labels for the figures."""
    from headspan.analysis.origin import weights_of
    from headspan.figures import Context
    from headspan.scores import Scores, is_result

    opened: AttentionWeights | None = None
    if is_result(reference):
        scores = Scores.load(reference)
        opened = weights_of(scores, weights, note) if weights else None
    else:
        from headspan.models.weights import open
        from headspan.scoring.run import score

        opened = open(reference)
        for sentence in opened.notes:
            note(sentence)
        with progress("scoring") as update:
            scores = score(opened, progress=update)
    if behaviour is not None:
        habits = _read_behaviour(behaviour)
        if doubt := habits.doubt(scores):
            note(doubt)
        scores.annotations["behaviour"] = habits.to_dict()
    context = Context(scores, opened, run=run)
    context.labels = _labels(labels, context)
    return context


def _labels(name: str | None, context: Context) -> Labels | None:
    """Labels by name, checked against the heads of the model; a shared head takes over those of its group."""
    from headspan.analysis.labels import Labels

    if name is None:
        return None
    found = context.behaviour.labels(threshold=_BEHAVES) if name == "behaviour" else Labels.load(name)
    if doubt := found.doubt(context.scores.provenance):
        note(doubt)
    return found.for_model(context.scores.ports)


def _read_behaviour(path: Path) -> BehaviourScores:
    from headspan.analysis.behaviour import BehaviourScores
    from headspan.system.outputs import remember_input

    remember_input(path)
    try:
        return BehaviourScores.from_dict(json_module.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise HeadspanError(f"{path} cannot be read as head scores in JSON: {error}") from None


_EXPORTS = {".graphml": "to_graphml", ".json": "to_json", ".csv": "to_csv"}
_DRAWINGS = (".png", ".pdf", ".svg")


def _kind(path: Path) -> str:
    """What to write, by the file's name."""
    if path.suffix.lower() not in (*_EXPORTS, *_DRAWINGS):
        known = ", ".join((*_EXPORTS, *_DRAWINGS))
        raise HeadspanError(f"cannot tell from {path} what to write: its name must end in one of {known}")
    return path.suffix.lower().lstrip(".")


def _export(chosen: Wiring, path: Path, ellipse: bool, dpi: float, force: bool) -> None:
    """Write a wiring in the format that the file's name ends with."""
    ending = path.suffix.lower()
    if ending in _EXPORTS:
        getattr(chosen, _EXPORTS[ending])(path, force=force)
        return
    from headspan.figures import save_wiring

    save_wiring(chosen, path, ellipse=ellipse, dpi=dpi, force=force)
