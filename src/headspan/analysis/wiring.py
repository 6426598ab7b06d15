"""Choose the edges worth looking at, build the graph of heads, and hand it to other programs."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from headspan.analysis.circuit import Circuit, edges_of, given_circuit
from headspan.analysis.effects_result import Effects, effects_in, effects_of
from headspan.analysis.given import ScoresLike, given_labels, given_pairings, given_scores
from headspan.analysis.graph_files import Graph, Link, as_graphml, as_networkx
from headspan.analysis.hubs import HubScores, hubs
from headspan.analysis.significance import DISCOVERY_RATE, Null, Significance, significance
from headspan.errors import HeadspanError, visible
from headspan.heads import Head, Pairing, Port, parse_pairings
from headspan.scores import Edge, Edges, ScoreMatrix, Scores, edge_row
from headspan.scoring.metrics import metric_of
from headspan.system.arguments import checked
from headspan.system.ordering import descending, occurrence
from headspan.system.outputs import GENERATOR, writing
from headspan.system.tabular import Tabular

if TYPE_CHECKING:
    import networkx

    from headspan.analysis.labels import Labels

SCHEMA = 1
EDGE_COLUMNS = (*Edge._fields, "effect", "source_labels", "target_labels")
Rule = Literal["top", "top-per-target", "significance", "threshold"]
RULES: tuple[Rule, ...] = get_args(Rule)


class HeadCounts(NamedTuple):
    """How many heads of a wiring carry a label, and how many carry none; nodes that are no heads are not counted."""

    in_class: int
    out_of_class: int


@dataclass(frozen=True)
class Node:
    """A head of the graph (or another node of the model), with its labels and its hub values by pairing."""

    head: Port
    labels: tuple[str, ...] = ()
    inlet: Mapping[str, float] = field(default_factory=dict)
    outlet: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False, eq=False)
class Wiring(Tabular):
    """Edges between heads, chosen by one rule from one similarity; a notebook shows it as a drawing."""

    metric: str
    pairings: tuple[Pairing, ...]
    rule: str
    edges: Edges
    nodes: tuple[Node, ...]
    label_names: tuple[str, ...]
    scores: Scores = field(repr=False)
    notes: tuple[str, ...] = ()  # where there are no edges, what would not be empty

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per edge, with its effect where it was measured and the labels of both heads (by ``;``)."""
        labels = {node.head: ";".join(node.labels) for node in self.nodes}
        ends = ("source", "target")
        return [
            edge_row(edge)
            | {"effect": self.effect(edge)}
            | {f"{end}_labels": labels[getattr(edge, end)] for end in ends}
            for edge in self.edges
        ]

    @cached_property
    def _effects(self) -> Effects | None:
        return effects_in(self.scores)

    def effect(self, edge: Edge) -> float | None:
        """The measured effect of an edge, where the result holds it."""
        return None if self._effects is None else self._effects.at(edge.pairing, edge.source, edge.target)

    def _edge_fields(self, edge: Edge) -> dict[str, str | int | float]:
        fields: dict[str, str | int | float] = {"metric": edge.metric, "pairing": str(edge.pairing)}
        fields |= {"rank": edge.rank, "score": edge.score}
        effect = self.effect(edge)
        return fields if effect is None else fields | {"effect": effect}

    def _headline(self) -> str:
        return f"{self.metric}, {self.rule}: {len(self.edges)} edges between {self.counted}"

    @property
    def counted(self) -> str:
        """How many heads, and nodes besides, are on the edges, in words."""
        others = len({str(node.head) for node in self.nodes if not isinstance(node.head, Head)})
        heads = f"{sum(isinstance(node.head, Head) for node in self.nodes)} heads"
        return f"{heads} and {others} node{'' if others == 1 else 's'}" if others else heads

    @checked
    def node(self, head: Port | str) -> Node:
        """The node of one head, or of another node of the model by its name."""
        wanted, _ = self.scores.ports.ask(head)
        for node in self.nodes:
            if str(node.head) == str(wanted):
                return node
        raise HeadspanError(f"{wanted} is on none of the {len(self.edges)} edges of this wiring: ask for more edges")

    @checked
    def between(self, pairing: str | Pairing) -> Edges:
        """The edges of one pairing, best first."""
        wanted = Pairing.parse(pairing)
        return Edges(edge for edge in self.edges if edge.pairing == wanted)

    @checked
    def head_counts(self, labels: Labels | None = None) -> HeadCounts:
        """Labelled and unlabelled heads among the nodes (by the labels given here, or those attached)."""
        heads = {node.head: node for node in self.nodes if isinstance(node.head, Head)}
        labelled = sum(bool(node.labels if labels is None else labels.of(head)) for head, node in heads.items())
        return HeadCounts(labelled, len(heads) - labelled)

    def serves(self) -> list[tuple[Head, Head]]:
        """Each shared key/value head with each query head of its group, where both are on edges.

        A path goes into a KV head by what it reads and on by what the query heads of its group write.
        """
        present = {node.head for node in self.nodes}
        links = self.scores.ports.served_by.items()
        return [(kv, head) for head, kv in links if head in present and kv in present]

    def strengths(self) -> list[float]:
        """How strongly to draw every edge, from 0 to 1: the root of its excess over chance, as on the page."""
        roles = {role for edge in self.edges for role in edge.pairing}
        ranks = {role: dict(zip(self.scores.heads(role), self.scores.ranks(role), strict=True)) for role in roles}
        ends = [
            (edge.score, ranks[edge.pairing.source][edge.source], ranks[edge.pairing.target][edge.target])
            for edge in self.edges
        ]
        values, first, second = np.array(ends, dtype=np.float64).reshape(-1, 3).T
        return metric_of(self.metric).strength(values, self.scores.d_model, first, second).tolist()

    # ---------------------------------------------------------------- exports

    def to_networkx(self) -> networkx.MultiDiGraph:
        """A directed multigraph; edges are keyed by pairing and carry ``score`` and ``rank``.

        Under GQA edges keyed "serves" lead from a KV head to the query heads of its group.
        """
        return as_networkx(self._graph())

    @checked
    def to_json(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Nodes and edges as JSON with a schema version."""
        names = self._graph_names()
        nodes = [
            {
                "head": names[node.head],
                "layer": node.head.layer,
                "kind": node.head.kind,
                "position": node.head.position,
                "labels": list(node.labels),
                "inlet": dict(node.inlet),
                "outlet": dict(node.outlet),
            }
            for node in self.nodes
        ]
        edges = [{"source": names[e.source], "target": names[e.target], **self._edge_fields(e)} for e in self.edges]
        content = {"generator": GENERATOR, "schema": SCHEMA, **self._about(), "nodes": nodes, "edges": edges}
        if self.scores.ports.shared:
            content["serves"] = [{"source": str(kv), "target": str(head)} for kv, head in self.serves()]
        _write(path, "json", json.dumps(content, indent=1, ensure_ascii=False) + "\n", force)

    @checked
    def to_csv(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """The rows as a CSV file."""
        text = io.StringIO()
        writer = csv.DictWriter(text, EDGE_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        _write(path, "csv", text.getvalue(), force)

    @checked
    def to_graphml(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """GraphML, as Gephi, Cytoscape, yEd, igraph and networkx read it."""
        _write(path, "graphml", as_graphml(self._graph()), force)

    def _graph(self) -> Graph:
        names = self._graph_names()
        edges = [Link(names[e.source], names[e.target], str(e.pairing), self._edge_fields(e)) for e in self.edges]
        edges += [Link(str(kv), str(head), "serves", {"pairing": "serves"}) for kv, head in self.serves()]
        return Graph(self._about(), {names[node.head]: _node_fields(node) for node in self.nodes}, edges)

    def _graph_names(self) -> dict[Port, str]:
        """The names of the nodes; one that writes at one end of the stream and reads at the other is two of them."""
        count = Counter(str(node.head) for node in self.nodes)
        twice = [node.head for node in self.nodes if count[str(node.head)] > 1]
        names = {node.head: str(node.head) for node in self.nodes}
        return names | {port: f"{port}.{'W' if port in self.scores.heads('W') else 'R'}" for port in twice}

    def _about(self) -> dict[str, str]:
        return {
            "metric": self.metric,
            "pairings": ",".join(map(str, self.pairings)),
            "rule": self.rule,
            "model": str(self.scores.provenance.get("reference", "")),
            "folding": str(self.scores.provenance.get("folding", "none")),
        }

    def _repr_svg_(self) -> str | None:
        from headspan.figures import wiring_svg

        return wiring_svg(self) if self.edges else None

    def _repr_html_(self) -> str | None:
        """In place of an empty drawing, what would not be empty."""
        return None if self.edges else "".join(f"<p>{escape(note)}</p>" for note in self.notes)


@checked
def wiring(
    scores: ScoresLike,
    pairings: str | Pairing | Iterable[str | Pairing] = "flow",
    metric: str = "pk",
    k: int = 20,
    rule: Rule = "top",
    q: float | None = None,
    null: Null | None = None,
    minimum: float | None = None,
    labels: Labels | str | os.PathLike[str] | None = None,
    *,
    used: bool = False,
    circuit: Circuit | str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Wiring:
    """The graph of the strongest forward pairs, or of the edges of a circuit.

    Parameters
    ----------
    pairings
        ``"flow"`` (OQ, OK, OV), ``"all"``, or a list; every pairing chooses its own edges.
    k
        How many edges per pairing (rule ``top``, the paper's) or per target head (``top-per-target``).
    rule
        ``top``; ``top-per-target``; ``significance``: the q-value is at most ``q`` (0.05 by default) under ``null``
        (``random`` subspaces by default, for ``pk``, or the ``reversed`` pairs; see
        :mod:`headspan.analysis.significance`); ``threshold``: the score is at least ``minimum``. With another rule
        ``q`` and ``null`` would do nothing and are refused.
    minimum
        With any rule, leave out pairs that score less than this.
    labels
        Head classes to attach to the nodes, or the name or CSV file of some.
    used
        Keep only edges that the model uses, by the effects in the result (see :mod:`headspan.analysis.effects`).
    circuit
        A circuit or its JSON file (:mod:`headspan.analysis.circuit`): its edges, whatever their scores, in place of
        those of a rule.
    say
        Called with a sentence where nobody can tell whether the labels or the circuit are for these weights.
    """
    if circuit is not None:
        _no_rule(rule, q, null, minimum)
        return _drawn(given_circuit(circuit), scores, metric, labels, used, say)
    chosen = parse_pairings(pairings)
    _check(rule, k, q, null, minimum)
    rate, against = DISCOVERY_RATE if q is None else q, null or "random"
    scores = given_scores(scores, [metric], _needed(chosen, rule, against))
    chosen = given_pairings(pairings, scores, metric)
    labels = given_labels(labels, scores, say)
    measured = effects_of(scores) if used else None
    if measured is not None:
        asked, chosen = chosen, tuple(pairing for pairing in chosen if not pairing.of_nodes)
        if not chosen:
            raise HeadspanError(
                f"effects are measured between heads, and {', '.join(map(str, asked))} has other nodes: leave out used"
            )
    edges, found = Edges(), list[Significance]()
    for pairing in chosen:
        matrix = scores[metric, pairing].forward()
        with np.errstate(invalid="ignore"):
            allowed = np.ones(matrix.values.shape, dtype=bool) if minimum is None else matrix.values >= minimum
            if rule == "significance":
                found.append(significance(scores, pairing, null=against, metric=metric))
                allowed &= found[-1].q <= rate
            if measured is not None:
                allowed &= measured.used(pairing)
        edges += _choose(matrix, allowed, k, rule)
    names = tuple(labels.names) if labels is not None else ()
    nodes = _nodes(edges, scores, metric, chosen, labels)
    notes = () if edges else tuple(_why_empty(scores, metric, chosen, rule, k, rate, minimum, found))
    described = _describe(rule, k, rate, against, minimum) + (", used" if used else "")
    return Wiring(metric, chosen, described, edges, nodes, names, scores, notes)


def _no_rule(rule: str, q: float | None, null: str | None, minimum: float | None) -> None:
    """A circuit says itself which edges it has."""
    if rule != "top" or any(value is not None for value in (q, null, minimum)):
        raise HeadspanError("a circuit says which edges it has: leave out rule, q, null and minimum, or the circuit")


def _drawn(
    circuit: Circuit,
    scores: ScoresLike,
    metric: str,
    labels: Labels | str | os.PathLike[str] | None,
    used: bool,
    say: Callable[[str], None],
) -> Wiring:
    """The wiring of a circuit: its edges with the scores that they have here."""
    scores = given_scores(scores, [metric], parse_pairings(circuit.pairings or "flow"))
    labels = given_labels(labels, scores, say)
    measured = effects_of(scores) if used else None
    edges, differ = Edges(), 0
    for edge, pairing, source, target in edges_of(circuit, scores.ports):
        matrix = scores[metric, pairing].forward()
        if measured is not None and not measured.used(pairing)[matrix.find(source, target)]:
            continue
        score = matrix.at(source, target)
        rank = matrix.rank_of(source, target)
        edges.append(Edge(metric, pairing, rank, source, target, score))  # type: ignore[arg-type]
        known = edge.score if edge.metric == metric else None
        differ += known is not None and abs(known - score) > 1e-3 * max(1.0, abs(score))
    if differ:
        say(
            f"{differ} of the {len(edges)} edges have other scores in the circuit {circuit.name[:60]!r} than in this "
            "result: it may have been made from another model"
        )
    edges = Edges(sorted(edges, key=lambda edge: (str(edge.pairing), edge.rank)))
    chosen = tuple(dict.fromkeys(edge.pairing for edge in edges))
    names = tuple(labels.names) if labels is not None else ()
    described = f"circuit {visible(circuit.name)[:60]}".rstrip() + (", used" if used else "")
    notes = () if edges else ("the circuit has no edges to show here",)
    return Wiring(metric, chosen, described, edges, _nodes(edges, scores, metric, chosen, labels), names, scores, notes)


def _needed(pairings: tuple[Pairing, ...], rule: str, null: str) -> tuple[Pairing, ...]:
    """The pairings to score: the reversed null looks at the reversed ones too."""
    if (rule, null) != ("significance", "reversed"):
        return pairings
    return parse_pairings([*pairings, *(Pairing(p.target, p.source) for p in pairings)])


def _why_empty(
    scores: Scores,
    metric: str,
    pairings: Iterable[Pairing],
    rule: str,
    k: int,
    q: float,
    minimum: float | None,
    found: Iterable[Significance],
) -> Iterator[str]:
    """What to ask for instead of a choice without edges, for every pairing."""
    if rule in ("top", "top-per-target") and k == 0:
        yield f"no edges were asked for ({rule} 0): give a larger k"
        return
    yield from (result.nothing(q) for result in found if result.smallest_q > q)
    for pairing in pairings:
        best = scores[metric, pairing].forward().top(1)
        if not best:
            yield f"{pairing} has no forward pairs"
        elif minimum is not None and best[0].score < minimum:
            yield f"no {pairing} pair scores {minimum:g} or more; the largest {metric} is {best[0].score:.4g}"


def _check(rule: str, k: int, q: float | None, null: str | None, minimum: float | None) -> None:
    if rule not in RULES:
        raise HeadspanError(f"unknown edge rule {rule!r}: choose one of {', '.join(RULES)}")
    if k < 0:
        raise HeadspanError(f"cannot choose {k} edges: give a number of 0 or more")
    for name, value in (("null", null), ("q", q)):
        if rule != "significance" and value is not None:
            raise HeadspanError(
                f"{name} {value} has no effect on the rule {rule}: it belongs to the rule significance, so leave it "
                "out or choose that rule"
            )
    if q is not None and not 0 < q <= 1:
        raise HeadspanError(f"a q-value lies between 0 and 1, not {q}: give for example 0.01")
    if rule == "threshold" and minimum is None:
        raise HeadspanError("the rule threshold needs the smallest score to show: give minimum, for example 20")


def _choose(matrix: ScoreMatrix, allowed: np.ndarray, k: int, rule: Rule) -> Iterable[Edge]:
    """The edges of one pairing, best first; a rank always counts all pairs of the pairing."""
    rows, columns, values = matrix.pairs()
    order = descending(values)
    rows, columns, values = rows[order], columns[order], values[order]
    keep = allowed[rows, columns]
    if rule == "top":
        keep &= np.arange(len(values)) < k
    elif rule == "top-per-target":
        keep &= occurrence(columns) < k
    for i in np.flatnonzero(keep):
        source, target = matrix.sources[rows[i]], matrix.targets[columns[i]]
        yield Edge(matrix.metric, matrix.pairing, int(i) + 1, source, target, float(values[i]))


def _describe(rule: str, k: int, q: float, null: str, minimum: float | None) -> str:
    text = {
        "top": f"top {k} per pairing",
        "top-per-target": f"top {k} per target",
        "significance": f"q ≤ {q:g} ({null} null)",
        "threshold": "",
    }[rule]
    return ", ".join(part for part in (text, "" if minimum is None else f"score ≥ {minimum:g}") if part)


def _nodes(
    edges: Edges, scores: Scores, metric: str, pairings: Iterable[Pairing], labels: Labels | None
) -> tuple[Node, ...]:
    """Every head and node that is an end of an edge, in the order of the stream, query heads before shared ones."""
    heads = {edge.source for edge in edges} | {edge.target for edge in edges}
    whole = edges and not scores.screened  # hubs need every pair
    found = {str(pairing): hubs(scores, pairing, metric) for pairing in pairings} if whole else {}
    inlets = {pairing: _by_head(hub.inlet) for pairing, hub in found.items()}
    outlets = {pairing: _by_head(hub.outlet) for pairing, hub in found.items()}
    return tuple(
        Node(
            head,
            labels.of(head) if labels is not None and isinstance(head, Head) else (),
            {pairing: values[head] for pairing, values in inlets.items() if head in values},
            {pairing: values[head] for pairing, values in outlets.items() if head in values},
        )
        for head in sorted(heads, key=_stream_order)
    )


def _stream_order(port: Port) -> tuple[Any, ...]:
    return (port.position, port.kv, port.index, "") if isinstance(port, Head) else (port.position, True, 0, port.name)


def _by_head(hub: HubScores) -> dict[Port, float]:
    return {head: float(value) for head, value in zip(hub.heads, hub.values, strict=True) if not np.isnan(value)}


def _node_fields(node: Node) -> dict[str, str | int | float]:
    fields: dict[str, str | int | float] = {
        "layer": node.head.layer, "kind": node.head.kind, "position": node.head.position,
        "labels": ";".join(node.labels),
    }  # fmt: skip
    fields |= {f"inlet_{pairing}": value for pairing, value in node.inlet.items()}
    return fields | {f"outlet_{pairing}": value for pairing, value in node.outlet.items()}


def _write(path: str | os.PathLike[str], kind: str, text: str, force: bool) -> None:
    with writing(path, kind, force=force) as temporary:
        temporary.write_bytes(text.encode("utf-8", "replace"))  # a file name may hold bytes that are no text
