"""The vocabulary: roles, pairings, heads and other nodes, where they stand, and which pairs are compared.

>>> Head.parse("L4H7")
Head(layer=4, index=7, kind='H')
>>> str(Head(17, 1, "KV"))
'L17KV1'
>>> Pairing.parse("OK").source
<Role.O: 'O'>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from headspan.errors import HeadspanError

PairSet = Literal["default", "forward", "same-type", "all"]


class Role(str, Enum):
    """A port: what a head's queries, keys and values read and its output writes; R and W of any other node."""

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
        """A role by its letter; what is no text, such as an array, is refused like any other word."""
        return value if isinstance(value, Role) else cls(value if isinstance(value, str) else str(value)[:80])

    @property
    def writes(self) -> bool:
        """True for the ports that add to the residual stream."""
        return self in (Role.O, Role.W)

    @property
    def shared(self) -> bool:
        """True for the roles that several query heads share under GQA and MQA."""
        return self in (Role.K, Role.V)

    @property
    def partner(self) -> Role:
        """The other weight of the same circuit: Q with K (W_QK), O with V (W_OV)."""
        return _PARTNERS[self]


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
# What nodes other than heads add: heads write what they read, they write what heads and other nodes read.
NODE_PAIRINGS = (Pairing(Role.O, Role.R), *(Pairing(Role.W, role) for role in (Role.Q, Role.K, Role.V, Role.R)))


