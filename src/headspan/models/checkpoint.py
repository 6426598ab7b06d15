"""The attention weights of an opened checkpoint, read one tensor at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from headspan.checkpoints.base import TensorSource
from headspan.checkpoints.untrusted import config_part
from headspan.models.checkpoint_notes import checkpoint_notes, unembedding_differs
from headspan.models.families.entry import WHY_NOT_FOLDABLE, Config
from headspan.models.families.latent_attention import LatentFactors, LatentReader, latent_ports
from headspan.models.families.tensor_map import TensorMap, bias_of, weight_of
from headspan.models.weights import AttentionWeights, Norm, attention_role, check_finite, check_rows
from headspan.results.identity import IDENTITY_PREFIX
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Head, Role
from headspan.vocabulary.ports import PortTable

if TYPE_CHECKING:
    from headspan.checkpoints.tokenizer import Vocabulary

_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps", "eps")
_PLACES = {Role.Q: 0, Role.K: 1, Role.V: 2}  # their order in a fused tensor


class CheckpointWeights(AttentionWeights):
    """Attention weights of a `TensorSource`."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.reference = source.reference
        self._map = TensorMap(source)
        self._entry = self._map.entry
        self.architecture = self._map.architecture
        self.d_model, self.n_layers = self._map.d_model, self._map.n_layers
        self.layers = self._map.layers
        self._sizes = {layer: self._map.sizes[layer] for layer in self.layers}
        self.n_heads = max(size.n_heads for size in self._sizes.values())
        self.n_kv_heads = max(size.n_kv_heads for size in self._sizes.values())
        self._latents = {layer: self._map.latents[layer] for layer in self.layers if self._map.latents}
        self._latent = LatentReader(self._latents, self._in_layer) if self._latents else None
        self.ports = latent_ports(self._latents) if self._latents else self._port_table()
        self.norm_place = self._entry.norm_place
        self.norm_kind = "none" if self.norm_place == "none" else self._entry.norm_kind
        self.not_foldable_reason = WHY_NOT_FOLDABLE.get(self._entry.norm_place)
        self.value_bias_is_constant = self._has_constant_value_bias()
        self.tied_embedding = False if unembedding_differs(self._map) else self._map.tied
        self.vocab_size = self._find_vocab_size()
        self.notes = [*source.notes, *self._map.notes, *checkpoint_notes(self, self._map)]
        self._kept: tuple[str, np.ndarray] | None = None  # the last tensor read: a fused one serves three roles

    @property
    def even(self) -> bool:
        """True if all layers have the same number of heads, all of the same size."""
        return self._map.even

    def _port_table(self) -> PortTable:
        counts = {layer: (size.n_heads, size.n_kv_heads) for layer, size in self._sizes.items()}
        return PortTable.of_counts(counts, self._map.kv_layers)

    # -- weights ---------------------------------------------------------------------------------------------

    def _has_constant_value_bias(self) -> bool:
        entry, shape = self._entry, self._map.latent
        module = shape and shape.latent_module(Role.V)
        scaled = module and bias_of(self._map.in_layer(self.layers[0], module)) in self._map.names
        changed = entry.sinks or entry.gated or entry.own_gate or entry.value_norm
        return not (changed or _clips(self._map.config) or scaled)

    def d_head(self, role: Role | str) -> int:
        role = attention_role(role)
        return max(size.width(role) for size in (self._latents or self._sizes).values())

    def widths(self, role: Role | str) -> np.ndarray:
        role = attention_role(role)
        return np.array([self._width(role, head) for head in self.heads(role)], dtype=np.int64)

    def _width(self, role: Role, head: Head) -> int:
        shape = self._latents.get(head.layer)
        if shape is None or role is not Role.K:
            return (shape or self._sizes[head.layer]).width(role)
        return shape.rotary if head.kind == "KR" else shape.free

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        role = attention_role(role)
        self._check_layer(layer)
        if self._latent is not None:
            found = _widened(self._latent.read(role, layer), self.d_head(role))
            return check_finite(found, role, self.heads_in(role, layer), self.reference)
        if not self.heads_in(role, layer):  # keys and values borrowed from an earlier layer are listed there
            return np.zeros((0, self.d_model, self.d_head(role)), dtype=np.float32)
        name = self._map.weight(role, layer)
        stored = self._read_once(name) if self._entry.fused and role is not Role.O else self.source.read(name)
        if self._entry.layout == "heads":
            weights = stored.transpose(0, 2, 1) if role is Role.O else stored
        else:
            stored = stored.T if self._entry.transposed else stored
            if role is Role.O:
                weights = stored.reshape(self.d_model, self._sizes[layer].n_heads, -1).transpose(1, 0, 2)
            else:
                weights = self._split(role, layer, stored).transpose(0, 2, 1)
        weights = _widened(weights, self.d_head(role)).view()  # a view, since the stored tensor may be cached
        weights.flags.writeable = False
        return check_finite(weights, role, self.heads_in(role, layer), self.reference)

    def rotary_queries(self, layer: int) -> np.ndarray | None:
        self._check_layer(layer)
        return None if self._latent is None else self._latent.rotary_queries(layer)

    def latent_map(self, role: Role | str, layer: int) -> np.ndarray | None:
        self._check_layer(layer)
        role = attention_role(role)
        return None if self._latent is None or role is Role.O else self._latent.latent_map(role, layer)

    def latent_factors(self, role: Role | str, layer: int) -> LatentFactors | None:
        self._check_layer(layer)
        role = attention_role(role)
        if self._latent is None or role is Role.O:
            return None
        return self._latent.factors(role, layer, self._dtype_in_layer)

    def _dtype_in_layer(self, layer: int, module: str) -> str:
        return self.source.dtype(weight_of(self._map.in_layer(layer, module)))

    def _in_layer(self, layer: int, module: str) -> np.ndarray:
        """A weight by the name of its module in the layer; cached, since keys and values both read the largest one."""
        name = weight_of(self._map.in_layer(layer, module))
        return self._read_once(name) if module.endswith("kv_b_proj") else self.source.read(name)

    def _split(self, role: Role, layer: int, stored: np.ndarray) -> np.ndarray:
        """The rows of one role, (n, m, …), from a tensor that may hold all three."""
        size, rest = self._sizes[layer], stored.shape[1:]
        n, n_kv, m = size.n_heads, size.n_kv_heads, size.width(role)
        if self._entry.layout == "separate":
            per_head = stored.reshape(size.heads(role), -1, *rest)
            return per_head[:, :m]  # the rows of a gate come after the queries
        if self._entry.layout == "concatenated":
            start = sum(size.heads(r) * size.width(r) for r in (Role.Q, Role.K, Role.V)[: _PLACES[role]])
            return stored[start : start + size.heads(role) * m].reshape(size.heads(role), m, *rest)
        if self._entry.layout == "quarters":
            parts = stored.reshape(4, 3, n // 4, m, *rest)
            return parts[:, {Role.Q: 0, Role.V: 1, Role.K: 2}[role]].reshape(n, m, *rest)
        per_group = n // n_kv
        groups = stored.reshape(n_kv, per_group + 2, m, *rest)
        if role is Role.Q:
            return groups[:, :per_group].reshape(n, m, *rest)
        return groups[:, per_group if role is Role.K else per_group + 1]

    def port_rows(self, role: Role | str, layer: int) -> np.ndarray:
        """The outputs of the module that holds Q, K or V of a layer that belong to each head, (n, m)."""
        role = Role.parse(role)
        return self._split(role, layer, np.arange(self._map.rows(role, layer)))

    def _read_once(self, name: str) -> np.ndarray:
        if self._kept is None or self._kept[0] != name:
            self._kept = None  # release the old tensor before reading the next
            self._kept = (name, self.source.read(name))
        return self._kept[1]

    def bias(self, role: Role | str, layer: int) -> np.ndarray | None:
        role = attention_role(role)
        self._check_layer(layer)
        if self._latent is not None and role is not Role.O:
            found = self._latent.bias(role, layer, self._bias_in_layer)
            return None if found is None else _widened(found, self.d_head(role))
        name = self._map.bias(role, layer)
        if name is None or not self.heads_in(role, layer):
            return None
        if role is Role.O:
            return self._vector(name, self.d_model)
        if self._entry.layout == "heads":
            return self._finite(name, (len(self.heads_in(role, layer)), self.d_head(role)))
        found = self._split(role, layer, self._vector(name, self._map.rows(role, layer)))
        return _widened(found, self.d_head(role))

    def _bias_in_layer(self, layer: int, module: str) -> np.ndarray | None:
        name = bias_of(self._map.in_layer(layer, module))
        if name not in self._map.names:
            return None
        return self._vector(name, self._map.shape(weight_of(self._map.in_layer(layer, module)))[0])

    def storage_dtype(self, role: Role | str, layer: int) -> str:
        self._check_layer(layer)
        return self.source.dtype(self._map.weight(attention_role(role), layer))

    def tensors(self) -> dict[str, int]:
        names = dict.fromkeys(n for layer in self.layers for role in ROLES for n in self._map.tensors(role, layer))
        return {name: self.source.nbytes(name) for name in names}

    def total_bytes(self) -> int:
        return sum(self.source.nbytes(name) for name in self._map.names)

    def _vector(self, name: str, length: int) -> np.ndarray:
        return self._finite(name, (length,))

    def _finite(self, name: str, expected: tuple[int, ...]) -> np.ndarray:
        """A small tensor, checked to have this shape and finite numbers."""
        if self._map.shape(name) != expected:
            raise HeadspanError(f"{name} of {self.reference} has shape {self._map.shape(name)}, expected {expected}")
        tensor = self.source.read(name)
        if not np.isfinite(tensor).all():
            raise HeadspanError(f"{name} of {self.reference} contains NaN or infinite numbers")
        return tensor

    # -- norms -----------------------------------------------------------------------------------------------

    def norm(self, layer: int) -> Norm | None:
        self._check_layer(layer)
        return self._read_norm([self._map.in_layer(layer, module) for module in self._entry.norm])

    def output_norm(self, layer: int) -> Norm | None:
        self._check_layer(layer)
        modules = [self._map.in_layer(layer, module) for module in self._entry.output_norm]
        return self._read_norm(modules, self._eps("post_norm_eps"))

    def final_norm(self) -> Norm | None:
        module = self._entry.final_norm
        plain = self._entry.plain_final_norm
        return self._read_norm([] if module is None else [self._map.in_body(module)], plain=plain)

    def _read_norm(self, modules: list[str], eps: float | None = None, plain: bool = False) -> Norm | None:
        if not modules:
            return None
        eps = self._eps() if eps is None else eps
        if self._entry.weightless_norm:
            return Norm(self._entry.norm_kind, np.ones(self.d_model, dtype=np.float32), None, eps)
        if self.norm_place == "partial" and weight_of(modules[0]) not in self._map.names:
            return None
        module = self._map.first_present(modules)
        gain = self._vector(weight_of(module), self.d_model)
        if self._entry.one_plus and not plain and not self._map.config.get("_gguf"):  # GGUF files hold the sum
            gain = gain + 1
        has_bias = bias_of(module) in self._map.names
        return Norm(self._entry.norm_kind, gain, self._vector(bias_of(module), self.d_model) if has_bias else None, eps)

    def _eps(self, *first: str) -> float:
        """The epsilon of a norm, from the first of these keys in the config or from a common key."""
        if self._entry.eps is not None:
            return self._entry.eps
        key = next((key for key in (*first, *_EPS) if key in self._map.config), None)
        value = 1e-5 if key is None else self._map.config[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise HeadspanError(
                f"the config of {self.reference} has {key} = {repr(value)[:80]}: a small number is needed"
            )
        return float(value)

    # -- vocabulary ------------------------------------------------------------------------------------------

    def _find_vocab_size(self) -> int | None:
        if self._map.unembedding is not None:
            shape = self._map.shape(self._map.unembedding)
            return shape[-1 if self._tokens_are_columns() else 0] if shape else None
        size = self._map.config.get("vocab_size", self._map.config.get("d_vocab"))
        return size if isinstance(size, int) else None

    def _tokens_are_columns(self) -> bool:
        return self._entry.layout == "heads" and self._map.unembedding != weight_of(self._entry.embedding)

    def embedding(self) -> np.ndarray:
        return self._embedding_rows(None)

    def embedding_rows(self, start: int, stop: int) -> np.ndarray:
        return self._embedding_rows(check_rows(start, stop))

    def _embedding_rows(self, rows: slice | None) -> np.ndarray:
        name = weight_of(self._map.in_body(self._entry.embedding))
        if name not in self._map.names:
            raise HeadspanError(f"{self.reference} has no embedding: the tensor {name} is not in the checkpoint")
        return self._check_width(name, self.source.read(name, rows))

    def unembedding_rows(self, start: int, stop: int) -> np.ndarray:
        rows = check_rows(start, stop)
        if self._map.unembedding is None:
            names = " nor ".join(weight_of(module) for module in self._entry.unembedding)
            raise HeadspanError(
                f"{self.reference} has no unembedding: neither {names} nor a tied embedding is in the checkpoint"
            )
        name = self._map.unembedding
        if self._tokens_are_columns():
            return np.ascontiguousarray(self._check_width(name, self._read_once(name).T[rows]))
        return self._check_width(name, self.source.read(name, rows))

    def _check_width(self, name: str, rows: np.ndarray) -> np.ndarray:
        if rows.ndim != 2 or rows.shape[1] != self.d_model:
            raise HeadspanError(
                f"{name} of {self.reference} has shape {self._map.shape(name)}: its vectors are not of d_model "
                f"{self.d_model}, so tokens are not directions of the residual stream"
            )
        return rows

    def unembedding_bias(self) -> np.ndarray | None:
        name = self._map.unembedding_bias()
        return None if name is None else self._vector(name, self.vocab_size or 0)

    @cached_property
    def _words(self) -> Vocabulary | None:
        """Cached: a page needs it twice, and reading 250,000 tokens takes a second."""
        return self.source.vocabulary()

    def vocabulary(self) -> Vocabulary | None:
        return self._words

    # -- the rest --------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        present = [name for name in self._other_tensors() if self._is_there(name)]
        return IDENTITY_PREFIX + self.source.fingerprint([*self.tensors(), *present])

    def attention_hash(self) -> str:
        hashes = self.source.hashes(self.tensors())
        digest = hashlib.sha256()
        for name in sorted(hashes):
            digest.update(name.removeprefix(self._map.prefix).encode("utf-8", "surrogatepass") + b"\0" + hashes[name])
        return digest.hexdigest()

    def _other_tensors(self) -> Iterator[str]:
        """The other tensors that are read besides the weights of heads: biases and norms."""
        modules = [self._map.module(role, layer) for layer in self.layers for role in ROLES]
        latents = [self._map.latent.latent_module(role) for role in ROLES] if self._map.latent else []
        modules += [self._map.in_layer(layer, module) for layer in self.layers for module in latents if module]
        around = [*self._entry.norm, *self._entry.output_norm]
        norms = [self._map.in_layer(layer, module) for layer in self.layers for module in around]
        if self._entry.final_norm is not None:
            norms.append(self._map.in_body(self._entry.final_norm))
        yield from dict.fromkeys([*map(bias_of, modules), *map(weight_of, norms), *map(bias_of, norms)])

    def _is_there(self, name: str) -> bool:
        """Whether a tensor can be read. Scores do not need these tensors, so a missing shard is not an error."""
        try:
            return name in self._map.names and bool(self.source.dtype(name))
        except HeadspanError:
            return False

    @property
    def reopenable(self) -> bool:
        return bool(self.source.files())

    def check_unchanged(self) -> None:
        self.source.check_unchanged()

    def close(self) -> None:
        self._kept = None
        self.source.close()


def _widened(weights: np.ndarray, width: int) -> np.ndarray:
    """Pad the last axis with zeros to the width of the widest heads."""
    missing = width - weights.shape[-1]
    return np.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, missing)]) if missing else weights


def _clips(config: Config) -> bool:
    """True if projections are clamped (OLMo, MPT), so that a value bias does not add a constant."""
    return any(part.get("clip_qkv") for part in (config, config_part(config, "attn_config")))
