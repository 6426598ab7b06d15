"""Encode numbers for the page: base64 arrays, quantised for models too large to store exactly."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headspan.results.effects import Effects
from headspan.results.matrix import ScoreMatrix
from headspan.results.scores import Scores
from headspan.subspaces.metrics import METRICS
from headspan.system.ordering import descending, occurrence, shared_ranks
from headspan.vocabulary.heads import FLOW_PAIRINGS, forward_mask, same_type_mask

# The most matrix values that the page stores in 4, 2 and 1 bytes each (times 4/3 for base64).
EXACT_VALUES = 60_000
EXACT_FIRST = 250_000  # values of the first similarity, which matters most
FINE_VALUES = 600_000
COARSE_VALUES = 3_300_000
_INDEX = np.int16  # numpy sorts 16-bit integers many times faster than wider ones; no model has 32,768 heads


def pack(values: np.ndarray, dtype: str) -> str:
    """Little-endian base64 of an array.

    >>> pack(np.array([1, 2]), "u2")
    'AQACAA=='
    """
    return base64.b64encode(np.ascontiguousarray(values, dtype=f"<{dtype}").tobytes()).decode("ascii")


def finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return None if value is None or not math.isfinite(value) else value


def whole(count: int) -> str:
    """The smallest unsigned type for numbers below ``count``; the page applies the same rule when reading.

    >>> whole(144), whole(9504), whole(70_000)
    ('u1', 'u2', 'u4')
    """
    return next(f"u{size}" for size in (1, 2, 4) if count <= 256**size)


def mask_kind(matrix: ScoreMatrix) -> str | None:
    """The name of a matrix's pair set, if it is one that the page can enumerate."""
    present = ~np.isnan(matrix.values)
    if np.array_equal(present, forward_mask(matrix.sources, matrix.targets)):
        return "forward"
    if matrix.pairing.same_type and np.array_equal(present, same_type_mask(matrix.sources)):
        return "same-type"
    return None


def quantise(values: np.ndarray, encoding: str) -> dict[str, Any]:
    """Values (without NaN) exactly as ``f4``, or as ``u2``/``u1`` steps between the smallest and the largest.

    >>> quantise(np.array([0.0, 1.0]), "u1")
    {'encoding': 'u1', 'low': 0.0, 'high': 1.0, 'data': 'AP8='}
    """
    if encoding == "f4" or not len(values):
        return {"encoding": "f4", "low": 0.0, "high": 0.0, "data": pack(values, "f4")}
    low, high = float(values.min()), float(values.max())
    steps = {"u2": 65535, "u1": 255}[encoding]
    scaled = (values.astype(np.float64) - low) * (steps / (high - low) if high > low else 0.0)
    return {"encoding": encoding, "low": low, "high": high, "data": pack(np.rint(scaled), encoding)}


def encode_matrices(scores: Scores) -> dict[str, dict[str, Any]]:
    """Heat-map data by ``metric/pairing``: exact for small models, quantised for larger ones.

    The first similarity (Projection Kernel, if present) keeps its precision whatever else was computed. For a very
    large model only the most useful pairings are stored pair by pair (OQ, OK and OV first); the others keep the largest
    score between every two layers.
    """
    keys = sorted(scores.arrays, key=lambda key: key[1] not in FLOW_PAIRINGS)
    sizes = {key: int(np.count_nonzero(~np.isnan(scores.arrays[key]))) for key in keys}
    first = next((metric for metric in METRICS if metric in scores.metrics), keys[0][0])
    total = sum(sizes.values())
    own = sum(size for (metric, _), size in sizes.items() if metric == first)
    rest = "f4" if total <= EXACT_VALUES else "u2" if total <= FINE_VALUES else "u1"
    encodings = {first: "f4" if own <= EXACT_FIRST else "u2" if own <= FINE_VALUES else "u1"}
    budget = COARSE_VALUES
    encoded: dict[str, dict[str, Any]] = {}
    for key in keys:
        matrix, encoding = scores[key], encodings.get(key[0], rest)
        if encoding == "u1" and sizes[key] > budget:
            encoded[f"{key[0]}/{key[1]}"] = _layer_map(matrix)
            continue
        budget -= sizes[key]
        encoded[f"{key[0]}/{key[1]}"] = _one_matrix(matrix, encoding)
    return encoded


def encode_effects(measured: Effects | None) -> dict[str, dict[str, Any]]:
    """Measured effects by ``effect/pairing``, with the same precision as scores of that many values."""
    if measured is None:
        return {}
    matrices = {pairing: measured.matrix(pairing) for pairing in measured.pairings}
    total = sum(int(np.count_nonzero(~np.isnan(matrix.values))) for matrix in matrices.values())
    if total > COARSE_VALUES:
        return {}
    encoding = "f4" if total <= EXACT_VALUES else "u2" if total <= FINE_VALUES else "u1"
    return {f"effect/{pairing}": _one_matrix(matrix, encoding) for pairing, matrix in matrices.items()}


def _one_matrix(matrix: ScoreMatrix, encoding: str) -> dict[str, Any]:
    kind = mask_kind(matrix)
    present = ~np.isnan(matrix.values)
    content = {"pairs": kind or "bits", **quantise(matrix.values[present], encoding)}
    if kind is None:
        content["bits"] = base64.b64encode(np.packbits(present, bitorder="little").tobytes()).decode("ascii")
    return content


