"""``headspan wiring`` and ``headspan figures``: commands that draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headspan.cli.common import (
    BehaviourOption,
    Force,
    FromOption,
    LabelsOption,
    Listing,
    Metric,
    NullOption,
    Pairings,
    ResultRef,
    ToOption,
    WeightsOption,
    k_option,
    listing,
    note,
    out_option,
    progress,
)
from headspan.cli.tables import EFFECT_FORMATS, effect_columns
from headspan.vocabulary.errors import HeadspanError, refuse_ignored

if TYPE_CHECKING:
    from headspan.graphs.graph import Wiring

DpiOption = Annotated[float, typer.Option(min=20, max=1200, help="Pixels per inch of PNG files.")]
_EXPORTS = {".graphml": "to_graphml", ".json": "to_json", ".csv": "to_csv"}
_DRAWINGS = (".png", ".pdf", ".svg")


def register(app: typer.Typer) -> None:
    app.command("wiring")(listing(wiring))
    app.command("figures")(figures)


def wiring(
    scores: ResultRef,
    pairing: Pairings = None,
    metric: Metric = None,
    k: Annotated[int | None, k_option("Edges per pairing, or per target. [default: 20]", 0)] = None,
    rule: Annotated[
        str, typer.Option(help="How to choose edges: top, top-per-target, significance or threshold.")
    ] = "top",
    q: Annotated[float | None, typer.Option(help="With --rule significance: largest q-value. [default: 0.05]")] = None,
    null: NullOption = None,
    minimum: Annotated[float | None, typer.Option(help="Leave out pairs that score less than this.")] = None,
    labels: LabelsOption = None,
    from_: FromOption = None,
    to: ToOption = None,
    large_effect: Annotated[
        bool, typer.Option("--large-effect", help="Only edges with a large effect (headspan effects --into).")
    ] = False,
    circuit: Annotated[
        str | None,
        typer.Option(help="Show the edges of this JSON file instead (saved by the page or by headspan paths)."),
    ] = None,
    out: Annotated[
        list[Path] | None, out_option("Write to .graphml, .json, .csv, .png, .pdf or .svg; may be repeated.")
    ] = None,
    ellipse: Annotated[
        bool, typer.Option("--ellipse", help="Draw labelled heads in an ellipse instead of the grid.")
    ] = False,
    dpi: Annotated[
        float | None, typer.Option(min=20, max=1200, help="Pixels per inch of PNG files. [default: 160]")
    ] = None,
    force: Force = False,
) -> Listing:
    """Choose the strongest edges between heads; list, export or draw them.

    \b
    Examples:
      headspan wiring demo
      headspan wiring gpt2.safetensors --labels gpt2 --out wiring.png --out wiring.graphml
      headspan wiring gpt2.safetensors --rule significance --null reversed --q 0.05 --out edges.csv
      headspan wiring gpt2.safetensors --circuit induction.json --out induction.svg
    """
    from headspan.graphs.graph import EDGE_COLUMNS
    from headspan.graphs.selection import wiring as choose
    from headspan.results.effects_fields import EFFECT_FIELDS
    from headspan.subspaces.metrics import PK
    from headspan.system.outputs import check_outputs

    if not any(path.suffix.lower() in _DRAWINGS for path in out or []):
        refuse_ignored("without a drawing (--out wiring.png)", ellipse=ellipse, dpi=dpi)
    check_outputs([(path, _kind(path)) for path in out or []], inputs=[scores, labels, circuit], force=force)
    chosen = choose(
        scores,
        pairing,
        metric or PK,
        k,
        rule,  # type: ignore[arg-type]
        q,
        null,  # type: ignore[arg-type]
        minimum,
        labels,
        from_=from_,
        to=to,
        large_effect=large_effect,
        circuit=circuit,
    )
    for sentence in chosen.notes:
        note(sentence)
    for path in out or []:
        _export(chosen, path, ellipse, 160 if dpi is None else dpi, force)
        note(f"{path}: {len(chosen.edges)} edges between {chosen.counted}")
    title = f"{chosen.metric}, {chosen.rule}: {len(chosen.edges)} edges between {chosen.counted}"
    rows = chosen.rows()
    hidden = {"metric"} | {name for name in EFFECT_FIELDS if all(row[name] is None for row in rows)}
    shown = [c for c in EDGE_COLUMNS if c not in hidden and (labels or not c.endswith("_labels"))]
    table = [effect_columns({name: row[name] for name in shown}) for row in rows]
    formats = {"score": ".4f"} | EFFECT_FORMATS
    tables = [(title, table, formats)]
    return Listing(rows, columns=EDGE_COLUMNS, tables=tables, spare=("rank",), written=bool(out))


def _kind(path: Path) -> str:
    """The format to write, from the file's name."""
    if path.suffix.lower() not in (*_EXPORTS, *_DRAWINGS):
        known = ", ".join((*_EXPORTS, *_DRAWINGS))
        raise HeadspanError(f"unknown format: {path}. Its name must end in one of {known}")
    return path.suffix.lower().lstrip(".")


def _export(chosen: Wiring, path: Path, ellipse: bool, dpi: float, force: bool) -> None:
    """Write a wiring in the format given by the file's name."""
    ending = path.suffix.lower()
    if ending in _EXPORTS:
        getattr(chosen, _EXPORTS[ending])(path, force=force)
        return
    from headspan.plotting import save_wiring

    save_wiring(chosen, path, ellipse=ellipse, dpi=dpi, force=force)


def figures(
    scores: ResultRef,
    out: Annotated[Path, out_option("Directory for the figures.")],
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Figures, comma-separated: wiring, grid, two-layer, scatter, use, identity, head-scores, kl, norms, "
            "unembedding, random, folded-wiring, mse; may be repeated. [default: all]"
        ),
    ] = None,
    format: Annotated[
        list[str] | None,
        typer.Option("--format", help="png, pdf or svg, comma-separated; may be repeated. [default: png]"),
    ] = None,
    k: Annotated[int | None, k_option("Edges per pairing in wiring diagrams. [default: 20]")] = None,
    labels: LabelsOption = None,
    model: WeightsOption = None,
    behaviour: BehaviourOption = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run the model to measure head scores (needs headspan[torch]).")
    ] = False,
    text: Annotated[str | None, typer.Option(help="Text for the attention patterns.")] = None,
    dpi: DpiOption = 160,
    force: Force = False,
) -> None:
    """Draw the paper's figures for any model; report each figure that cannot be drawn, with the reason.

    \b
    Examples:
      headspan figures demo --out figures --run
      headspan figures gpt2 --labels gpt2 --out figures --format pdf,png
      headspan figures gpt2.safetensors --weights gpt2 --only wiring,scatter --out figures
    """
    from headspan.plotting.figures import figures as draw

    with progress("drawing") as update:
        drawn = draw(
            scores,
            out,
            only or "all",
            format or "png",
            k=k,
            labels=labels,
            model=model,
            behaviour=behaviour,
            run=run,
            text=text,
            dpi=dpi,
            force=force,
            progress=update,
        )
    for name, reason in drawn.skipped.items():
        note(f"{name} was not drawn: {reason}")
    for remark in drawn.notes:
        note(remark)
