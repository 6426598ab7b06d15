"""A model's weights with the statistics of a run: what influence compares (:mod:`headspan.results.observations`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headspan.models.folding import FoldedWeights
from headspan.models.weights import AttentionWeights, check_finite
from headspan.models.wrapped import WrappedWeights
from headspan.results.identity import same_model
from headspan.results.observations import Statistics
from headspan.vocabulary.errors import HeadspanError, warn
from headspan.vocabulary.heads import ROLES, Role
from headspan.vocabulary.ports import shape_text

Roots = Mapping[tuple[Role, int], np.ndarray]  # by role and layer, (n, m, m), or (n, 1, 1) for a factor of all columns


class ObservedWeights(WrappedWeights):
    """Weights, unchanged, that also give the folded ones times the roots of their statistics.

    roots: for every role and layer that will be asked for; about: what a result records of the statistics.
    """

    def __init__(self, weights: AttentionWeights, roots: Roots, about: dict[str, Any]) -> None:
        super().__init__(weights)
        self.centred = weights.centred
        self.roots, self.about = roots, about
        self._folded = weights if weights.folding != "none" else FoldedWeights(weights)

    @property
    def held_bytes(self) -> int:
        return self.inner.held_bytes + sum(root.nbytes for root in self.roots.values())

    def observed(self, role: Role | str, layer: int) -> np.ndarray:
        role = Role.parse(role)
        own, root = self._folded.read(role, layer), self.roots[role, layer]
        with np.errstate(over="ignore", invalid="ignore"):  # reported below, with the head's name
            found = own * root if root.shape[1:] == (1, 1) else np.matmul(own, root)
        return check_finite(found, role, self.heads_in(role, layer), f"{self.reference} with its statistics")

    @property
    def provenance(self) -> dict[str, Any]:
        return {**self.inner.provenance, "statistics": {**self.about, **self._folded._centring()}}


def observed_weights(weights: AttentionWeights, statistics: Statistics) -> ObservedWeights:
    """Weights with the statistics of a run of the same model; those of another model are refused."""
    if weights.folding == "none" and not weights.foldable:
        raise HeadspanError(f"there is no influence for {weights.reference}: {weights.not_foldable_reason}")
    widths = {role: (len(weights.heads(role)), weights.d_head(role)) for role in ROLES}
    arrays = {Role.O: "spread/O", Role.Q: "fisher/Q", Role.K: "fisher/K", Role.V: "mean/V"}
    seen = {role: statistics.arrays[name].shape[:2] for role, name in arrays.items()}
    if not weights.ports.same_heads(statistics.ports) or widths != seen:
        raise HeadspanError(
            f"the statistics are not those of {weights.reference}, which has "
            f"{shape_text(weights.ports, weights.d_model)}: make those with `hs.observe(model)`"
        )
    given = {**weights.provenance, "folding": "none"}
    if doubt := same_model(statistics.model, given, "the statistics", "these weights"):
        warn(doubt)
    roots: dict[tuple[Role, int], np.ndarray] = {}
    for role in ROLES:
        found = statistics.roots(role)
        for layer in weights.layers_with(role):
            roots[role, layer] = found[weights.ports.span(role, layer)]
    return ObservedWeights(weights, roots, statistics.about)