def _layer_map(matrix: ScoreMatrix) -> dict[str, Any]:
    """The largest score between every two layers, for a matrix too large to keep."""
    layers = sorted({head.layer for head in (*matrix.sources, *matrix.targets)})
    place = {layer: i for i, layer in enumerate(layers)}
    best = np.full((len(layers), len(layers)), -np.inf, dtype=np.float32)
    rows = np.array([place[head.layer] for head in matrix.sources])
    columns = np.array([place[head.layer] for head in matrix.targets])
    values = np.where(np.isnan(matrix.values), -np.inf, matrix.values)
    for row in place.values():  # the maximum over the heads of a source layer, then over the columns of a target layer
        np.maximum.at(best[row], columns, values[rows == row].max(axis=0, initial=-np.inf))
    return {"pairs": "layers", "encoding": "f4", "data": pack(np.where(np.isinf(best), np.nan, best), "f4")}


# ---------------------------------------------------------------------- edges


@dataclass(frozen=True)
class Limits:
    """How many edges the page keeps per metric and pairing, and per head."""

    overall: int
    per_head: int

    @classmethod
    def of(cls, scores: Scores) -> Limits:
        heads = len(scores.ports.query)
        return cls(overall=400, per_head=10 if heads <= 64 else 5 if heads <= 400 else 3)


def kept_pairs(
    matrix: ScoreMatrix, limits: Limits, also: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and ranks of the pairs worth keeping, best first.

    These are the best ``overall`` forward pairs, and every head's best ``per_head`` pairs as source and as target, so
    that the page can apply every edge rule and list every head's best partners. ``also`` marks further pairs.
    """
    forward = forward_mask(matrix.sources, matrix.targets)
    values = np.where(np.isnan(matrix.values), -np.inf, matrix.values)
    among, finite = _among_best(values, limits.per_head), np.isfinite(values)
    if (finite & ~forward).any():
        among |= _among_best(np.where(forward, values, -np.inf), limits.per_head)
    present = np.flatnonzero(finite)
    order = present[descending(values.ravel()[present])]  # the order of ScoreMatrix.top
    among.ravel()[order[forward.ravel()[order]][: limits.overall]] = True
    if also is not None:
        among |= also
    # These few candidates may include ties, so choose among them one by one.
    places = np.flatnonzero(among.ravel()[order])
    rows, columns = np.divmod(order[places], values.shape[1])
    ahead = forward[rows, columns]
    keep = np.cumsum(ahead) <= limits.overall
    keep &= ahead
    for ends in (rows.astype(_INDEX), columns.astype(_INDEX)):
        keep |= occurrence(ends) < limits.per_head
        keep |= ahead & (occurrence(np.where(ahead, ends, _INDEX(-1))) < limits.per_head)
    if also is not None:
        keep |= also[rows, columns]
    ranks = shared_ranks(values.ravel()[order])
    return rows[keep], columns[keep], ranks[places[keep]]


def _among_best(values: np.ndarray, count: int) -> np.ndarray:
    """Mask of values that are among the best ``count`` of their row or column, or tied with one of those."""
    found = np.zeros(values.shape, dtype=bool)
    for across, marks in ((values, found), (np.ascontiguousarray(values.T), found.T)):
        if across.size:
            last = max(0, across.shape[1] - count)
            marks |= across >= np.partition(across, last, axis=1)[:, last : last + 1]
    return found


def encode_edges(
    matrix: ScoreMatrix,
    limits: Limits,
    statistics: dict[str, np.ndarray] | None = None,
    also: np.ndarray | None = None,
    strength: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    evidence: np.ndarray | None = None,
) -> dict[str, Any]:
    """The kept pairs as parallel arrays; ``statistics`` are further matrices (z, q, effects) to carry along.

    ``strength`` gives the drawing strength of pairs, from 0 to 1; one byte is enough for the eye. ``evidence`` are the
    bits of `headspan.statistics.evidence`.
    """
    rows, columns, ranks = kept_pairs(matrix, limits, also)
    forward = forward_mask(matrix.sources, matrix.targets)
    count = int(np.count_nonzero(~np.isnan(matrix.values)))
    content: dict[str, Any] = {
        "count": count,
        "forward": int(np.count_nonzero(~np.isnan(matrix.values) & forward)),
        "source": pack(rows, whole(len(matrix.sources))),
        "target": pack(columns, whole(len(matrix.targets))),
        "rank": pack(ranks, whole(count + 1)),
        "score": pack(matrix.values[rows, columns], "f4"),
    }
    for name, values in (statistics or {}).items():
        content[name] = pack(values[rows, columns], "f4")
    if strength is not None:
        content["strength"] = pack(np.rint(255 * strength(rows, columns)), "u1")
    if evidence is not None:
        content["evidence"] = pack(evidence[rows, columns], "u1")
    return content


def best_pairs(matrix: ScoreMatrix, count: int) -> list[tuple[int, int]]:
    """(row, column) of the best forward pairs."""
    rows, columns, values = matrix.forward().pairs()
    order = descending(values)[:count]
    return list(zip(rows[order].tolist(), columns[order].tolist(), strict=True))


def metric_order(scores: Scores) -> list[str]:
    """The similarities of a result, Projection Kernel first, unknown ones last."""
    return sorted(scores.metrics, key=lambda metric: [*METRICS, metric].index(metric))
