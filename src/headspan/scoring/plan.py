"""What a run computes, cut into tiles that fit the memory and can be done in any order, anywhere.

The layers are cut into blocks. A tile is one similarity between two blocks of layers, all needed pairs of roles in it:
it needs the factors of these two blocks and nothing else. Each kernel value is computed once: ⟨O of h, Q of h'⟩
serves OQ and, transposed, QO.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from headspan.errors import HeadspanError
from headspan.heads import ROLES, Pairing, PairSet, Role, layers_of, pair_mask
from headspan.models.weights import AttentionWeights
from headspan.scoring.contraction import Job, Route, cheaper_route
from headspan.system.threads import cores

_BASE_BYTES = 200 * 10**6  # the interpreter with numpy and scipy
_PROCRUSTES_BLOCK = 2  # layers: small tiles, because each pair costs a factorisation


class Panel(NamedTuple):
    """The heads of one role in one block of layers: what one factor array holds."""

    role: Role
    block: int


class Tile(NamedTuple):
    metric: str
    number: int
    jobs: tuple[Job, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(dict.fromkeys(panel for job in self.jobs for panel in (job.first, job.second)))  # type: ignore[misc]

    @property
    def name(self) -> str:
        return f"{self.metric}-{self.number:05d}"


@dataclass
class Plan:
    """All tiles of a run, with what decides their values."""

    metrics: tuple[str, ...]
    pairings: tuple[Pairing, ...]
    pairs: PairSet
    routes: dict[str, Route]
    blocks: dict[str, list[tuple[int, ...]]]  # per metric: layers of each block
    work_bytes: int
    identity: dict[str, Any]  # fingerprint of the model and whatever else changes the numbers
    tiles: list[Tile] = field(default_factory=list)
    workers: int = 1  # layers whose factors are made at once

    @property
    def key(self) -> str:
        """A hash that is equal exactly when a finished tile of one run can serve another."""
        parts = {
            "metrics": self.metrics,
            "pairings": [str(p) for p in self.pairings],
            "pairs": self.pairs,
            "routes": self.routes,
            "blocks": self.blocks,
            "work_bytes": self.work_bytes,
            "identity": self.identity,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def make_plan(
    weights: AttentionWeights,
    metrics: tuple[str, ...],
    pairings: tuple[Pairing, ...],
    pairs: PairSet,
    memory: int,
    route: Route | None = None,
    identity: dict[str, Any] | None = None,
) -> Plan:
    """Cut the work into as few tiles as the memory allows."""
    roles = [role for role in ROLES if any(role in pairing for pairing in pairings)]
    _check_dimensions(weights, metrics, pairings)
    per_layer = {role: len(weights.heads(role)) // len(weights.layers) for role in ROLES}
    layer_bytes = sum(4 * per_layer[role] * weights.d_model * weights.d_head(role) for role in roles)
    heads_per_layer = sum(per_layer[role] for role in roles)
    widest = max(per_layer[role] * weights.d_head(role) for role in ROLES)
    # Making factors of one layer takes a few float64 copies of its widest weight.
    making = 6 * 8 * weights.d_model * widest
    workers = max(1, min(cores(), (memory - _BASE_BYTES) // 4 // making))
    spare = memory - _BASE_BYTES - workers * making
    work_bytes = min(2**30, max(0, spare) // 3)
    least = 2 * layer_bytes + 16 * heads_per_layer * 2 * weights.d_model
    if spare < least:
        raise HeadspanError(
            f"{memory / 1e9:.2f} GB is too little for this model: two layers at a time need about "
            f"{(memory - spare + least) / 1e9:.2f} GB; give more with --memory or fewer pairings"
        )
    per_block = max(1, min(len(weights.layers), int((spare - work_bytes) // (2 * layer_bytes))))
    if per_block * 2 > len(weights.layers) and (spare - work_bytes) >= len(weights.layers) * layer_bytes:
        per_block = len(weights.layers)  # everything fits at once: one block, held once
    plan = Plan(metrics, pairings, pairs, {}, {}, work_bytes, identity or {}, workers=workers)
    for metric in metrics:
        size = min(per_block, _PROCRUSTES_BLOCK) if metric == "procrustes" else per_block
        plan.blocks[metric] = _even_blocks(weights.layers, size)
        tiles = list(_tiles(weights, metric, plan))
        if metric != "procrustes":
            plan.routes[metric] = route or _route(weights, metric, tiles)
        plan.tiles += tiles
    return plan


def _even_blocks(layers: Sequence[int], largest: int) -> list[tuple[int, ...]]:
    count = -(-len(layers) // largest)
    return [tuple(int(x) for x in part) for part in np.array_split(np.array(layers), count)]


def needed_kernel(plan: Plan, weights: AttentionWeights, first: Role, second: Role) -> np.ndarray | None:
    """Which entries of the kernel matrix first × second some pairing asks for; None when no pairing does.

    A same-role kernel is symmetric, so its entries below the diagonal are asked for above it.
    """
    needed = None
    for pairing in plan.pairings:
        if set(pairing) != {first, second}:
            continue
        mask = pair_mask(pairing, weights.heads(pairing.source), weights.heads(pairing.target), plan.pairs)
        if pairing.source is not first:
            mask = mask.T
        if first is second:
            mask = np.triu(mask | mask.T)
        needed = mask if needed is None else needed | mask
    return needed


def _tiles(weights: AttentionWeights, metric: str, plan: Plan) -> Iterator[Tile]:
    blocks = plan.blocks[metric]
    kernels = {
        (first, second): needed_kernel(plan, weights, first, second)
        for i, first in enumerate(ROLES)
        for second in ROLES[i:]
    }
    layer_of = {role: layers_of(weights.heads(role)) for role in ROLES}
    number = 0
    for a in range(len(blocks)):
        for b in range(a, len(blocks)):
            jobs = []
            for (first, second), needed in kernels.items():
                for x, y in {(a, b), (b, a)}:
                    if needed is None:
                        continue
                    rows = np.isin(layer_of[first], blocks[x])
                    columns = np.isin(layer_of[second], blocks[y])
                    part = needed[np.ix_(rows, columns)]
                    if part.any():
                        jobs.append(Job(Panel(first, x), Panel(second, y), part))
            if jobs:
                yield Tile(metric, number, tuple(sorted(jobs, key=lambda j: (j.first, j.second))))
                number += 1


def factor_shape(weights: AttentionWeights, metric: str, role: Role, n: int) -> tuple[int, int, int]:
    """Shape of the factor array of n heads; Linear CKA's factors live in the head, not in the residual stream."""
    m = weights.d_head(role)
    return (n, m, m) if metric == "linear_cka" else (n, weights.d_model, m)


def _route(weights: AttentionWeights, metric: str, tiles: Sequence[Tile]) -> Route:
    shapes: dict[Any, tuple[int, int, int]] = {}
    jobs = []
    for tile in tiles:
        for job in tile.jobs:
            jobs.append(job)
            for panel, n in zip((job.first, job.second), job.needed.shape, strict=True):
                shapes[panel] = factor_shape(weights, metric, panel.role, n)  # type: ignore[union-attr]
    return cheaper_route(shapes, jobs)


def _check_dimensions(weights: AttentionWeights, metrics: Sequence[str], pairings: Sequence[Pairing]) -> None:
    for metric in metrics:
        if metric not in ("linear_cka", "procrustes"):
            continue
        for pairing in pairings:
            m, m2 = weights.d_head(pairing.source), weights.d_head(pairing.target)
            if m != m2:
                raise HeadspanError(
                    f"{metric} compares weights column by column, but {pairing.source} has {m} columns and "
                    f"{pairing.target} has {m2}: leave out {metric} or the pairing {pairing}"
                )
