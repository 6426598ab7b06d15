"""What all results have in common: rows, a data frame, a file, plain values, a short repr and an HTML table."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from headspan.results import saving
from headspan.system.arguments import checked
from headspan.vocabulary.errors import missing_extra, visible

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Self

_SHOWN = 6  # rows of a repr: with its headline and column names, ten lines
_SHOWN_HTML = 20
_WIDEST = 28  # characters of a cell in a repr
_LINE = 120  # characters of a line in a repr
_FORMULA = re.compile(r"[=+\-@\t\r＝＋－＠]")  # first characters of a formula in a spreadsheet
_NUMBER = re.compile(r"[+-]?[0-9.]+([eE][+-]?[0-9]+)?%?")


class Tabular:
    """Gives a class that has ``rows()`` everything else that results have in common.

    Its repr fits twelve lines of a screen. To be saved it needs a row in ``headspan.results.saving.KINDS`` and
    annotated fields.
    """

    altered = False  # True in a result that was read from an edited file

    def rows(self) -> list[dict[str, Any]]:
        """Flat records: the same keys in each, every value a number, a text or None."""
        raise NotImplementedError

    def _headline(self) -> str:
        """One line that describes the result."""
        return type(self).__name__

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame."""
        return data_frame(self.rows())

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values: kind, schema, version and fields; arrays are lists."""
        return saving.to_dict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return saving.from_dict(cls, content)

    @checked
    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write everything to one safetensors file, which :func:`headspan.load` reads; it appears only when complete.

        force: replace a file of another kind; a file that was read is never replaced.
        """
        saving.save(self, path, force=force)

    @classmethod
    @checked
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that ``save`` wrote; a file of another kind or a newer version is refused."""
        return saving.load_as(cls, path)

    def _inputs(self) -> Sequence[Any]:
        """What the result was made from, where that can be files: they are not replaced by saving."""
        return ()

    def __repr__(self) -> str:
        return text_table(self._headline(), self.rows())

    def _repr_html_(self) -> str | None:
        return html_table(self._headline(), self.rows())

    def __eq__(self, other: object) -> bool:
        """True for the same rows; missing values are equal."""
        return same_content(self.rows(), other.rows()) if isinstance(other, type(self)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def text_table(headline: str, rows: list[dict[str, Any]]) -> str:
    """A headline and the first rows in columns, as many as fit a line."""
    lines = [_fitted(visible(line)) for line in headline.splitlines()]
    if rows:
        table = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows[:_SHOWN])]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        whole = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table)
        lines += map(_fitted, whole)
    if len(rows) > _SHOWN:
        lines.append(f"… and {len(rows) - _SHOWN:,} more rows")
    return "\n".join(lines)


def _fitted(line: str) -> str:
    return line if len(line) <= _LINE else line[: _LINE - 1] + "…"


def same_content(mine: Any, theirs: Any) -> bool:
    """Whether two records or lists of records are equal; NaN equals NaN.

    >>> same_content([{"score": float("nan")}], [{"score": float("nan")}])
    True
    """
    return json.dumps(mine, default=str) == json.dumps(theirs, default=str)


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Records as CSV under a line of column names; a missing value is an empty cell.

    >>> csv_text([{"node": "=1+1", "z": -0.5}], ["node", "z"])
    "node,z\\n'=1+1,-0.5\\n"
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if columns:
        writer.writerow(columns)
    writer.writerows([_csv_cell(row[name]) for name in columns] for row in rows)
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    """Text on one line, with a ' before what a spreadsheet would compute, because names are untrusted."""
    if not isinstance(value, str):
        return value
    formula = _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    return visible(f"'{value}" if formula else value)


def data_frame(content: Any, **options: Any) -> pandas.DataFrame:
    """Flat records, columns or a matrix as a data frame, raises with how to install pandas."""
    try:
        import pandas
    except ImportError:
        raise missing_extra("pandas", "graph", "a data frame") from None
    return pandas.DataFrame(content, **options)


def html_table(headline: str, rows: list[dict[str, Any]]) -> str:
    """A headline and the first rows, for a notebook."""
    head = "".join(f"<th>{escape(name)}</th>" for name in (rows[0] if rows else ()))
    body = "".join(
        "<tr>" + "".join(_html_cell(value) for value in row.values()) + "</tr>" for row in rows[:_SHOWN_HTML]
    )
    more = f"<p>… and {len(rows) - _SHOWN_HTML:,} more rows</p>" if len(rows) > _SHOWN_HTML else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    return f"<p>{escape(headline)}</p>{table}{more}"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    text = f"{value:.4g}" if isinstance(value, float) else visible(str(value))
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _html_cell(value: Any) -> str:
    style = " style='text-align:right'" if isinstance(value, (int, float)) else ""
    text = f"{value:.4f}" if isinstance(value, float) else "–" if value is None else str(value)
    return f"<td{style}>{escape(text)}</td>"
