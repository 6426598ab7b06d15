"""The strongest pairs of a result: all of them, those around one head, in one layer, or of one class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headspan.results.choices import given_labels, given_metrics, given_pairings
from headspan.results.labels import LabelsLike
from headspan.results.matrix import Edge, Edges, ScoreMatrix, edge_row
from headspan.results.tabular import Tabular
from headspan.subspaces.metrics import PK
from headspan.system.arguments import checked
from headspan.system.ordering import descending, shared_ranks
from headspan.vocabulary.ends import EndsLike, acts_as, check_head, given_ends, in_layer, of_class
from headspan.vocabulary.errors import HeadspanError, refuse_ignored
from headspan.vocabulary.heads import (
    FLOW_PAIRINGS,
    Head,
    HeadOrNode,
    Pairing,
    Port,
    Role,
    parse_pairings,
)

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
    check_head(table, wanted)
    if role is not None and not any(role in one for _, one in chosen):
        like = f"{role}K" if role.writes else f"O{role}"
        named = ", ".join(dict.fromkeys(str(one) for _, one in chosen))
        raise HeadspanError(f"{asked} is not part of {named}: choose a pairing with {role}, for example {like}")
    incoming, outgoing = Edges(), Edges()
    for name, one in chosen:
        matrix = scores[name, one].forward()
        ends = (acts_as(table, wanted, one.source), acts_as(table, wanted, one.target))
        shape = matrix.values.shape
        if one.source in roles:
            outgoing += _best(matrix, np.broadcast_to(np.isin(_ids(matrix.sources), _ids(ends[0]))[:, None], shape), k)
        if one.target in roles:
            incoming += _best(matrix, np.broadcast_to(np.isin(_ids(matrix.targets), _ids(ends[1]))[None, :], shape), k)
    reads = acts_as(table, wanted, Role.K)
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
    from_: EndsLike | None = None,
    to: EndsLike | None = None,
    layer: int | None = None,
    label: str | None = None,
    labels: LabelsLike | None = None,
    side: Literal["source", "target"] | None = None,
) -> Edges:
    """The k largest scores of every pairing; ranks count all pairs of the pairing.

    from_, to: only pairs with these sources and targets: a head (``"L5H1"``), a port (``"L5H1.K"``), a layer
    (``"L5"``), a class of the labels, a node, or a list of them. layer, label: only pairs with a head of this layer or
    class. side: which of the two heads that must be, ``"source"`` or ``"target"``; by default either. labels: head
    classes, or the name or CSV file of some; they become columns of the rows.
    """
    table, classes = scores.ports, given_labels(labels, scores)
    ends = given_ends(from_, to, table, classes)
    either = [] if label is None else [of_class(table, label, classes)]
    either += [] if layer is None else [in_layer(table, layer)]
    if not either:
        refuse_ignored("without `layer` or `label`", side=side)
    names = given_metrics(metric, scores)
    chosen = {name: given_pairings(pairing, scores, name) for name in names}
    ends.check(one for found in chosen.values() for one in found)
    edges = Edges()
    for matrix in (scores[name, one] for name in names for one in chosen[name]):
        one, sources, targets = matrix.pairing, matrix.sources, matrix.targets
        keep = ends.mask(one, sources, targets)
        for end in either:
            rows, columns = end.among(sources, one.source)[:, None], end.among(targets, one.target)[None, :]
            keep = keep & (rows if side == "source" else columns if side == "target" else rows | columns)
        edges += _best(matrix, keep, k)
    if classes is not None:
        names = {str(end) for edge in edges for end in (edge.source, edge.target)}
        edges.labels = {name: classes.joined(name) for name in sorted(names)}
    return edges


def _best(matrix: ScoreMatrix, keep: np.ndarray, k: int) -> Iterator[Edge]:
    """The k largest of the pairs to keep, with their ranks among all pairs; ties come in head order."""
    if k < 0:
        raise HeadspanError(f"cannot list {k} pairs: give a number of 0 or more")
    rows, columns, values = matrix.pairs()
    order = descending(values)
    ranks = shared_ranks(values[order])
    for place in np.flatnonzero(keep[rows[order], columns[order]])[:k]:
        i = order[place]
        source, target = matrix.sources[rows[i]], matrix.targets[columns[i]]
        yield Edge(matrix.metric, matrix.pairing, int(ranks[place]), source, target, float(values[i]))


def _ids(heads: Iterable[HeadOrNode]) -> np.ndarray:
    """Heads as strings, which numpy can compare."""
    return np.array([str(head) for head in heads], dtype=object).astype(str)
