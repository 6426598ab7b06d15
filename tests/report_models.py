"""Small models and results for the tests of the report, and a reader for the numbers in its payload."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

import headspan as hs
from headspan.models.weights import AttentionWeights
from headspan.results.scores import Scores
from headspan.vocabulary.heads import PAIRINGS, ROLES, pair_mask
from headspan.vocabulary.ports import PortTable

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028'\"&amp;<!--"


def array_model(layers: int = 4, heads: int = 4, kv_heads: int = 4, d: int = 24, m: int = 4) -> AttentionWeights:
    """Random weights with one planted connection: head 1 of layer 0 writes what head 0 of layer 2 has as keys."""
    rng = np.random.default_rng(7)
    counts = {"Q": heads, "K": kv_heads, "V": kv_heads, "O": heads}
    arrays: dict[str, Any] = {role: rng.standard_normal((layers, n, d, m)) for role, n in counts.items()}
    arrays["K"][min(2, layers - 1), 0] = arrays["O"][0, 1] + 0.1 * rng.standard_normal((d, m))
    return hs.open({**arrays, "unembedding": rng.standard_normal((40, d))})


def noise_model(layers: int = 32, heads: int = 32, d: int = 256, m: int = 8, seed: int = 3) -> AttentionWeights:
    """Random weights, as before training."""
    rng = np.random.default_rng(seed)
    return hs.open({role: rng.standard_normal((layers, heads, d, m)) for role in "QKVO"})


def synthetic_scores(layers: int, heads: int, reference: str = "synthetic") -> Scores:
    """A result of any size without a model: gamma-distributed pk, beta-distributed cs."""
    table = PortTable.regular(range(layers), heads, heads)
    rng = np.random.default_rng(0)
    shape = (layers * heads, layers * heads)
    arrays = {}
    for metric in ("pk", "cs"):
        for pairing in PAIRINGS:
            values = 4 + rng.gamma(2.0, 1.0, shape) if metric == "pk" else rng.beta(2, 30, shape)
            mask = pair_mask(pairing, table.of(pairing.source), table.of(pairing.target), "default")
            arrays[metric, pairing] = np.where(mask, values, np.nan).astype(np.float32)
    ranks = {role: np.full(shape[0], 128, dtype=np.int32) for role in ROLES}
    return Scores(arrays, table, 4096, ranks, {"reference": reference, "folding": "none"})


def unpack(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=f"<{dtype}")


def payload_edges(payload: dict[str, Any], metric: str, pairing: str) -> dict[tuple[str, str], tuple[int, float]]:
    """(source, target) -> (rank, score) of the edges kept in a payload, read as the page reads them."""
    raw = payload["edges"][f"{metric}/{pairing}"]
    lists = [payload["heads"]["kv" if role in "KV" else "query"] for role in pairing]

    def whole(name: str, count: int) -> np.ndarray:
        return unpack(raw[name], next(f"u{size}" for size in (1, 2, 4) if count <= 256**size))

    sources, targets = whole("source", len(lists[0])), whole("target", len(lists[1]))
    ranks, scores = whole("rank", raw["count"] + 1), unpack(raw["score"], "f4")
    return {
        (lists[0][i], lists[1][j]): (int(rank), float(score))
        for i, j, rank, score in zip(sources, targets, ranks, scores, strict=True)
    }
