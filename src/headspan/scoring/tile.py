"""The scores of one tile: factors, contraction, final map."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.scoring.assembly import pair_name, rank_name, size_name
from headspan.scoring.contraction import contract
from headspan.scoring.factors import FactorStore
from headspan.scoring.own_metrics import check_numbers, own_scores
from headspan.scoring.plan import Plan, Tile


def compute_tile(
    weights: AttentionWeights,
    plan: Plan,
    tile: Tile,
    device: str = "cpu",
    tick: Callable[[float], None] = lambda share: None,
    store: FactorStore | None = None,
) -> dict[str, np.ndarray]:
    """Scores of one tile by pair of panels ("Q0-K1": role and block of both sides), and subspace ranks ("rank-Q0")."""
    store = store or FactorStore(weights, plan)
    factors, jobs, metric = store.of(tile), plan.jobs(tile), plan.metric(tile.metric)
    if metric.kernel:
        route = plan.routes[tile.metric]
        rooted = metric.finish is np.sqrt
        kernels = contract(
            factors, jobs, route=route, work_bytes=plan.work_bytes, device=device, rooted=rooted, tick=tick
        )
        values = [metric.finish(kernel) for kernel in kernels]
    else:
        values = []
        for job, pair in zip(jobs, tile.pairs, strict=True):
            if tile.metric in plan.own:
                values.append(own_scores(weights, plan, metric, pair, factors))
            else:
                values.append(metric.all_pairs(factors[pair[0]], factors[pair[1]], job.needed))  # type: ignore[misc]
            tick(1 / len(jobs))
    if tile.metric in plan.own:
        check_numbers(plan, tile, jobs, values)
    sizes = {panel: store.sizes(panel, tile.metric) for panel in tile.panels} if metric.observed else {}
    if metric.observed:
        ends = [(sizes[first], sizes[second]) for first, second in tile.pairs]
        values = [value * first[:, None] * second for value, (first, second) in zip(values, ends, strict=True)]
    arrays = {pair_name(*pair): value for pair, value in zip(tile.pairs, values, strict=True)}
    arrays |= {size_name(panel): size for panel, size in sizes.items()}
    return arrays | {rank_name(panel): store.ranks(panel, tile.metric) for panel in tile.panels}
