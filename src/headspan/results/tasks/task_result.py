"""Which edges of a model carry a task: attributions of all edges, exact values of the best, and a circuit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from headspan.results.checks import check_heads, damaged
from headspan.results.identity import short_name
from headspan.results.labels import Labels, with_labels
from headspan.results.metadata import IDENTITY, check_fields, optional, text
from headspan.results.scores import Scores
from headspan.results.tabular import Tabular
from headspan.results.tasks.circuit import Circuit
from headspan.results.tasks.edge_table import EdgeTable, block_node, mlp_node
from headspan.results.tasks.examples import Examples
from headspan.results.tasks.graph_files import write_graph
from headspan.system.ordering import places
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, Head, Node
from headspan.vocabulary.ports import PortTable

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of edges kept, as in the MIB benchmark
FAITHFUL = 0.8  # faithfulness of the circuit that "auto" looks for
_TOP_SHARE = 0.01


class Values(TypedDict):
    """A task on some prompts: mean value on clean and corrupted prompts, and the share that the model solves."""

    prompts: int
    clean: float
    corrupted: float
    solved: float


class CurvePoint(TypedDict):
    """A circuit of so many edges, and its faithfulness on held-out prompts."""

    edges: int
    share: float
    faithfulness: float


@dataclass(repr=False, eq=False)
class Task(Tabular):
    """A task on a model. Arrays are (writers, readers) in the order of ``table``.

    attribution: estimated change of the task's value if the edge is corrupted, mean over prompts.
    exact: that change measured, for the best edges; NaN elsewhere.
    frequency: share of bootstrap resamples of the prompts in which the edge is among the ``k`` largest.
    circuit: the edges of a circuit, if one was asked for. faithfulness: of that circuit, on held-out prompts.
    asked: the edges with the ends ``from_`` and ``to``, to list. classes: of labelled heads, as columns of the rows.
    similarities: overlap or influence of edges between heads by metric, with their rank (``pk``, ``pk_rank`` …).
    examples: what the best edges between heads do on one prompt.
    """

    name: str
    ports: PortTable
    nodes: list[str]
    parallel: bool
    attribution: np.ndarray
    exact: np.ndarray
    frequency: np.ndarray
    k: int
    values: Values
    held_out: Values | None = None
    circuit: np.ndarray | None = None
    faithfulness: float | None = None
    curve: list[CurvePoint] = field(default_factory=list[CurvePoint])
    similarities: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    protocol: dict[str, Any] = field(default_factory=dict[str, Any])
    interrupted: bool = False
    notes: list[str] = field(default_factory=list[str])
    examples: Examples | None = None
    asked: np.ndarray | None = None
    classes: dict[str, str] = field(default_factory=dict[str, str])

    @cached_property
    def table(self) -> EdgeTable:
        """The writers and readers of the model."""
        found: list[Node] = []
        for name in self.nodes:
            layer = int(name[1:].removesuffix("MLP").removesuffix("BLOCK"))
            found.append(mlp_node(layer, parallel=self.parallel) if name.endswith("MLP") else block_node(layer))
        return EdgeTable.of(self.ports, found)

    @property
    def cpr(self) -> float | None:
        """Area under the faithfulness over the share of edges kept."""
        return _area(self.curve, gap=False)

    @property
    def cmd(self) -> float | None:
        """Area between the faithfulness and 1."""
        return _area(self.curve, gap=True)

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per edge, the ``k`` with the largest attributions first."""
        return self._rows(self.k, self.asked)

    def edges(self) -> list[dict[str, Any]]:
        """The same for every edge of the circuit, largest first."""
        return self._rows(self.attribution.size, self.edges_kept)

    def _rows(self, count: int, among: np.ndarray | None) -> list[dict[str, Any]]:
        places = self.table.strongest(self.attribution, count, among)
        return with_labels([self._row(int(place)) for place in places], self.classes)

    def _row(self, place: int) -> dict[str, Any]:
        row, column = divmod(place, self.attribution.shape[1])
        source, target = self.table.edge(row, column)
        found: dict[str, Any] = {
            "source": source,
            "target": target,
            "attribution": float(self.attribution[row, column]),
            "exact": _number(self.exact[row, column]),
            "frequency": float(self.frequency[row, column]),
            "in_circuit": None if self.circuit is None else bool(self.circuit[row, column]),
        }
        for name, values in self.similarities.items():
            value = _number(values[row, column])
            found[name] = int(value) if value is not None and name.endswith("_rank") else value
        return found

    def overlap(self) -> list[dict[str, Any]]:
        """How many of the verified edges between heads are in the top 1 % of each similarity, and by chance."""
        chosen = np.isfinite(self.exact) & self.table.between_heads
        found: list[dict[str, Any]] = []
        for name in self.similarities:
            if name.endswith("_rank"):
                continue
            ranks = self.similarities[f"{name}_rank"]
            known = chosen & np.isfinite(ranks)
            top = ranks <= np.maximum(1, np.floor(_TOP_SHARE * self._pairs(name)))
            found.append(
                {
                    "similarity": name,
                    "edges": int(known.sum()),
                    "in_top_1%": int((known & top).sum()),
                    "by_chance": float(_TOP_SHARE * known.sum()),
                }
            )
        return found

    def _pairs(self, name: str) -> np.ndarray:
        """How many edges the ranks of each reader's pairing count."""
        ranks = self.similarities[f"{name}_rank"]
        roles = np.array([str(port.role) for port in self.table.readers])
        counts = {role: np.isfinite(ranks[:, roles == role]).sum() for role in set(roles.tolist())}
        return np.array([counts[role] for role in roles])[None]

    @property
    def edges_kept(self) -> np.ndarray:
        """True for the edges of the circuit, (writers, readers)."""
        if self.circuit is None:
            raise HeadspanError(
                f"no circuit was made for {self.name}. Run `hs.task(model, {self.name!r}, circuit='auto')`"
            )
        return self.circuit

    def labels(self) -> Labels:
        """The heads of the circuit as a class with the name of the task; of a shared K or V, all heads that use it."""
        kept, table = self.edges_kept, self.table
        writes = [table.writers[i].head for i in np.flatnonzero(kept.any(1))]
        reads = [table.readers[i].head for i in np.flatnonzero(kept.any(0))]
        heads = [head for head in (*writes, *reads) if isinstance(head, Head)]
        used = {one for head in heads for one in (self.ports.group_of(head) if head.kv else (head,))}
        return Labels.from_pairs([(head, self.name) for head in sorted(used)], self.name)

    def to_circuit(self) -> Circuit:
        """The circuit as ``headspan wiring --circuit`` and ``headspan task --circuit`` read it."""
        model = str(self.model.get("reference", ""))
        return Circuit.of_table(self.table, self.attribution, self.edges_kept, self.name, model)

    def save_graph(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write all edges as a graph of EAP-IG and MIB, ``.json`` or ``.pt``."""
        d_model = int(self.protocol["d_model"])
        write_graph(path, self.table, self.attribution, self.circuit, d_model=d_model, force=force)

    def _headline(self) -> str:
        model = short_name(str(self.model.get("reference", "a model")))
        solved = f"solves {self.values['solved']:.0%} of {self.values['prompts']} prompts"
        circuit = "" if self.circuit is None else f", circuit of {int(self.circuit.sum()):,} edges"
        return f"{self.name} in {model}: {self.table.n_edges:,} edges, {solved}{circuit}"

    def _inputs(self) -> Sequence[Any]:
        return [self.model.get("reference"), self.protocol.get("task")]

    def _check(self, path: Path) -> None:
        """Refuse a file whose arrays do not fit its heads."""
        check_heads(self.ports.ports, path)
        check_fields(self.model, {**IDENTITY, "reference": optional(text())}, "model", path)
        try:
            shape = self.table.mask.shape
        except ValueError:
            raise damaged(path, "its nodes are not MLPs or blocks") from None
        arrays = [self.attribution, self.exact, self.frequency, *self.similarities.values()]
        if any(array.shape != shape or array.dtype != np.float32 for array in arrays):
            raise damaged(path, "its arrays do not fit its edges")
        for edges in (one for one in (self.circuit, self.asked) if one is not None):
            if edges.shape != shape or edges.dtype != np.bool_:
                raise damaged(path, "its circuit does not fit its edges")
        if not np.isfinite(self.attribution).all() or any(
            f"{name}_rank" not in self.similarities for name in self.similarities if not name.endswith("_rank")
        ):
            raise damaged(path, "it contains values that no run can have")
        if self.examples is not None:
            self.examples.check(self.ports, path)


def on_edges(scores: Scores, metric: str, table: EdgeTable) -> dict[str, np.ndarray]:
    """One similarity on the edges of a model, and its rank among the forward pairs of the pairing."""
    values = np.full(table.mask.shape, np.nan, dtype=np.float32)
    ranks = values.copy()
    rows = np.array([isinstance(port.head, Head) for port in table.writers])
    for pairing in FLOW_PAIRINGS:
        if (metric, pairing) not in scores:
            continue
        matrix = scores[metric, pairing].forward()
        columns = np.array([port.role is pairing.target for port in table.readers])
        found = places(matrix.values)
        values[np.ix_(rows, columns)] = matrix.values
        ranks[np.ix_(rows, columns)] = np.where(found > 0, found, np.nan)
    return {metric: values, f"{metric}_rank": ranks}


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _area(curve: Sequence[CurvePoint], *, gap: bool) -> float | None:
    """Area under the faithfulness, or of its gap to 1, by trapezoids over the shares; None without all of them."""
    points = [point for point in curve if any(abs(point["share"] - share) < 1e-12 for share in SHARES)]
    if len(points) < len(SHARES):
        return None
    values = np.array([point["faithfulness"] for point in points])
    return float(np.trapezoid(np.abs(1 - values) if gap else values, [point["share"] for point in points]))
