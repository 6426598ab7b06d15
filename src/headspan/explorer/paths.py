"""The strongest paths to the targets of the strongest edges, for the page."""

from __future__ import annotations

from typing import Any

from headspan.graphs.paths import strongest
from headspan.models.weights import AttentionWeights
from headspan.results.scores import Scores
from headspan.subspaces.metrics import PK
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, Port

DEPTH, MOST = 3, 30  # most hops, and paths kept for each number of hops
TARGETS, FEWER = 10, 4  # most targets, and fewer in a large model
_SMALL, _LARGE = 10**8, 3.2e8  # (heads × dimensions)² beyond which there are fewer targets, or none
_MEMORY = 3 * 10**8


def strongest_paths(scores: Scores, weights: AttentionWeights | None) -> list[dict[str, Any]] | None:
    """Paths of two and three hops, each best first: their heads, the pairing of the last hop, score and chance.

    They end at the targets of the strongest edges. None without weights or in a very large model; use
    ``headspan paths --to`` there.
    """
    if weights is None:
        return None
    work = (len(weights.ports.query) * weights.d_head("V")) ** 2
    targets = _targets(scores, TARGETS if work <= _SMALL else FEWER)
    if not targets or work > _LARGE:
        return None
    try:
        found = strongest(weights, to=targets, depth=DEPTH, k=MOST, memory=_MEMORY)
    except HeadspanError:  # paths are not defined for this kind of attention
        return None
    return [
        {
            "heads": [str(port) for port in (path.source, *path.via, path.target)],
            "pairing": str(path.pairing),
            "score": float(path.score),
            "chance": float(path.chance),
            "z": None if path.z is None else float(path.z),
            "pks": [float(pk) for pk in path.pks],
        }
        for path in found
        if path.hops > 1
    ]


def _targets(scores: Scores, most: int) -> list[Port]:
    """The distinct targets of the strongest edges, best first."""
    edges = [e for p in FLOW_PAIRINGS if (PK, p) in scores for e in scores[PK, p].forward().top(TARGETS)]
    edges.sort(key=lambda edge: -edge.score)
    return list(dict.fromkeys(Port(edge.target, edge.pairing.target) for edge in edges))[:most]
