"""The dimension for chance overlaps of two weights: d, or d − 1 if both are centred.

Folding LayerNorm makes the columns of weights orthogonal to the vector of ones. Two random subspaces of that hyperplane
are random subspaces of d − 1 dimensions. If only one of them lies in it, the other is uniform in all d dimensions, so
the position of the first does not matter and chance is exactly that of d dimensions. Hence d − 1 applies to pairs with
both sides centred, and d to all others.

A result records in its provenance which of its weights are centred (``centred``, ``not_centred``). Results from earlier
versions record only that they are folded, and the model family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from headspan.results.scores import Scores
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, HeadRole, Pairing, Port, Role

if TYPE_CHECKING:
    from headspan.models.weights import AttentionWeights


def dimension_between(d: int, first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """The dimension for each pair of weights, given which are centred (broadcast together).

    >>> dimension_between(8, [True, False], True)
    array([7, 8])
    """
    return np.maximum(d - (np.asarray(first, dtype=bool) & np.asarray(second, dtype=bool)), 1)


def pair_dimension(scores: Scores, pairing: Pairing) -> np.ndarray:
    """The dimension for every pair of a pairing, shaped like its scores; (1, 1) if it is the same for all."""
    first, second = (few(centred(scores, role)) for role in pairing)
    return dimension_between(scores.d_model, first[:, None], second[None, :])


def dimension_at(scores: Scores, pairing: Pairing, rows: ArrayLike, columns: ArrayLike) -> np.ndarray:
    """The dimension for some pairs of a pairing."""
    first, second = (centred(scores, role) for role in pairing)
    return dimension_between(scores.d_model, first[np.asarray(rows)], second[np.asarray(columns)])


def usual_dimension(scores: Scores, pairing: Pairing) -> int:
    """One dimension for all pairs of a pairing, the largest, where differences between heads do not matter."""
    return int(pair_dimension(scores, pairing).max(initial=1))


def pair_dimension_of(weights: AttentionWeights, source: HeadRole | str, target: HeadRole | str) -> int:
    """The dimension for two weights of a model."""

    def flag(name: HeadRole | str) -> bool:
        head, role = HeadRole.parse(name)
        table = weights.ports
        # Rotary query rows are centred like the queries of their layer.
        place = table.span(role, head.layer).start if head.kind == "QR" else table.find(head, role)
        return bool(weights.centred_ports(role)[place])

    return int(dimension_between(weights.d_model, flag(source), flag(target)))


def centred(scores: Scores, role: Role | str) -> np.ndarray:
    """Which weights of a role are centred, (n,)."""
    role = Role.parse(role)
    found = centred_by(scores.provenance, scores.heads(role), role)
    return found & (scores.ranks(role) < scores.d_model)  # a subspace of full rank is not in the hyperplane


def centred_by(provenance: Mapping[str, Any], ports: Sequence[Port], role: Role) -> np.ndarray:
    """Which weights of a role are centred, from the provenance alone."""
    roles, others = provenance.get("centred"), provenance.get("not_centred", [])
    if roles is None:
        roles, others = _of_earlier_versions(provenance, ports)
    if not isinstance(roles, list) or not isinstance(others, list):
        raise HeadspanError("the result does not say which of its weights are centred. Score the model again")
    if str(role) not in roles:
        return np.zeros(len(ports), dtype=bool)
    exceptions = set(map(str, others))
    return np.array([f"{port}.{role}" not in exceptions for port in ports], dtype=bool)


def _of_earlier_versions(provenance: Mapping[str, Any], ports: Sequence[Port]) -> tuple[list[str], list[str]]:
    """What versions before 0.4 folded, by family; empty if the family does not define its norm."""
    if provenance.get("folding") != "folded":
        return [], []
    from headspan.models.families.table import ARCHITECTURES

    family = ARCHITECTURES.get(str(provenance.get("architecture")))
    if family is None or family.norm_kind != "layer":
        return [], []
    if family.norm_place == "output":  # attention reads uncentred inputs, so none of its weights is centred
        return [], []
    first = [port for port in ports if port.layer == 0] if family.norm_place == "partial" else []
    return [*map(str, ROLES), str(Role.W)], [f"{port}.{role}" for port in first for role in "QKV"]


def few(flags: np.ndarray) -> np.ndarray:
    """A single entry if all are the same, to keep derived arrays small."""
    return flags[:1] if flags.size and (flags == flags[0]).all() else flags
