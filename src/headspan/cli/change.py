"""Commands for change: diff (two models), track (a series of checkpoints)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.common import Fold, Force, Listing, Table, k_option, listing, note, out_option, progress

if TYPE_CHECKING:
    from headspan.change.diff import Diff
    from headspan.change.series import Series

_KINDS = {".html": "page", ".png": "png", ".pdf": "pdf", ".svg": "svg"}
_FORMATS = {
    "drift": ".3g", "floor": ".2g", "angle": ".2f", "before": ".3f", "after": ".3f", "change": "+.3f",
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("diff")(listing(diff))
    app.command("track")(listing(track))


def diff(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model before: directory, file, hub id or 'demo'.")],
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="The model after, of the same shape, or a LoRA adapter directory.")
    ],
    fold: Fold = False,
    k: Annotated[int, k_option("How many weights, and edges a pairing, to list.")] = 20,
    out: Annotated[
        list[Path] | None, out_option("A page (.html), a figure (.png) or all of it (.safetensors); may be repeated.")
    ] = None,
    effects: Annotated[
        bool, typer.Option("--effects", help="Also run both models: the effect of each listed edge before and after.")
    ] = False,
    table: Annotated[str, typer.Option(help="Which listing: drift, edge, hub or all.")] = "all",
    memory: Annotated[str | None, typer.Option(help="Most memory to use, like 2GB. [default: half of free]")] = None,
    force: Force = False,
) -> Listing:
    """Compare two models of one shape, or a model and its LoRA adapter: drift of every head, edges and hubs.

    \b
    Examples:
      headspan diff gpt2 my-tuned-gpt2 --out diff.html
      headspan diff base-directory lora-directory --fold --json
    """
    from headspan.change.diff import TABLES
    from headspan.change.diff import diff as run
    from headspan.vocabulary.errors import HeadspanError

    if table != "all" and table not in TABLES:
        raise HeadspanError(f"there is no listing {table!r}: choose {', '.join(TABLES)} or all")
    outputs = _outputs(out or [], "diff", [base, other], force)
    with progress("comparing") as update:
        change = run(base, other, fold=fold, k=k, effects=effects, memory=memory, progress=update)
    for sentence in change.notes:
        note(sentence)
    for path, kind in outputs:
        _write(change, path, kind, force)
    return Listing(change.records(table), tables=_tables(change, table, k))


def _tables(change: Diff, table: str, k: int) -> list[Table]:
    """One table after the other, each with the columns it has."""
    moved = sum(line.moved for line in change.drift)
    titles = {
        "drift": f"weights that moved farthest ({moved} of {len(change.drift)} above the rounding floor)",
        "edge": f"edges: entered or left the top {change.k}, and largest other changes (pk)",
        "hub": "hubs that rose or fell",
    }
    rows = {name: [_short(row) for row in change.records(name)] for name in titles if table in ("all", name)}
    return [(titles[name], r[:k] if name == "drift" else r, _FORMATS) for name, r in rows.items()]


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A record that fits a terminal: both ranks in one column."""
    ranks = f"{row['rank_before']} → {row['rank_after']}"
    hidden = {"table", "rank_before", "rank_after"} | {
        key for key, value in row.items() if key[:6] == "effect" and value is None
    }
    return {key: value for key, value in row.items() if key not in hidden} | {"rank": ranks}


def track(
    references: Annotated[
        list[str],
        typer.Argument(metavar="REF…", help="Checkpoints in order, 'org/name@step*', 'run/step*', or a saved series."),
    ],
    out: Annotated[
        list[Path] | None,
        out_option("The series (.safetensors), a page (.html), a figure (.png); may be repeated."),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Only these steps, like 0,1,2,4.")] = None,
    last: Annotated[int | None, typer.Option(help="Only so many checkpoints from the end.", min=1)] = None,
    fold: Fold = False,
    k: Annotated[int, k_option("Keep edges that are ever among so many.")] = 20,
    run: Annotated[bool, typer.Option("--run", help="Also run every checkpoint for its head scores.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave downloaded files in the cache of the hub.")] = False,
    allow_duplicates: Annotated[
        bool, typer.Option("--allow-duplicates", help="Take equal checkpoints under two names for two steps.")
    ] = False,
    table: Annotated[
        str, typer.Option(help="Which listing: trajectory, edge, drift, hub, head or all.")
    ] = "trajectory",
    memory: Annotated[str | None, typer.Option(help="Most memory to use, like 2GB. [default: half of free]")] = None,
    force: Force = False,
) -> Listing:
    """Follow a training run: when edges form, how far heads move, hubs and head scores step by step.

    With --out run.safetensors finished steps are kept, and the same command goes on after a stop; without it the table
    is printed and nothing is kept.

    \b
    Examples:
      headspan track 'EleutherAI/pythia-70m@step*' --steps 0,1000,143000 --out run.safetensors
      headspan track checkpoints/step* --run --out run.safetensors --out run.html
      headspan track run.safetensors --table drift --csv
    """
    from headspan.change.series import TABLES, Series
    from headspan.change.track import track as follow
    from headspan.results.scores import is_result
    from headspan.vocabulary.errors import HeadspanError

    if table != "all" and table not in TABLES:
        raise HeadspanError(f"there is no listing {table!r}: choose {', '.join(TABLES)} or all")
    outputs, home = _outputs(out or [], "series", references, force), None
    if len(references) == 1 and is_result(references[0]):
        series = Series.load(references[0])
    else:
        home = next((path for path, kind in outputs if kind == "series"), None)
        if home is None:
            note("without --out run.safetensors nothing is kept: a run that is stopped begins anew")
        with progress("tracking") as update:
            series = follow(
                references, home, steps=_numbers(steps), last=last, fold=fold, k=k, run=run, keep=keep,
                allow_duplicates=allow_duplicates, memory=memory, force=force, progress=update, say=note,
            )  # fmt: skip
    for sentence in series.notes:
        note(sentence)
    for path, kind in outputs:
        if path == home:  # written when it was complete
            note(f"{path}: {series!r}")
        else:
            _write(series, path, kind, force)
    formats = dict.fromkeys(("first", "final", "score"), ".3f") | {"growth": "+.3f", "half": ".4g"}
    formats |= dict.fromkeys(("from_previous", "from_last"), ".3g")
    rows = series.records(table)
    shown = [key for key in (rows[0] if rows else ()) if key != "table"]
    title = f"{len(series.steps)} steps, {len(series.edges)} edges ever among the top {series.k} (pk)"
    return Listing(rows, title, formats, shown=shown)


def _outputs(paths: list[Path], own: str, inputs: list[str], force: bool) -> list[tuple[Path, str]]:
    """What is to be written where, refused before any work if it cannot or must not be."""
    from headspan.system.outputs import check_outputs
    from headspan.vocabulary.errors import HeadspanError

    kinds = {".safetensors": own, **_KINDS}
    wrong = next((path for path in paths if path.suffix.lower() not in kinds), None)
    if wrong is not None:
        raise HeadspanError(f"cannot write {wrong}: its name must end in {', '.join(kinds)}")
    outputs = [(path, kinds[path.suffix.lower()]) for path in paths]
    check_outputs(outputs, inputs=inputs, force=force)
    return outputs


def _write(change: Diff | Series, path: Path, kind: str, force: bool) -> None:
    """One of the forms that a comparison or a series can be kept in."""
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
        raise HeadspanError(f"{text[:80]!r} are no step numbers: write them like 0,1,2,4") from None
