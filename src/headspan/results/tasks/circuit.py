"""A circuit: named edges between heads and other nodes, in a JSON file that can be shared and edited by hand.

    {"format": "headspan circuit", "version": 1, "name": "induction", "model": "demo", "nodes": ["L0H3", "L1H2"],
     "edges": [{"source": "L0H3.O", "target": "L1H2.K", "metric": "pk", "score": 9.1}]}

``metric`` and ``score`` are optional, and so is ``nodes``, since every end of an edge is a node. Other ends are
``embedding.W``, ``L3MLP.R``, ``L3MLP.W`` and ``logits.R`` in the circuit of a task, or any node of a result. The file
is not trusted: it is refused if it is too large, has another format or names heads that the model does not have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from headspan.results.tabular import Tabular
from headspan.results.tasks.edge_table import EdgeTable, beside_heads
from headspan.subspaces.metrics import PK
from headspan.system.arguments import checked
from headspan.system.inputs import read_text, reason
from headspan.system.outputs import writing
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import HeadOrNode, Pairing, Role, is_head_name
from headspan.vocabulary.ports import PortTable
from headspan.vocabulary.words import counted

FORMAT, VERSION = "headspan circuit", 1
_LARGEST = 16 * 2**20  # bytes
_MOST_EDGES = 20_000
_LONGEST = 300  # letters of a name
_METRIC = PK
ATTRIBUTION = "attribution"  # the metric of an edge that was found for a task


@dataclass(frozen=True)
class CircuitEdge:
    """One edge between two ports, ``L4H11.O`` and ``L5H1.K``; the score as written in the file."""

    source: str
    target: str
    metric: str = _METRIC
    score: float | None = None

    def resolved(self, table: PortTable) -> tuple[Pairing, HeadOrNode, HeadOrNode]:
        """The pairing, and both ends as ports of a model."""
        (source, writes), (target, reads) = _split(self.source), _split(self.target)
        return Pairing(writes, reads), table.resolve(source, writes), table.resolve(target, reads)


@dataclass(frozen=True, repr=False, eq=False)
class Circuit(Tabular):
    """Named edges; ``save`` and ``load`` keep them in a file, ``headspan.wiring(scores, circuit=…)`` draws them."""

    name: str
    model: str
    edges: tuple[CircuitEdge, ...]
    others: tuple[str, ...] = ()  # nodes without an edge

    @property
    def nodes(self) -> tuple[str, ...]:
        """The distinct heads and nodes of the circuit."""
        ends = [_split(end)[0] for edge in self.edges for end in (edge.source, edge.target)]
        return tuple(dict.fromkeys([*ends, *self.others]))

    @property
    def pairings(self) -> tuple[Pairing, ...]:
        """The distinct pairings of its edges."""
        return tuple(dict.fromkeys(Pairing(_split(edge.source)[1], _split(edge.target)[1]) for edge in self.edges))

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per edge."""
        return [vars(edge) | {} for edge in self.edges]

    def _headline(self) -> str:
        heads = all(map(is_head_name, self.nodes))
        ends = counted(len(self.nodes), "head") if heads else f"{len(self.nodes)} heads and nodes"
        return f"circuit {self.name}: {counted(len(self.edges), 'edge')} between {ends}"

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        about = {"format": FORMAT, "version": VERSION, "name": self.name, "model": self.model}
        edges = [{key: value for key, value in vars(edge).items() if value is not None} for edge in self.edges]
        return about | {"nodes": list(self.nodes), "edges": edges}

    @checked
    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the circuit; the file appears only when complete."""
        with writing(path, "json", force=force) as temporary:
            text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
            temporary.write_bytes((text + "\n").encode("utf-8", "replace"))

    @classmethod
    @checked
    def load(cls, path: str | os.PathLike[str]) -> Circuit:
        """Read a circuit file, which need not be trusted."""
        return cls.from_dict(_read(Path(path)), os.fspath(path))

    @classmethod
    def from_dict(cls, content: Any, where: str = "this") -> Circuit:
        """A circuit from the content of its file, after checking every part."""
        about = _object(content)
        if about.get("format") != FORMAT:
            raise HeadspanError(
                f'{where} is not a circuit. It must be a JSON object with "format": "{FORMAT}", as `hs.paths(scores)` '
                "and the page write it"
            )
        version = about.get("version")
        if type(version) is not int or version != VERSION:
            raise HeadspanError(
                f"{where} is a circuit of version {repr(version)[:40]}, and this headspan reads version {VERSION}. Use "
                "a newer headspan"
            )
        given = about.get("edges")
        edges = _list(given)
        if edges is None or len(edges) > _MOST_EDGES:
            seen = type(given).__name__ if edges is None else f"{len(edges):,} of them"
            raise HeadspanError(f"the edges of {where} must be a list of at most {_MOST_EDGES:,}, not {seen}")
        read = tuple(_edge(edge, i, where) for i, edge in enumerate(edges, start=1))
        return cls(_text(about, "name", where), _text(about, "model", where), read, _nodes(about, where))

    @classmethod
    def of_table(
        cls, table: EdgeTable, values: np.ndarray, kept: np.ndarray, name: str, model: str, metric: str = ATTRIBUTION
    ) -> Circuit:
        """The kept edges of a whole model with their values, largest first.

        values, kept: (writers, readers) as in the table.
        """
        if (count := int((kept & table.mask).sum())) > _MOST_EDGES:
            raise HeadspanError(
                f"a circuit file holds at most {_MOST_EDGES:,} edges, and this circuit has {count:,}: keep fewer, or "
                "write a graph file"
            )
        flat = np.flatnonzero(kept & table.mask)
        flat = flat[np.argsort(-np.abs(values.ravel()[flat]), kind="stable")]
        places = [divmod(int(i), table.mask.shape[1]) for i in flat]
        edges = (CircuitEdge(*table.edge(*place), metric, float(values[place])) for place in places)
        return cls(name, model, tuple(edges))

    def kept(self, table: EdgeTable) -> np.ndarray:
        """True for the edges of this circuit in the table of a whole model, (writers, readers).

        As everywhere, K and V of a query head are those of its KV head.
        """
        found = np.zeros(table.mask.shape, dtype=bool)
        for _, pairing, source, target in self.check(table.ports):
            found[table.place(f"{source}.{pairing.source}", f"{target}.{pairing.target}")] = True
        return found

    def without_missing(self, table: PortTable) -> tuple[Circuit, int]:
        """This circuit without the embedding, MLPs and logits that a result lacks, and how many edges they had."""
        missing = {name for name in self.nodes if beside_heads(name) and table.node(name) is None}
        edges = [edge for edge in self.edges if missing.isdisjoint((_split(edge.source)[0], _split(edge.target)[0]))]
        others = tuple(name for name in self.others if name not in missing)
        return replace(self, edges=tuple(edges), others=others), len(self.edges) - len(edges)

    def between_heads(self) -> tuple[Circuit, int]:
        """This circuit with edges from head to head only, and how many others it has."""
        kept = tuple(edge for edge in self.edges if all(is_head_name(_split(p)[0]) for p in (edge.source, edge.target)))
        return replace(self, edges=kept, others=()), len(self.edges) - len(kept)

    def check(self, table: PortTable) -> list[tuple[CircuitEdge, Pairing, HeadOrNode, HeadOrNode]]:
        """The edges as ports of a model; an unknown head is an error that names it."""
        found: list[tuple[CircuitEdge, Pairing, HeadOrNode, HeadOrNode]] = []
        for edge in self.edges:
            pairing, source, target = edge.resolved(table)
            if not source.position < target.position:
                raise HeadspanError(
                    f"the circuit {self.name[:60]!r} has an edge {edge.source} → {edge.target}, but nothing flows "
                    "from a later layer to an earlier one. Reverse the edge or leave it out"
                )
            found.append((edge, pairing, source, target))
        return found


def given_circuit(circuit: Circuit | str | os.PathLike[str]) -> Circuit:
    """A circuit as given, or read from a file."""
    return circuit if isinstance(circuit, Circuit) else Circuit.load(circuit)


def _read(path: Path) -> Any:
    missing = f"there is no file {path}. Write a circuit with `hs.paths(scores)`, with the page or by hand"
    try:
        text = read_text(path, missing, "circuit", most=_LARGEST)
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise HeadspanError(f"{path} cannot be read as a circuit in JSON: {reason(error)[:120]}") from None


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _object(content: Any) -> Mapping[str, Any]:
    """A JSON object; an empty one for anything else."""
    return cast("Mapping[str, Any]", content) if isinstance(content, Mapping) else {}


def _list(content: Any) -> list[Any] | None:
    """A JSON list; None for anything else."""
    return cast("list[Any]", content) if isinstance(content, list) else None


def _text(content: Mapping[str, Any], key: str, where: str) -> str:
    value = content.get(key, "")
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise HeadspanError(f"the {key} of {where} must be a text of at most {_LONGEST} letters")
    return value


def _nodes(content: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Names of nodes; objects have their name under "name"."""
    given = _list(content.get("nodes", []))
    if given is None or len(given) > _MOST_EDGES:
        raise HeadspanError(f"the nodes of {where} must be a list of at most {_MOST_EDGES:,} names")
    named: list[Any] = [_object(node).get("name") if isinstance(node, Mapping) else node for node in given]
    names = tuple(name for name in named if isinstance(name, str) and 0 < len(name) <= _LONGEST)
    if len(names) != len(given):
        raise HeadspanError(f"the nodes of {where} must be names of heads, like L4H7")
    return names


