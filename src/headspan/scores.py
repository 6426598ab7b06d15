"""The result of a run: one labelled matrix per (metric, pairing), with provenance, in one safetensors file.

A result knows nothing of the model it came from but what its provenance says.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headspan.errors import HeadspanError, WrongArgument, missing_extra, visible
from headspan.heads import Head, HeadRole, Pairing, Port, Role, forward_mask
from headspan.port_table import PortTable
from headspan.scores_file import is_result, read_result, write_result
from headspan.system.arguments import checked
from headspan.system.ordering import descending
from headspan.system.tabular import Tabular, data_frame, html_table

if TYPE_CHECKING:
    import networkx
    import pandas
    import xarray

    from headspan.analysis.neighbours import Around

__all__ = ["Edge", "Edges", "ScoreMatrix", "Scores", "edge_row", "is_result", "load"]

_WIDEST = 60  # letters of a reference in a repr


class Edge(NamedTuple):
    """One pair of heads with its score and its rank in its pairing (1 = largest)."""

    metric: str
    pairing: Pairing
    rank: int
    source: Head  # or a Node, where the result has some
    target: Head
    score: float


def edge_row(edge: Edge) -> dict[str, Any]:
    """An edge as a flat record."""
    names = {"pairing": str(edge.pairing), "source": str(edge.source), "target": str(edge.target)}
    return {**edge._asdict(), **names}


class Edges(Tabular, list[Edge]):
    """A list of edges that a notebook shows as a table."""

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per edge: metric, pairing, rank, source, target, score."""
        return [edge_row(edge) for edge in self]

    def _headline(self) -> str:
        return f"{len(self)} edges"


@dataclass(frozen=True, repr=False, eq=False)
class ScoreMatrix(Tabular):
    """Scores of all pairs in one pairing: rows are sources, columns targets, missing pairs NaN."""

    metric: str
    pairing: Pairing
    sources: tuple[Head, ...]  # or Nodes, where the result has some
    targets: tuple[Head, ...]
    values: np.ndarray
    ports: PortTable | None = None  # knows that L17H3.K is L17KV1.K

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per pair, largest score first."""
        return self.top(self.values.size).rows()

    def to_pandas(self) -> pandas.DataFrame:
        """The matrix as a data frame: sources as index, targets as columns, NaN where there is no pair."""
        return data_frame(self.values, index=list(map(str, self.sources)), columns=list(map(str, self.targets)))

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

    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row indices, column indices and scores of the pairs that are present, in row order."""
        rows, columns = np.nonzero(~np.isnan(self.values))
        return rows, columns, self.values[rows, columns]

    @checked
    def top(self, k: int = 20) -> Edges:
        """The k largest scores, ties in head order; fewer when there are fewer pairs."""
        if k < 0:
            raise HeadspanError(f"cannot list {k} pairs: give a number of 0 or more")
        rows, columns, values = self.pairs()
        order = descending(values)[:k]
        return Edges(
            Edge(self.metric, self.pairing, rank, self.sources[rows[i]], self.targets[columns[i]], float(values[i]))
            for rank, i in enumerate(order, start=1)
        )

    @checked
    def at(self, source: Port | str, target: Port | str) -> float:
        """The score of one pair (NaN where the pair is not in the pair set)."""
        return float(self.values[self.find(source, target)])

    @checked
    def rank_of(self, source: Port | str, target: Port | str) -> int:
        """The place of a pair among all pairs of this pairing, 1 for the largest score."""
        row, column = self.find(source, target)
        if math.isnan(self.values[row, column]):
            raise HeadspanError(f"the pair {source} → {target} is not among the {self.pairing} pairs of this result")
        values = self.values.ravel()
        earlier_ties = np.count_nonzero(values[: row * len(self.targets) + column] == self.values[row, column])
        return int(np.count_nonzero(values > self.values[row, column]) + earlier_ties) + 1

    def find(self, source: Port | str, target: Port | str) -> tuple[int, int]:
        """Row and column of a pair; under GQA a query head's K and V are those of its KV head."""
        table = self.ports or PortTable({self.pairing.source: self.sources, self.pairing.target: self.targets})
        return table.find(source, self.pairing.source), table.find(target, self.pairing.target)

    def _repr_html_(self) -> str:
        return html_table(self._headline(), self.top(10).rows())


