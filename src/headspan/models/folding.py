"""Weights with the norms folded in, computed layer by layer as they are read.

What a head reads or writes is a span, defined up to one positive scalar per token, and the division by a norm is such a
scalar. A norm may therefore come before attention, between attention and the stream, or both.

A norm before attention: the block computes W·(γ ⊙ z + β) + b from the normalised stream z. Folding moves γ, β into W:

* LayerNorm: W_in' = W_in·diag(γ)·C_d with bias W_in·β + b for Q, K and V, where C_d = I − 11ᵀ/d; and W_O' = C_d·W_O,
  because writers may centre a stream that every reader centres. The final norm is folded into the unembedding in the
  same way, which is then centred over tokens (adding a constant to all logits does not change the probabilities).
* RMSNorm: W_in' = W_in·diag(γ), and likewise for the unembedding; nothing is centred.
* If a layer reads the stream without a norm, its Q, K and V are unchanged.

A norm after attention (OLMo 2; Gemma 2 has both): W_O' = diag(γ)·W_O, or diag(γ)·C_d·W_O for LayerNorm, and the output
bias likewise. Its division is left out, and its constant β is not part of what heads write.

* The value bias becomes part of the output bias, since attention rows sum to 1 (where they do not, it is kept).

The embedding is unchanged, because every reader of the stream centres it.
"""

from __future__ import annotations

import numpy as np

from headspan.models.opening import ModelLike, open
from headspan.models.weights import AttentionWeights, Norm, attention_role, check_finite
from headspan.models.wrapped import WrappedWeights
from headspan.system.deprecation import renamed
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role

_ROWS = 8192  # rows of the unembedding processed at once
FOLDED_NORMS = {
    "pre": ["before attention", "before the unembedding"],
    "partial": ["before attention, except in the first layer", "before the unembedding"],
    "output": ["on the attention output", "before the unembedding"],
    "sandwich": ["before attention", "on the attention output", "before the unembedding"],
}
"""The norms whose gains are folded into the weights, by the position of a family's norms."""

# From docs/evidence.md: how well raw and folded scores follow measured effects.
_ADVISED = "advised for RMSNorm"
_ADVICE = {
    ("rms", "pre"): f"{_ADVISED}: folded scores follow effects a little better (one model measured)",
    ("rms", "sandwich"): "not advised for finding large effects: folded scores follow effects worse (one model "
    "measured)",
    ("layer", "pre"): "not needed for LayerNorm: raw and folded scores follow measured effects about equally",
}


def fold_advice(weights: AttentionWeights) -> str | None:
    """Whether to fold the norms of a model, if that is known."""
    return _ADVICE.get((weights.norm_kind, weights.norm_place)) if weights.foldable else None


def folding_is_advised(weights: AttentionWeights) -> bool:
    """Whether these weights have norms that should be folded and are not."""
    return weights.folding == "none" and (fold_advice(weights) or "").startswith(_ADVISED)


@renamed(weights="model")
def fold(model: ModelLike) -> FoldedWeights:
    """The weights of a model with the norms folded in, or an error that says why this is not possible.

    >>> rng = np.random.default_rng(0)
    >>> arrays = {role: rng.normal(size=(1, 2, 8, 3)) for role in "QKVO"}
    >>> folded = fold(open({**arrays, "norm": "layer", "gain": np.full((1, 8), 2.0)}))
    >>> bool(np.allclose(folded.read("Q", 0).mean(axis=1), 0))
    True
    """
    return FoldedWeights(open(model))


def unfolded(weights: AttentionWeights) -> AttentionWeights:
    """The original weights, whether or not they were folded."""
    return weights.inner if isinstance(weights, FoldedWeights) else weights


def through(vectors: np.ndarray, norm: Norm | None) -> np.ndarray:
    """Directions (n, d, m) read after a norm, as directions of the stream before it."""
    if norm is None:
        return vectors
    vectors = vectors * norm.gain[:, None]
    return vectors - vectors.mean(axis=1, keepdims=True) if norm.kind == "layer" else vectors


def written_through(vectors: np.ndarray, norm: Norm | None, centred: bool) -> np.ndarray:
    """Vectors (n, d, m) written before a norm, as they reach the stream; centred if all its readers centre it."""
    if norm is not None:
        vectors = vectors - vectors.mean(axis=1, keepdims=True) if norm.kind == "layer" else vectors
        vectors = vectors * norm.gain[:, None]
    return vectors - vectors.mean(axis=1, keepdims=True) if centred else vectors


