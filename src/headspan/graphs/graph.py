"""The graph of selected edges between heads: its rows and nodes, and exports for other programs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headspan.results.checks import damaged
from headspan.results.effects import Effects, effects_in
from headspan.results.effects_fields import EFFECT_FIELDS, effect_fields
from headspan.results.graph_files import Graph, Link, as_graphml, as_networkx
from headspan.results.matrix import Edge, Edges, edge_row
from headspan.results.scores import Scores
from headspan.results.tabular import Tabular, csv_text
from headspan.statistics.dimension import centred, dimension_between
from headspan.statistics.evidence import evidence_of, rises_above_chance
from headspan.subspaces.metrics import drawing_strength, metric_of
from headspan.system.arguments import checked
from headspan.system.outputs import GENERATOR, writing
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Head, HeadOrNode, Pairing, Role
from headspan.vocabulary.words import counted

if TYPE_CHECKING:
    import networkx

    from headspan.results.labels import Labels

SCHEMA = 1
EDGE_COLUMNS = (*Edge._fields, *EFFECT_FIELDS, "source_labels", "target_labels")


class HeadCounts(NamedTuple):
    """The numbers of heads of a wiring with and without a label; other nodes are not counted."""

    in_class: int
    out_of_class: int


@dataclass(frozen=True)
class WiringNode:
    """A head of the graph (or another node of the model), with its labels and its hub values by pairing."""

    head: HeadOrNode
    labels: tuple[str, ...] = ()
    inlet: Mapping[str, float] = field(default_factory=dict)
    outlet: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False, eq=False)
class Wiring(Tabular):
    """Edges between heads, selected by one rule from one similarity; a notebook shows it as a drawing."""

    metric: str
    pairings: tuple[Pairing, ...]
    rule: str
    edges: Edges
    nodes: tuple[WiringNode, ...]
    label_names: tuple[str, ...]
    scores: Scores = field(repr=False)
    notes: tuple[str, ...] = ()  # without edges, what to choose instead; otherwise caveats

    def _check(self, path: Path) -> None:
        known = {node.head for node in self.nodes}
        if not {end for edge in self.edges for end in (edge.source, edge.target)} <= known:
            raise damaged(path, "it has edges of heads that are not among its nodes")
        for edge in self.edges:
            self.scores[edge.metric, edge.pairing].find(edge.source, edge.target)

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per edge, with its effect if measured and the labels of both heads (separated by ``;``)."""
        labels = {node.head: ";".join(node.labels) for node in self.nodes}
        ends = ("source", "target")
        return [
            edge_row(edge) | fields | {f"{end}_labels": labels[getattr(edge, end)] for end in ends}
            for edge, fields in zip(self.edges, self._effect_fields, strict=True)
        ]

    @cached_property
    def _effects(self) -> Effects | None:
        return effects_in(self.scores)

    @cached_property
    def _effect_fields(self) -> list[dict[str, Any]]:
        return effect_fields(self._effects, [(edge.pairing, edge.source, edge.target) for edge in self.edges])

    def effect(self, edge: Edge) -> float | None:
        """The measured effect of an edge, if the result has it."""
        return None if self._effects is None else self._effects.at(edge.pairing, edge.source, edge.target)

    def _edge_fields(self) -> list[dict[str, str | int | float]]:
        """The fields of every edge in a file; effects only if measured."""
        return [
            {"metric": edge.metric, "pairing": str(edge.pairing), "rank": edge.rank, "score": edge.score}
            | {name: value for name, value in effect.items() if value is not None}
            for edge, effect in zip(self.edges, self._effect_fields, strict=True)
        ]

    def _headline(self) -> str:
        return f"{self.metric}, {self.rule}: {counted(len(self.edges), 'edge')} between {self.counted}"

    @property
    def counted(self) -> str:
        """The numbers of heads and other nodes on the edges, in words."""
        others = len({str(node.head) for node in self.nodes if not isinstance(node.head, Head)})
        heads = counted(sum(isinstance(node.head, Head) for node in self.nodes), "head")
        return f"{heads} and {counted(others, 'node')}" if others else heads

    @checked
    def node(self, head: HeadOrNode | str) -> WiringNode:
        """The node of one head, or of another node of the model by its name."""
        wanted, _ = self.scores.ports.ask(head)
        for node in self.nodes:
            if str(node.head) == str(wanted):
                return node
        raise HeadspanError(f"{wanted} is on none of the {len(self.edges)} edges of this wiring. Choose more edges")

    @checked
    def between(self, pairing: str | Pairing) -> Edges:
        """The edges of one pairing, best first."""
        wanted = Pairing.parse(pairing)
        return Edges(edge for edge in self.edges if edge.pairing == wanted)

    @checked
    def head_counts(self, labels: Labels | None = None) -> HeadCounts:
        """Labelled and unlabelled heads among the nodes (by the given labels, or those attached)."""
        heads = {node.head: node for node in self.nodes if isinstance(node.head, Head)}
        labelled = sum(bool(node.labels if labels is None else labels.of(head)) for head, node in heads.items())
        return HeadCounts(labelled, len(heads) - labelled)

    def serves(self) -> list[tuple[Head, Head]]:
        """Each shared key/value head with each query head of its group, if both are on edges.

        A path enters a KV head through what it reads and continues with what the query heads of its group write.
        """
        present = {node.head for node in self.nodes}
        links = self.scores.ports.served_by.items()
        return [(kv, head) for head, kv in links if head in present and kv in present]

    def strengths(self) -> list[float]:
        """The drawing strength of every edge, from 0 to 1: its excess over chance."""
        scores, known = self.scores, dict[Role, dict[Any, tuple[float, ...]]]()
        for role in {role for edge in self.edges for role in edge.pairing}:
            ranks = scores.ranks(role)
            sizes = scores.sizes.get((self.metric, role), np.ones(len(ranks)))
            ends = zip(ranks.tolist(), centred(scores, role).tolist(), sizes.tolist(), strict=True)
            known[role] = dict(zip(scores.heads(role), ends, strict=True))
        edges = [
            (edge.score, *known[edge.pairing.source][edge.source], *known[edge.pairing.target][edge.target])
            for edge in self.edges
        ]
        columns = np.array(edges, dtype=np.float64).reshape(-1, 7).T
        values, first, first_centred, first_size, second, second_centred, second_size = columns
        d = dimension_between(scores.d_model, first_centred, second_centred)
        return drawing_strength(
            metric_of(self.metric).excess(values, d, first, second, first_size * second_size)
        ).tolist()

    def evidence(self) -> list[int | None]:
        """The evidence for every edge as in `Evidence.bits`, 0 for none; None where nothing could be tested."""
        known: dict[Pairing, np.ndarray | None] = {}
        above = rises_above_chance(self.scores) if self.edges else False
        for pairing in {edge.pairing for edge in self.edges}:
            known[pairing] = evidence_of(self.scores, self.metric, pairing, measured=self._effects, above=above).bits
        found: list[int | None] = []
        for edge in self.edges:
            bits = known[edge.pairing]
            place = self.scores[self.metric, edge.pairing].find(edge.source, edge.target)
            found.append(None if bits is None else int(bits[place]))
        return found

    # ---------------------------------------------------------------- exports

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """A directed multigraph; edges are keyed by pairing and have ``score`` and ``rank``.

        Under GQA, edges with the key "serves" lead from a KV head to the query heads of its group.
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
        pairs = zip(self.edges, self._edge_fields(), strict=True)
        edges = [{"source": names[e.source], "target": names[e.target], **fields} for e, fields in pairs]
        content = {"generator": GENERATOR, "schema": SCHEMA, **self._about(), "nodes": nodes, "edges": edges}
        if self.scores.ports.shared:
            content["serves"] = [{"source": str(kv), "target": str(head)} for kv, head in self.serves()]
        _write(path, "json", json.dumps(content, indent=1, ensure_ascii=False) + "\n", force)

    @checked
    def to_csv(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """The rows as a CSV file."""
        _write(path, "csv", csv_text(self.rows(), EDGE_COLUMNS), force)

    @checked
    def to_graphml(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """GraphML for Gephi, Cytoscape, yEd, igraph and networkx."""
        _write(path, "graphml", as_graphml(self._graph()), force)

    def _graph(self) -> Graph:
        names = self._graph_names()
        pairs = zip(self.edges, self._edge_fields(), strict=True)
        edges = [Link(names[e.source], names[e.target], str(e.pairing), fields) for e, fields in pairs]
        edges += [Link(str(kv), str(head), "serves", {"pairing": "serves"}) for kv, head in self.serves()]
        return Graph(self._about(), {names[node.head]: _node_fields(node) for node in self.nodes}, edges)

    def _graph_names(self) -> dict[HeadOrNode, str]:
        """The names of the nodes. A node that writes at the start of the stream and reads at its end becomes two."""
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


def _node_fields(node: WiringNode) -> dict[str, str | int | float]:
    fields: dict[str, str | int | float] = {
        "layer": node.head.layer, "kind": node.head.kind, "position": node.head.position,
        "labels": ";".join(node.labels),
    }  # fmt: skip
    fields |= {f"inlet_{pairing}": value for pairing, value in node.inlet.items()}
    return fields | {f"outlet_{pairing}": value for pairing, value in node.outlet.items()}


def _write(path: str | os.PathLike[str], kind: str, text: str, force: bool) -> None:
    with writing(path, kind, force=force) as temporary:
        temporary.write_bytes(text.encode("utf-8", "replace"))  # a file name may contain bytes that are not text