def parse_pairings(texts: str | Pairing | Iterable[str | Pairing]) -> tuple[Pairing, ...]:
    """Pairings from ``"all"``, ``"flow"`` (OQ, OK, OV), ``"OQ,OK"`` or a list of them, each once.

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
            name = str(part).strip().lower()
            if name == "all":
                found.update(dict.fromkeys(PAIRINGS))
            elif name == "flow":
                found.update(dict.fromkeys(FLOW_PAIRINGS))
            else:
                found[Pairing.parse(part)] = None
    return tuple(found)


# Kinds of heads: one with its own four weights or a query head, keys and values that a group of query heads shares,
# and the rotary key that all heads of a layer share under latent attention.
HEAD_KINDS = ("H", "KV", "KR")
_HEAD = re.compile(r"L([0-9]{1,6})(H|KV|KR)([0-9]{1,6})", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Head:
    """One head: a query head prints as ``L17H3``, a shared key/value head as ``L17KV1``."""

    layer: int
    index: int
    kind: str = "H"

    def __str__(self) -> str:
        return f"L{self.layer}{self.kind}{self.index}"

    @property
    def kv(self) -> bool:
        """True for keys and values that several query heads share."""
        return self.kind != "H"

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
        return cls(int(match[1]), int(match[3]), match[2].upper())


def attention_position(layer: int) -> int:
    """Where the attention of a layer stands in the residual stream: after everything of the layers before it."""
    return 2 * layer


def mlp_position(layer: int, parallel: bool = False) -> int:
    """Where the MLP of a layer stands: after its attention, or beside it in parallel blocks."""
    return attention_position(layer) + (not parallel)


EMBEDDING_POSITION = -1
UNEMBEDDING_POSITION = 2**31


@dataclass(frozen=True, order=True)
class Node:
    """Anything else that reads or writes the stream: a direction, a neuron, a feature, an adapter, a token.

    position orders the stream (see :func:`attention_position`); layer is where it stands, −1 for the embedding.
    """

    position: int
    layer: int
    name: str
    kind: str = "direction"
    kv = False

    def __str__(self) -> str:
        return self.name


Port: TypeAlias = "Head | Node"


class HeadRole(NamedTuple):
    """One weight of one head, written ``L4H11.O``."""

    head: Head
    role: Role

    def __str__(self) -> str:
        return f"{self.head}.{self.role}"

    @classmethod
    def parse(cls, text: str | HeadRole) -> HeadRole:
        if isinstance(text, HeadRole):
            return text
        name, dot, role = text.strip().partition(".") if isinstance(text, str) else ("", "", "")
        if not dot or role.upper() not in map(str, ROLES):
            raise HeadspanError(f"{str(text)[:80]!r} is not a head with a role: write for example L4H11.O or L5H1.K")
        return cls(Head.parse(name), Role(role.upper()))


@dataclass(frozen=True)
class PortTable:
    """What reads and writes the stream: for every role its heads or nodes, in the order of the stream.

    With shared key/value heads (GQA, MQA) a KV head stands once, never once per query head. ``served_by`` then says
    for every query head which one it reads through.
    """

    ports: Mapping[Role, tuple[Port, ...]]
    served_by: Mapping[Head, Head] = field(default_factory=dict)

    @classmethod
    def regular(cls, layers: Iterable[int], n_heads: int, n_kv_heads: int) -> PortTable:
        """Every layer with the same numbers of query and key/value heads.

        >>> table = PortTable.regular(range(2), 6, 2)
        >>> str(table.kv_of("L1H4")), [str(head) for head in table.group_of("L1KV1")]
        ('L1KV1', ['L1H3', 'L1H4', 'L1H5'])
        """
        layers = tuple(layers)
        kind = "KV" if n_kv_heads < n_heads else "H"
        return cls.of_heads(
            tuple(Head(layer, i) for layer in layers for i in range(n_heads)),
            tuple(Head(layer, i, kind) for layer in layers for i in range(n_kv_heads)),
        )

    @classmethod
    def of_heads(cls, query: Sequence[Head], kv: Sequence[Head]) -> PortTable:
        """Q and O of the query heads, K and V of the others; the query heads of a layer share its KV heads evenly."""
        query, kv = tuple(query), tuple(kv)
        shared: dict[int, list[Head]] = {}
        counts: dict[int, int] = {}
        for head in kv:
            if head.kv:
                shared.setdefault(head.layer, []).append(head)
        for head in query:
            counts[head.layer] = counts.get(head.layer, 0) + 1
        served_by = {
            head: shared[head.layer][head.index * len(shared[head.layer]) // counts[head.layer]]
            for head in query
            if head.layer in shared and head.index < counts[head.layer]
        }
        return cls({role: kv if role.shared else query for role in ROLES}, served_by)

    @property
    def query(self) -> tuple[Head, ...]:
        """The heads that have a Q and an O."""
        return self.of(Role.O)

    @property
    def kv(self) -> tuple[Head, ...]:
        """The heads that have a V: the query heads themselves, or those that groups of them share."""
        return self.of(Role.V)

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """Every head once: query heads, then shared ones."""
        return tuple(dict.fromkeys(h for role in (Role.O, Role.V, Role.K) for h in self.of(role)))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Everything that is no head, once."""
        return tuple(dict.fromkeys(node for role in (Role.W, Role.R) for node in self.of(role)))

    @property
    def shared(self) -> bool:
        """True where query heads share their keys and values."""
        return bool(self.served_by)

    def of(self, role: Role | str) -> tuple[Any, ...]:
        """The heads of a role (of R and W: the nodes), in the order of the stream."""
        return self.ports.get(Role.parse(role), ())

    def span(self, role: Role, layer: int) -> slice:
        """Where the ports of one layer stand in the list of a role."""
        return self._spans[role].get(layer, slice(0, 0))

    @cached_property
    def _spans(self) -> dict[Role, dict[int, slice]]:
        spans: dict[Role, dict[int, slice]] = {}
        for role, ports in self.ports.items():
            spans[role] = {}
            for i, port in enumerate(ports):
                start = spans[role].get(port.layer, slice(i, i)).start
                spans[role][port.layer] = slice(start, i + 1)
        return spans

    @cached_property
    def _places(self) -> dict[Role, dict[str, int]]:
        return {role: {str(port).upper(): i for i, port in enumerate(ports)} for role, ports in self.ports.items()}

    def kv_of(self, head: Head | str) -> Head:
        """The head whose keys and values a query head reads through: itself where nothing is shared."""
        head = Head.parse(head)
        return self.served_by.get(head, head)

    def group_of(self, head: Head | str) -> tuple[Head, ...]:
        """The query heads that a key/value head serves: itself where nothing is shared."""
        head = Head.parse(head)
        return tuple(query for query, kv in self.served_by.items() if kv == head) or (head,)

    def find(self, name: Port | str, role: Role | str) -> int:
        """The place of a head or node in the list of a role; a query head's K and V are those of its KV head."""
        role = Role.parse(role)
        places = self._places.get(role, {})
        text = str(name).strip().upper() if isinstance(name, (str, Head, Node)) else ""
        if text in places:
            return places[text]
        if not self.nodes or _HEAD.fullmatch(text) or not text:
            head = Head.parse(name)  # type: ignore[arg-type]
            if role.shared and head in self.served_by:
                return places[str(self.served_by[head]).upper()]
        ports = self.of(role)
        if not ports:
            raise HeadspanError(f"nothing here has the role {role}: there are {', '.join(map(str, self.ports))}")
        what = "head" if _HEAD.fullmatch(text) else "node"
        raise HeadspanError(
            f"there is no {what} {str(name)[:80]} with role {role} here: its {role} go from {ports[0]} to {ports[-1]}"
        )

    def resolve(self, name: Port | str, role: Role | str) -> Any:
        """The head or node of a role that a name means, by the rule of :meth:`find`."""
        return self.of(role)[self.find(name, role)]

    def note(self, name: Port | str, role: Role | str) -> str | None:
        """A sentence where a name means the KV head of a query head, for whoever shows the result.

        >>> PortTable.regular(range(2), 6, 2).note("L1H4", "K")
        'L1H4 shares its keys and values: L1H4.K is L1KV1.K, which serves L1H3, L1H4, L1H5'
        """
        found = self.resolve(name, role)
        if str(found) == str(name).strip().upper() or not isinstance(found, Head) or not found.kv:
            return None
        asked = Head.parse(name)  # type: ignore[arg-type]
        group = ", ".join(map(str, self.group_of(found)))
        return f"{asked} shares its keys and values: {asked}.{Role(role)} is {found}.{Role(role)}, which serves {group}"


def layers_of(heads: Sequence[Port]) -> np.ndarray:
    """Layer number of every head, as an integer array."""
    return np.array([head.layer for head in heads], dtype=np.int64)


def positions_of(ports: Sequence[Port]) -> np.ndarray:
    """Where every head or node stands in the stream, as an integer array."""
    return np.array([port.position for port in ports], dtype=np.int64)


def forward_mask(sources: Sequence[Port], targets: Sequence[Port]) -> np.ndarray:
    """True where the source stands before the target: for heads, where its layer comes before the target's."""
    return positions_of(sources)[:, None] < positions_of(targets)[None, :]


def same_type_mask(heads: Sequence[Port]) -> np.ndarray:
    """True for each unordered pair once, in layer order, a head with itself left out (i < j)."""
    index = np.arange(len(heads))
    return index[:, None] < index[None, :]


def pair_mask(pairing: Pairing, sources: Sequence[Port], targets: Sequence[Port], pairs: PairSet) -> np.ndarray:
    """Which pairs of a pairing belong to a pair set; :func:`mask_of` for a part of them."""
    everything = slice(0, len(sources)), slice(0, len(targets))
    return mask_of(pairing, positions_of(sources), positions_of(targets), pairs, *everything)


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
