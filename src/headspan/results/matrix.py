"""One labelled matrix of scores, and edges taken from it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headspan.results.checks import damaged
from headspan.results.tabular import Tabular, data_frame, html_table
from headspan.system.arguments import checked
from headspan.system.ordering import descending, shared_ranks
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Head, HeadOrNode, Pairing, Role, forward_mask
from headspan.vocabulary.ports import PortTable
from headspan.vocabulary.words import counted

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas


class Edge(NamedTuple):
    """One pair of heads with its score and its rank in its pairing (1 = largest)."""

    metric: str
    pairing: Pairing
    rank: int
    source: HeadOrNode
    target: HeadOrNode
    score: float


def edge_row(edge: Edge) -> dict[str, Any]:
    """An edge as a flat record."""
    names = {"pairing": str(edge.pairing), "source": str(edge.source), "target": str(edge.target)}
    return {**edge._asdict(), **names}


class Edges(Tabular, list[Edge]):
    """A list of edges that a notebook shows as a table.

    labels: the classes of the heads of these edges by name, joined by ``;``; with them, both heads have a column.
    """

    labels: dict[str, str] | None = None

    def _check(self, path: Path) -> None:
        missing = {str(end) for edge in self for end in (edge.source, edge.target)} - set(self.labels or ())
        if self.labels is not None and missing:
            raise damaged(path, f"its labels do not have {min(missing)[:40]}")

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per edge: metric, pairing, rank, source, target, score; source_labels, target_labels."""
        rows = [edge_row(edge) for edge in self]
        if self.labels is not None:
            rows = [r | {f"{end}_labels": self.labels[r[end]] for end in ("source", "target")} for r in rows]
        return rows

    def _headline(self) -> str:
        return counted(len(self), "edge")


