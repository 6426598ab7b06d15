"""The strongest pairs of a result: all of them, those around one head, in one layer, or of one class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.results.choices import given_labels, given_metrics, given_pairings
from headspan.results.labels import LabelsLike
from headspan.results.matrix import Edge, Edges, ScoreMatrix, edge_row
from headspan.results.tabular import Tabular
from headspan.subspaces.metrics import PK
from headspan.system.arguments import checked
from headspan.system.ordering import descending
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import (
    FLOW_PAIRINGS,
    Head,
    HeadOrNode,
    Node,
    Pairing,
    Port,
    Role,
    layers_of,
    parse_pairings,
)
from headspan.vocabulary.ports import PortTable

if TYPE_CHECKING:
    from headspan.results.scores import Scores


@dataclass(frozen=True, repr=False, eq=False)
class Around(Tabular):
    """The neighbourhood of a head or node, or of one of its ports: its strongest inputs and outputs, best first.

    reads: the heads that read for this head: itself or, under GQA, its KV head.
    note: a text for display if that is another head, else None.
    """

    head: HeadOrNode | Port
    incoming: Edges
    outgoing: Edges
    reads: tuple[HeadOrNode, ...]
    note: str | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per edge: direction (``in`` or ``out``), metric, pairing, rank, source, target, score."""
        both = (("in", self.incoming), ("out", self.outgoing))
        return [{"direction": name, **row} for name, edges in both for row in map(edge_row, edges)]

    def __repr__(self) -> str:
        lines = [f"{self.head}: fed by {len(self.incoming)} and feeding {len(self.outgoing)} edges"]
        for name, edges in (("in", self.incoming), ("out", self.outgoing)):
            best = sorted(edges, key=lambda edge: -edge.score)[:4]
            lines += [f"  {name:<4}{e.source} → {e.target}  {e.pairing}  {e.score:.4f}" for e in best]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return (
            f"<p>Who feeds {escape(str(self.head))}</p>{self.incoming._repr_html_()}"
            f"<p>Whom {escape(str(self.head))} feeds</p>{self.outgoing._repr_html_()}"
        )


@checked
def around(
    scores: Scores,
    head: HeadOrNode | Port | str,
    k: int = 10,
    metric: str | Iterable[str] = PK,
    pairing: str | Pairing | Iterable[str | Pairing] | None = None,
) -> Around:
    """The strongest inputs and outputs of a head: the k largest forward pairs of every pairing on each side.

    By default all pairings of the scores in which the source writes and the target reads: OQ, OK, OV.
    A head with a role, ``L5H1.K``, gives the pairs of that port only. In a result with nodes their names are accepted
    too (``refusal``, ``refusal.R``), and a head's pairs with nodes are included.

    Under GQA a query head reads through the key/value head of its group, and a key/value head writes through the query
    heads of its group: their pairs are included.
    """
    chosen = _chosen_around(scores, given_metrics(metric, scores), pairing)
    table = scores.ports
    wanted, role = table.ask(head)
    asked, roles = (wanted, tuple(Role)) if role is None else (Port(wanted, role), (role,))
    if isinstance(wanted, Head) and wanted not in table.heads:
        raise HeadspanError(
            f"this result has no head {wanted}: its heads go from {table.query[0]} to {table.query[-1]}"
            + (f", its shared ones from {table.kv[0]} to {table.kv[-1]}" if table.shared else "")
        )
    if role is not None and not any(role in one for _, one in chosen):
        like = f"{role}K" if role.writes else f"O{role}"
        named = ", ".join(dict.fromkeys(str(one) for _, one in chosen))
        raise HeadspanError(f"{asked} is not part of {named}: choose a pairing with {role}, for example {like}")
    incoming, outgoing = Edges(), Edges()
    for name, one in chosen:
        matrix = scores[name, one].forward()
        ends = (_acts_as(table, wanted, one.source), _acts_as(table, wanted, one.target))
        shape = matrix.values.shape
        if one.source in roles:
            outgoing += _best(matrix, np.broadcast_to(np.isin(_ids(matrix.sources), _ids(ends[0]))[:, None], shape), k)
        if one.target in roles:
            incoming += _best(matrix, np.broadcast_to(np.isin(_ids(matrix.targets), _ids(ends[1]))[None, :], shape), k)
    reads = _acts_as(table, wanted, Role.K)
    shared = next((role for role in roles if role.shared and isinstance(wanted, Head) and not wanted.kv), None)
    return Around(asked, incoming, outgoing, reads, None if shared is None else table.note(wanted, shared))


