"""Commands for change: diff (two models), track (a series of checkpoints)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.common import Csv, Json, note, print_table, progress

if TYPE_CHECKING:
    from headspan.analysis.drift import Diff

_FORMATS = {
    "drift": ".3g", "floor": ".2g", "angle": ".2f", "before": ".3f", "after": ".3f", "change": "+.3f",
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("diff")(diff)


def diff(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model before: directory, file, hub id or 'demo'.")],
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="The model after, of the same shape, or a LoRA adapter directory.")
    ],
    fold: Annotated[bool, typer.Option("--fold", help="Fold the norms into the weights first.")] = False,
    k: Annotated[int, typer.Option("-k", "--top", help="How many weights, and edges a pairing, to list.", min=1)] = 20,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write everything there (.safetensors).")] = None,
    table: Annotated[str, typer.Option(help="Which listing: drift, edge, hub or all.")] = "all",
    memory: Annotated[str | None, typer.Option(help="Most memory to use, like 2GB. [default: half of free]")] = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Compare two models of one shape, or a model and its LoRA adapter: drift of every head, edges and hubs.

    Example: headspan diff gpt2 my-tuned-gpt2 --out diff.safetensors
    Example: headspan diff base-directory lora-directory --fold --json
    """
    from headspan.analysis.drift import TABLES
    from headspan.analysis.drift import diff as run
    from headspan.errors import HeadspanError

    if table != "all" and table not in TABLES:
        raise HeadspanError(f"there is no listing {table!r}: choose {', '.join(TABLES)} or all")
    with progress("comparing") as update:
        change = run(base, other, fold=fold, k=k, memory=memory, progress=update)
    for sentence in change.notes:
        note(sentence)
    if out is not None:
        change.save(out)
        note(f"{out}: {change!r}")
    if as_json or as_csv:
        print_table(change.records(table), as_json=as_json, as_csv=as_csv)
    else:
        _print_diff(change, table, k)


def _print_diff(change: Diff, table: str, k: int) -> None:
    """One table after the other, each with the columns it has."""
    moved = sum(line.moved for line in change.drift)
    titles = {
        "drift": f"weights that moved farthest ({moved} of {len(change.drift)} above the rounding floor)",
        "edge": f"edges: entered or left the top {change.k}, and largest other changes (pk)",
        "hub": "hubs that rose or fell",
    }
    for name, title in titles.items():
        if table in ("all", name):
            rows = [_short(row) for row in change.records(name)]
            print_table(rows[:k] if name == "drift" else rows, title=title, formats=_FORMATS)
            if not rows:
                print(f"({title})\n")


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A record that fits a terminal: both ranks in one column."""
    ranks = f"{row['rank_before']} → {row['rank_after']}"
    return {key: value for key, value in row.items() if key not in ("table", "rank_before", "rank_after")} | {
        "rank": ranks
    }
