"""Which heads write a direction, and which read it: probes, features, adapters, neurons, tokens.

The share of a direction u in a head's port is ‖Uᵀu‖²/‖u‖², where U is an orthonormal basis of the port: the part of u
that the head can write (O) or read (Q, K, V). For a subspace of r dimensions it is PK/r. Three numbers compare it with
chance:

* p: for a uniformly random direction the share follows Beta(m/2, (d − m)/2) exactly, where m is the rank of the port;
  for subspaces see :func:`headspan.subspaces.random_subspaces.random_law`. Trained directions are not uniform, so a
  small p alone is weak evidence.
* z: PK against random subspaces, in their standard deviations.
* p_kind: the fraction of other nodes of its kind with at least this share in the same port, (1 + count)/(1 + others).

Each is for one pair. The smallest p among N ports is about 1/N by chance.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from headspan.node_kinds.node_sets import NodeSet
from headspan.node_kinds.opening import node_sets
from headspan.node_kinds.ranking import Sort, kind_p, random_p, random_z
from headspan.node_kinds.search import Search, Side
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import given_weights
from headspan.statistics.dimension import dimension_between
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.memory import parse_memory
from headspan.system.ordering import shared_ranks
from headspan.system.progress import Update
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Node

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike
    from headspan.node_kinds.opening import OneNode, OnePath

COLUMNS = ("node", "kind", "side", "rank", "partner", "share", "p", "z", "p_kind")
_AT_ONCE = 1024  # nodes whose rows are computed together
MOST_ROWS = 50_000  # most rows listed by node; larger results are listed by head


@renamed(add="nodes")
@checked
def nodes(
    model: ModelLike,
    nodes: str | os.PathLike[str] | Sequence[OneNode] | Node | NodeSet | None = None,
    sae: str | os.PathLike[str] | Sequence[OnePath] | None = None,
    adapter: str | os.PathLike[str] | Sequence[OnePath] | None = None,
    neurons: str | list[str] | None = None,
    tokens: str | list[str] | None = None,
    embedding: bool = False,
    unembedding: bool = False,
    fold: bool = False,
    k: int = 10,
    sort: Sort = "p_kind",
    seed: int = 0,
    memory: int | str = 2**30,
    progress: Update | None = None,
    *,
    components: str | list[str] | None = None,
) -> NodeReport:
    """For each node its k strongest writers and readers: heads before and after it, and other given nodes.

    model: opened weights or a reference. nodes: ``FILE[:name][@layer]``, or `headspan.Node`; sae: ``DIR[:indices]``;
    adapter: a PEFT directory; neurons: ``"L3:17,L3:*"``; tokens: ``" Paris, London"`` or a list; embedding and
    unembedding: all rows; components: of a parameter decomposition, ``FILE[:MODULE[:indices]]``.
    fold: fold norms into the weights of the model and of the nodes that read after them.
    sort: rank by ``"p_kind"``, p among other nodes of the kind (by share where it is unknown or equal), by ``"p"`` of a
    random direction, or by ``"share"``.
    memory bounds the working arrays; whatever the number of nodes, only the best k of each node and head are kept.

    >>> rng = np.random.default_rng(0)
    >>> model = {role: rng.normal(size=(3, 2, 20, 4)) for role in "QKVO"}
    >>> direction = model["O"][1, 0] @ rng.normal(size=4)
    >>> report = nodes(model, Node(direction, "planted", layer=2))
    >>> report.rows()[0]["partner"], round(report.rows()[0]["share"], 6)
    ('L1H0.O', 1.0)
    """
    if k < 1:
        raise HeadspanError(f"k must be at least 1, not {k}")
    if seed < 0:
        raise HeadspanError(f"seed must be a whole number of 0 or more, not {seed}")
    budget = max(parse_memory(memory), 2**20)
    weights = given_weights(model, fold)
    sets = node_sets(weights, nodes, sae, adapter, neurons, tokens, embedding, unembedding, components)
    if not sets:
        raise HeadspanError(
            "no nodes were given. Name some with `nodes`, `sae`, `adapter`, `neurons`, `tokens`, `components`, "
            "`embedding` or `unembedding`"
        )
    search = Search(weights, sets, k, budget, seed, progress, sort)
    search.run()
    return NodeReport.of_search(search)


class Overlap(TypedDict):
    """A node and a port, with the share of the node in the port; None where a number is undefined."""

    node: str
    kind: str
    side: str
    rank: int
    partner: str
    share: float
    p: float | None
    z: float | None
    p_kind: float | None


@dataclass(frozen=True)
class StoredOverlaps:
    """The pairs of a report that was saved; those of too many nodes are kept head by head only."""

    nodes: list[Overlap] | None
    heads: list[Overlap]

    def by_node(self) -> Iterator[Overlap]:
        if self.nodes is None:
            raise HeadspanError("this file has too many nodes to list one by one. Use by_head, or run nodes again")
        yield from self.nodes

    def by_head(self) -> Iterator[Overlap]:
        yield from self.heads

    def of(self, name: str) -> list[Overlap] | None:
        wanted = name.strip().upper()
        return [row for row in self.by_node() if row["node"].upper() == wanted] or None


@dataclass(frozen=True, repr=False, eq=False)
class NodeReport(Tabular):
    """The strongest writers and readers of nodes, and the nodes that each head writes and reads most.

    rows: by node, or by head if there are too many nodes to list; by_node and by_head choose explicitly.
    count: how many nodes; ports: how many ports of heads they were compared with.
    """

    reference: str
    k: int
    d_model: int
    folding: str
    notes: list[str]
    count: int
    ports: int
    overlaps: StoredOverlaps

    @classmethod
    def of_search(cls, search: Search) -> NodeReport:
        """The report of a search that has run; its rows are made when they are asked for."""
        weights, sides = search.weights, search.sides
        notes = [*dict.fromkeys(note for found in search.sets for note in found.notes), *search.notes]
        lost = sum(int(np.count_nonzero(ranks == 0)) for side in sides for ranks in side.node_ranks.values())
        if lost:
            notes.append(f"{lost} ports of nodes have length 0, so they have no direction and are left out")
        count, ports = int(search.offsets[-1]), sum(len(ports) for side in sides for ports, _ in side.ports)
        found: Any = FoundOverlaps(search, count * 2 * search.k <= MOST_ROWS)
        return cls(weights.reference, search.k, weights.d_model, weights.folding, notes, count, ports, found)

    def _headline(self) -> str:
        folded = ", norms folded in" if self.folding != "none" else ""
        what, them = ("1 node", "it") if self.count == 1 else (f"{self.count:,} nodes", "them")
        return f"{what} and the ports of {self.reference} that write and read {them} most{folded}"

    @property
    def listed_by_node(self) -> bool:
        """Whether `rows` are listed by node."""
        return self.count * 2 * self.k <= MOST_ROWS

    def rows(self) -> list[dict[str, Any]]:
        """node, kind, side, rank, partner, share, p, z, p_kind of each kept pair."""
        return [dict(row) for row in (self.by_node() if self.listed_by_node else self.by_head())]

    def of(self, name: str) -> list[Overlap]:
        """The rows of one node."""
        found = self.overlaps.of(name) if isinstance(name, str) else None
        if found is None:
            raise HeadspanError(f"there is no node {str(name)[:80]!r} in this result")
        return found

    def by_node(self) -> Iterator[Overlap]:
        """Node by node: its writers, then its readers, strongest first."""
        return self.overlaps.by_node()

    def by_head(self) -> Iterator[Overlap]:
        """Port by port of the heads: the nodes that it writes or reads most; rank counts nodes then."""
        return self.overlaps.by_head()


class FoundOverlaps:
    """The pairs that a search kept, with rows made on demand; the same methods as `StoredOverlaps`."""

    def __init__(self, search: Search, few: bool) -> None:
        self._sets, self._sides, self._offsets = list(search.sets), search.sides, search.offsets
        self.d_model, self._few = search.weights.d_model, few

    def _to_parts(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {"nodes": list(self.by_node()) if self._few else None, "heads": list(self.by_head())}, {}

    def of(self, name: str) -> list[Overlap] | None:
        for i, found in enumerate(self._sets):
            number = found.find(name)
            if number is not None:
                place = int(np.flatnonzero(np.asarray(found.ids) == number)[0])
                part = range(place, place + 1)
                return [row for side in self._sides for row in self._node_rows(side, i, part)[0]]
        return None

    def by_node(self) -> Iterator[Overlap]:
        """By node: its writers, then its readers, strongest first."""
        for i, found in enumerate(self._sets):
            for start in range(0, len(found), _AT_ONCE):
                part = range(start, min(start + _AT_ONCE, len(found)))
                rows = [self._node_rows(side, i, part) for side in self._sides]
                for of_node in zip(*rows, strict=True):
                    yield from (row for of_side in of_node for row in of_side)

    def by_head(self) -> Iterator[Overlap]:
        """By port of a head: the nodes that it writes or reads most; rank then counts nodes."""
        for side in self._sides:
            for first, best in sorted(side.heads.items()):
                ports = first + np.arange(len(best.ids))[:, None] + np.zeros_like(best.ids)
                sets = np.searchsorted(self._offsets, best.ids, side="right") - 1
                kept: dict[tuple[int, int], Overlap] = {}
                for i in np.unique(sets[best.values >= 0]).tolist():
                    here = np.flatnonzero(((sets == i) & (best.values >= 0)).ravel())
                    places = best.ids.ravel()[here] - self._offsets[i]
                    ranks = shared_ranks(best.scores).ravel()[here]
                    rows = self._rows(side, i, places, ports.ravel()[here], best.values.ravel()[here], ranks)
                    kept |= {(int(at) // best.ids.shape[1], int(at)): row for at, row in zip(here, rows, strict=True)}
                yield from (kept[key] for key in sorted(kept))

    def _node_rows(self, side: Side, i: int, part: range) -> list[list[Overlap]]:
        """The rows of some nodes of a set on one side, one list per node."""
        ids, scores, ranks = side.kept(i, part)
        found: list[list[Overlap]] = [[] for _ in part]
        here = np.argwhere(scores >= 0)
        places = part.start + here[:, 0]
        chosen = tuple(here.T)
        for node, row in zip(
            here[:, 0],
            self._rows(side, i, places, ids[chosen], scores[chosen], ranks[chosen]),
            strict=True,
        ):
            found[int(node)].append(row)
        return found

    def _rows(
        self, side: Side, i: int, places: np.ndarray, ports: np.ndarray, shares: np.ndarray, ranks: np.ndarray
    ) -> list[Overlap]:
        """Records of pairs of nodes of one set with ports."""
        if not len(places):
            return []
        found = self._sets[i]
        numbers = np.asarray(found.ids)[places]
        m, r = side.port_ranks[ports], side.node_ranks[i][places]
        d = dimension_between(self.d_model, side.role in found.centred_roles, side.port_centred[ports])
        p = random_p(shares, d, m, r)
        z = random_z(shares * r, d, m, r)
        own = _kind_p(side, i, numbers, ports, shares)
        columns = (numbers, ranks, ports, shares.astype(np.float64), p, z, own)
        return [
            {
                "node": found.name(int(number)), "kind": found.kind, "side": side.name, "rank": int(rank),
                "partner": side.port_name(int(port)), "share": float(share), "p": _or_none(one), "z": _or_none(other),
                "p_kind": _or_none(kind),
            }
            for number, rank, port, share, one, other, kind in zip(*columns, strict=True)
        ]  # fmt: skip


def _or_none(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _kind_p(side: Side, i: int, numbers: np.ndarray, ports: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """p_kind of pairs of nodes and ports; NaN without others."""
    nulls, others = side.nulls.get(i), side.others.get(i)
    found = np.full(len(ports), np.nan)
    if nulls is None or others is None:
        return found
    itself = np.isin(numbers, others)
    for port in np.unique(ports[ports < len(nulls)]):
        here = ports == port
        found[here] = kind_p(nulls[port], shares[here], itself[here])
    return found
