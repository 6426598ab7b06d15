"""What only the weights can tell: principal angles of the best pairs, tokens of heads and of shared directions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from headspan.analysis.pair import PairReader, PairReport, SignedTokens
from headspan.analysis.tokens import all_tokens
from headspan.explorer.encode import best_pairs, pack
from headspan.heads import FLOW_PAIRINGS, HeadRole, Pairing
from headspan.models.weights import AttentionWeights
from headspan.scores import Scores
from headspan.scoring.subspaces import orthonormal_basis, principal_angles

Progress = Callable[[int, int], None]

# Pairs that carry their angles, per pairing: the flow of information first.
FLOW_ANGLES, OTHER_ANGLES = 80, 20
SHARED_PAIRS, SHARED_DIRECTIONS, SHARED_TOKENS = 6, 3, 5
_STEPS = 65535 / (np.pi / 2)


def pair_details(
    scores: Scores, weights: AttentionWeights, with_tokens: bool, progress: Progress
) -> dict[str, dict[str, dict[str, Any]]]:
    """Principal angles of the best forward pairs by pairing and ``row>column``, and tokens of the very best."""
    metric = "pk" if "pk" in scores.metrics else scores.metrics[0]
    chosen = {
        pairing: best_pairs(scores[metric, pairing], FLOW_ANGLES if pairing in FLOW_PAIRINGS else OTHER_ANGLES)
        for pairing in scores.pairings
        if (metric, pairing) in scores
    }
    total, done = sum(map(len, chosen.values())), 0
    basis = _bases(weights)
    reader = PairReader(weights) if with_tokens else None  # reads the vocabulary once
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for pairing, pairs in chosen.items():
        entries = found.setdefault(str(pairing), {})
        for place, (row, column) in enumerate(pairs):
            ends = _ends(scores, pairing, row, column)
            first, second = basis(ends[0]), basis(ends[1])
            if not (first.size and second.size):
                continue  # a zero weight spans nothing
            entry: dict[str, Any] = {"angles": pack(np.rint(principal_angles(first, second) * _STEPS), "u2")}
            if reader is not None and pairing in FLOW_PAIRINGS and place < SHARED_PAIRS:
                report = reader.compare(*ends, top=SHARED_DIRECTIONS, tokens=SHARED_TOKENS)
                entry["directions"] = _directions(report)
            entries[f"{row}>{column}"] = entry
            done += 1
            progress(done, total)
    return found


def _bases(weights: AttentionWeights) -> Callable[[HeadRole], np.ndarray]:
    """Orthonormal bases of single heads; a few hundred are kept, since the best pairs share their heads."""

    @lru_cache(maxsize=64)
    def layer(role: str, number: int) -> np.ndarray:
        return weights.read(role, number)

    @lru_cache(maxsize=512)
    def basis(end: HeadRole) -> np.ndarray:
        head, role = end
        place = weights.heads_in(role, head.layer).index(head)
        return orthonormal_basis(layer(role.value, head.layer)[place], weights.storage_dtype(role, head.layer)).vectors

    return basis


def _ends(scores: Scores, pairing: Pairing, row: int, column: int) -> tuple[HeadRole, HeadRole]:
    return (
        HeadRole(scores.heads(pairing.source)[row], pairing.source),
        HeadRole(scores.heads(pairing.target)[column], pairing.target),
    )


def _directions(report: PairReport) -> list[dict[str, Any]]:
    def texts(signed: SignedTokens | None) -> list[list[str]] | None:
        return None if signed is None else [[t.token for t in signed.positive], [t.token for t in signed.negative]]

    return [
        {"angle": round(d.angle_degrees, 2), "writes": texts(d.writes), "reads": texts(d.reads)}
        for d in report.directions
    ]


def tokens_by_role(weights: AttentionWeights, k: int, progress: Progress) -> dict[str, dict[str, list[str]]]:
    """The k tokens of every head, by role; an error where the model has no unembedding."""
    found: dict[str, dict[str, list[str]]] = {}
    for entry in all_tokens(weights, k=k, progress=progress):
        found.setdefault(str(entry.role), {})[str(entry.head)] = [token.token for token in entry.tokens]
    return found