def _chosen_around(
    scores: Scores, metrics: Iterable[str], pairing: str | Pairing | Iterable[str | Pairing] | None
) -> list[tuple[str, Pairing]]:
    """The matrices to look into: without a pairing, all that go from a writer to a reader."""
    if pairing is not None:
        return [(metric, one) for metric in metrics for one in parse_pairings(pairing)]
    held = [(metric, one) for metric in metrics for one in scores.pairings if one.flow and (metric, one) in scores]
    return held or [(metric, one) for metric in metrics for one in FLOW_PAIRINGS]


@checked
def top(
    scores: Scores,
    pairing: str | Pairing | Iterable[str | Pairing] = "flow",
    k: int = 20,
    metric: str | Iterable[str] = PK,
    *,
    layer: int | None = None,
    label: str | None = None,
    labels: LabelsLike | None = None,
) -> Edges:
    """The k largest scores of every pairing; ranks count all pairs of the pairing.

    layer: only pairs with a head of this layer. labels: head classes, or the name or CSV file of some; they become
    columns of the rows. label: only pairs with a head of this class.
    """
    classes = given_labels(labels, scores)
    members: tuple[Head, ...] | None = None
    if label is not None:
        if classes is None:
            raise HeadspanError(f"the class {label!r} needs labels: give `labels` as well")
        members = classes.heads(label)
    if layer is not None and layer not in {port.layer for port in (*scores.ports.heads, *scores.ports.nodes)}:
        layers = sorted({head.layer for head in scores.ports.query})
        raise HeadspanError(
            f"this result has no heads in layer {layer}: they are in layers {layers[0]} to {layers[-1]}"
        )
    edges = Edges()
    names = given_metrics(metric, scores)
    for matrix in (scores[name, one] for name in names for one in given_pairings(pairing, scores, name)):
        keep = np.ones(matrix.values.shape, dtype=bool)
        if layer is not None:
            keep &= (layers_of(matrix.sources) == layer)[:, None] | (layers_of(matrix.targets) == layer)[None, :]
        if members is not None:
            inside = _ids(members)
            keep &= np.isin(_ids(matrix.sources), inside)[:, None] | np.isin(_ids(matrix.targets), inside)[None, :]
        edges += _best(matrix, keep, k)
    if classes is not None:
        names = {str(end) for edge in edges for end in (edge.source, edge.target)}
        edges.labels = {name: classes.joined(name) for name in sorted(names)}
    return edges


def _best(matrix: ScoreMatrix, keep: np.ndarray, k: int) -> Iterator[Edge]:
    """The k largest of the pairs to keep, with their ranks among all pairs, ties in head order."""
    if k < 0:
        raise HeadspanError(f"cannot list {k} pairs: give a number of 0 or more")
    rows, columns, values = matrix.pairs()
    order = descending(values)
    kept = np.flatnonzero(keep[rows[order], columns[order]])[:k]
    for rank in kept.tolist():
        i = order[rank]
        source, target = matrix.sources[rows[i]], matrix.targets[columns[i]]
        yield Edge(matrix.metric, matrix.pairing, rank + 1, source, target, float(values[i]))


def _acts_as(table: PortTable, head: HeadOrNode, role: Role) -> tuple[HeadOrNode, ...]:
    """The heads that hold this head's weight of a role: itself, its KV head, or the query heads of its group."""
    if isinstance(head, Node):
        return tuple(port for port in table.of(role) if str(port) == head.name)
    if head in table.of(role):
        return (head,)
    if head.kv:
        return table.group_of(head) if not role.shared and head in table.heads else ()
    return (table.kv_of(head),) if role.shared and head in table.served_by else ()


def _ids(heads: Iterable[HeadOrNode]) -> np.ndarray:
    """Heads as strings, which numpy can compare."""
    return np.array([str(head) for head in heads], dtype=object).astype(str)
