"""`AttentionWeights`: the d×m weights of every head of a model, read one layer at a time, with its norms.

The interface is the same for a checkpoint (:mod:`headspan.checkpoint`), for plain arrays (here) and for folded
weights (:mod:`headspan.folding`); nothing to the right of it in the design knows which one it has.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.architectures import NormKind
from headspan.errors import HeadspanError
from headspan.heads import ROLES, Head, HeadRole, HeadTable, Role

if TYPE_CHECKING:
    from headspan.sources.vocabulary import Vocabulary


@dataclass(frozen=True)
class Norm:
    """One normalisation: (centre for "layer",) divide by the root mean square, times gain, plus bias.

    ``gain`` (d,) has the 1 already added where the family stores γ − 1.
    """

    kind: NormKind
    gain: np.ndarray
    bias: np.ndarray | None
    eps: float


class AttentionWeights(ABC):
    """The attention weights of one model. Shapes: d = d_model, m = d_head of the role, n = heads of the role."""

    d_model: int
    n_layers: int  # as the model counts them; layers without attention included
    n_heads: int
    n_kv_heads: int
    layers: tuple[int, ...]  # those with attention, by their number in the model
    head_table: HeadTable
    architecture: str
    reference: str
    norm_kind: str  # "layer", "rms" or "none"
    norm_place: str  # "pre" where folding is exact; else "post", "output", "sandwich", "residual", "partial", "none"
    not_foldable_reason: str | None
    vocab_size: int | None
    tied_embedding: bool | None  # None where there is no unembedding at all
    value_bias_is_constant: bool  # attention rows sum to 1 and values are not clipped
    notes: list[str]

    @property
    def foldable(self) -> bool:
        """True where the norm in front of attention can be moved into the weights exactly."""
        return self.not_foldable_reason is None

    def heads(self, role: Role | str) -> tuple[Head, ...]:
        """The heads of a role in layer order; a shared KV head stands once."""
        return self.head_table.of(Role(role))

    def heads_in(self, role: Role | str, layer: int) -> tuple[Head, ...]:
        """The heads of a role in one layer."""
        self._check_layer(layer)
        heads = self.heads(role)
        count = len(heads) // len(self.layers)
        start = self.layers.index(layer) * count
        return heads[start : start + count]

    def read_head(self, head_role: HeadRole | str) -> np.ndarray:
        """The (d, m) weight of one head, for example of ``"L4H11.O"``."""
        head, role = HeadRole.parse(head_role) if isinstance(head_role, str) else head_role
        self.head_table.find(head, role)
        return self.read(role, head.layer)[head.index]

    @abstractmethod
    def d_head(self, role: Role | str) -> int:
        """Columns of the weights of a role."""

    @abstractmethod
    def read(self, role: Role | str, layer: int) -> np.ndarray:
        """All weights of a role in a layer, (n, d, m): W_Qᵀ, W_Kᵀ, W_Vᵀ or W_O; columns span the subspace."""

    @abstractmethod
    def bias(self, role: Role | str, layer: int) -> np.ndarray | None:
        """(n, m) for Q, K and V, (d,) for O, or None."""

    @abstractmethod
    def storage_dtype(self, role: Role | str, layer: int) -> str:
        """The dtype the weight is stored in, which bounds its accuracy."""

    @abstractmethod
    def tensors(self) -> dict[str, int]:
        """The tensors that hold the heads, with their bytes as stored."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes of all tensors of the model."""

    @abstractmethod
    def norm(self, layer: int) -> Norm | None:
        """The norm between the stream and this layer's attention."""

    @abstractmethod
    def final_norm(self) -> Norm | None:
        """The norm in front of the unembedding."""

    @abstractmethod
    def embedding(self) -> np.ndarray:
        """(vocabulary, d)."""

    @abstractmethod
    def unembedding_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows of the unembedding, for working through a large vocabulary piece by piece."""

    def unembedding(self) -> np.ndarray:
        """(vocabulary, d): one direction of the stream per token."""
        return self.unembedding_rows(0, self.vocab_size or 0)

    @abstractmethod
    def unembedding_bias(self) -> np.ndarray | None:
        """(vocabulary,) or None."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the content."""

    def vocabulary(self) -> Vocabulary | None:
        """The tokens of the model's tokenizer, where there is one."""
        return None

    @property
    def folding(self) -> str:
        return "none"

    @property
    def provenance(self) -> dict[str, Any]:
        """What these weights are and where they come from, as JSON-able values."""
        dtypes = {self.storage_dtype(role, layer) for role in ROLES for layer in self.layers}
        return {
            "reference": self.reference,
            "architecture": self.architecture,
            "fingerprint": self.fingerprint(),
            "folding": self.folding,
            "storage_dtypes": sorted(dtypes),
            "left_out_layers": sorted(set(range(self.n_layers)) - set(self.layers)),
        }

    @property
    def reopenable(self) -> bool:
        """True where another process can open the same weights by their reference."""
        return False

    def check_unchanged(self) -> None:  # noqa: B027 - arrays do not change behind our back
        """Raise when a file behind these weights was changed or deleted since it was opened."""

    def close(self) -> None:  # noqa: B027 - arrays have nothing to close
        """Let go of open files."""

    def __enter__(self) -> AttentionWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_layer(self, layer: int) -> None:
        if layer not in self.layers:
            raise HeadspanError(
                f"{self.reference} has no attention weights in layer {layer}: {len(self.layers)} of its layers have, "
                f"from {self.layers[0]} to {self.layers[-1]}"
            )