def _edge(content: Any, number: int, where: str) -> CircuitEdge:
    """One edge of a file."""
    if not isinstance(content, Mapping):
        raise HeadspanError(f"edge {number} of {where} must be an object with source and target")
    edge = _object(content)
    ends: list[str] = []
    for key in ("source", "target"):
        port = edge.get(key)
        if not isinstance(port, str) or len(port) > _LONGEST:
            raise HeadspanError(f"the {key} of edge {number} of {where} must be a port like L4H11.O")
        ends.append(port)
    (_, writes), (_, reads) = map(_split, ends)
    if not Pairing(writes, reads).flow:
        raise HeadspanError(
            f"edge {number} of {where} goes from {ends[0][:60]} to {ends[1][:60]}. An edge goes from O "
            "(or W of a node) to Q, K or V (or R of a node)"
        )
    metric, score = edge.get("metric", _METRIC), edge.get("score")
    if not isinstance(metric, str) or len(metric) > _LONGEST:
        raise HeadspanError(f"the metric of edge {number} of {where} must be a name like pk")
    if score is not None and (isinstance(score, bool) or not isinstance(score, (int, float)) or abs(score) > 1e300):
        raise HeadspanError(f"the score of edge {number} of {where} must be a number")
    return CircuitEdge(ends[0], ends[1], metric, None if score is None else float(score))


def _split(port: str) -> tuple[str, Role]:
    """The name and the role of a port; a node's name may have dots."""
    name, dot, role = port.strip().rpartition(".")
    if not dot or not name or role.upper() not in Role.__members__:
        raise HeadspanError(f"{port[:80]!r} is not a head with a role. Write for example L4H11.O or L5H1.K")
    return name, Role(role.upper())


def edges_of(circuit: Circuit, table: PortTable) -> Iterable[tuple[CircuitEdge, Pairing, HeadOrNode, HeadOrNode]]:
    """The distinct edges of a circuit on a model."""
    seen: dict[tuple[str, Pairing, HeadOrNode, HeadOrNode], CircuitEdge] = {}
    for edge, pairing, source, target in circuit.check(table):
        seen.setdefault((edge.metric, pairing, source, target), edge)
    return [(edge, pairing, source, target) for (_, pairing, source, target), edge in seen.items()]
