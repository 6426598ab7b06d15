"""The interface of tabular results: rows, a data frame, a short repr and an HTML table."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from headspan.vocabulary.errors import missing_extra, visible

if TYPE_CHECKING:
    import pandas

_SHOWN = 6  # rows of a repr: with its headline and column names, ten lines
_SHOWN_HTML = 20
_WIDEST = 28  # characters of a cell in a repr
_FORMULA = re.compile(r"[=+\-@\t\r＝＋－＠]")  # first characters of a formula in a spreadsheet
_NUMBER = re.compile(r"[+-]?[0-9.]+([eE][+-]?[0-9]+)?%?")


class Tabular:
    """Gives a class that has ``rows()`` a data frame and a repr that fits ten lines of a screen."""

    def rows(self) -> list[dict[str, Any]]:
        """Flat records: the same keys in each, every value a number, a text or None."""
        raise NotImplementedError

    def _headline(self) -> str:
        """One line that describes the result."""
        return type(self).__name__

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame."""
        return data_frame(self.rows())

    def __repr__(self) -> str:
        rows = self.rows()
        lines = [visible(self._headline())]
        if rows:
            table = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows[:_SHOWN])]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
        if len(rows) > _SHOWN:
            lines.append(f"… and {len(rows) - _SHOWN:,} more rows")
        return "\n".join(lines)

    def _repr_html_(self) -> str | None:
        return html_table(self._headline(), self.rows())

    def __eq__(self, other: object) -> bool:
        """True for the same rows; missing values are equal."""
        return same_content(self.rows(), other.rows()) if isinstance(other, type(self)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


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
