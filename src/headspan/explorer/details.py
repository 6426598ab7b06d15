"""Details that need the weights: principal angles of the best pairs, tokens of heads and of shared directions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from headspan.explorer.encode import best_pairs, metric_order, pack
from headspan.models.weights import AttentionWeights
from headspan.reading.pair import PairReader, SharedDirection, SignedTokens
from headspan.reading.token_lengths import VocabularyRows
from headspan.reading.tokens import tokens_of
from headspan.results.scores import Scores
from headspan.statistics.dimension import dimension_at
from headspan.subspaces.bases import orthonormal_bases
from headspan.subspaces.random_subspaces import expected_squares
from headspan.system.memory import available_memory
from headspan.system.progress import Update
from headspan.vocabulary.heads import FLOW_PAIRINGS, ROLES, Pairing, Port

# Number of pairs stored with their angles, per pairing; the pairings along the flow of information come first.
FLOW_ANGLES, OTHER_ANGLES = 80, 20
WIDE = 128  # dimensions; wider heads take eight times as long per pair, so a quarter of the pairs is stored
SHARED_PAIRS, SHARED_DIRECTIONS, SHARED_TOKENS = 6, 3, 5
_STEPS = 65535 / (np.pi / 2)


def pair_details(
    scores: Scores, weights: AttentionWeights, rows: VocabularyRows | None, progress: Update
) -> dict[str, dict[str, dict[str, Any]]]:
    """Principal angles of the best forward pairs by pairing and ``row>column``, and tokens of the top few.

    rows: the vocabulary, if there are tokens; it is read once for all pairs.
    """
    metric = metric_order(scores)[0]
    share = 4 if max(weights.d_head(role) for role in ROLES) > WIDE else 1
    chosen = {
        pairing: best_pairs(
            scores[metric, pairing], (FLOW_ANGLES if pairing in FLOW_PAIRINGS else OTHER_ANGLES) // share
        )
        for pairing in scores.pairings
        if (metric, pairing) in scores and not pairing.of_nodes  # the model's weights hold no nodes
    }
    total, done = sum(map(len, chosen.values())), 0
    basis = _bases(weights)
    shown: list[tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]] = []
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for pairing, pairs in chosen.items():
        entries = found.setdefault(str(pairing), {})
        for place, (row, column) in enumerate(pairs):
            ends = _ends(scores, pairing, row, column)
            first, second = basis(ends[0]), basis(ends[1])
            if not (first.size and second.size):
                continue  # a zero weight spans nothing
            entry: dict[str, Any] = {"angles": pack(np.rint(_angles(first, second) * _STEPS), "u2")}
            if rows is not None and pairing in FLOW_PAIRINGS and place < SHARED_PAIRS:
                shown.append((entry, (first, second)))
            entries[f"{row}>{column}"] = entry
            done += 1
            progress(done, total)
    if shown:
        reader = PairReader(weights, unembedding=rows)
        described = reader.directions_of([bases for _, bases in shown], SHARED_DIRECTIONS, SHARED_TOKENS)
        for (entry, _), directions in zip(shown, described, strict=True):
            entry["directions"] = _directions(directions)
    return found


def _angles(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Principal angles to a hundredth of a degree, enough for a picture.

    Computed from the eigenvalues of MMᵀ, where M is the product of the bases: three times as fast as singular values.
    Cosines are inaccurate for small angles; ``headspan pair`` uses sines there.
    """
    product = (first.T @ second).astype(np.float64)
    product = product if product.shape[0] <= product.shape[1] else product.T
    squares = np.linalg.eigvalsh(product @ product.T)[::-1]
    return np.arccos(np.sqrt(np.clip(squares, 0.0, 1.0)))


_MOST_CURVES = 40


