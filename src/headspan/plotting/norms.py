"""Norms of the QK and OV matrices by layer (figure 9 of the paper)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.plotting import style
from headspan.plotting.canvas import new_figure, thinned
from headspan.vocabulary.heads import Role

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def circuit_norms(weights: AttentionWeights, layer: int) -> dict[str, np.ndarray]:
    """Frobenius norms of W_QK and W_OV of every query head of a layer, without forming the d×d matrices."""
    norms = {}
    for name, own, shared in (("QK", Role.Q, Role.K), ("OV", Role.O, Role.V)):
        a, b = (weights.read(r, weights.layer_of(r, layer)).astype(np.float64) for r in (own, shared))
        gram_a, gram_b = np.swapaxes(a, 1, 2) @ a, np.swapaxes(b, 1, 2) @ b
        gram_b = np.repeat(gram_b, len(gram_a) // len(gram_b), axis=0)  # a KV head serves a group of query heads
        norms[name] = np.sqrt(np.einsum("hij,hij->h", gram_a, gram_b))
    return norms


def norms_figure(weights: AttentionWeights) -> Figure:
    """Mean and one standard deviation over the heads of every layer."""
    by_layer = [circuit_norms(weights, layer) for layer in weights.layers]
    figure = new_figure(max(4.4, min(9.0, 0.25 * len(by_layer) + 2)), 3.2)
    axes = figure.add_axes((0.13, 0.15, 0.84, 0.76))
    x = np.arange(len(by_layer))
    for name, colour, marker in (("QK", style.ROLE_COLOURS[Role.Q], "o"), ("OV", style.ROLE_COLOURS[Role.K], "s")):
        mean = np.array([norms[name].mean() for norms in by_layer])
        sigma = np.array([norms[name].std() for norms in by_layer])
        axes.fill_between(x, mean - sigma, mean + sigma, color=colour, alpha=0.18, linewidth=0, gid=f"band:{name}")
        axes.plot(
            x, mean, color=colour, marker=marker, markersize=3.5, linewidth=1.4, label=f"W_{name}", gid=f"mean:{name}"
        )
    ticks = thinned(len(x))
    axes.set_xticks(ticks, [str(weights.layers[i]) for i in ticks])
    axes.set(xlabel="layer", ylabel="Frobenius norm", title="Mean over heads, band of one standard deviation")
    axes.legend()
    return figure
