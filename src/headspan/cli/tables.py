"""Rows as a table for a reader, or as JSON or CSV for a program."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headspan.errors import visible

Row = Mapping[str, Any]

_PIPE = 200  # columns where the output has no width of its own
_GAP = 2  # blanks between columns
_WORD = 16  # text up to this length is a name, which is never folded
_FOLDED = 12  # longer text is folded to no less than this


def print_json(value: Any) -> None:
    """JSON on stdout, NaN as null so that every reader accepts it."""
    text = json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False)
    print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def print_csv(rows: Sequence[Row], columns: Sequence[str] = ()) -> None:
    """CSV with full precision on stdout; ``columns`` head an empty list."""
    names = list(rows[0]) if rows else list(columns)
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    if names:
        writer.writeheader()
    writer.writerows({name: _csv_cell(row[name]) for name in names} for row in rows)
    print(text.getvalue(), end="")


def print_lines(lines: Iterable[str], indent: int = 0) -> None:
    """Lines of text; those longer than the terminal is wide are broken between words, never inside a number.

    indent: blanks in front of what goes on in another line.
    """
    for line in lines:
        whole, rest = visible(line), " " * indent
        parts = textwrap.wrap(whole, _columns(), subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
        print("\n".join(parts) or whole)


def print_table(rows: Sequence[Row], title: str | None = None, formats: Mapping[str, str] | None = None) -> None:
    """Rows as a table; its columns are the keys of the first row, ``formats`` gives a format spec per column.

    Numbers and names are never cut. Where the terminal is too narrow, column heads go over several lines, then long
    texts are folded; if that is not enough, lines are longer than the terminal is wide.
    """
    if title:
        print_lines([title])
    if not rows:
        print("nothing to show")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    formats = formats or {}
    columns = list(rows[0])
    cells = {name: [_cell(row[name], formats.get(name, "")) for row in rows] for name in columns}
    widths = {name: max(_width(cell) for cell in cells[name]) for name in columns}
    heads = {name: visible(name).replace("_", " ") for name in columns}
    room = _columns() - _GAP * (len(columns) - 1)
    if sum(max(widths[n], _width(heads[n])) for n in columns) > room:
        heads = {name: head.replace(" ", "\n") for name, head in heads.items()}
    needed = {name: max(widths[name], _width(heads[name])) for name in columns}
    least = {name: needed[name] if widths[name] <= _WORD else max(_FOLDED, _width(heads[name])) for name in columns}
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        numeric = all(isinstance(row[name], (int, float)) or row[name] is None for row in rows)
        side = "right" if numeric else "left"
        table.add_column(Text(heads[name]), justify=side, overflow="fold", min_width=least[name])
    for i in range(len(rows)):
        table.add_row(*(Text(cells[name][i]) for name in columns))
    width = max(_columns(), sum(least.values()) + _GAP * len(columns))
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _columns() -> int:
    """The width to print for: of the terminal, or what COLUMNS says; a pipe has none of its own."""
    if os.environ.get("COLUMNS", "").isdigit():
        return max(20, int(os.environ["COLUMNS"][:6]))
    if sys.stdout is None or not sys.stdout.isatty():
        return _PIPE
    import shutil

    return shutil.get_terminal_size().columns


def _width(text: str) -> int:
    """Cells that the longest line of a text takes: letters of some scripts are two cells wide."""
    from rich.cells import cell_len

    return max(map(cell_len, text.split("\n")))


def _cell(value: Any, spec: str) -> str:
    if value is None or value != value:
        return "–"
    value = ("no", "yes")[value] if isinstance(value, bool) else value
    text = format(value, spec) if spec else str(value)
    return "\n".join(map(visible, text.split("\n")))


def _csv_cell(value: Any) -> Any:
    value = plain(value)
    return visible(value) if isinstance(value, str) else value


def plain(value: Any) -> Any:
    """Numpy scalars, heads, pairings and NaN as plain JSON values."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, str) or type(value).__module__ == "headspan.heads":
        return str(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
