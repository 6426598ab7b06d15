"""``headspan diff`` (two models) and ``headspan track`` (a series of checkpoints)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.common import Fold, Force, Listing, Table, k_option, listing, note, out_option, progress

if TYPE_CHECKING:
    from headspan.change.diff import Diff
    from headspan.change.series import Series

_KINDS = {".html": "page", ".png": "png", ".pdf": "pdf", ".svg": "svg"}
_FORMATS = {"drift": ".3g", "floor": ".2g", "angle": ".2f"} | dict.fromkeys(("score_before", "score_after"), ".3f")
_FORMATS |= {"score_change": "+.3f"}
_SHOWN = {
    "drift": ("head", "role", "drift", "floor", "angle", "moved", "rank"),
    "edge": ("pairing", "source", "target", "kind", "rank", "score_before", "score_after", "score_change"),
    "hub": ("pairing", "hub", "head", "rank", "score_before", "score_after", "score_change"),
}


def register(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command("diff")(listing(diff))
    app.command("track")(listing(track))


def diff(
    model: Annotated[str, typer.Argument(metavar="BASE", help="First model: directory, file, hub id or 'demo'.")],
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="Second model, of the same shape, or a LoRA adapter directory.")
    ],
    fold: Fold = False,
    k: Annotated[int, k_option("Number of weights, and of edges per pairing, to list.")] = 20,
    out: Annotated[
        list[Path] | None,
        out_option("Write a page (.html), a figure (.png) or the data (.safetensors); may be repeated."),
    ] = None,
    effects: Annotated[
        bool, typer.Option("--effects", help="Also run both models and measure the effect of each listed edge in both.")
    ] = False,
    table: Annotated[str, typer.Option(help="Table to print: drift, edge, hub or all.")] = "all",
    memory: Annotated[
        str | None, typer.Option(help="Memory limit, for example 2GB. [default: half of free memory]")
    ] = None,
    force: Force = False,
) -> Listing:
    """Compare two models, or a model and its adapter (compare takes two results): how far heads moved, edges, hubs.

    Both must have the same shape.

    \b
    Examples:
      headspan diff gpt2 my-tuned-gpt2 --out diff.html
      headspan diff base-directory lora-directory --fold --json
    """
    from headspan.change.diff import TABLES
    from headspan.change.diff import diff as run
    from headspan.vocabulary.errors import HeadspanError

    if table != "all" and table not in TABLES:
        raise HeadspanError(f"unknown table {table!r}. Choose {', '.join(TABLES)} or all")
    outputs = _outputs(out or [], "diff", [model, other], force)
    with progress("comparing") as update:
        change = run(model, other, fold=fold, k=k, effects=effects, memory=memory, progress=update)
    for sentence in change.notes:
        note(sentence)
    for path, kind in outputs:
        _write(change, path, kind, force)
    return Listing(change.rows(table), tables=_tables(change, table, k))


def _tables(change: Diff, table: str, k: int) -> list[Table]:
    """The tables, each with its own columns."""
    moved = sum(line.moved for line in change.drift)
    titles = {
        "drift": f"weights that changed most ({moved} of {len(change.drift)} above the rounding floor)",
        "edge": f"edges that entered or left the top {change.k}, and the largest other changes (pk)",
        "hub": "hubs whose rank changed, with their score",
    }
    rows = {name: [_short(row) for row in change.rows(name)] for name in titles if table in ("all", name)}
    return [(titles[name], r[:k] if name == "drift" else r, _FORMATS) for name, r in rows.items()]


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A row narrow enough for a terminal: both ranks share one column; the change is that of the score."""
    words = {"score_before": "before", "score_after": "after", "score_change": "change"}
    found = {"rank": f"{row['rank_before']} → {row['rank_after']}"} | row
    effects = [name for name, value in row.items() if name.startswith("effect") and value is not None]
    return {name: found[words.get(name, name)] for name in (*_SHOWN[row["table"]], *effects)}


