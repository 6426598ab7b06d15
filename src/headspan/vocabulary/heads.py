"""Roles, heads, nodes, ports and pairings, their positions in the stream, and which pairs are compared.

A *role* is a letter: Q, K, V or O of a head, R or W of a node. A *port* is one role of one head or node, ``L4H11.O``.
A *pairing* is two roles, ``OK``.

>>> Head.parse("L4H7")
Head(layer=4, index=7, kind='H')
>>> str(Head(17, 1, "KV"))
'L17KV1'
>>> Pairing.parse("OK").source
<Role.O: 'O'>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from headspan.vocabulary.errors import HeadspanError

PairSet = Literal["default", "forward", "same-type", "all"]
OnePairing = Literal[
    "QQ", "QK", "QV", "QO", "KQ", "KK", "KV", "KO", "VQ", "VK", "VV", "VO", "OQ", "OK", "OV", "OO",
    "OR", "WQ", "WK", "WV", "WR",
]  # fmt: skip


class Role(str, Enum):
    """A letter: Q, K and V read for a head and O writes; R reads and W writes for any other node."""

    Q = "Q"
    K = "K"
    V = "V"
    O = "O"
    R = "R"
    W = "W"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def _missing_(cls, value: object) -> Role:
        if isinstance(value, str) and value.strip().upper() in cls.__members__:
            return cls[value.strip().upper()]
        raise HeadspanError(f"{str(value)[:80]!r} is not a role: choose one of {', '.join(map(str, ROLES))}")

    @classmethod
    def parse(cls, value: Role | str) -> Role:
        """A role by its letter; raises for anything else."""
        return value if isinstance(value, Role) else cls(value if isinstance(value, str) else str(value)[:80])

    @property
    def writes(self) -> bool:
        """True for the roles that add to the residual stream."""
        return self in (Role.O, Role.W)

    @property
    def shared(self) -> bool:
        """True for the roles that several query heads share under GQA and MQA."""
        return self in (Role.K, Role.V)

    @property
    def partner(self) -> Role:
        """The other weight of the same circuit: Q with K (W_QK), O with V (W_OV)."""
        return _PARTNERS[self]


_DOES = {Role.Q: "reads (query)", Role.K: "reads (key)", Role.V: "reads (value)", Role.O: "writes"}
_PARTNERS = {Role.Q: Role.K, Role.K: Role.Q, Role.V: Role.O, Role.O: Role.V, Role.R: Role.W, Role.W: Role.R}
ROLES = (Role.Q, Role.K, Role.V, Role.O)
NODE_ROLES = (Role.R, Role.W)


class Pairing(NamedTuple):
    """Role of the source compared with role of the target; prints as ``OK``."""

    source: Role
    target: Role

    def __str__(self) -> str:
        return f"{self.source}{self.target}"

    @property
    def same_type(self) -> bool:
        return self.source is self.target

    @property
    def flow(self) -> bool:
        """True where the source writes and the target reads."""
        return self.source.writes and not self.target.writes

    @property
    def of_nodes(self) -> bool:
        """True where one side is not a head."""
        return self.source in NODE_ROLES or self.target in NODE_ROLES

    @property
    def between_nodes(self) -> bool:
        """True where neither side is a head."""
        return self.source in NODE_ROLES and self.target in NODE_ROLES

    @classmethod
    def parse(cls, text: str | Pairing) -> Pairing:
        if isinstance(text, Pairing):
            return text
        letters = text.strip().upper() if isinstance(text, str) else ""
        if len(letters) != 2 or any(letter not in Role.__members__ for letter in letters):
            raise HeadspanError(
                f"unknown pairing {str(text)[:80]!r}: give two of Q, K, V, O, source first, for example OK"
            )
        return cls(Role(letters[0]), Role(letters[1]))


PAIRINGS = tuple(Pairing(source, target) for source in ROLES for target in ROLES)
FLOW_PAIRINGS = tuple(Pairing(Role.O, target) for target in (Role.Q, Role.K, Role.V))
SAME_TYPE_PAIRINGS = tuple(Pairing(role, role) for role in ROLES)
# Pairings of other nodes: what heads write and nodes read, and what nodes write and heads or nodes read.
NODE_PAIRINGS = (Pairing(Role.O, Role.R), *(Pairing(Role.W, role) for role in (Role.Q, Role.K, Role.V, Role.R)))
PAIRING_WORDS = {"all": PAIRINGS, "flow": FLOW_PAIRINGS, "nodes": NODE_PAIRINGS}  # names for several pairings


def parse_pairings(texts: str | Pairing | Iterable[str | Pairing]) -> tuple[Pairing, ...]:
    """Pairings from ``"all"``, ``"flow"`` (OQ, OK, OV), ``"nodes"``, ``"OQ,OK"`` or a list of them, each once.

    >>> [str(p) for p in parse_pairings("flow")]
    ['OQ', 'OK', 'OV']
    """
    if isinstance(texts, (str, Pairing)):
        texts = [texts]
    if not isinstance(texts, Iterable):
        raise HeadspanError(f"{str(texts)[:80]!r} is not a list of pairings: give for example flow, OK or OQ,OK")
    found: dict[Pairing, None] = {}
    for text in texts:
        for part in text.split(",") if isinstance(text, str) else [text]:
            several = PAIRING_WORDS.get(str(part).strip().lower())
            found.update(dict.fromkeys([Pairing.parse(part)] if several is None else several))
    return tuple(found)


def one_pairing(texts: str | Pairing | Iterable[str | Pairing]) -> Pairing:
    """The only pairing of a name or list, where several make no sense.

    >>> str(one_pairing(["OK"]))
    'OK'
    """
    found = parse_pairings(texts)
    if len(found) != 1:
        raise HeadspanError(f"this takes one pairing at a time, not {', '.join(map(str, found)) or 'none'}: choose one")
    return found[0]


# Kinds of heads: one with its own four weights or a query head, keys and values that a group of query heads shares,
# the rotary key that all heads of a layer share under latent attention, and the rotary queries of one of those heads.
_HEAD = re.compile(r"L([0-9]{1,6})(?:(H|KV|QR)([0-9]{1,6})|(KR)0?)", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Head:
    """One head: a query head prints as ``L17H3``, a shared key/value head as ``L17KV1``, a rotary key as ``L17KR``."""

    layer: int
    index: int
    kind: str = "H"

    def __str__(self) -> str:
        return f"L{self.layer}{self.kind}" + ("" if self.kind == "KR" else str(self.index))

    @property
    def kv(self) -> bool:
        """True for keys and values that several query heads share."""
        return self.kind in ("KV", "KR")

    @property
    def position(self) -> int:
        return attention_position(self.layer)

    @classmethod
    def parse(cls, text: str | Head) -> Head:
        if isinstance(text, Head):
            return text
        match = _HEAD.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise HeadspanError(
                f"{str(text)[:80]!r} is not a head name: write L4H7 (layer 4, head 7) or L17KV1 for a shared "
                "key/value head"
            )
        return cls(int(match[1]), int(match[3] or 0), (match[2] or match[4]).upper())


def is_head_name(text: str) -> bool:
    """True for a text with the form of a head name, which no node may have."""
    return _HEAD.fullmatch(text.strip()) is not None


def attention_position(layer: int) -> int:
    """The position of a layer's attention in the residual stream: after everything in earlier layers."""
    return 2 * layer


