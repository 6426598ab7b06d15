"""The dimension for chance overlaps of two weights: d, or d − 1 if both are centred.

Folding LayerNorm makes the columns of weights orthogonal to the vector of ones. Two random subspaces of that hyperplane
are random subspaces of d − 1 dimensions. Where only one of them lies in it, the other is uniform in all d dimensions,
and then nothing depends on where the first one lies: chance is exactly that of d dimensions. So d − 1 is for pairs of
which both sides are centred, and d for all others.

A result records in its provenance which of its weights are centred (``centred``, ``not_centred``). Results of earlier
versions say only that they are folded, and of which family they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from headspan.models.families.table import ARCHITECTURES
from headspan.models.weights import AttentionWeights
from headspan.results.scores import Scores
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, HeadOrNode, Pairing, Port, Role


def dimension_between(d: int, first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """The dimensions for weights that are centred or not (broadcast together).

    >>> dimension_between(8, [True, False], True)
    array([7, 8])
    """
    return np.maximum(d - (np.asarray(first, dtype=bool) & np.asarray(second, dtype=bool)), 1)


def pair_dimension(scores: Scores, pairing: Pairing) -> np.ndarray:
    """The dimensions for every pair of a pairing, as the matrix of its scores; (1, 1) where all pairs have the same."""
    first, second = (_few(centred(scores, role)) for role in pairing)
    return dimension_between(scores.d_model, first[:, None], second[None, :])


def dimension_at(scores: Scores, pairing: Pairing, rows: ArrayLike, columns: ArrayLike) -> np.ndarray:
    """The dimensions for some pairs of a pairing."""
    first, second = (centred(scores, role) for role in pairing)
    return dimension_between(scores.d_model, first[np.asarray(rows)], second[np.asarray(columns)])


def usual_dimension(scores: Scores, pairing: Pairing) -> int:
    """One number for all pairs of a pairing, where single heads make no difference: the largest."""
    return int(pair_dimension(scores, pairing).max(initial=1))


def pair_dimension_of(weights: AttentionWeights, source: Port | str, target: Port | str) -> int:
    """The dimensions for two weights of a model."""

    def flag(name: Port | str) -> bool:
        head, role = Port.parse(name)
        table = weights.ports
        # Rotary query rows are read as the queries of their layer are.
        place = table.span(role, head.layer).start if head.kind == "QR" else table.find(head, role)
        return bool(weights.centred_ports(role)[place])

    return int(dimension_between(weights.d_model, flag(source), flag(target)))


def centred(scores: Scores, role: Role | str) -> np.ndarray:
    """Which weights of a role are centred, (n,)."""
    role = Role.parse(role)
    found = centred_by(scores.provenance, scores.heads(role), role)
    return found & (scores.ranks(role) < scores.d_model)  # a subspace of full rank is not in the hyperplane


def centred_by(provenance: Mapping[str, Any], ports: Sequence[HeadOrNode], role: Role) -> np.ndarray:
    """The same from a provenance alone."""
    roles, others = provenance.get("centred"), provenance.get("not_centred", [])
    if roles is None:
        roles, others = _of_earlier_versions(provenance, ports)
    if not isinstance(roles, list) or not isinstance(others, list):
        raise HeadspanError("the result does not say which of its weights are centred. Score the model again")
    if str(role) not in roles:
        return np.zeros(len(ports), dtype=bool)
    exceptions = set(map(str, others))
    return np.array([f"{port}.{role}" not in exceptions for port in ports], dtype=bool)


def _of_earlier_versions(provenance: Mapping[str, Any], ports: Sequence[HeadOrNode]) -> tuple[list[str], list[str]]:
    """What versions before 0.4 folded, by the family; nothing where it does not say which norm it has."""
    family = ARCHITECTURES.get(str(provenance.get("architecture")))
    if provenance.get("folding") != "folded" or family is None or family.norm_kind != "layer":
        return [], []
    if family.norm_place == "output":  # nothing is centred before attention, so not after it either
        return [], []
    first = [port for port in ports if port.layer == 0] if family.norm_place == "partial" else []
    return [*map(str, ROLES), str(Role.W)], [f"{port}.{role}" for port in first for role in "QKV"]


def _few(flags: np.ndarray) -> np.ndarray:
    """One number for all where all are the same: what is computed of it stays small."""
    return flags[:1] if flags.size and (flags == flags[0]).all() else flags