def open(ref: Any) -> AttentionWeights:
    """Open a model's attention weights, lazily.

    ``ref`` is a directory in Hugging Face layout, a file (.safetensors, .bin, .pth, .gguf), a hub id with optional
    ``@revision``, ``"demo"``, a live torch model, or four arrays ``{"Q": …, "K": …, "V": …, "O": …}`` of shape
    (layer, head, d_model, d_head); K and V may have fewer heads than Q and O. See :class:`ArrayWeights`.

    >>> rng = np.random.default_rng(0)
    >>> weights = open({role: rng.normal(size=(2, 4, 16, 3)) for role in "QKVO"})
    >>> weights.read("O", 1).shape
    (4, 16, 3)
    """
    if isinstance(ref, AttentionWeights):
        return ref
    if isinstance(ref, Mapping):
        return ArrayWeights(ref)
    if isinstance(ref, (list, tuple)) and len(ref) == 4:
        return ArrayWeights(dict(zip("QKVO", ref, strict=True)))
    from headspan.checkpoint import CheckpointWeights
    from headspan.sources import open_source
    from headspan.sources.base import TensorSource

    return CheckpointWeights(ref if isinstance(ref, TensorSource) else open_source(ref))


def check_finite(weights: np.ndarray, role: Role, heads: Sequence[Head], where: str) -> np.ndarray:
    """The (n, d, m) weights unchanged, or an error that names the first head with NaN or infinity."""
    # A sum is finite only if every term is, and costs no temporary of the size of the weights.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = ~np.isfinite(weights.sum(axis=(1, 2), dtype=np.float64))
    for index in map(int, np.flatnonzero(suspicious)):
        bad = int(np.count_nonzero(~np.isfinite(weights[index])))
        if bad:
            raise HeadspanError(
                f"the weight {role} of head {heads[index]} (layer {heads[index].layer}) in {where} holds {bad} NaN or "
                "infinite numbers, so it spans nothing meaningful"
            )
    return weights


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
        gain, gain_bias : optional (layer, d_model), of the norm in front of attention; norm: "layer" or "rms";
            eps: its epsilon.
        final_gain, final_bias : optional (d_model,). unembedding, embedding : optional (vocabulary, d_model).
    """

    architecture = "arrays"
    reference = "arrays"
    value_bias_is_constant = True

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        known = {*map(str, ROLES), *_BIASES, *_VECTORS, "norm", "eps"}
        names = {str(key): key for key in arrays}
        missing = [str(role) for role in ROLES if str(role) not in names]
        if missing or not set(names) <= known:
            raise HeadspanError(
                f"four arrays Q, K, V and O are needed, got {', '.join(names) or 'nothing'}"
                f" (further names understood: {', '.join(sorted(known - set('QKVO')))})"
            )
        self._arrays = {
            name: np.asarray(arrays[key]) for name, key in names.items() if name not in ("norm", "eps")
        }
        self._norm = arrays.get("norm")
        self._eps = float(arrays.get("eps", 1e-5))
        self._check_shapes()
        self.norm_kind = self._check_norm()
        self.norm_place = "pre" if self._norm else "none"
        self.not_foldable_reason = (
            None if self._norm else "the arrays come without a norm, so there is nothing to fold"
        )
        unembedding = self._arrays.get("unembedding")
        self.vocab_size = None if unembedding is None else len(unembedding)
        self.tied_embedding = None if unembedding is None else False
        self.notes = []

    def _check_shapes(self) -> None:
        shapes = {role: self._arrays[role.value].shape for role in ROLES}
        for role, shape in shapes.items():
            array = self._arrays[role.value]
            if len(shape) != 4 or 0 in shape or array.dtype.kind not in "fiuV":
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
        self.head_table = HeadTable.regular(self.layers, n_heads, n_kv)
        vocab = len(self._arrays["unembedding"]) if "unembedding" in self._arrays else 0
        others = {
            **{name: (n_layers, expected[r][1], expected[r][3]) for name, r in _BIASES.items() if r is not Role.O},
            "bO": (n_layers, d_model), "gain": (n_layers, d_model), "gain_bias": (n_layers, d_model),
            "final_gain": (d_model,), "final_bias": (d_model,), "unembedding_bias": (vocab,),
            "unembedding": (vocab, d_model),
        }  # fmt: skip
        for name, shape in others.items():
            if name in self._arrays and self._arrays[name].shape != shape:
                raise HeadspanError(f"{name} has shape {self._arrays[name].shape}, expected {shape}")

    def _check_norm(self) -> str:
        if self._norm not in (None, "layer", "rms"):
            raise HeadspanError(f"norm must be 'layer' or 'rms', not {self._norm!r}")
        if self._norm is None and any(name in self._arrays for name in ("gain", "gain_bias", "final_gain")):
            raise HeadspanError("gains were given without saying which norm they belong to: add norm='layer' or 'rms'")
        return self._norm or "none"

    def d_head(self, role: Role | str) -> int:
        return self._arrays[Role(role).value].shape[3]

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        role = Role(role)
        self._check_layer(layer)
        weights = _as_float(self._arrays[role.value][layer])
        return check_finite(weights, role, self.heads_in(role, layer), "the arrays")

    def bias(self, role: Role | str, layer: int) -> np.ndarray | None:
        self._check_layer(layer)
        biases = self._arrays.get(f"b{Role(role)}")
        return None if biases is None else _as_float(biases[layer])

    def storage_dtype(self, role: Role | str, layer: int) -> str:
        return self._arrays[Role(role).value].dtype.name

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
        return self._vocabulary_matrix("unembedding")[start:stop]

    def unembedding_bias(self) -> np.ndarray | None:
        bias = self._arrays.get("unembedding_bias")
        return None if bias is None else _as_float(bias)

    def _vocabulary_matrix(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            raise HeadspanError(
                f"these weights come without {name}: add it to the arrays, (vocabulary, {self.d_model})"
            )
        return _as_float(self._arrays[name])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self._norm} {self._eps}".encode())
        for name, array in sorted(self._arrays.items()):
            digest.update(f"{name} {array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()


def _as_float(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.float64 if array.dtype == np.float64 else np.float32)
