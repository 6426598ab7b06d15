"""The strongest writers and readers of many nodes at once: blocks of nodes against stacks of ports.

The orthonormal bases U of many ports are concatenated, so comparing a block of nodes with all of them is one matrix
product; ‖UᵀX‖² of a node's orthonormal basis X, divided by its dimension, is its share. Only the best k ports of each
node and the best k nodes of each port of a head are kept. Nodes of one set share one position, so they are compared
only with nodes of other sets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.node_kinds.node_sets import NodeSet
from headspan.node_kinds.ranking import FEWEST_OTHERS, Sort, keys_by_kind, keys_by_p
from headspan.subspaces.bases import orthonormal_bases
from headspan.system.ordering import Best, shared_ranks
from headspan.system.progress import Update
from headspan.vocabulary.heads import HeadOrNode, Role, positions_of

PRODUCT = 2**24  # entries of one matrix product
OTHERS = 999  # most nodes used for the empirical null of a kind
MOST_NODE_PAIRS = 2 * 10**9  # pairs of nodes beyond which nodes are compared with heads only
MOST_NULL_PARTNERS = 4096  # most nodes among the partners of an empirical null
_NULL_NUMBERS = 2**28
_BY_COLUMNS = 8  # up to this many dimensions, bases are orthonormalised column by column
_AT_ONCE = 4096  # columns of one set read for one stack
_TOGETHER = 1024  # small sets share a stack up to this many columns
_NOTHING = -1.0  # the share of pairs that are not compared
_SMALL = 1e-5  # a remainder of a column, relative to it, that counts as rounding


def unit_bases(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Orthonormal bases of (n, d, r) vectors, float32, and their ranks; columns beyond the rank are zero."""
    n, _, r = vectors.shape
    if r > _BY_COLUMNS:
        bases, ranks = orthonormal_bases(vectors, "float32")
        return bases.astype(np.float32), ranks.astype(np.int64)
    bases = vectors.astype(np.float64 if r > 1 else np.float32)
    ranks = np.zeros(n, dtype=np.int64)
    for j in range(r):
        column, before = bases[:, :, j], bases[:, :, :j]
        length = np.sqrt(np.einsum("nd,nd->n", column, column, dtype=np.float64))
        for _ in range(2 if j else 0):
            column = column - np.einsum("ndi,ni->nd", before, np.einsum("ndi,nd->ni", before, column))
        rest = np.sqrt(np.einsum("nd,nd->n", column, column, dtype=np.float64)) if j else length
        real = rest > _SMALL * length
        bases[:, :, j] = column * np.divide(1, rest, out=np.zeros_like(rest), where=real)[:, None]
        ranks += real
    return bases.astype(np.float32), ranks


def as_rows(bases: np.ndarray) -> np.ndarray:
    """(n, d, r) bases as (n·r, d) rows."""
    return np.ascontiguousarray(bases.transpose(0, 2, 1)).reshape(-1, bases.shape[1])


@dataclass
class Stack:
    """Concatenated ports: (d, n·m) bases, their ranks and positions; ``first`` is the number of ports before them."""

    ports: Sequence[HeadOrNode]
    role: Role
    bases: np.ndarray
    width: int
    ranks: np.ndarray
    positions: np.ndarray
    first: int
    centred: np.ndarray  # which ports lie in d − 1 dimensions
    owners: np.ndarray | None = None  # the set of each port, if they are nodes

    def shares(self, rows: np.ndarray, ranks: np.ndarray, part: slice) -> np.ndarray:
        """The share of each node, (n·r, d) rows, that each port of a part reads or writes: (n, ports)."""
        n = len(ranks)
        products = rows @ self.bases[:, part.start * self.width : part.stop * self.width]
        products = products.reshape(len(rows), part.stop - part.start, self.width)
        squares = np.einsum("xhm,xhm->xh", products, products)
        total = squares.reshape(n, -1, squares.shape[1]).sum(axis=1) if len(rows) > n else squares
        return np.minimum(total / np.maximum(ranks, 1)[:, None].astype(np.float32), 1)


class _Block(NamedTuple):
    """Some nodes of a set: (n, d, r) vectors at one position."""

    ports: Sequence[HeadOrNode]
    vectors: np.ndarray
    position: int
    centred: bool
    owner: int


def _go_together(group: Sequence[_Block], block: _Block) -> bool:
    """Whether a block may join others in one stack; a file of a thousand arrays is a thousand sets of one node."""
    columns = sum(len(one.ports) for one in (*group, block)) * block.vectors.shape[2]
    same_width = group[0].vectors.shape[2] == block.vectors.shape[2]
    return same_width and group[0].position == block.position and columns <= _TOGETHER


