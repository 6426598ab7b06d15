"""Order the heads of a contraction so that a few large products cover the needed pairs.

>>> steps = np.triu(np.ones((4, 4), dtype=bool), 1)
>>> found = rectangles(np.kron(steps, np.ones((100, 100), dtype=bool)))
>>> [(length(rows), length(columns)) for rows, columns in found]
[(100, 300), (100, 200), (100, 100)]
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Key = Hashable

_EDGE = 24  # extra cost of a row or column of a product, in entries: reading it, and narrow products
_TRIANGLE = 1024  # rows of a product of an array with itself, of which BLAS computes only one half
_MOST = 1024  # rows and columns of one product, to bound its memory


class Job(NamedTuple):
    """One kernel matrix to fill: factors of ``first`` against factors of ``second`` where ``needed`` is true."""

    first: Key
    second: Key
    needed: np.ndarray


class Rectangle(NamedTuple):
    """Some pairs: rows and columns of a matrix of pairs."""

    rows: slice
    columns: slice


def rectangles(needed: np.ndarray, most_rows: int = _MOST, most_columns: int = _MOST) -> list[Rectangle]:
    """Rectangles that cover the needed entries, each once, and few others.

    A rectangle with too many other entries is halved repeatedly, as long as the saving is larger than the cost of
    more edges: a staircase becomes one large rectangle, two of half its size, four of a quarter.
    """
    return _cover(needed, Rectangle(slice(0, needed.shape[0]), slice(0, needed.shape[1])), most_rows, most_columns)[1]


def _cover(needed: np.ndarray, area: Rectangle, most_rows: int, most_columns: int) -> tuple[int, list[Rectangle]]:
    """The cheapest rectangles that cover the needed entries of an area, and their cost in entries."""
    inside = needed[area]
    r, c = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
    if not r.size:
        return 0, []
    top, left = area.rows.start + int(r[0]), area.columns.start + int(c[0])
    height, width = int(r[-1] - r[0]) + 1, int(c[-1] - c[0]) + 1
    whole = Rectangle(slice(top, top + height), slice(left, left + width))
    cost, fits = height * width + _EDGE * (height + width), height <= most_rows and width <= most_columns
    wasted = height * width - np.count_nonzero(inside)
    if fits and wasted <= _EDGE * min(height, width):
        return cost, [whole]
    if width > most_columns or (height <= most_rows and width > height):
        middle = _middle(inside, 0) + area.columns.start
        halves = [whole._replace(columns=part) for part in (slice(left, middle), slice(middle, left + width))]
    else:
        middle = _middle(inside, 1) + area.rows.start
        halves = [whole._replace(rows=part) for part in (slice(top, middle), slice(middle, top + height))]
    costs, parts = zip(*(_cover(needed, half, most_rows, most_columns) for half in halves), strict=True)
    return (cost, [whole]) if fits and cost <= sum(costs) else (sum(costs), [*parts[0], *parts[1]])


def _middle(needed: np.ndarray, axis: int) -> int:
    """Where to cut: at the step of the staircase nearest to the middle of the needed entries."""
    counts = needed.sum(axis=axis)
    used = np.flatnonzero(counts)
    half = int(used[0] + used[-1] + 1) // 2
    steps = np.flatnonzero(np.diff(counts[used[0] : used[-1] + 1])) + 1 + used[0]
    return int(steps[np.argmin(np.abs(steps - half))]) if steps.size else half


class Arrangement(NamedTuple):
    """An order of the heads of all factors in which a few large rectangles cover the needed pairs.

    places: the positions of each factor array's heads in that order.
    pieces: rectangles of pairs in it; a pair may be needed in either order.
    """

    places: dict[Key, np.ndarray]
    pieces: list[Rectangle]

    @property
    def runs(self) -> Iterator[tuple[Key, slice, slice]]:
        """Runs of adjacent heads of one factor array and their positions; heads without pairs are left out."""
        used = np.zeros(sum(map(len, self.places.values())), dtype=bool)
        for rows, columns in self.pieces:
            used[rows] = used[columns] = True
        for key, places in self.places.items():
            mine = np.flatnonzero(used[places])
            for run in np.split(mine, np.flatnonzero((np.diff(mine) != 1) | (np.diff(places[mine]) != 1)) + 1):
                if run.size:
                    yield key, slice(run[0], run[-1] + 1), slice(places[run[0]], places[run[-1]] + 1)


def arrange(counts: Mapping[Key, int], jobs: Sequence[Job]) -> Arrangement:
    """Put heads in order for the pairs of these jobs.

    If two groups of roles are compared (writers with readers), each group is sorted by the
    number of a head's partners, so that forward pairs form one staircase for all roles. Otherwise nearly all pairs are
    needed, and only the entries above the diagonal are computed.
    """
    firsts, seconds = (
        list(dict.fromkeys(keys)) for keys in zip(*((job.first, job.second) for job in jobs), strict=True)
    )
    apart = not set(firsts) & set(seconds)
    if not apart:
        firsts = seconds = list(dict.fromkeys([*firsts, *seconds]))
    rows, columns = _spans(firsts, counts), _spans(seconds, counts)
    needed = np.zeros((sum(map(length, rows.values())), sum(map(length, columns.values()))), dtype=bool)
    for job in jobs:
        needed[rows[job.first], columns[job.second]] |= job.needed
    if not apart:
        needed = np.triu(needed | needed.T)
        return Arrangement({key: _range(rows[key]) for key in firsts}, _triangle(needed, slice(0, len(needed))))
    by_row, by_column = (np.argsort(needed.sum(axis=axis), kind="stable") for axis in (1, 0))
    row_places, column_places = np.argsort(by_row), np.argsort(by_column) + len(by_row)
    places = {key: row_places[rows[key]] for key in firsts} | {key: column_places[columns[key]] for key in seconds}
    pieces = rectangles(needed[by_row][:, by_column])
    return Arrangement(places, [piece._replace(columns=moved(piece.columns, len(by_row))) for piece in pieces])


def _triangle(needed: np.ndarray, part: slice) -> list[Rectangle]:
    """Squares on the diagonal, which cost half, and rectangles that cover the other needed entries."""
    if length(part) <= _TRIANGLE:
        return [Rectangle(part, part)] if needed[part, part].any() else []
    middle = (part.start + part.stop) // 2
    first, second = slice(part.start, middle), slice(middle, part.stop)
    beside = _cover(needed, Rectangle(first, second), _MOST, _MOST)[1]
    return [*_triangle(needed, first), *beside, *_triangle(needed, second)]


def _spans(keys: Iterable[Key], counts: Mapping[Key, int]) -> dict[Key, slice]:
    spans, start = {}, 0
    for key in keys:
        spans[key], start = slice(start, start + counts[key]), start + counts[key]
    return spans


def taken_apart(arrangement: Arrangement, sums: Sequence[np.ndarray], jobs: Sequence[Job]) -> list[np.ndarray]:
    """The kernel matrix of each job from the sums of all pieces; 0 where it has no pairs."""
    totals = [np.zeros(job.needed.shape) for job in jobs]
    for piece, values in zip(arrangement.pieces, sums, strict=True):
        for job, total in zip(jobs, totals, strict=True):
            first, second = arrangement.places[job.first], arrangement.places[job.second]
            for rows, columns, part in ((*piece, values), (piece.columns, piece.rows, values.T)):
                r, c = (np.flatnonzero((p >= s.start) & (p < s.stop)) for p, s in ((first, rows), (second, columns)))
                if r.size and c.size:
                    total[np.ix_(r, c)] = part[np.ix_(first[r] - rows.start, second[c] - columns.start)]
    return totals


def length(part: slice) -> int:
    return part.stop - part.start


def moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _range(part: slice) -> np.ndarray:
    return np.arange(part.start, part.stop)
