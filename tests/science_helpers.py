"""Small results made by hand, for tests of everything that reads scores."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headspan.results.scores import Scores
from headspan.vocabulary.heads import ROLES, Pairing, pair_mask
from headspan.vocabulary.ports import PortTable


def make_scores(
    arrays: Mapping[tuple[str, str], np.ndarray],
    *,
    layers: int,
    heads: int,
    kv_heads: int | None = None,
    d_model: int = 64,
    rank: int = 8,
) -> Scores:
    """Scores with the default pair set from full matrices, all subspaces of one dimension."""
    table = PortTable.regular(range(layers), heads, heads if kv_heads is None else kv_heads)
    masked = {}
    for (metric, name), values in arrays.items():
        pairing = Pairing.parse(name)
        mask = pair_mask(pairing, table.of(pairing.source), table.of(pairing.target), "default")
        masked[metric, pairing] = np.where(mask, values, np.nan).astype(np.float32)
    ranks = {role: np.full(len(table.of(role)), rank, dtype=np.int32) for role in ROLES}
    return Scores(masked, table, d_model, ranks)


def random_scores(
    seed: int, pairings: tuple[str, ...], *, layers: int, heads: int, metrics: tuple[str, ...] = ("pk",)
) -> Scores:
    """Independent exponential scores: exchangeable, without ties."""
    rng = np.random.default_rng(seed)
    n = layers * heads
    arrays = {(metric, pairing): rng.exponential(size=(n, n)) for metric in metrics for pairing in pairings}
    return make_scores(arrays, layers=layers, heads=heads)
