"""The vocabulary: roles, pairings, heads, and which pairs of heads are compared.

>>> Head.parse("L4H7")
Head(layer=4, index=7, kv=False)
>>> str(Head(17, 1, kv=True))
'L17KV1'
>>> Pairing.parse("OK").source
<Role.O: 'O'>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from headspan.errors import HeadspanError

PairSet = Literal["default", "forward", "same-type", "all"]


class Role(str, Enum):
    """Which of a head's four weights: read by queries, keys, values, or written by the output."""

    Q = "Q"
    K = "K"
    V = "V"
    O = "O"

    def __str__(self) -> str:
        return self.value

    @property
    def shared(self) -> bool:
        """True for the roles that several query heads share under GQA and MQA."""
        return self in (Role.K, Role.V)

    @property
    def partner(self) -> Role:
        """The other weight of the same circuit: Q with K (W_QK), O with V (W_OV)."""
        return _PARTNERS[self]


_PARTNERS = {Role.Q: Role.K, Role.K: Role.Q, Role.V: Role.O, Role.O: Role.V}
ROLES = tuple(Role)


class Pairing(NamedTuple):
    """Role of the source head compared with role of the target head; prints as ``OK``."""

    source: Role
    target: Role

    def __str__(self) -> str:
        return f"{self.source}{self.target}"

    @property
    def same_type(self) -> bool:
        return self.source is self.target

    @classmethod
    def parse(cls, text: str | Pairing) -> Pairing:
        if isinstance(text, Pairing):
            return text
        letters = text.strip().upper()
        if len(letters) != 2 or any(letter not in Role.__members__ for letter in letters):
            raise HeadspanError(f"unknown pairing {text[:80]!r}: give two of Q, K, V, O, source first, for example OK")
        return cls(Role(letters[0]), Role(letters[1]))


PAIRINGS = tuple(Pairing(source, target) for source in ROLES for target in ROLES)
FLOW_PAIRINGS = tuple(Pairing(Role.O, target) for target in (Role.Q, Role.K, Role.V))
SAME_TYPE_PAIRINGS = tuple(Pairing(role, role) for role in ROLES)


def parse_pairings(texts: str | Pairing | Iterable[str | Pairing]) -> tuple[Pairing, ...]:
    """Pairings from ``"all"``, ``"flow"`` (OQ, OK, OV), ``"OQ,OK"`` or a list of them, each once.

    >>> [str(p) for p in parse_pairings("flow")]
    ['OQ', 'OK', 'OV']
    """
    if isinstance(texts, (str, Pairing)):
        texts = [texts]
    found: dict[Pairing, None] = {}
    for text in texts:
        for part in [text] if isinstance(text, Pairing) else text.split(","):
            name = str(part).strip().lower()
            if name == "all":
                found.update(dict.fromkeys(PAIRINGS))
            elif name == "flow":
                found.update(dict.fromkeys(FLOW_PAIRINGS))
            else:
                found[Pairing.parse(part)] = None
    return tuple(found)


_HEAD = re.compile(r"L(\d{1,6})(H|KV)(\d{1,6})", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Head:
    """One head: a query head prints as ``L17H3``, a shared key/value head as ``L17KV1``."""

    layer: int
    index: int
    kv: bool = False

    def __str__(self) -> str:
        return f"L{self.layer}{'KV' if self.kv else 'H'}{self.index}"

    @classmethod
    def parse(cls, text: str | Head) -> Head:
        if isinstance(text, Head):
            return text
        match = _HEAD.fullmatch(text.strip())
        if match is None:
            raise HeadspanError(
                f"{text[:80]!r} is not a head name: write L4H7 (layer 4, head 7) or L17KV1 for a shared key/value head"
            )
        return cls(int(match[1]), int(match[3]), match[2].upper() == "KV")


class HeadRole(NamedTuple):
    """One weight of one head, written ``L4H11.O``."""

    head: Head
    role: Role

    def __str__(self) -> str:
        return f"{self.head}.{self.role}"

    @classmethod
    def parse(cls, text: str) -> HeadRole:
        name, dot, role = text.strip().partition(".")
        if not dot or role.upper() not in Role.__members__:
            raise HeadspanError(f"{text[:80]!r} is not a head with a role: write for example L4H11.O or L5H1.K")
        return cls(Head.parse(name), Role(role.upper()))


@dataclass(frozen=True)
class HeadTable:
    """The heads of a model: one list for Q and O, one for K and V, both in layer order.

    With shared key/value heads (GQA, MQA) a KV head stands once, never once per query head.
    """

    query: tuple[Head, ...]
    kv: tuple[Head, ...]

    @classmethod
    def regular(cls, layers: Iterable[int], n_heads: int, n_kv_heads: int) -> HeadTable:
        """Every layer with the same numbers of query and key/value heads."""
        layers = tuple(layers)
        shared = n_kv_heads < n_heads
        return cls(
            query=tuple(Head(layer, i) for layer in layers for i in range(n_heads)),
            kv=tuple(Head(layer, i, shared) for layer in layers for i in range(n_kv_heads)),
        )

    def of(self, role: Role) -> tuple[Head, ...]:
        return self.kv if role.shared else self.query

    def find(self, head: Head | str, role: Role) -> int:
        """The position of a head in the list of its role, or an error that names what there is."""
        head = Head.parse(head)
        heads = self.of(role)
        try:
            return heads.index(head)
        except ValueError:
            raise HeadspanError(
                f"this model has no head {head} with role {role}: its {role} heads go from {heads[0]} to {heads[-1]}"
            ) from None


def layers_of(heads: Sequence[Head]) -> np.ndarray:
    """Layer number of every head, as an integer array."""
    return np.array([head.layer for head in heads], dtype=np.int64)


def forward_mask(sources: Sequence[Head], targets: Sequence[Head]) -> np.ndarray:
    """True where the source layer comes before the target layer."""
    return layers_of(sources)[:, None] < layers_of(targets)[None, :]


def same_type_mask(heads: Sequence[Head]) -> np.ndarray:
    """True for each unordered pair once, in layer order, a head with itself left out (i < j)."""
    index = np.arange(len(heads))
    return index[:, None] < index[None, :]


def pair_mask(pairing: Pairing, sources: Sequence[Head], targets: Sequence[Head], pairs: PairSet) -> np.ndarray:
    """Which pairs of a pairing belong to a pair set.

    ``default`` is the paper's choice: same-type pairs for QQ, KK, VV and OO (they contain the forward
    ones), forward pairs for the rest. ``all`` leaves out only a weight compared with itself.
    """
    if pairs == "forward" or (pairs == "default" and not pairing.same_type):
        return forward_mask(sources, targets)
    if pairs in ("default", "same-type"):
        if not pairing.same_type:
            return np.zeros((len(sources), len(targets)), dtype=bool)
        return same_type_mask(sources)
    if pairs == "all":
        mask = np.ones((len(sources), len(targets)), dtype=bool)
        if pairing.same_type:
            np.fill_diagonal(mask, False)
        return mask
    raise HeadspanError(f"unknown pair set {pairs!r}: choose forward, same-type or all")
