"""Edges and hubs before and after: what entered or left the top k, and what changed most."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import numpy as np

from headspan.results.matrix import ScoreMatrix
from headspan.results.scores import Scores
from headspan.statistics.hubs import HubScores, hubs
from headspan.subspaces.metrics import PK
from headspan.system.ordering import places
from headspan.vocabulary.heads import Head, HeadOrNode, Pairing, Role

EdgeKind = Literal["entered", "left", "strengthened", "weakened"]  # entered or left the top k, PK grew or fell


HubKind = Literal["rank up", "rank down"]


class EdgeChange(NamedTuple):
    """One pair of heads before and after; ranks count all forward pairs of the pairing."""

    pairing: Pairing
    source: Head
    target: Head
    kind: EdgeKind
    before: float
    after: float
    change: float
    rank_before: int
    rank_after: int
    effect_before: float | None = None  # the edge's effect, if measured
    effect_after: float | None = None
    effect_unit: str | None = None


class HubChange(NamedTuple):
    """A hub whose rank in its pairing changed."""

    pairing: Pairing
    hub: str  # inlet or outlet
    head: Head
    kind: HubKind
    before: float
    after: float
    change: float
    rank_before: int
    rank_after: int


def aligned(before: ScoreMatrix, after: ScoreMatrix) -> tuple[ScoreMatrix, ScoreMatrix]:
    """Forward pairs of both, on the heads that both have."""
    parts = []
    for matrix, other in ((before, after), (after, before)):
        rows = [i for i, head in enumerate(matrix.sources) if head in set(other.sources)]
        columns = [i for i, head in enumerate(matrix.targets) if head in set(other.targets)]
        sources, targets = tuple(matrix.sources[i] for i in rows), tuple(matrix.targets[i] for i in columns)
        values = matrix.values[np.ix_(rows, columns)]
        parts.append(ScoreMatrix(matrix.metric, matrix.pairing, sources, targets, values).forward())
    return parts[0], parts[1]


def edge_changes(
    before: Scores, after: Scores, pairing: Pairing, k: int, moved: Collection[tuple[Head, Role]]
) -> Iterator[EdgeChange]:
    """Edges that entered or left the top k, then the largest other changes between heads that moved."""
    a, b = aligned(before[PK, pairing], after[PK, pairing])
    ranks_a, ranks_b = places(a.values), places(b.values)
    change = b.values.astype(np.float64) - a.values
    rows = np.array([(head, pairing.source) in moved for head in a.sources], dtype=bool)
    columns = np.array([(head, pairing.target) in moved for head in a.targets], dtype=bool)
    top_a, top_b = ((ranks > 0) & (ranks <= k) for ranks in (ranks_a, ranks_b))
    rest = ~(top_a ^ top_b) & (ranks_a > 0) & (rows[:, None] | columns[None, :])
    groups: list[tuple[EdgeKind, np.ndarray, np.ndarray, int]] = [
        ("entered", top_b & ~top_a, ranks_b, k),
        ("left", top_a & ~top_b, ranks_a, k),
        ("strengthened", rest & (change > 0), -change, k),
        ("weakened", rest & (change < 0), change, k),
    ]
    for kind, mask, order, limit in groups:
        found = np.argwhere(mask)
        for i, j in found[np.argsort(order[mask], kind="stable")][:limit]:
            yield EdgeChange(
                pairing, a.sources[i], a.targets[j], kind, float(a.values[i, j]), float(b.values[i, j]),
                float(change[i, j]), int(ranks_a[i, j]), int(ranks_b[i, j]),
            )  # fmt: skip


def hub_changes(before: Scores, after: Scores, pairing: Pairing, k: int) -> Iterator[HubChange]:
    """Hubs among the first k of either model whose rank differs in the other, largest changes first."""
    if not len(before[PK, pairing].forward().pairs()[2]):
        return  # one layer has no forward pairs and no hubs
    found = [hubs(scores, pairing) for scores in (before, after)]
    for hub in ("inlet", "outlet"):
        a, b = (getattr(one, hub) for one in found)
        ranks = [_hub_places(one) for one in (a, b)]
        changes = []
        for head in dict.fromkeys([*(line.head for line in a.top(k)), *(line.head for line in b.top(k))]):
            old, new = (place.get(head) for place in ranks)
            if old is None or new is None or old == new:
                continue
            kind: HubKind = "rank up" if new < old else "rank down"
            scores = a.of(head), b.of(head)
            if not any(scores):
                continue  # not chosen before or after, so its rank is meaningless
            changes.append(HubChange(pairing, hub, head, kind, *scores, scores[1] - scores[0], old, new))
        yield from sorted(changes, key=lambda line: -abs(line.rank_before - line.rank_after))


def _hub_places(scores: HubScores) -> dict[HeadOrNode, int]:
    return {line.head: line.rank for line in scores.top(len(scores.heads))}