def mlp_position(layer: int, parallel: bool = False) -> int:
    """The position of a layer's MLP: after its attention, or at the same position in parallel blocks."""
    return attention_position(layer) + (not parallel)


EMBEDDING_POSITION = -1
UNEMBEDDING_POSITION = 2**31
_LONGEST_NAME = 200


def check_node_name(name: str) -> str:
    """The name, if it is valid for a node in every file format; raises otherwise.

    >>> check_node_name("refusal, layer 14"), check_node_name("L3.N17")
    ('refusal, layer 14', 'L3.N17')
    """
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise HeadspanError(
            f"{repr(name)[:60]} cannot be the name of a node: give 1 to {_LONGEST_NAME} printable characters"
        )
    if is_head_name(name.partition(".")[0]):
        raise HeadspanError(f"{name[:60]!r} cannot be the name of a node because it names a head: choose another")
    return name


@dataclass(frozen=True, order=True, init=False, repr=False)
class Node:
    """Anything besides a head that reads or writes the stream: a direction, a neuron, a feature, an adapter, a token.

    Make one from a vector or some vectors, ``Node(basis, "refusal", layer=14)``; results hold nodes without a basis.
    Two nodes are the same if their layers, names and kinds are.

    basis: anything with a ``.shape``: (d,) for a direction, (d, r) or (r, d) for a subspace that r vectors span.
    layer: the node is at the entrance of this layer; without one it reads at the end and writes at the start.
    reads, writes: which ports it has, R and W; a probe reads, a steering vector writes.
    variance: of what it writes along each vector of its basis, in units of that vector; influence needs it.
    position: its place in the stream (see :func:`attention_position`). In a port table a node has one for each port:
    that of W may come just before that of R, and the layer is −1 where it writes at the start.

    >>> Node(np.ones(8), name="refusal", layer=14, reads=True, writes=False)
    node refusal at layer 14: shape (8,), reads
    """

    layer: int  # None in a node made without one, until a port table holds it
    name: str
    kind: str
    position: int = field(compare=False)
    basis: Any = field(compare=False)
    reads: bool = field(compare=False)
    writes: bool = field(compare=False)
    variance: float | None = field(compare=False)
    kv = False

    def __init__(
        self,
        basis: Any = None,
        name: str = "node",
        layer: int | None = None,
        reads: bool = True,
        writes: bool = True,
        *,
        kind: str = "direction",
        position: int | None = None,
        variance: float | None = None,
    ) -> None:
        if position is None:  # made by a user; the rows of a port table have a position and are not checked again
            name = check_node_name(name.strip() if isinstance(name, str) else name)
            _check_node(name, basis, layer, reads, writes, variance)
            position = UNEMBEDDING_POSITION if layer is None else attention_position(int(layer))
        given = {"layer": layer, "name": name, "kind": kind, "position": position, "basis": basis}
        for field_name, value in (given | {"reads": reads, "writes": writes, "variance": variance}).items():
            object.__setattr__(self, field_name, value)

    @classmethod
    def at(
        cls, position: int, layer: int, name: str, kind: str = "direction", reads: bool = True, writes: bool = True
    ) -> Node:
        """A row of a port table: a node at a position, without a basis."""
        return cls(None, name, layer, reads, writes, kind=kind, position=position)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        where = "" if self.layer is None else f" at layer {self.layer}"
        shape = "" if self.basis is None else f"shape {tuple(self.basis.shape)}, "
        roles = " and ".join(word for word, has in (("reads", self.reads), ("writes", self.writes)) if has)
        return f"node {self.name}{where}: {shape}{roles}"