@dataclass(frozen=True, repr=False, eq=False)
class ScoreMatrix(Tabular):
    """Scores of all pairs in one pairing: rows are sources, columns targets, missing pairs NaN."""

    metric: str
    pairing: Pairing
    sources: tuple[HeadOrNode, ...]
    targets: tuple[HeadOrNode, ...]
    values: np.ndarray
    ports: PortTable | None = None  # maps L17H3.K to L17KV1.K

    def _check(self, path: Path) -> None:
        shape = len(self.sources), len(self.targets)
        if self.values.shape != shape:
            raise damaged(path, f"its values have shape {self.values.shape}, its heads need {shape}")

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per pair, largest score first."""
        return self.top(self.values.size).rows()

    def to_pandas(self) -> pandas.DataFrame:
        """The matrix as a data frame: sources as index, targets as columns, NaN where there is no pair."""
        return data_frame(self.values, index=list(map(str, self.sources)), columns=list(map(str, self.targets)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """``values``, so that numpy functions take the matrix as it is."""
        if copy is False and dtype is not None and np.dtype(dtype) != self.values.dtype:
            raise ValueError(f"scores of type {self.values.dtype} are not {np.dtype(dtype)} without a copy")
        return np.array(self.values, dtype) if copy else np.asarray(self.values, dtype)

    def by_layer(self) -> npt.NDArray[Any]:
        """The scores as [source layer, source head, target layer, target head], as TransformerLens users index.

        Heads are query heads, also for keys and values: under GQA the score of a shared key/value head appears once for
        each query head of its group, while ``values`` has it once. NaN where there is no pair, and for layers without
        attention. A matrix whose layers have different numbers of heads is refused.

        >>> import headspan as hs
        >>> matrix = hs.score("demo", "pk", "OK")["pk", "OK"]
        >>> matrix.by_layer().shape, bool(matrix.by_layer()[0, 3, 1, 0] == matrix.at("L0H3", "L1H0"))
        ((2, 8, 2, 8), True)
        """
        rows, columns = self._grid(self.pairing.source, self.sources), self._grid(self.pairing.target, self.targets)
        found = self.values[np.ix_(rows.ravel(), columns.ravel())]
        found[rows.ravel() < 0], found[:, columns.ravel() < 0] = np.nan, np.nan
        return found.reshape(*rows.shape, *columns.shape)

    def _grid(self, role: Role, ends: tuple[HeadOrNode, ...]) -> npt.NDArray[np.intp]:
        """The place in ``ends`` of every query head, (layer, head); -1 in layers without heads."""
        table = self.ports or PortTable({role: ends})
        heads = [head for head in table.query or ends if isinstance(head, Head)]
        counts = Counter(head.layer for head in heads)
        places = {head: table.find(head, role) for head in heads} if role in ROLES else {}
        if len({*counts.values()}) != 1 or {*places.values()} != {*range(len(ends))}:
            raise HeadspanError(
                f"the {self.pairing} scores have no form [layer, head, layer, head], because "
                f"{_uneven(role, ends, counts)}. Use values with sources and targets, or to_pandas()"
            )
        grid = np.full((max(counts) + 1, max(counts.values())), -1, dtype=np.intp)
        for head, place in places.items():
            grid[head.layer, head.index] = place
        return grid

    def __repr__(self) -> str:
        best = "".join(f"\n  {e.source} → {e.target}  {e.score:.4f}" for e in self.top(3))
        return f"{self._headline()}{best}"

    def _headline(self) -> str:
        shape = "×".join(map(str, self.values.shape))
        return f"{self.metric} {self.pairing}: {len(self.pairs()[2]):,} pairs of {shape}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScoreMatrix):
            return NotImplemented
        mine, theirs = ((m.metric, m.pairing, m.sources, m.targets) for m in (self, other))
        return mine == theirs and np.array_equal(self.values, other.values, equal_nan=True)

    __hash__ = None  # type: ignore[assignment]

    def forward(self) -> ScoreMatrix:
        """Only the pairs whose source layer comes before the target layer."""
        values = np.where(forward_mask(self.sources, self.targets), self.values, np.nan)
        return replace(self, values=values.astype(self.values.dtype))

    def pairs(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], np.ndarray]:
        """Row indices, column indices and scores of the pairs that are present, in row order."""
        rows, columns = np.nonzero(~np.isnan(self.values))
        return rows, columns, self.values[rows, columns]

    @checked
    def top(self, k: int = 20) -> Edges:
        """The k largest scores; fewer when there are fewer pairs. Equal scores share a rank and come in head order."""
        if k < 0:
            raise HeadspanError(f"cannot list {k} pairs: give a number of 0 or more")
        rows, columns, values = self.pairs()
        order = descending(values)[:k]
        return Edges(
            Edge(self.metric, self.pairing, rank, self.sources[rows[i]], self.targets[columns[i]], float(values[i]))
            for rank, i in zip(shared_ranks(values[order]).tolist(), order, strict=True)
        )

    def best(self) -> Edge | None:
        """The largest score, or None where there are no pairs."""
        if np.isnan(self.values).all():
            return None
        i, j = np.unravel_index(np.nanargmax(self.values), self.values.shape)
        return Edge(self.metric, self.pairing, 1, self.sources[i], self.targets[j], float(self.values[i, j]))

    @checked
    def at(self, source: HeadOrNode | str, target: HeadOrNode | str) -> float:
        """The score of one pair (NaN where the pair is not in the pair set)."""
        return float(self.values[self.find(source, target)])

    @checked
    def rank_of(self, source: HeadOrNode | str, target: HeadOrNode | str) -> int:
        """The rank of a pair among all pairs of this pairing: one plus the number of larger scores."""
        row, column = self.find(source, target)
        if math.isnan(self.values[row, column]):
            raise HeadspanError(f"the pair {source} → {target} is not among the {self.pairing} pairs of this result")
        return int(np.count_nonzero(self.values > self.values[row, column])) + 1

    def find(self, source: HeadOrNode | str, target: HeadOrNode | str) -> tuple[int, int]:
        """Row and column of a pair; under GQA a query head's K and V are those of its KV head."""
        table = self.ports or PortTable({self.pairing.source: self.sources, self.pairing.target: self.targets})
        return table.find(source, self.pairing.source), table.find(target, self.pairing.target)

    def _repr_html_(self) -> str:
        return html_table(self._headline(), self.top(10).rows())


def _uneven(role: Role, ends: tuple[HeadOrNode, ...], counts: Counter[int]) -> str:
    """Why the ends of a role are not a grid of layers and heads."""
    if not all(isinstance(end, Head) for end in ends):
        return f"{next(end for end in ends if not isinstance(end, Head))} is not a head"
    if len({*counts.values()}) > 1:
        return f"layers have {min(counts.values())} to {max(counts.values())} heads"
    return f"the {role} include {', '.join(str(end) for end in ends if end.kind == 'KR')[:40] or 'shared heads'}"
