"""All pairings of the weights of two heads: what each side does, and how far they overlap.

>>> import headspan as hs
>>> found = hs.pair("demo", "L0H3", "L1H0.K")
>>> [(row["pairing"], row["source_does"], row["target_does"]) for row in found.rows()][:2]
[('OK', 'writes', 'reads (key)'), ('QK', 'reads (query)', 'reads (key)')]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.reading.overlap import notes_on_shared_heads, overlap
from headspan.results.tabular import Tabular
from headspan.vocabulary.ends import acts_as, check_head
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Head, Pairing, Port, Role, does_as, forward_mask
from headspan.vocabulary.words import counted


@dataclass(frozen=True)
class PairOfRoles:
    """One pairing of two heads. edge: ``forward`` where what the source writes reaches the target, ``backward`` where
    what the target writes reaches the source. z: PK against random subspaces, None if it cannot vary.
    """

    pairing: Pairing
    edge: str | None
    pk: float
    pk_normalised: float
    random_mean: float
    z: float | None
    shared_directions: int
    smallest_angle: float


@dataclass(frozen=True, repr=False, eq=False)
class HeadPairs(Tabular):
    """Every pairing of the weights of two heads: those along which information can pass first."""

    source: str
    target: str
    pairs: list[PairOfRoles]
    notes: list[str] = field(default_factory=list[str])

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per pairing; source_does, target_does: ``writes``, ``reads (query)`` …"""
        return [
            {
                "pairing": str(one.pairing),
                "source_does": does_as(one.pairing.source),
                "target_does": does_as(one.pairing.target),
                "edge": one.edge,
                "pk": one.pk,
                "pk_normalised": one.pk_normalised,
                "random_mean": one.random_mean,
                "z": one.z,
                "shared_directions": one.shared_directions,
                "smallest_angle": one.smallest_angle,
            }
            for one in self.pairs
        ]

    def _headline(self) -> str:
        return f"{self.source} (source) and {self.target} (target): {counted(len(self.pairs), 'pairing')}"


def is_port(name: Head | Port | str) -> bool:
    """Whether a name has a role."""
    return isinstance(name, Port) or (isinstance(name, str) and "." in name)


def head_pairs(weights: AttentionWeights, source: Head | Port | str, target: Head | Port | str) -> HeadPairs:
    """Compare every weight of one head, or one of its weights, with those of another."""
    ends = [_ports(weights, name) for name in (source, target)]
    found: list[PairOfRoles] = []
    for one in ends[0]:
        for other in ends[1]:
            numbers = overlap(weights, one, other)
            found.append(
                PairOfRoles(
                    Pairing(one.role, other.role), _edge(one, other), numbers.pk, numbers.pk_normalised,
                    numbers.random_mean, numbers.z, numbers.shared_directions,
                    float(np.degrees(numbers.principal_angles[0])),
                )
            )  # fmt: skip
    found.sort(key=lambda one: (one.edge is None, one.edge != "forward"))
    notes = [note for end in ends for note in notes_on_shared_heads(weights, *end)[:1]]
    return HeadPairs(str(source), str(target), found, notes)


def _ports(weights: AttentionWeights, name: Head | Port | str) -> list[Port]:
    """The ports that a name means: one, or all that a head has; a query head reads with K and V of its KV head."""
    if is_port(name):
        return [Port.parse(name)]  # type: ignore[arg-type]
    head = Head.parse(name)  # type: ignore[arg-type]
    table = weights.ports
    if head.kind == "QR":
        raise HeadspanError(f"{head} has queries only. Give {head}.Q")
    check_head(table, head)
    roles = [Role.K, Role.V] if head.kind == "KV" else [Role.K] if head.kv else ROLES
    return [Port(head, role) for role in roles if acts_as(table, head, role)]


def _edge(one: Port, other: Port) -> str | None:
    """The direction in which information can pass between two ports."""
    if one.role.writes and not other.role.writes and forward_mask([one.head], [other.head]).item():
        return "forward"
    if other.role.writes and not one.role.writes and forward_mask([other.head], [one.head]).item():
        return "backward"
    return None