def _check_node(name: str, basis: Any, layer: object, reads: Any, writes: Any, variance: Any) -> None:
    """Refuse what a user cannot make a node of."""
    number = isinstance(variance, Real) and not isinstance(variance, bool)
    if variance is not None and not (number and 0 < float(variance) < np.inf):
        raise HeadspanError(f"the variance of {name} must be a number above 0, not {repr(variance)[:40]}")
    if variance is not None and writes is False:
        raise HeadspanError(f"{name} does not write, so it has no variance: leave out variance, or set writes to True")
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, (int, np.integer)) or layer < 0):
        raise HeadspanError(f"the layer of {name} must be a whole number from 0, not {repr(layer)[:40]}")
    if not isinstance(reads, bool) or not isinstance(writes, bool):
        raise HeadspanError(f"reads and writes of {name} must be True or False")
    if not reads and not writes:
        raise HeadspanError(f"{name} neither reads nor writes: set reads or writes to True")
    if not hasattr(basis, "shape") or getattr(getattr(basis, "dtype", None), "kind", "f") in "OSUMm":
        raise HeadspanError(f"the basis of {name} must be an array of numbers, not {repr(basis)[:60]}")
    if len(basis.shape) not in (1, 2) or 0 in basis.shape:
        seen = tuple(basis.shape)
        raise HeadspanError(f"the basis of {name} has shape {seen}: give one vector (d,) or vectors (d, r)")


