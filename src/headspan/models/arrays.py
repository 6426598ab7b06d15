"""Attention weights given as plain arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from headspan.checkpoints.dtypes import exact_array
from headspan.checkpoints.mapping import hash_tensor
from headspan.checkpoints.untrusted import changed
from headspan.models.weights import AttentionWeights, Norm, attention_role, check_finite, check_rows
from headspan.results.identity import IDENTITY_PREFIX
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Role
from headspan.vocabulary.ports import PortTable

_BIASES = {f"b{role}": role for role in ROLES}
_VECTORS = ("gain", "gain_bias", "final_gain", "final_bias", "unembedding", "unembedding_bias", "embedding")


class ArrayWeights(AttentionWeights):
    """Weights given as plain arrays.

    Parameters
    ----------
    arrays : mapping with
        Q, K, V, O : (layer, head, d_model, d_head). K and V may have fewer heads (GQA); Q and K share one d_head,
            V and O another.
        bQ, bK, bV : optional biases (layer, head, d_head); bO: (layer, d_model).
        gain, gain_bias : optional (layer, d_model), of the norm before attention; norm: "layer" or "rms";
            eps: its epsilon.
        final_gain, final_bias : optional (d_model,). unembedding, embedding : optional (vocabulary, d_model).
    """

    architecture = "arrays"
    reference = "arrays"
    value_bias_is_constant = True

    def __init__(self, arrays: Mapping[Any, Any]) -> None:
        known = {*map(str, ROLES), *_BIASES, *_VECTORS, "norm", "eps"}
        names = {str(key): key for key in arrays}
        missing = [str(role) for role in ROLES if str(role) not in names]
        if missing or not set(names) <= known:
            raise HeadspanError(
                f"four arrays Q, K, V and O are needed, got {', '.join(names) or 'nothing'}"
                f" (other accepted names: {', '.join(sorted(known - set('QKVO')))})"
            )
        self._arrays = {n: exact_array(arrays[key], n) for n, key in names.items() if n not in ("norm", "eps")}
        self._norm = arrays.get("norm")
        self._eps = _epsilon(arrays.get("eps", 1e-5))
        self._check_shapes()
        self.norm_kind = self._check_norm()
        self.norm_place = "pre" if self._norm else "none"
        self.not_foldable_reason = None if self._norm else "the arrays have no norm, so there is nothing to fold"
        unembedding = self._arrays.get("unembedding")
        self.vocab_size = None if unembedding is None else len(unembedding)
        self.tied_embedding = None if unembedding is None else False
        self.notes = []
        self._last: str | None = None  # the most recently computed hash

    def _check_shapes(self) -> None:
        shapes = {role: self._arrays[role.value].shape for role in ROLES}
        for role, shape in shapes.items():
            array = self._arrays[role.value]
            if len(shape) != 4 or 0 in shape:
                raise HeadspanError(
                    f"{role} must be numbers of shape (layer, head, d_model, d_head), all at least 1: "
                    f"got {shape} of {array.dtype}"
                )
        (n_layers, n_heads, d_model, qk), (_, n_kv, _, vo) = shapes[Role.Q], shapes[Role.V]
        expected = {
            Role.Q: (n_layers, n_heads, d_model, qk), Role.K: (n_layers, n_kv, d_model, qk),
            Role.V: (n_layers, n_kv, d_model, vo), Role.O: (n_layers, n_heads, d_model, vo),
        }  # fmt: skip
        if shapes != expected or n_heads % n_kv:
            raise HeadspanError(
                "Q, K, V and O do not fit together: " + ", ".join(f"{r} {s}" for r, s in shapes.items())
                + "; they need the same layers and d_model, Q and O the same heads, K and V the same heads dividing "
                "those of Q, Q and K the same d_head, V and O the same d_head"
            )  # fmt: skip
        self.d_model, self.n_layers, self.n_heads, self.n_kv_heads = d_model, n_layers, n_heads, n_kv
        self.layers = tuple(range(n_layers))
        self.ports = PortTable.regular(self.layers, n_heads, n_kv)
        vocab = len(np.atleast_1d(self._arrays.get("unembedding", ())))
        others = {
            **{name: (n_layers, expected[r][1], expected[r][3]) for name, r in _BIASES.items() if r is not Role.O},
            "bO": (n_layers, d_model), "gain": (n_layers, d_model), "gain_bias": (n_layers, d_model),
            "final_gain": (d_model,), "final_bias": (d_model,), "unembedding_bias": (vocab,),
            "unembedding": (vocab, d_model),
        }  # fmt: skip
        embedding = self._arrays.get("embedding")
        if embedding is not None and (embedding.ndim != 2 or embedding.shape[1] != d_model):
            raise HeadspanError(f"embedding has shape {embedding.shape}, expected (vocabulary, {d_model})")
        for name, shape in others.items():
            if name in self._arrays and self._arrays[name].shape != shape:
                raise HeadspanError(f"{name} has shape {self._arrays[name].shape}, expected {shape}")

    def _check_norm(self) -> str:
        if not (self._norm is None or (isinstance(self._norm, str) and self._norm in ("layer", "rms"))):
            raise HeadspanError(f"norm must be 'layer' or 'rms', not {self._norm!r}")
        if self._norm is None and any(name in self._arrays for name in ("gain", "gain_bias", "final_gain")):
            raise HeadspanError("gains were given without the kind of norm: add norm='layer' or norm='rms'")
        return self._norm or "none"

    def d_head(self, role: Role | str) -> int:
        return self._arrays[attention_role(role).value].shape[3]

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        role = attention_role(role)
        self._check_layer(layer)
        weights = _as_float(self._arrays[role.value][layer])
        return check_finite(weights, role, self.heads_in(role, layer), "the arrays")

    def bias(self, role: Role | str, layer: int) -> np.ndarray | None:
        self._check_layer(layer)
        biases = self._arrays.get(f"b{attention_role(role)}")
        return None if biases is None else _as_float(biases[layer])

    def storage_dtype(self, role: Role | str, layer: int) -> str:
        self._check_layer(layer)
        return self._arrays[attention_role(role).value].dtype.name

    def tensors(self) -> dict[str, int]:
        return {role.value: self._arrays[role.value].nbytes for role in ROLES}

    def total_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def norm(self, layer: int) -> Norm | None:
        self._check_layer(layer)
        pick = {key: value[layer] for key, value in self._arrays.items() if key in ("gain", "gain_bias")}
        return self._make_norm(pick.get("gain"), pick.get("gain_bias"))

    def final_norm(self) -> Norm | None:
        return self._make_norm(self._arrays.get("final_gain"), self._arrays.get("final_bias"))

    def _make_norm(self, gain: np.ndarray | None, bias: np.ndarray | None) -> Norm | None:
        if self._norm is None:
            return None
        gain = np.ones(self.d_model, dtype=np.float32) if gain is None else _as_float(gain)
        return Norm(self._norm, gain, None if bias is None else _as_float(bias), self._eps)

    def embedding(self) -> np.ndarray:
        return self._vocabulary_matrix("embedding")

    def unembedding_rows(self, start: int, stop: int) -> np.ndarray:
        rows = self._vocabulary_matrix("unembedding")
        return rows[check_rows(start, stop)]

    def unembedding_bias(self) -> np.ndarray | None:
        bias = self._arrays.get("unembedding_bias")
        return None if bias is None else _as_float(bias)

    def _vocabulary_matrix(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            raise HeadspanError(
                f"these weights have no {name}: add it to the arrays with shape (vocabulary, {self.d_model})"
            )
        return _as_float(self._arrays[name])

    def fingerprint(self) -> str:
        settings = f"{self._norm} {self._eps}"
        self._last = self._hash(settings, [name for name in self._arrays if name not in ("embedding", "unembedding")])
        return IDENTITY_PREFIX + self._last

    def attention_hash(self) -> str:
        return self._hash("", map(str, ROLES))

    def _hash(self, settings: str, names: Iterable[str]) -> str:
        digest = hashlib.sha256(settings.encode())
        for name in sorted(names):
            digest.update(name.encode() + hash_tensor(self._arrays[name], name))
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        before = self._last
        if before is not None and self.fingerprint() != IDENTITY_PREFIX + before:
            raise changed(self.reference)


def _epsilon(value: Any) -> float:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 0 <= value < 1:
        raise HeadspanError(f"eps must be a small number, not {repr(value)[:80]}")
    return float(value)


def _as_float(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.float64 if array.dtype == np.float64 else np.float32)
