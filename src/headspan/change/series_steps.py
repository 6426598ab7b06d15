"""Build a `Series` from what was measured at the steps of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headspan.change.series import Series
from headspan.change.series_file import SeriesEdge, Step
from headspan.change.step_store import Arrays
from headspan.checkpoints.hub.revisions import Checkpoint
from headspan.system.ordering import shared_ranks
from headspan.vocabulary.heads import FLOW_PAIRINGS, ROLES, Head, Pairing, Role

Parts = list[tuple[dict[str, Any], Arrays]]  # metadata and arrays of every step


def assembled(
    checkpoints: Sequence[Checkpoint], parts: Parts, k: int, chosen: dict[Pairing, np.ndarray], notes: list[str]
) -> Series:
    """The series of all steps.

    parts: what was measured at each step, in order. chosen: flat indices of edges whose scores every step has.
    """
    shape = parts[-1][0]["shape"]
    heads = {role: tuple(map(Head.parse, shape["heads"][str(role)])) for role in ROLES}
    edges: list[SeriesEdge] = []
    scores, ranks = [], []
    for pairing in FLOW_PAIRINGS:
        strongest = [arrays[f"index/{pairing}"][:k] for _, arrays in parts]
        union = np.unique(np.concatenate(strongest))
        rows, columns = np.divmod(union, len(heads[pairing.target]))
        edges += [
            SeriesEdge(pairing, heads[pairing.source][i], heads[pairing.target][j])
            for i, j in zip(rows, columns, strict=True)
        ]
        found = [_at(arrays, pairing, union, chosen) for _, arrays in parts]
        scores.append(np.stack([value for value, _ in found]))
        ranks.append(np.stack([rank for _, rank in found]))
    infos = [info for info, _ in parts]
    steps = tuple(
        Step(checkpoint.step, checkpoint.name, info["content"])
        for checkpoint, info in zip(checkpoints, infos, strict=True)
    )
    provenance = {"architecture": infos[-1]["architecture"], "fingerprints": [i["fingerprint"] for i in infos]}
    if "dimensions" in infos[-1]:  # missing in unfinished runs of earlier versions
        provenance |= {"d_model": shape["d_model"], "dimensions": infos[-1]["dimensions"]}
    provenance |= {name: infos[-1][name] for name in ("centred", "not_centred") if name in infos[-1]}
    provenance["served_by"] = shape.get("served_by")
    return Series(
        steps, k, infos[-1]["folding"], heads, tuple(edges), np.concatenate(scores, axis=1),
        np.concatenate(ranks, axis=1), _by_role(parts, "from_previous", heads),
        _by_role(parts, "from_last", heads), _stacked(parts), _stacked_head_scores(parts),
        notes, provenance,
    )  # fmt: skip


def _at(
    arrays: Arrays, pairing: Pairing, wanted: np.ndarray, chosen: dict[Pairing, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and ranks of some edges at one step; NaN and 0 for edges that were not kept."""
    index, values = arrays[f"index/{pairing}"], arrays[f"score/{pairing}"]
    place = {int(flat): i for i, flat in enumerate(index)}
    positions = np.array([place.get(int(flat), -1) for flat in wanted], dtype=np.int64)
    scores = np.where(positions >= 0, values[positions] if values.size else np.nan, np.float32(np.nan))
    extra = arrays.get(f"chosen/{pairing}")
    if extra is not None:
        kept = {int(flat): value for flat, value in zip(chosen[pairing], extra, strict=True)}
        scores = np.array([kept.get(int(f), s) for f, s in zip(wanted, scores, strict=True)], dtype=np.float32)
    ranks = np.append(shared_ranks(values), 0)  # the last one is for position -1
    return scores.astype(np.float32), ranks[positions].astype(np.int32)


def _by_role(parts: Parts, name: str, heads: dict[Role, Any]) -> dict[Role, np.ndarray]:
    empty = {role: np.full(len(heads[role]), np.nan, dtype=np.float32) for role in ROLES}
    return {role: np.stack([arrays.get(f"{name}/{role}", empty[role]) for _, arrays in parts]) for role in ROLES}


def _stacked(parts: Parts) -> dict[tuple[str, Pairing], np.ndarray]:
    names = [(hub, p) for hub in ("inlet", "outlet") for p in FLOW_PAIRINGS if f"{hub}/{p}" in parts[0][1]]
    return {(hub, p): np.stack([arrays[f"{hub}/{p}"] for _, arrays in parts]) for hub, p in names}


def _stacked_head_scores(parts: Parts) -> dict[str, np.ndarray]:
    kinds = [name.partition("/")[2] for name in parts[0][1] if name.startswith("head/")]
    return {kind: np.stack([arrays[f"head/{kind}"] for _, arrays in parts]) for kind in kinds}