HeadOrNode: TypeAlias = Head | Node


def does_as(role: Role | str) -> str:
    """What a weight does in the stream, by its role or its name.

    >>> does_as("L4H11.O"), does_as(Role.Q)
    ('writes', 'reads (query)')
    """
    role = role if isinstance(role, Role) else Role.parse(role.rpartition(".")[2])
    return _DOES.get(role, "writes" if role.writes else "reads")


class Port(NamedTuple):
    """One role of one head, written ``L4H11.O``; where a result has nodes, also of a node."""

    head: HeadOrNode
    role: Role

    def __str__(self) -> str:
        return f"{self.head}.{self.role}"

    @classmethod
    def parse(cls, text: str | Port) -> Port:
        if isinstance(text, Port):
            return text
        name, dot, role = text.strip().partition(".") if isinstance(text, str) else ("", "", "")
        if not dot or role.upper() not in map(str, ROLES):
            raise HeadspanError(f"{str(text)[:80]!r} is not a head with a role: write for example L4H11.O or L5H1.K")
        return cls(Head.parse(name), Role(role.upper()))


def layers_of(heads: Sequence[HeadOrNode]) -> np.ndarray:
    """Layer number of every head or node, as an integer array."""
    return np.array([head.layer for head in heads], dtype=np.int64)


def positions_of(ports: Sequence[HeadOrNode]) -> np.ndarray:
    """The stream position of every head or node, as an integer array."""
    return np.array([port.position for port in ports], dtype=np.int64)


def forward_mask(sources: Sequence[HeadOrNode], targets: Sequence[HeadOrNode]) -> np.ndarray:
    """True where the source comes before the target: for heads, where its layer is earlier."""
    return positions_of(sources)[:, None] < positions_of(targets)[None, :]


def same_type_mask(heads: Sequence[HeadOrNode]) -> np.ndarray:
    """True for each unordered pair once, in layer order, without a head and itself (i < j)."""
    index = np.arange(len(heads))
    return index[:, None] < index[None, :]


def pair_mask(
    pairing: Pairing, sources: Sequence[HeadOrNode], targets: Sequence[HeadOrNode], pairs: PairSet
) -> np.ndarray:
    """Which pairs of a pairing belong to a pair set; see :func:`mask_of` for a subset of rows and columns."""
    everything = slice(0, len(sources)), slice(0, len(targets))
    chosen = mask_of(pairing, positions_of(sources), positions_of(targets), pairs, *everything)
    return chosen & other_node(sources, targets) if pairing.between_nodes else chosen


def other_node(sources: Sequence[HeadOrNode], targets: Sequence[HeadOrNode]) -> np.ndarray:
    """True where source and target are different nodes: a direction that writes what it reads is not informative."""
    names = {str(port): i for i, port in enumerate((*sources, *targets))}
    first, second = (np.array([names[str(port)] for port in ports], dtype=int) for ports in (sources, targets))
    return first[:, None] != second[None, :]


def mask_of(
    pairing: Pairing, sources: np.ndarray, targets: np.ndarray, pairs: PairSet, rows: slice, columns: slice
) -> np.ndarray:
    """Which pairs among some rows and columns belong to a pair set, from the positions of all sources and targets.

    ``default`` is the paper's choice: same-type pairs for QQ, KK, VV and OO (they contain the forward
    ones), forward pairs for the rest. ``all`` leaves out only a weight compared with itself.
    """
    if pairs not in get_args(PairSet):
        raise HeadspanError(f"unknown pair set {str(pairs)[:80]!r}: choose forward, same-type or all")
    row_index, column_index = np.arange(len(sources))[rows, None], np.arange(len(targets))[None, columns]
    if pairs == "forward" or (pairs == "default" and not pairing.same_type):
        return sources[rows, None] < targets[None, columns]
    if pairs == "all":
        return (row_index != column_index) | np.bool_(not pairing.same_type)
    return (row_index < column_index) & np.bool_(pairing.same_type)
