"""Print rows as a table, as JSON or as CSV."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headspan.vocabulary.errors import visible

Row = Mapping[str, Any]
EFFECT_FORMATS = {"effect": ".4f", "percentile_in_layers": ".1f", "ratio": ".1f"}
_EFFECT_NAMES = {"effect_unit": "unit", "large_effect": "large", "random_write_ratio": "ratio"}

_PIPE = 200  # columns if the output has no width
_GAP = 2  # spaces between columns
_WORD = 16  # text up to this length is treated as a name and never wrapped
_FOLDED = 11  # longer text is wrapped at this width or more


def effect_columns(row: Row) -> dict[str, Any]:
    """A row of an edge with short names and units of its effect; names that it has already stay long."""
    from headspan.results.large_effects import SHORT_UNITS

    short = {name: new for name, new in _EFFECT_NAMES.items() if new not in row}
    units = {"effect_unit": SHORT_UNITS.get(row.get("effect_unit") or "")}
    return {short.get(name, name): units.get(name, value) for name, value in row.items()}


def print_json(value: Any) -> None:
    """Print JSON to stdout, with NaN as null so that every parser accepts it."""
    text = json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False)
    print("\n".join(line if line.isprintable() else _json_visible(line) for line in text.split("\n")))


def _json_visible(line: str) -> str:
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def print_csv(rows: Sequence[Row], columns: Sequence[str] = ()) -> None:
    """Print CSV with full precision to stdout; ``columns`` is the header of an empty list."""
    from headspan.results.tabular import csv_text  # needs numpy, which --help does not

    names = list(rows[0]) if rows else list(columns)
    print(csv_text(({name: plain(row[name]) for name in names} for row in rows), names), end="")


def print_lines(lines: Iterable[str], indent: int = 0) -> None:
    """Print lines of text, wrapped between words at the terminal's width, never inside a number.

    indent: spaces before the continuation lines.
    """
    for line in lines:
        whole, rest = visible(line), " " * indent
        parts = textwrap.wrap(whole, _columns(), subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
        print("\n".join(parts) or whole)


def print_table(
    rows: Sequence[Row],
    title: str | None = None,
    formats: Mapping[str, str] | None = None,
    spare: Sequence[str] = (),
) -> list[str]:
    """Print rows as a table; the columns are the keys of the first row, ``formats`` has a format spec per column.

    Numbers and names are never cut. In a narrow terminal, headings wrap first, then long text; then columns of
    ``spare`` are left out, one after the other, and returned. If that is not enough, lines exceed the terminal's width.
    """
    if title:
        print_lines([title])
    if not rows:
        print("nothing to show")
        return []
    formats = formats or {}
    columns = list(rows[0])
    cells = {name: [_cell(row[name], formats.get(name, "")) for row in rows] for name in columns}
    widths = {name: max(map(_width, cells[name])) for name in columns}
    heads = {name: visible(name).replace("_", " ") for name in columns}
    if sum(max(widths[n], _width(heads[n])) for n in columns) > _room(columns):
        heads = {name: head.replace(" ", "\n") for name, head in heads.items()}
    needed = {name: max(widths[name], _width(heads[name])) for name in columns}
    right = {n for n in columns if all(isinstance(row[n], (int, float)) or row[n] is None for row in rows)}
    least = {
        name: needed[name] if widths[name] <= _WORD or name in right else max(_FOLDED, _width(heads[name]))
        for name in columns
    }
    left_out: list[str] = []
    for name in (name for name in spare if name in columns):
        if sum(least[n] for n in columns) <= _room(columns):
            break
        columns.remove(name)
        left_out.append(name)
    heads = {name: heads[name] for name in columns}
    given = _shrunk({name: needed[name] for name in columns}, least, _room(columns))
    tallest = max(head.count("\n") for head in heads.values())
    heads = {name: "\n" * (tallest - head.count("\n")) + head for name, head in heads.items()}
    print("\n".join(_table_row(heads, given, right)))
    print("─" * (sum(given.values()) + _GAP * (len(columns) - 1)))
    for i in range(len(rows)):
        print("\n".join(_table_row({name: cells[name][i] for name in columns}, given, right)))
    return left_out


def _room(columns: Sequence[str]) -> int:
    """The width that is left for cells beside the gaps between them."""
    return _columns() - _GAP * (len(columns) - 1)


def _shrunk(needed: Mapping[str, int], least: Mapping[str, int], room: int) -> dict[str, int]:
    """Column widths that fit the available width as far as wrapping allows; the widest columns wrap first."""
    widths = dict(needed)
    while sum(widths.values()) > room:
        foldable = [name for name in widths if widths[name] > least[name]]
        if not foldable:
            break
        widths[max(foldable, key=widths.__getitem__)] -= 1
    return widths


def _table_row(cells: Mapping[str, str], widths: Mapping[str, int], right: set[str]) -> list[str]:
    """The lines of one row; cells of several lines are aligned at the top."""
    folded = [_folded(cells[name], width) for name, width in widths.items()]
    height = max(map(len, folded))
    lines = [
        (" " * _GAP).join(
            " " * (width - _width(text)) + text if name in right else text + " " * (width - _width(text))
            for (name, width), cell in zip(widths.items(), folded, strict=True)
            for text in [cell[i] if i < len(cell) else ""]
        )
        for i in range(height)
    ]
    return [line.rstrip() for line in lines]


def _folded(cell: str, width: int) -> list[str]:
    """The lines of a cell, wrapped between words, and inside a word only if it is longer than the column."""
    lines: list[str] = []
    for line in cell.split("\n"):
        if _width(line) <= width:
            lines.append(line)
            continue
        current = ""
        for word in line.split(" "):
            if current and _width(f"{current} {word}") > width:
                lines.append(current)
                current = word
            else:
                current = f"{current} {word}" if current else word
            while _width(current) > width:
                cut = max(1, next(i for i in range(len(current), -1, -1) if _width(current[:i]) <= width))
                lines.append(current[:cut])
                current = current[cut:]
        lines.append(current)
    return lines


def _columns() -> int:
    """The width to print for: COLUMNS or the terminal's width; a pipe has none."""
    if os.environ.get("COLUMNS", "").isdigit():
        return max(20, int(os.environ["COLUMNS"][:6]))
    if sys.stdout is None or not sys.stdout.isatty():
        return _PIPE
    import shutil

    return shutil.get_terminal_size().columns


def _width(text: str) -> int:
    """The width of the longest line in terminal cells; letters of some scripts take two."""
    from rich.cells import cell_len

    if text.isascii() and "\n" not in text:
        return len(text)
    return max(map(cell_len, text.split("\n")))


def _cell(value: Any, spec: str) -> str:
    if value is None or value != value:
        return "–"
    value = ("no", "yes")[value] if isinstance(value, bool) else value
    text = format(value, spec) if spec else str(value)
    return "\n".join(map(visible, text.split("\n")))


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
    if isinstance(value, str) or type(value).__module__ == "headspan.vocabulary.heads":
        return str(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
