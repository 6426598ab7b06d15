"""Figures of the weights: norms of QK and OV by layer (figure 9 of the paper), and unembedding vectors.

Unembedding vectors are drawn against the bias of the final norm: why token scores are centred and normalised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.plotting import style
from headspan.plotting.canvas import new_figure, thinned
from headspan.reading.tokens import reader
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED = 4  # tokens with the largest norms are named next to their points


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


class TokenNumbers(NamedTuple):
    """Per token: length, inner product with the bias of the final norm, and that product for the unit vector."""

    norm: np.ndarray
    product: np.ndarray
    unit_product: np.ndarray


def token_numbers(weights: AttentionWeights) -> dict[str, TokenNumbers]:
    """The numbers of all tokens, for the original vectors and with their mean subtracted."""
    from headspan.reading.token_lengths import VocabularyRows, reciprocal, row_norms

    final = weights.final_norm()
    if final is None or final.bias is None or not final.bias.any():
        raise HeadspanError("it needs a bias of the final norm, which this model does not have")
    rows = VocabularyRows.unembedding(weights)
    beta = final.bias.astype(np.float64)
    found = {}
    for title, preprocess in (("not centred", "identity"), ("centred", "centre")):
        blocks = [(row_norms(block), block @ beta) for _, block in rows.preprocessed(preprocess, 4096)]
        norm, product = (np.concatenate(part) for part in zip(*blocks, strict=True))
        found[title] = TokenNumbers(norm, product, product * reciprocal(norm))
    return found


def norm_figure(weights: AttentionWeights) -> Figure:
    """Length of every unembedding vector against its inner product with β_final."""
    return _two_panels(weights, "norm", "product", "‖e‖", "⟨e, β_final⟩")


def normalised_figure(weights: AttentionWeights) -> Figure:
    """The inner product with β_final before and after the vectors are normalised."""
    return _two_panels(weights, "product", "unit_product", "⟨e, β_final⟩", "⟨e / ‖e‖, β_final⟩")


def _two_panels(weights: AttentionWeights, x: str, y: str, x_name: str, y_name: str) -> Figure:
    figure = new_figure(9.2, 3.9)
    numbers = token_numbers(weights)
    read = reader(weights)
    image = None
    for i, (title, tokens) in enumerate(numbers.items()):
        axes = figure.add_axes((0.07 + 0.445 * i, 0.14, 0.375, 0.75))
        xs, ys = getattr(tokens, x), getattr(tokens, y)
        image = axes.scatter(xs, ys, c=np.arange(len(xs)), s=4 if len(xs) > 500 else 14, cmap=style.SEQUENTIAL,
                             linewidths=0, alpha=0.6, rasterized=True, gid=f"tokens:{title}")  # fmt: skip
        _name_extremes(axes, xs, ys, tokens.norm, read)
        axes.set_title(f"{title}: Pearson r = {_pearson(xs, ys):.3f}".replace("-", "−"), loc="left")
        axes.set(xlabel=x_name, ylabel=y_name)
    assert image is not None
    bar = figure.colorbar(image, cax=figure.add_axes((0.925, 0.14, 0.013, 0.75)))
    bar.set_label("token id")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.solids.set_alpha(1)  # pyright: ignore[reportOptionalMemberAccess]
    return figure


def _name_extremes(axes: Axes, x: np.ndarray, y: np.ndarray, norm: np.ndarray, read: Callable[[int], str]) -> None:
    """Name the tokens of the longest vectors, towards the middle of the panel and without overlap."""
    middle = (x.min() + x.max()) / 2
    gap = 0.05 * float(np.ptp(y))
    last = np.inf
    for token in sorted(np.argsort(-norm, kind="stable")[:_NAMED], key=lambda t: -y[t]):
        right = x[token] < middle
        last = min(float(y[token]), last - gap)
        axes.annotate(
            f"  {read(int(token))}  ", (x[token], y[token]), (float(x[token]), last), fontsize=6.5, va="center",
            ha="left" if right else "right", gid=f"token:{token}",
        )  # fmt: skip


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    if x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])