def chance_curves(scores: Scores, details: dict[str, dict[str, dict[str, Any]]] | None) -> dict[str, str]:
    """Mean cos² of random subspaces by their dimensions and the ambient one (``64,64,768``), for the pairs whose
    angles are in the page."""
    shapes = set[tuple[int, int, int]]()
    for pairing, entries in (details or {}).items():
        places = np.array([list(map(int, key.split(">"))) for key in entries], dtype=np.int64).reshape(-1, 2).T
        ranks = np.sort([scores.ranks(role)[place] for role, place in zip(pairing, places, strict=True)], axis=0)
        d = dimension_at(scores, Pairing.parse(pairing), *places)
        shapes |= set(zip(*ranks.tolist(), d.tolist(), strict=True))
    return {
        f"{small},{large},{d}": pack(np.array(expected_squares(d, small, large)), "f4")
        for small, large, d in sorted(shapes)[-_MOST_CURVES:]
    }


def _bases(weights: AttentionWeights) -> Callable[[Port], np.ndarray]:
    """Orthonormal bases of single heads. A few hundred are cached, since the best pairs share heads."""

    @lru_cache(maxsize=64)
    def layer(role: str, number: int) -> np.ndarray:
        return weights.read(role, number)

    @lru_cache(maxsize=512)
    def basis(end: Port) -> np.ndarray:
        head, role = end
        place = weights.heads_in(role, head.layer).index(head)
        own = layer(role.value, head.layer)[place : place + 1]
        bases, ranks = orthonormal_bases(own, weights.storage_dtype(role, head.layer))
        return bases[0, :, : int(ranks[0])]

    return basis


def _ends(scores: Scores, pairing: Pairing, row: int, column: int) -> tuple[Port, Port]:
    return (
        Port(scores.heads(pairing.source)[row], pairing.source),
        Port(scores.heads(pairing.target)[column], pairing.target),
    )


def _directions(directions: list[SharedDirection]) -> list[dict[str, Any]]:
    def texts(signed: SignedTokens | None) -> list[list[str]] | None:
        return None if signed is None else [[t.token for t in signed.positive], [t.token for t in signed.negative]]

    return [
        {"angle": round(d.angle_degrees, 2), "writes": texts(d.source_tokens), "reads": texts(d.target_tokens)}
        for d in directions
    ]


TOKEN_WORK = 3e11  # floating-point operations allowed for the tokens of a page: a few seconds


def vocabulary_of(weights: AttentionWeights) -> VocabularyRows:
    """The rows of the unembedding, kept in memory if they fit into half of what is free. An error if there is none."""
    return VocabularyRows.unembedding(weights, available_memory() // 2)


def tokens_by_role(
    scores: Scores, weights: AttentionWeights, rows: VocabularyRows, k: int, progress: Update
) -> dict[str, dict[str, list[str]]]:
    """The top k tokens by role for every head, or for the heads on the strongest edges if all would take too long."""
    ports = [Port(head, role) for role in ROLES for head in weights.heads(role)]
    work = 2.0 * rows.size * weights.d_model * max(weights.d_head(role) for role in ROLES)
    most = int(TOKEN_WORK // work)
    if len(ports) > most:
        ports = _on_strongest_edges(scores, max(most, 2))
    found: dict[str, dict[str, list[str]]] = {}
    for entry in tokens_of(weights, ports, rows, k, progress=progress):
        found.setdefault(str(entry.role), {})[str(entry.head)] = [token.token for token in entry.tokens]
    return found


def _on_strongest_edges(scores: Scores, most: int) -> list[Port]:
    """The ends of the strongest edges, taking the pairings in turn."""
    metric = metric_order(scores)[0]
    pairings = [p for p in FLOW_PAIRINGS if (metric, p) in scores] or [
        p for p in scores.pairings if set(p) <= set(ROLES)
    ]
    lists = [scores[metric, pairing].forward().top(most) for pairing in pairings if (metric, pairing) in scores]
    ports: dict[Port, None] = {}
    for edges in itertools.zip_longest(*lists):
        for edge in filter(None, edges):
            for end in (Port(edge.source, edge.pairing.source), Port(edge.target, edge.pairing.target)):
                if len(ports) < most:
                    ports[end] = None
    return list(ports)