def _node_stack(role: Role, blocks: Sequence[_Block], first: int) -> Stack:
    bases, ranks = unit_bases(np.concatenate([block.vectors for block in blocks]))
    n, d, r = bases.shape
    side_by_side = np.ascontiguousarray(bases.transpose(1, 0, 2)).reshape(d, n * r)
    sizes = [len(block.ports) for block in blocks]
    owners, centred = (np.repeat([getattr(b, name) for b in blocks], sizes) for name in ("owner", "centred"))
    ports = [port for block in blocks for port in block.ports]
    return Stack(ports, role, side_by_side, r, ranks, np.full(n, blocks[0].position), first, centred, owners)


@dataclass
class Side:
    """One direction of the search: writers of what the nodes read, or readers of what they write."""

    role: Role  # of the nodes
    name: str
    partners: tuple[Role, ...]  # of heads
    ports: list[tuple[Sequence[HeadOrNode], Role]] = field(default_factory=list)
    ranks: list[np.ndarray] = field(default_factory=list)
    centred: list[np.ndarray] = field(default_factory=list)
    best: dict[int, dict[int, Best]] = field(default_factory=dict)  # set -> first node of a block -> best ports
    heads: dict[int, Best] = field(default_factory=dict)  # best nodes, by the first port of a stack of heads
    node_ranks: dict[int, np.ndarray] = field(default_factory=dict)
    nulls: dict[int, np.ndarray] = field(default_factory=dict)  # (ports, others), sorted; NaN where not compared
    others: dict[int, np.ndarray] = field(default_factory=dict)

    def kept(self, i: int, part: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Best ports of some nodes of a set, their shares and ranks, (n, up to k); the shares of no port are −1."""
        blocks = self.best.get(i, {}).items()
        found = [(start, best) for start, best in blocks if start < part.stop and start + len(best.ids) > part.start]
        wide = max((best.ids.shape[1] for _, best in found), default=0)
        ids = np.full((len(part), wide), -1, dtype=np.int64)
        shares = np.full((len(part), wide), _NOTHING, dtype=np.float32)
        ranks = np.zeros((len(part), wide), dtype=np.int64)
        for start, best in found:
            first, last = max(start, part.start), min(start + len(best.ids), part.stop)
            into = slice(first - part.start, last - part.start), slice(0, best.ids.shape[1])
            here = slice(first - start, last - start)
            ids[into], shares[into], ranks[into] = best.ids[here], best.values[here], shared_ranks(best.scores[here])
        return ids, shares, ranks

    @cached_property
    def port_ranks(self) -> np.ndarray:
        """The rank of every port, by its number."""
        return np.concatenate([*self.ranks, np.zeros(0, dtype=np.int64)]).astype(np.int64)

    @cached_property
    def port_centred(self) -> np.ndarray:
        """Which ports lie in d − 1 dimensions, by their number."""
        return np.concatenate([*self.centred, np.zeros(0, dtype=bool)])

    @cached_property
    def _starts(self) -> list[int]:
        return np.cumsum([0, *(len(ports) for ports, _ in self.ports)]).tolist()

    def port_name(self, number: int) -> str:
        """A port by its number, as ``L4H7.O``."""
        stack = bisect_right(self._starts, number) - 1
        ports, role = self.ports[stack]
        return f"{ports[number - self._starts[stack]]}.{role}"

    @property
    def other(self) -> Role:
        """The role of nodes that are partners on this side."""
        return self.role.partner

    def compared(self, stack: Stack, position: int) -> slice:
        """The ports of a stack on the correct side of a position; they are sorted, so this is one slice."""
        here = stack.positions < position if self.role is Role.R else stack.positions > position
        found = np.flatnonzero(here)
        return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)


class Search:
    """Runs both sides over all sets."""

    def __init__(
        self, weights: AttentionWeights, sets: Sequence[NodeSet], k: int, memory: int, seed: int,
        progress: Update | None, sort: Sort = "p_kind",
    ) -> None:  # fmt: skip
        self.sort = sort
        self.weights, self.sets, self.k, self.memory = weights, sets, k, memory
        self.offsets = np.cumsum([0, *map(len, sets)])
        self.notes: list[str] = []
        self._progress, self._done = progress, 0
        self.sides = [Side(Role.R, "written by", (Role.O,)), Side(Role.W, "read by", (Role.Q, Role.K, Role.V))]
        self._with_nodes = self._nodes_are_compared()
        ports = {side.role: self._port_count(side) for side in self.sides}
        self._total = sum(len(found) * ports[role] for found in sets for role in found.places)
        self._choose_others(np.random.default_rng(seed), max(1, *ports.values()))

    # -- plan ------------------------------------------------------------------------------------------------

    def _nodes_are_compared(self) -> bool:
        """Whether nodes are compared with one another; not if there would be too many pairs."""
        readers, writers = (
            sorted((s.places[role].position, len(s) * s.width(role)) for s in self.sets if role in s.places)
            for role in (Role.R, Role.W)
        )
        before = np.cumsum([0, *(columns for _, columns in writers)])
        places = np.searchsorted([position for position, _ in writers], [position for position, _ in readers])
        pairs = sum(int(before[place]) * columns for place, (_, columns) in zip(places, readers, strict=True))
        pairs -= sum(  # nodes are not compared within their own set
            len(s) ** 2 * s.width(Role.R) * s.width(Role.W)
            for s in self.sets
            if {Role.R, Role.W} <= s.places.keys() and s.places[Role.W].position < s.places[Role.R].position
        )
        if pairs > MOST_NODE_PAIRS:
            self.notes.append(
                f"the nodes form {pairs:,} pairs among themselves, so they are compared with heads only: give "
                "fewer nodes to compare them with one another"
            )
        return 0 < pairs <= MOST_NODE_PAIRS

    def _port_count(self, side: Side) -> int:
        heads = sum(len(self.weights.heads(role)) for role in side.partners)
        return heads + (sum(len(s) for s in self.sets if side.other in s.places) if self._with_nodes else 0)

    def _choose_others(self, rng: np.random.Generator, ports: int) -> None:
        """Other nodes of each set's kind for the null, preferably nodes that were not requested."""
        most = int(np.clip(_NULL_NUMBERS // (2 * ports * max(1, len(self.sets))), 99, OTHERS))
        few = 0
        for i, found in enumerate(self.sets):
            everyone = np.arange(found.population)
            rest = np.setdiff1d(everyone, np.asarray(found.ids)) if len(found) < found.population else everyone
            pool = rest if len(rest) >= FEWEST_OTHERS else everyone
            if found.population <= FEWEST_OTHERS:
                few += 1
                continue
            chosen = np.sort(rng.choice(pool, min(most, len(pool)), replace=False))
            for side in self.sides:
                if side.role in found.places:
                    side.others[i] = chosen
        if few:
            what = f"{few} of {len(self.sets)} kinds of nodes have" if len(self.sets) > 1 else "these nodes have"
            self.notes.append(
                f"{what} no empirical p, which needs at least {FEWEST_OTHERS + 1} nodes of one kind at one position"
            )

    # -- partners --------------------------------------------------------------------------------------------

    def _stacks(self, side: Side) -> Iterator[Stack]:
        first = 0
        for role in side.partners:
            for layers in self._layer_runs(role):
                stack = self._head_stack(role, layers, first)
                first += len(stack.ports)
                yield stack
        if not self._with_nodes:
            return
        for blocks in self._node_blocks(side.other):
            stack = _node_stack(side.other, blocks, first)
            first += len(stack.ports)
            yield stack

    def _node_blocks(self, role: Role) -> Iterator[list[_Block]]:
        """Nodes that can be one stack: of sets with the same position and width."""
        group: list[_Block] = []
        having = [i for i, found in enumerate(self.sets) if role in found.places]
        for i in sorted(having, key=lambda i: (self.sets[i].places[role].position, self.sets[i].width(role))):
            found = self.sets[i]
            for part, vectors in found.blocks(role, max(1, _AT_ONCE // found.width(role))):
                ports, centred = found.nodes(role)[part.start : part.stop], role in found.centred_roles
                block = _Block(ports, vectors, found.places[role].position, centred, i)
                if group and not _go_together(group, block):
                    yield group
                    group = []
                group.append(block)
        if group:
            yield group

    def _layer_runs(self, role: Role) -> Iterator[tuple[int, ...]]:
        layers = self.weights.layers_with(role)
        widest = max(len(self.weights.heads_in(role, layer)) for layer in layers)
        per_layer = 4 * self.weights.d_model * widest * self.weights.d_head(role)
        step = max(1, self.memory // 2 // per_layer)
        yield from (layers[start : start + step] for start in range(0, len(layers), step))

    def _head_stack(self, role: Role, layers: tuple[int, ...], first: int) -> Stack:
        parts, ranks, m = [], [], self.weights.d_head(role)
        for layer in layers:
            bases, found = orthonormal_bases(self.weights.read(role, layer), self.weights.storage_dtype(role, layer))
            n, d, _ = bases.shape
            parts.append(bases.transpose(1, 0, 2).reshape(d, n * m).astype(np.float32))
            ranks.append(found)
        heads = [head for layer in layers for head in self.weights.heads_in(role, layer)]
        flags = self.weights.centred_ports(role)
        centred = np.concatenate([flags[self.weights.ports.span(role, layer)] for layer in layers])
        bases, ranks = np.concatenate(parts, axis=1), np.concatenate(ranks)
        return Stack(heads, role, bases, m, ranks, positions_of(heads), first, centred)

    # -- the work --------------------------------------------------------------------------------------------

    def run(self) -> None:
        for side in self.sides:
            members = [i for i, found in enumerate(self.sets) if side.role in found.places]
            for stacks in self._groups(side) if members else ():
                side.ports += [(stack.ports, stack.role) for stack in stacks]
                side.ranks += [stack.ranks for stack in stacks]
                side.centred += [stack.centred for stack in stacks]
                for i in members:
                    self._compare(side, stacks, i)

    def _groups(self, side: Side) -> Iterator[list[Stack]]:
        """Stacks that fit in memory together, so that a block of nodes is made once for all of them."""
        group: list[Stack] = []
        for stack in self._stacks(side):
            if group and sum(one.bases.nbytes for one in (*group, stack)) > self.memory // 2:
                yield group
                group = []
            group.append(stack)
        if group:
            yield group

    def _compare(self, side: Side, stacks: Sequence[Stack], i: int) -> None:
        found = self.sets[i]
        position = found.places[side.role].position
        parts = [side.compared(stack, position) for stack in stacks]
        self._null(side, stacks, parts, i)
        for where, block in found.blocks(side.role, self._block_size(found, side.role)):
            bases, ranks = unit_bases(block)
            side.node_ranks.setdefault(i, np.zeros(len(found), np.int32))[where] = ranks
            best = side.best.setdefault(i, {}).setdefault(where.start, Best(len(ranks), self.k))
            rows = as_rows(bases)
            for stack, part in zip(stacks, parts, strict=True):
                if part.stop > part.start:
                    shares = stack.shares(rows, ranks, part)
                    shares[ranks == 0] = _NOTHING
                    if stack.owners is not None:
                        shares[:, stack.owners[part] == i] = _NOTHING
                    keys = self._keys(side, stack, part, i, where, ranks, shares)
                    best.update(stack.first + part.start, keys.T, shares.T)
                    if stack.owners is None:
                        self._keep_for_heads(side, stack, part, int(self.offsets[i]) + where.start, keys, shares)
                self._count(len(ranks) * len(stack.ports))

    def _keys(
        self, side: Side, stack: Stack, part: slice, i: int, where: slice, ranks: np.ndarray, shares: np.ndarray
    ) -> np.ndarray:
        """By what the best ports of each node and the best nodes of each port are chosen, (nodes, ports)."""
        nulls, others = side.nulls.get(i), side.others.get(i)
        if self.sort == "p":
            d = self.weights.d_model - (stack.centred[part] & (side.role in self.sets[i].centred_roles))
            return keys_by_p(shares, d, stack.ranks[part], ranks)
        if self.sort == "share" or nulls is None or others is None:
            return shares
        first = stack.first + part.start
        itself = np.isin(np.asarray(self.sets[i].ids)[where], others)
        return keys_by_kind(shares, nulls[first : first + shares.shape[1]], itself)

    def _keep_for_heads(
        self, side: Side, stack: Stack, part: slice, first: int, keys: np.ndarray, shares: np.ndarray
    ) -> None:
        whole = np.full((2, len(shares), len(stack.ports)), _NOTHING)
        whole[0][:, part], whole[1][:, part] = keys, shares
        side.heads.setdefault(stack.first, Best(len(stack.ports), self.k)).update(first, *whole)

    def _block_size(self, found: NodeSet, role: Role) -> int:
        """Nodes at a time, the same for every stack, so that a product stays small."""
        width = max(self.memory // 2 // (4 * self.weights.d_model), 1)
        columns = sum(len(self.weights.heads(r)) * self.weights.d_head(r) for r in (Role.Q, Role.O)) // 2
        return max(32, PRODUCT // (max(1, min(width, columns)) * found.width(role)))

    def _null(self, side: Side, stacks: Sequence[Stack], parts: Sequence[slice], i: int) -> None:
        """The shares of other nodes of the kind in the same ports."""
        others, before = side.others.get(i), side.nulls.get(i)
        if others is None:
            return
        found, size = self.sets[i], self._block_size(self.sets[i], side.role)
        pairs = [
            (stack, part, np.full((len(stack.ports), len(others)), np.nan, np.float32))
            for stack, part in zip(stacks, parts, strict=True)
            if stack.owners is None or stack.first + len(stack.ports) <= MOST_NULL_PARTNERS
        ]
        compared = [pair for pair in pairs if pair[1].stop > pair[1].start]
        for start in range(0, len(others) if compared else 0, size):
            bases, ranks = unit_bases(found.members(side.role, others[start : start + size]))
            rows = as_rows(bases)
            for stack, part, nulls in compared:
                shares = stack.shares(rows, ranks, part)
                shares[ranks == 0] = np.nan
                nulls[part, start : start + size] = shares.T
        made = [np.sort(nulls, axis=1) for _, _, nulls in pairs]  # NaN last
        side.nulls[i] = np.concatenate([*([] if before is None else [before]), *made])

    def _count(self, pairs: int) -> None:
        self._done += pairs
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)