@dataclass(repr=False, eq=False)
class Scores:
    """All scores of a run, by ``scores["pk", "OK"]``."""

    arrays: dict[tuple[str, Pairing], np.ndarray]
    ports: PortTable
    d_model: int
    role_ranks: dict[Role, np.ndarray]
    provenance: dict[str, Any] = field(default_factory=dict)
    annotations: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, np.ndarray] = field(default_factory=dict)  # arrays that are no scores, such as "effect/OK"

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(metric for metric, _ in self.arrays))

    @property
    def pairings(self) -> tuple[Pairing, ...]:
        return tuple(dict.fromkeys(pairing for _, pairing in self.arrays))

    def __repr__(self) -> str:
        model = visible(str(self.provenance.get("reference", "arrays")))
        model = model if len(model) <= _WIDEST else "…" + model[-_WIDEST:]  # the end of a path tells which it is
        shared = f", {len(self.ports.kv)} shared key/value heads" if self.ports.shared else ""
        nodes = len({node.name for node in self.ports.nodes})
        shared += f", {nodes} node{'s' if nodes > 1 else ''}" if nodes else ""
        return (
            f"scores of {model}: {len(self.ports.query)} heads{shared}, d_model {self.d_model}\n"
            f"  {', '.join(self.metrics) or 'nothing'} for {', '.join(map(str, self.pairings)) or 'no pairing'}"
        )

    def __eq__(self, other: object) -> bool:
        """True for the same heads and the same scores; where they came from does not matter."""
        if not isinstance(other, Scores):
            return NotImplemented
        return (
            self.ports == other.ports
            and self.d_model == other.d_model
            and self.arrays.keys() == other.arrays.keys()
            and all(np.array_equal(a, other.arrays[key], equal_nan=True) for key, a in self.arrays.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def heads(self, role: Role | str) -> tuple[Head, ...]:
        return self.ports.of(role)

    def ranks(self, role: Role | str) -> np.ndarray:
        """Dimension of every head's subspace in that role (what the random baseline needs)."""
        role = Role.parse(role)
        if role not in self.role_ranks:
            raise HeadspanError(f"this result has no pairing with the role {role}, and so no ranks of it")
        return self.role_ranks[role]

    def check_all_pairs(self, what: str) -> None:
        """Refuse a screened result where every pair is needed, since its strongest ones alone would mislead."""
        if self.screened:
            raise HeadspanError(
                f"this result holds only the strongest pairs of every pairing (--screen), and {what} needs all of "
                "them: make it without --screen"
            )

    @property
    def screened(self) -> bool:
        """True where only the strongest pairs were computed; the provenance says how many, and how certain they are."""
        return "screen" in self.provenance

    def __contains__(self, key: tuple[str, str | Pairing]) -> bool:
        return _parse_key(key) in self.arrays

    def __getitem__(self, key: tuple[str, str | Pairing]) -> ScoreMatrix:
        metric, pairing = _parse_key(key)
        if (metric, pairing) not in self.arrays:
            here = ", ".join(dict.fromkeys(m for m, _ in self.arrays)) or "nothing"
            pairings = ", ".join(map(str, self.pairings))
            if metric in self.metrics and pairing in self.pairings:  # of nodes that the similarity says nothing about
                here, pairings = metric, ", ".join(str(p) for m, p in self.arrays if m == metric)
            raise HeadspanError(
                f"this result has no {metric} scores for {pairing}: it has {here} for {pairings}; "
                "choose one of these (--metric, --pairing), or run headspan score again with what you need"
            )
        values = self.arrays[metric, pairing]
        return ScoreMatrix(metric, pairing, self.heads(pairing.source), self.heads(pairing.target), values, self.ports)

    def top(
        self, pairings: str | Pairing | Iterable[str | Pairing] = "flow", k: int = 20, metric: str = "pk", **only: Any
    ) -> Edges:
        """The k largest scores of every pairing; ``layer=``, ``label=`` and ``labels=`` as in :func:`headspan.top`."""
        from headspan.analysis.neighbours import top

        return top(self, pairings, k, metric, **only)

    def around(self, head: Port | HeadRole | str, k: int = 10, metric: str = "pk") -> Around:
        """Who feeds a head, and whom it feeds, over all pairings; see :func:`headspan.around`."""
        from headspan.analysis.neighbours import around

        return around(self, head, k, metric)

    # ------------------------------------------------------------------ files

    @checked
    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write everything to one safetensors file; it appears only when complete.

        force: replace a file that is not a result; the model's own files are never replaced.
        """
        write_result(path, self, force)

    @classmethod
    @checked
    def load(cls, path: str | os.PathLike[str]) -> Scores:
        """Read a result file; a file from a newer version or of another kind is refused."""
        return cls(*read_result(Path(path)))

    # ---------------------------------------------------------------- exports

    def to_pandas(self) -> pandas.DataFrame:
        """One row per pair that is present: metric, pairing, source, target, score."""
        frames = []
        for metric, pairing in self.arrays:
            matrix = self[metric, pairing]
            rows, columns, values = matrix.pairs()
            frames.append(
                data_frame(
                    {
                        "metric": metric,
                        "pairing": str(pairing),
                        "source": np.array([str(h) for h in matrix.sources])[rows],
                        "target": np.array([str(h) for h in matrix.targets])[columns],
                        "score": values,
                    }
                )
            )
        import pandas

        return pandas.concat(frames, ignore_index=True) if frames else data_frame([])

    @checked
    def to_networkx(self, metric: str = "pk", pairings: Sequence[str | Pairing] | None = None) -> networkx.MultiDiGraph:
        """A directed multigraph: heads are nodes, pairs are edges keyed by pairing with attribute ``score``.

        A KV head has an edge "serves" to each query head of its group, so that paths go in by keys and values and
        out by outputs.
        """
        try:
            import networkx
        except ImportError:
            raise missing_extra("networkx", "graph", "a graph") from None
        graph = networkx.MultiDiGraph(metric=metric, model=str(self.provenance.get("reference", "")))
        for pairing in pairings if pairings is not None else self.pairings:
            matrix = self[metric, pairing]
            for head in (*matrix.sources, *matrix.targets):
                graph.add_node(str(head), layer=head.layer, kind=head.kind, position=head.position)
            for i, j, value in zip(*matrix.pairs(), strict=True):
                graph.add_edge(
                    str(matrix.sources[i]), str(matrix.targets[j]), key=str(matrix.pairing), score=float(value)
                )
        for head, kv in self.ports.served_by.items():
            if graph.has_node(str(head)) and graph.has_node(str(kv)):
                graph.add_edge(str(kv), str(head), key="serves")
        return graph

    def to_xarray(self) -> xarray.Dataset:
        """A data set with one labelled matrix ``pk_OK`` … per metric and pairing."""
        try:
            import xarray
        except ImportError:
            raise missing_extra("xarray", "graph", "a labelled array") from None
        variables = {}
        for metric, pairing in self.arrays:
            matrix = self[metric, pairing]
            rows, columns = f"{pairing.source}_source", f"{pairing.target}_target"
            variables[f"{metric}_{pairing}"] = xarray.DataArray(
                matrix.values,
                dims=(rows, columns),
                coords={rows: [str(h) for h in matrix.sources], columns: [str(h) for h in matrix.targets]},
            )
        return xarray.Dataset(variables, attrs={"provenance": json.dumps(self.provenance)})

    def _repr_html_(self) -> str:
        from html import escape

        model = escape(str(self.provenance.get("reference", "arrays")))
        metrics, pairings = ", ".join(map(escape, self.metrics)), ", ".join(map(str, self.pairings))
        return (
            f"<p><b>headspan scores</b> of {model}: {len(self.ports.query)} heads, d_model {self.d_model}; "
            f"{metrics} for {pairings}</p>"
        )


def _parse_key(key: Any) -> tuple[str, Pairing]:
    """A similarity and a pairing, as scores are asked for."""
    if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str)):
        raise WrongArgument(
            f'ask for scores by similarity and pairing, like scores["pk", "OK"], not by {str(key)[:60]!r}'
        )
    return key[0], Pairing.parse(key[1])


@checked
def load(path: str | os.PathLike[str]) -> Scores:
    """Read a result file written by ``headspan score`` or ``Scores.save``."""
    return Scores.load(path)
