"""Base class for weights that wrap others: everything not overridden comes from the wrapped weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headspan.models.weights import AttentionWeights, Norm
from headspan.vocabulary.heads import Role

if TYPE_CHECKING:
    from headspan.checkpoints.tokenizer import Vocabulary


class WrappedWeights(AttentionWeights):
    """The weights ``inner``, unchanged."""

    def __init__(self, inner: AttentionWeights) -> None:
        self.inner = inner
        self.reference, self.architecture = inner.reference, inner.architecture
        self.d_model, self.n_layers, self.layers = inner.d_model, inner.n_layers, inner.layers
        self.n_heads, self.n_kv_heads, self.ports = inner.n_heads, inner.n_kv_heads, inner.ports
        self.norm_kind, self.norm_place = inner.norm_kind, inner.norm_place
        self.not_foldable_reason = inner.not_foldable_reason
        self.vocab_size, self.tied_embedding = inner.vocab_size, inner.tied_embedding
        self.value_bias_is_constant = inner.value_bias_is_constant
        self.notes = [*inner.notes]

    # -- weights ---------------------------------------------------------------------------------------------

    def d_head(self, role: Role | str) -> int:
        return self.inner.d_head(role)

    def widths(self, role: Role | str) -> np.ndarray:
        return self.inner.widths(role)

    def centred_ports(self, role: Role | str) -> np.ndarray:
        return self.inner.centred_ports(role)

    def without_partner(self, role: Role | str) -> list[str]:
        return self.inner.without_partner(role)

    def without_variance(self) -> list[str]:
        return self.inner.without_variance()

    @property
    def held_bytes(self) -> int:
        return self.inner.held_bytes

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        return self.inner.read(role, layer)

    def observed(self, role: Role | str, layer: int) -> np.ndarray:
        return self.inner.observed(role, layer)

    def rotary_queries(self, layer: int) -> np.ndarray | None:
        return self.inner.rotary_queries(layer)

    def latent_map(self, role: Role | str, layer: int) -> np.ndarray | None:
        return self.inner.latent_map(role, layer)

    def bias(self, role: Role | str, layer: int) -> np.ndarray | None:
        return self.inner.bias(role, layer)

    def storage_dtype(self, role: Role | str, layer: int) -> str:
        return self.inner.storage_dtype(role, layer)

    def tensors(self) -> dict[str, int]:
        return self.inner.tensors()

    def total_bytes(self) -> int:
        return self.inner.total_bytes()

    # -- norms and vocabulary --------------------------------------------------------------------------------

    def norm(self, layer: int) -> Norm | None:
        return self.inner.norm(layer)

    def output_norm(self, layer: int) -> Norm | None:
        return self.inner.output_norm(layer)

    def final_norm(self) -> Norm | None:
        return self.inner.final_norm()

    @property
    def folding(self) -> str:
        return self.inner.folding

    @property
    def folded_norms(self) -> list[str]:
        return self.inner.folded_norms

    def embedding(self) -> np.ndarray:
        return self.inner.embedding()

    def embedding_rows(self, start: int, stop: int) -> np.ndarray:
        return self.inner.embedding_rows(start, stop)

    def unembedding_rows(self, start: int, stop: int) -> np.ndarray:
        return self.inner.unembedding_rows(start, stop)

    def unembedding_bias(self) -> np.ndarray | None:
        return self.inner.unembedding_bias()

    def vocabulary(self) -> Vocabulary | None:
        return self.inner.vocabulary()

    # -- identity --------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def attention_hash(self) -> str:
        return self.inner.attention_hash()

    @property
    def reopenable(self) -> bool:
        return self.inner.reopenable

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def close(self) -> None:
        self.inner.close()
