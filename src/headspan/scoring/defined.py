"""For which roles and pairings of a model a similarity is defined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.subspaces.metrics import Metric
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import NODE_ROLES, Pairing, Role


def check_dimensions(weights: AttentionWeights, metrics: Sequence[Metric], pairings: Sequence[Pairing]) -> None:
    for metric in (metric.key for metric in metrics if metric.inside_head):
        for pairing in (p for p in pairings if not p.of_nodes):
            for role in pairing:
                widths = {*map(int, weights.widths(role))}
                if len(widths) > 1:
                    raise HeadspanError(
                        f"{metric} compares weights column by column, but the {role} of this model have "
                        f"{' and '.join(map(str, sorted(widths)))} columns. Leave out {metric} or the pairing {pairing}"
                    )
            m, m2 = weights.d_head(pairing.source), weights.d_head(pairing.target)
            if m != m2:
                raise HeadspanError(
                    f"{metric} compares weights column by column, but {pairing.source} has {m} columns and "
                    f"{pairing.target} has {m2}. Leave out {metric} or the pairing {pairing}"
                )


def left_out(weights: AttentionWeights, metric: Metric, pairings: Sequence[Pairing]) -> dict[Pairing, str]:
    """The pairings for which a similarity has no scores, with the reason."""
    found: dict[Pairing, str] = {}
    if metric.flow_only:
        reason = "it says how much of what the source writes shows in what the target reads"
        found |= {pairing: reason for pairing in pairings if not pairing.flow}
    for pairing in (p for p in pairings if p.of_nodes and p not in found):
        widths = sorted({int(width) for role in pairing for width in weights.widths(role)})
        if metric.inside_head and (len(widths) > 1 or widths == [1]):
            nodes = np.concatenate([weights.widths(role) for role in NODE_ROLES])
            found[pairing] = f"it compares weights column by column, and the nodes have {_columns(nodes)}"
        elif metric.observed and pairing.source is Role.W and (unknown := weights.without_variance()):
            found[pairing] = f"the variance of what {unknown[0]} writes is unknown (hs.Node takes it as variance)"
        elif metric.reads_partner:
            lacking = [name for role in pairing for name in weights.without_partner(role)]
            if lacking:
                found[pairing] = f"it compares circuits, and {lacking[0]} has no second weight of the same width"
    return found


def _columns(widths: np.ndarray) -> str:
    least, most = int(widths.min()), int(widths.max())
    return f"{least} to {most} columns" if least < most else "1 column" if most == 1 else f"{most} columns"
