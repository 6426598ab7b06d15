"""The same weights with the norms folded in, worked out layer by layer as they are read.

A pre-norm block computes W·(γ ⊙ z + β) + b from the normalised stream z. Folding moves γ and β into the weights:

* LayerNorm: W_in' = W_in·diag(γ)·C_d with bias W_in·β + b for Q, K and V, and W_O' = C_d·W_O, because a stream that
  every reader centres may be centred by its writers; C_d = I − 11ᵀ/d. The final norm goes into the unembedding the
  same way, which is then centred over tokens (a constant added to all logits changes no probability).
* RMSNorm: W_in' = W_in·diag(γ), the unembedding likewise; nothing is centred.
* The value bias becomes part of the output bias, since attention rows sum to 1 (kept apart where they do not).

The embedding is left as it is: every reader of the stream centres what it writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headspan.errors import HeadspanError
from headspan.heads import Role
from headspan.models.weights import AttentionWeights, Norm, attention_role, check_finite, open

if TYPE_CHECKING:
    from headspan.sources.vocabulary import Vocabulary

_ROWS = 8192  # of the unembedding at a time


def fold(weights: AttentionWeights | str) -> FoldedWeights:
    """Weights (or a reference to a model) with the norms folded in, or an error that says why this is not possible.

    >>> rng = np.random.default_rng(0)
    >>> arrays = {role: rng.normal(size=(1, 2, 8, 3)) for role in "QKVO"}
    >>> folded = fold(open({**arrays, "norm": "layer", "gain": np.full((1, 8), 2.0)}))
    >>> bool(np.allclose(folded.read("Q", 0).mean(axis=1), 0))
    True
    """
    return FoldedWeights(open(weights))


class FoldedWeights(AttentionWeights):
    """Weights that read the normalised stream without gain, bias or mean."""

    def __init__(self, weights: AttentionWeights) -> None:
        if weights.folding != "none":
            raise HeadspanError(f"the weights of {weights.reference} are folded already: folding them twice is wrong")
        if not weights.foldable:
            raise HeadspanError(f"{weights.reference} cannot be folded: {weights.not_foldable_reason}")
        self.unfolded = weights
        self.reference, self.architecture = weights.reference, weights.architecture
        self.d_model, self.n_layers, self.layers = weights.d_model, weights.n_layers, weights.layers
        self.n_heads, self.n_kv_heads, self.ports = weights.n_heads, weights.n_kv_heads, weights.ports
        self.norm_kind, self.norm_place = weights.norm_kind, weights.norm_place
        self.not_foldable_reason = "it is folded already"
        self.vocab_size, self.tied_embedding = weights.vocab_size, False if weights.vocab_size else None
        self.value_bias_is_constant = weights.value_bias_is_constant
        self.notes = [*weights.notes]
        self._centred = weights.norm_kind == "layer"
        self._mean_token: np.ndarray | None = None

    @property
    def folding(self) -> str:
        return "folded"

    # -- weights ---------------------------------------------------------------------------------------------

    def d_head(self, role: Role | str) -> int:
        return self.unfolded.d_head(role)

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        role = attention_role(role)
        weights = self.unfolded.read(role, layer)
        with np.errstate(over="ignore", invalid="ignore"):  # told below, with the head's name
            if role is not Role.O:
                weights = weights * self._norm_of(layer).gain[:, None]
            if self._centred:
                weights = weights - weights.mean(axis=1, keepdims=True)
        return check_finite(weights, role, self.heads_in(role, layer), f"{self.reference} after folding")

    def bias(self, role: Role | str, layer: int) -> np.ndarray | None:
        role = attention_role(role)
        if role is Role.O:
            return self._output_bias(layer)
        if role is Role.V and self.value_bias_is_constant:
            return None
        return self._input_bias(role, layer)

    def _input_bias(self, role: Role, layer: int) -> np.ndarray | None:
        """W β + b of Q, K or V, (n, m)."""
        bias, beta = self.unfolded.bias(role, layer), self._norm_of(layer).bias
        if beta is None:
            return bias
        shift = np.einsum("hdm,d->hm", self.unfolded.read(role, layer), beta)
        return shift if bias is None else shift + bias

    def _output_bias(self, layer: int) -> np.ndarray | None:
        """The output bias with what a constant value vector adds through every head."""
        bias = self.unfolded.bias(Role.O, layer)
        values = self._input_bias(Role.V, layer) if self.value_bias_is_constant else None
        if values is not None:
            per_head = np.repeat(values, self.n_heads // self.n_kv_heads, axis=0)
            written = np.einsum("hdm,hm->d", self.unfolded.read(Role.O, layer), per_head)
            bias = written if bias is None else bias + written
        return bias - bias.mean() if bias is not None and self._centred else bias

    def _norm_of(self, layer: int) -> Norm:
        norm = self.unfolded.norm(layer)
        if norm is None:
            raise HeadspanError(f"layer {layer} of {self.reference} has no norm to fold")
        return norm

    def storage_dtype(self, role: Role | str, layer: int) -> str:
        return self.unfolded.storage_dtype(role, layer)

    def tensors(self) -> dict[str, int]:
        return self.unfolded.tensors()

    def total_bytes(self) -> int:
        return self.unfolded.total_bytes()

    # -- norms and vocabulary --------------------------------------------------------------------------------

    def norm(self, layer: int) -> Norm | None:
        return _plain(self._norm_of(layer))

    def final_norm(self) -> Norm | None:
        norm = self.unfolded.final_norm()
        return None if norm is None else _plain(norm)

    def embedding(self) -> np.ndarray:
        return self.unfolded.embedding()

    def unembedding_rows(self, start: int, stop: int) -> np.ndarray:
        rows = self._scaled_rows(start, stop)
        return rows - self._mean_row().astype(rows.dtype) if self._centred else rows

    def _scaled_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows with the final gain, and for LayerNorm centred over d, not yet over tokens."""
        rows, norm = self.unfolded.unembedding_rows(start, stop), self.unfolded.final_norm()
        rows = rows if norm is None else rows * norm.gain
        return rows - rows.mean(axis=1, keepdims=True) if self._centred else rows

    def _mean_row(self) -> np.ndarray:
        """The mean over tokens, which takes one pass over the vocabulary."""
        mean = self._mean_token
        if mean is None:
            size = self.vocab_size or 0
            pieces = (self._scaled_rows(start, min(start + _ROWS, size)) for start in range(0, size, _ROWS))
            mean = sum((rows.sum(axis=0, dtype=np.float64) for rows in pieces), np.zeros(self.d_model)) / max(size, 1)
            self._mean_token = mean
        return mean

    def unembedding_bias(self) -> np.ndarray | None:
        bias, norm = self.unfolded.unembedding_bias(), self.unfolded.final_norm()
        if norm is not None and norm.bias is not None:
            size, beta = self.vocab_size or 0, norm.bias
            pieces = [self.unfolded.unembedding_rows(s, min(s + _ROWS, size)) @ beta for s in range(0, size, _ROWS)]
            shift = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)
            bias = shift if bias is None else bias + shift
        return bias - bias.mean() if bias is not None and self._centred else bias

    def vocabulary(self) -> Vocabulary | None:
        return self.unfolded.vocabulary()

    def fingerprint(self) -> str:
        return self.unfolded.fingerprint()

    def attention_hash(self) -> str:
        return self.unfolded.attention_hash()

    @property
    def reopenable(self) -> bool:
        return self.unfolded.reopenable

    def check_unchanged(self) -> None:
        self.unfolded.check_unchanged()

    def close(self) -> None:
        self.unfolded.close()


def _plain(norm: Norm) -> Norm:
    return Norm(norm.kind, np.ones_like(norm.gain), None, norm.eps)
