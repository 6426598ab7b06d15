"""What every command shares: one way to print a table, one progress bar, one way to open a reference."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from headspan.errors import visible

# Options that all listings take, spelled once.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")]
ModelRef = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Directory, file (.safetensors, .gguf, .bin), hub id or 'demo'."),
]
ResultRef = Annotated[
    str,
    typer.Argument(metavar="RESULT|MODEL", help="A saved result, or a model reference to score on the spot."),
]

Force = Annotated[
    bool, typer.Option("--force", help="Replace a file that headspan did not make; never one that is read.")
]

Row = Mapping[str, Any]


def print_json(value: Any) -> None:
    """JSON on stdout, NaN as null so that every reader accepts it."""
    text = json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False)
    # JSON escapes only some of the characters that a terminal obeys.
    print("\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n")))


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def show(text: str) -> None:
    """Lines for reading on stdout, with nothing in them that a terminal would obey."""
    print("\n".join(map(visible, text.split("\n"))))


def print_table(
    rows: Sequence[Row],
    *,
    title: str | None = None,
    formats: Mapping[str, str] | None = None,
    as_json: bool = False,
    as_csv: bool = False,
    json_value: Any = None,
) -> None:
    """Rows as a table that reads well, or as JSON (``json_value`` or the rows), or as CSV with full precision.

    Columns are the keys of the first row; ``formats`` gives a format spec per column, for the table only.
    """
    if as_json:
        print_json(rows if json_value is None else json_value)
        return
    columns = list(rows[0]) if rows else []
    if as_csv:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({c: _plain(row[c]) for c in columns} for row in rows)
        print("\n".join(map(visible, text.getvalue().split("\n"))), end="")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(visible(title)) if title else None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
    )
    formats = formats or {}
    for column in columns:
        numeric = all(isinstance(row[column], (int, float)) or row[column] is None for row in rows)
        table.add_column(Text(visible(column)), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(Text(_cell(row[c], formats.get(c, ""))) for c in columns))
    # A pipe has no width of its own: do not cut the table there.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(table if rows else Text("nothing to show"))


def _cell(value: Any, spec: str) -> str:
    if value is None:
        return "–"
    return visible(format(value, spec) if spec else str(value))


def _plain(value: Any) -> Any:
    """Numpy scalars, heads, pairings and NaN as plain JSON values."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, str) or type(value).__module__ == "headspan.heads":
        return str(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def note(text: str) -> None:
    """A remark for the person at the terminal, on stderr so that it never mixes with the output."""
    print(visible(text), file=sys.stderr)


@contextmanager
def progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with time left on stderr, driven by ``update(done, total)``; silent when not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
