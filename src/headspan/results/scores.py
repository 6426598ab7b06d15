"""The result of a run: one labelled matrix per (metric, pairing), with provenance, in one safetensors file.

A result knows only the provenance of its model, not the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.results import strongest
from headspan.results.choices import given_pairings
from headspan.results.graph_files import Fields, Graph, Link, as_networkx
from headspan.results.matrix import Edge, Edges, ScoreMatrix, edge_row
from headspan.results.scores_file import SEALED_SCHEMA, is_result, read_result, result_parts
from headspan.results.strongest import Around
from headspan.results.tabular import Tabular, data_frame, html_table
from headspan.subspaces.metrics import PK, one_metric
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.vocabulary.errors import HeadspanError, WrongArgument, missing_extra, visible
from headspan.vocabulary.heads import Head, HeadOrNode, Pairing, Port, Role
from headspan.vocabulary.ports import PortTable

if TYPE_CHECKING:
    import networkx
    import pandas
    import xarray


__all__ = ["Edge", "Edges", "ScoreMatrix", "Scores", "edge_row", "is_result"]

_WIDEST = 60  # characters of a reference in a repr


@dataclass(repr=False, eq=False)
class Scores(Tabular):
    """All scores of a run, by ``scores["pk", "OK"]``."""

    _sealed_since = SEALED_SCHEMA

    arrays: dict[tuple[str, Pairing], np.ndarray]
    ports: PortTable
    d_model: int
    role_ranks: dict[Role, np.ndarray]
    provenance: dict[str, Any] = field(default_factory=dict[str, Any])
    annotations: dict[str, Any] = field(default_factory=dict[str, Any])
    extra: dict[str, np.ndarray] = field(
        default_factory=dict[str, np.ndarray]
    )  # arrays that are not scores, such as "effect/OK"
    sizes: dict[tuple[str, Role], np.ndarray] = field(
        default_factory=dict[tuple[str, Role], np.ndarray]
    )  # of the factors of observed similarities

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(metric for metric, _ in self.arrays))

    @property
    def pairings(self) -> tuple[Pairing, ...]:
        return tuple(dict.fromkeys(pairing for _, pairing in self.arrays))

    def __repr__(self) -> str:
        model = visible(str(self.provenance.get("reference", "arrays")))
        model = model if len(model) <= _WIDEST else "…" + model[-_WIDEST:]  # the end of a path is the informative part
        shared = f", {len(self.ports.kv)} shared key/value heads" if self.ports.shared else ""
        nodes = len({node.name for node in self.ports.nodes})
        shared += f", {nodes} node{'s' if nodes > 1 else ''}" if nodes else ""
        return (
            f"scores of {model}: {len(self.ports.query)} heads{shared}, d_model {self.d_model}\n"
            f"  {', '.join(self.metrics) or 'nothing'} for {', '.join(map(str, self.pairings)) or 'no pairing'}"
        )

    def __eq__(self, other: object) -> bool:
        """True for the same heads and the same scores; provenance is ignored."""
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
            raise HeadspanError(f"this result has no pairing with the role {role}, so it has no ranks for it")
        return self.role_ranks[role]

    def check_all_pairs(self, what: str) -> None:
        """Refuse a screened result where all pairs are needed, since the strongest alone would mislead."""
        if self.screened:
            raise HeadspanError(
                f"this result holds only the strongest pairs of every pairing (`screen`), but {what} needs all of "
                "them: make it without `screen`"
            )

    @property
    def screened(self) -> bool:
        """True where only the strongest pairs were computed; the provenance gives their number and certainty."""
        return "screen" in self.provenance

    def __contains__(self, key: tuple[str, str | Pairing]) -> bool:
        return _parse_key(key) in self.arrays

    def __getitem__(self, key: tuple[str, str | Pairing]) -> ScoreMatrix:
        metric, pairing = _parse_key(key)
        if (metric, pairing) not in self.arrays:
            here = ", ".join(dict.fromkeys(m for m, _ in self.arrays)) or "nothing"
            pairings = ", ".join(map(str, self.pairings))
            if metric in self.metrics and pairing in self.pairings:  # of nodes for which the similarity is undefined
                here, pairings = metric, ", ".join(str(p) for m, p in self.arrays if m == metric)
            raise HeadspanError(
                f"this result has no {metric} scores for {pairing}: it has {here} for {pairings}; "
                "choose one of these (`metric`, `pairing`), or score the model again with what you need"
            )
        values = self.arrays[metric, pairing]
        return ScoreMatrix(metric, pairing, self.heads(pairing.source), self.heads(pairing.target), values, self.ports)

    @renamed(pairings="pairing")
    def top(
        self,
        pairing: str | Pairing | Iterable[str | Pairing] = "flow",
        k: int = 20,
        metric: str | Iterable[str] = PK,
        **only: Any,
    ) -> Edges:
        """The k largest scores of every pairing; ``layer=``, ``label=`` and ``labels=`` as in :func:`headspan.top`."""
        return strongest.top(self, pairing, k, metric, **only)

    def around(
        self,
        head: HeadOrNode | Port | str,
        k: int = 10,
        metric: str | Iterable[str] = PK,
        pairing: str | Pairing | Iterable[str | Pairing] | None = None,
    ) -> Around:
        """The strongest inputs and outputs of a head, over all pairings by default; see :func:`headspan.around`."""
        return strongest.around(self, head, k, metric, pairing)

    # ------------------------------------------------------------------ files

    def _to_parts(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return result_parts(self)

    @classmethod
    def _from_parts(cls, head: Any, arrays: Mapping[str, np.ndarray], path: Path) -> Scores:
        return cls(*read_result(head, arrays, path))

    def _inputs(self) -> list[Any]:
        return [self.provenance.get("reference")]

    # ---------------------------------------------------------------- exports

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per pair that is present: metric, pairing, source, target, score."""
        return [
            {
                "metric": metric,
                "pairing": str(pairing),
                "source": str(matrix.sources[int(i)]),
                "target": str(matrix.targets[int(j)]),
                "score": float(value),
            }
            for (metric, pairing) in self.arrays
            for matrix in [self[metric, pairing]]
            for i, j, value in zip(*matrix.pairs(), strict=True)
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame."""
        frames: list[pandas.DataFrame] = []
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

    @renamed(pairings="pairing")
    @checked
    def to_networkx(
        self, metric: str | Iterable[str] = PK, pairing: str | Pairing | Iterable[str | Pairing] | None = None
    ) -> networkx.MultiDiGraph[str]:
        """A directed multigraph: heads are nodes, pairs are edges keyed by pairing with ``pairing`` and ``score``.

        A KV head has an edge "serves" to each query head of its group, so that paths go in by keys and values and
        out by outputs; its score is NaN.
        """
        metric, nodes, edges = one_metric(metric), dict[str, Fields](), list[Link]()
        for one in self.pairings if pairing is None else given_pairings(pairing, self, metric):
            matrix = self[metric, one]
            for head in (*matrix.sources, *matrix.targets):
                nodes[str(head)] = {"layer": head.layer, "kind": head.kind, "position": head.position}
            for i, j, value in zip(*matrix.pairs(), strict=True):
                source, target = str(matrix.sources[int(i)]), str(matrix.targets[int(j)])
                edges.append(Link(source, target, str(one), {"pairing": str(one), "score": float(value)}))
        links = ((str(kv), str(head)) for head, kv in self.ports.served_by.items())
        edges += [Link(*ends, "serves", {"pairing": "serves"}) for ends in links if {*ends} <= nodes.keys()]
        return as_networkx(Graph({"metric": metric, "model": str(self.provenance.get("reference", ""))}, nodes, edges))

    def to_xarray(self) -> xarray.Dataset:
        """A data set with one labelled matrix ``pk_OK`` … per metric and pairing."""
        try:
            import xarray
        except ImportError:
            raise missing_extra("xarray", "graph", "a labelled array") from None
        variables: dict[str, xarray.DataArray] = {}
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
        rows: list[dict[str, Any]] = []
        for metric, pairing in self.arrays:
            pairs, best = len(self[metric, pairing].pairs()[2]), self[metric, pairing].best()
            ends = {"source": None, "target": None, "score": None} if best is None else edge_row(best)
            found = {name: ends[name] for name in ("source", "target", "score")}
            rows.append({"metric": metric, "pairing": str(pairing), "pairs": pairs} | found)
        return html_table(repr(self).partition("\n")[0], rows)


def _parse_key(key: tuple[str, str | Pairing]) -> tuple[str, Pairing]:
    """The similarity and the pairing of an index."""
    if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str)):
        raise WrongArgument(
            f'index scores by similarity and pairing, like scores["pk", "OK"], not by {str(key)[:60]!r}'
        )
    return key[0], Pairing.parse(key[1])