class FoldedWeights(WrappedWeights):
    """Weights that read the normalised stream without gain, bias or mean."""

    def __init__(self, weights: AttentionWeights) -> None:
        if weights.folding != "none":
            raise HeadspanError(f"the weights of {weights.reference} are already folded")
        if not weights.foldable:
            raise HeadspanError(f"{weights.reference} cannot be folded: {weights.not_foldable_reason}")
        super().__init__(weights)
        self.not_foldable_reason = "it is already folded"
        self.tied_embedding = False if weights.vocab_size else None
        # Writers may be centred if every reader of their output centres it.
        self.centred = weights.norm_kind == "layer" and weights.norm_place != "output"
        self._centred_tokens = weights.norm_kind == "layer"
        self._mean_token: np.ndarray | None = None

    @property
    def folding(self) -> str:
        return "folded"

    # -- weights ---------------------------------------------------------------------------------------------

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        role = attention_role(role)
        weights = self.inner.read(role, layer)
        with np.errstate(over="ignore", invalid="ignore"):  # reported below, with the head's name
            weights = self.written(layer, weights) if role is Role.O else through(weights, self.inner.norm(layer))
        return check_finite(weights, role, self.heads_in(role, layer), f"{self.reference} after folding")

    def written(self, layer: int, weights: np.ndarray) -> np.ndarray:
        """Vectors (n, d, m) written by heads, as they reach the stream."""
        return written_through(weights, self.inner.output_norm(layer), self.centred)

    def centred_ports(self, role: Role | str) -> np.ndarray:
        role = Role.parse(role)
        if role is Role.O or self.norm_kind != "layer":
            return np.full(len(self.heads(role)), self.centred and role is Role.O)
        always = self.norm_place in ("pre", "sandwich")
        centred = {layer: always or self.inner.norm(layer) is not None for layer in self.layers_with(role)}
        return np.array([centred[head.layer] for head in self.heads(role)], dtype=bool)

    def rotary_queries(self, layer: int) -> np.ndarray | None:
        found = self.inner.rotary_queries(layer)
        return None if found is None else through(found, self.inner.norm(layer))

    def latent_map(self, role: Role | str, layer: int) -> np.ndarray | None:
        found = self.inner.latent_map(role, layer)
        return None if found is None else through(found[None], self.inner.norm(layer))[0]

    def bias(self, role: Role | str, layer: int) -> np.ndarray | None:
        role = attention_role(role)
        if role is Role.O:
            return self._output_bias(layer)
        if role is Role.V and self.value_bias_is_constant:
            return None
        return self._input_bias(role, layer)

    def _input_bias(self, role: Role, layer: int) -> np.ndarray | None:
        """W β + b of Q, K or V, (n, m)."""
        bias, norm = self.inner.bias(role, layer), self.inner.norm(layer)
        if norm is None or norm.bias is None:
            return bias
        shift = np.einsum("hdm,d->hm", self.inner.read(role, layer), norm.bias)
        return shift if bias is None else shift + bias

    def _output_bias(self, layer: int) -> np.ndarray | None:
        """The output bias plus the contribution of the value bias through every head."""
        bias = self.inner.bias(Role.O, layer)
        home = self.layer_of(Role.V, layer)
        values = self._input_bias(Role.V, home) if self.value_bias_is_constant else None
        if values is not None:
            per_head = np.repeat(values, len(self.heads_in(Role.O, layer)) // len(values), axis=0)
            written = np.einsum("hdm,hm->d", self.inner.read(Role.O, layer), per_head)
            bias = written if bias is None else bias + written
        return None if bias is None else self.written(layer, bias[None, :, None])[0, :, 0]

    # -- norms and vocabulary --------------------------------------------------------------------------------

    def norm(self, layer: int) -> Norm | None:
        return _plain(self.inner.norm(layer))

    def output_norm(self, layer: int) -> Norm | None:
        return _plain(self.inner.output_norm(layer))

    def final_norm(self) -> Norm | None:
        return _plain(self.inner.final_norm())

    @property
    def folded_norms(self) -> list[str]:
        return FOLDED_NORMS[self.norm_place]

    def unembedding_rows(self, start: int, stop: int) -> np.ndarray:
        rows = self._scaled_rows(start, stop)
        return rows - self._mean_row().astype(rows.dtype) if self._centred_tokens else rows

    def _scaled_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows with the final gain and, for LayerNorm, centred over d but not yet over tokens."""
        rows, norm = self.inner.unembedding_rows(start, stop), self.inner.final_norm()
        rows = rows if norm is None else rows * norm.gain
        return rows - rows.mean(axis=1, keepdims=True) if self._centred_tokens else rows

    def _mean_row(self) -> np.ndarray:
        """The mean over tokens, from one pass over the vocabulary."""
        mean = self._mean_token
        if mean is None:
            size = self.vocab_size or 0
            pieces = (self._scaled_rows(start, min(start + _ROWS, size)) for start in range(0, size, _ROWS))
            mean = sum((rows.sum(axis=0, dtype=np.float64) for rows in pieces), np.zeros(self.d_model)) / max(size, 1)
            self._mean_token = mean
        return mean

    def unembedding_bias(self) -> np.ndarray | None:
        bias, norm = self.inner.unembedding_bias(), self.inner.final_norm()
        if norm is not None and norm.bias is not None:
            size, beta = self.vocab_size or 0, norm.bias
            pieces = [self.inner.unembedding_rows(s, min(s + _ROWS, size)) @ beta for s in range(0, size, _ROWS)]
            shift = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)
            bias = shift if bias is None else bias + shift
        return bias - bias.mean() if bias is not None and self._centred_tokens else bias


def _plain(norm: Norm | None) -> Norm | None:
    return None if norm is None else Norm(norm.kind, np.ones_like(norm.gain), None, norm.eps)