def track(
    model: Annotated[
        list[str],
        typer.Argument(metavar="REF…", help="Checkpoints in order, 'org/name@step*', 'run/step*', or a saved series."),
    ],
    out: Annotated[
        list[Path] | None,
        out_option("Write the series (.safetensors), a page (.html) or a figure (.png); may be repeated."),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Use only these steps, for example 0,1,2,4.")] = None,
    last: Annotated[int | None, typer.Option(help="Use only the last N checkpoints.", min=1)] = None,
    fold: Fold = False,
    k: Annotated[int | None, k_option("Follow every edge that is in the top K at some step. [default: 20]")] = None,
    run: Annotated[bool, typer.Option("--run", help="Also run every checkpoint to measure head scores.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep downloaded files in the hub's cache.")] = False,
    allow_duplicates: Annotated[
        bool, typer.Option("--allow-duplicates", help="Accept identical checkpoints under different names.")
    ] = False,
    table: Annotated[
        str, typer.Option(help="Table to print: trajectory, edge, drift, hub, head or all.")
    ] = "trajectory",
    memory: Annotated[
        str | None, typer.Option(help="Memory limit, for example 2GB. [default: half of free memory]")
    ] = None,
    force: Force = False,
) -> Listing:
    """Follow a training run: when edges form, how far heads move, and hubs and head scores at each step.

    With --out run.safetensors, finished steps are saved, and the same command continues an interrupted run. Without it,
    the table is printed and nothing is saved.

    \b
    Examples:
      headspan track 'EleutherAI/pythia-70m@step*' --steps 0,1000,143000 --out run.safetensors
      headspan track checkpoints/step* --run --out run.safetensors --out run.html
      headspan track run.safetensors --table drift --csv
    """
    from headspan.change.series import TABLES, Series
    from headspan.change.track import track as follow
    from headspan.results.scores import is_result
    from headspan.vocabulary.errors import HeadspanError, refuse_ignored

    if table != "all" and table not in TABLES:
        raise HeadspanError(f"unknown table {table!r}. Choose {', '.join(TABLES)} or all")
    outputs, home = _outputs(out or [], "series", model, force), None
    if len(model) == 1 and is_result(model[0]):
        options = {"steps": steps, "last": last, "k": k, "fold": fold, "run": run, "keep": keep, "memory": memory}
        refuse_ignored("on a saved series", **options, allow_duplicates=allow_duplicates)
        series = Series.load(model[0])
    else:
        home = next((path for path, kind in outputs if kind == "series"), None)
        if home is None:
            note("without --out run.safetensors nothing is saved; an interrupted run starts again from the first step")
        with progress("tracking") as update:
            series = follow(
                model, home, steps=_numbers(steps), last=last, fold=fold, k=k, run=run, keep=keep,
                allow_duplicates=allow_duplicates, memory=memory, force=force, progress=update,
            )  # fmt: skip
    for sentence in series.notes:
        note(sentence)
    for path, kind in outputs:
        if path == home:  # already written, when the series was complete
            note(f"{path}: {series!r}")
        else:
            _write(series, path, kind, force)
    formats = dict.fromkeys(("first", "final", "score"), ".3f") | {"growth": "+.3f", "half": ".4g"}
    formats |= dict.fromkeys(("from_previous", "from_last"), ".3g")
    rows = series.rows(table)
    shown = [key for key in (rows[0] if rows else ()) if key != "table"]
    sorted_by = ", those that grew most first" if table == "trajectory" else ""
    title = f"{len(series.steps)} steps, {len(series.edges)} edges ever among the top {series.k} (pk){sorted_by}"
    return Listing(rows, title, formats, shown=shown)


def _outputs(paths: list[Path], own: str, inputs: list[str], force: bool) -> list[tuple[Path, str]]:
    """Check the output paths before any work."""
    from headspan.system.outputs import check_outputs
    from headspan.vocabulary.errors import HeadspanError

    kinds = {".safetensors": own, **_KINDS}
    wrong = next((path for path in paths if path.suffix.lower() not in kinds), None)
    if wrong is not None:
        raise HeadspanError(f"cannot write {wrong}. Its name must end in {', '.join(kinds)}")
    outputs = [(path, kinds[path.suffix.lower()]) for path in paths]
    check_outputs(outputs, inputs=inputs, force=force)
    return outputs


def _write(change: Diff | Series, path: Path, kind: str, force: bool) -> None:
    """Write a comparison or a series in one of its formats."""
    if kind in ("diff", "series"):
        change.save(path, force=force)
    elif kind == "page":
        from headspan.explorer.change import change_page

        change_page(change).save(path, force=force)
    else:
        from headspan.plotting.change import save_change

        save_change(change, path, force=force)
    note(f"{path}: {change!r}")


def _numbers(text: str | None) -> list[int] | None:
    """Step numbers from "0,1,2,4"."""
    from headspan.vocabulary.errors import HeadspanError

    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise HeadspanError(f"{text[:80]!r} is not a list of step numbers. Write for example 0,1,2,4") from None
