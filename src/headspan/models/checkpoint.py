"""The attention weights of an opened checkpoint, read one tensor at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from headspan.errors import HeadspanError
from headspan.heads import ROLES, PortTable, Role
from headspan.models.architectures import WHY_NOT_FOLDABLE
from headspan.models.identity import IDENTITY_PREFIX
from headspan.models.tensor_map import TensorMap, bias_of, weight_of
from headspan.models.weights import AttentionWeights, Norm, attention_role, check_finite, check_rows
from headspan.sources.base import TensorSource

if TYPE_CHECKING:
    from headspan.sources.vocabulary import Vocabulary

_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps", "eps")


_SAMPLED = 32  # rows of two tensors that are compared


class CheckpointWeights(AttentionWeights):
    """Attention weights of a `TensorSource`."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.reference = source.reference
        self._map = TensorMap(source)
        self._entry = self._map.entry
        self.architecture = self._map.architecture
        self.d_model, self.n_layers = self._map.d_model, self._map.n_layers
        self.n_heads, self.n_kv_heads = self._map.n_heads, self._map.n_kv_heads
        self.layers = self._map.layers
        self.ports = PortTable.regular(self.layers, self.n_heads, self.n_kv_heads)
        self.norm_place = self._entry.norm_place
        self.norm_kind = "none" if self.norm_place == "none" else self._entry.norm_kind
        self.not_foldable_reason = WHY_NOT_FOLDABLE.get(self._entry.norm_place)
        self.value_bias_is_constant = not (self._entry.sinks or self._entry.gated or _clips(self._map.config))
        self.tied_embedding = self._map.tied
        self.vocab_size = self._find_vocab_size()
        self.notes = [*source.notes, *self._map.notes, *self._make_notes()]
        self._kept: tuple[str, np.ndarray] | None = None  # a fused tensor serves three roles in a row

    # -- weights ---------------------------------------------------------------------------------------------

    def d_head(self, role: Role | str) -> int:
        attention_role(role)
        return self._map.d_head

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        role = attention_role(role)
        self._check_layer(layer)
        name = self._map.weight(role, layer)
        stored = self._read_once(name) if self._entry.fused and role is not Role.O else self.source.read(name)
        if self._entry.layout == "heads":
            weights = stored.transpose(0, 2, 1) if role is Role.O else stored
        else:
            stored = stored.T if self._entry.transposed else stored
            if role is Role.O:
                weights = stored.reshape(self.d_model, self.n_heads, self._map.d_head).transpose(1, 0, 2)
            else:
                weights = self._split(role, stored).transpose(0, 2, 1)
        return check_finite(np.ascontiguousarray(weights), role, self.heads_in(role, layer), self.reference)

    def _split(self, role: Role, stored: np.ndarray) -> np.ndarray:
        """The rows of one role, (n, m, …), out of a tensor of rows that may hold all three."""
        n, n_kv, m, rest = self.n_heads, self.n_kv_heads, self._map.d_head, stored.shape[1:]
        if self._entry.layout == "separate":
            per_head = stored.reshape(n_kv if role.shared else n, -1, *rest)
            return per_head[:, :m]  # what a gate adds to the queries stands behind them
        if self._entry.layout == "concatenated":
            start, count = {Role.Q: (0, n), Role.K: (n, n_kv), Role.V: (n + n_kv, n_kv)}[role]
            return stored[start * m : (start + count) * m].reshape(count, m, *rest)
        per_group = n // n_kv
        groups = stored.reshape(n_kv, per_group + 2, m, *rest)
        if role is Role.Q:
            return groups[:, :per_group].reshape(n, m, *rest)
        return groups[:, per_group if role is Role.K else per_group + 1]

    def port_rows(self, role: Role | str) -> np.ndarray:
        """Which outputs of the module that holds Q, K or V belong to each head, (n, m)."""
        role = Role.parse(role)
        return self._split(role, np.arange(self._map.rows(role)))

    def _read_once(self, name: str) -> np.ndarray:
        if self._kept is None or self._kept[0] != name:
            self._kept = None  # let go of the old tensor before reading the next
            self._kept = (name, self.source.read(name))
        return self._kept[1]

    def bias(self, role: Role | str, layer: int) -> np.ndarray | None:
        role = attention_role(role)
        self._check_layer(layer)
        name = self._map.bias(role, layer)
        if name is None:
            return None
        if role is Role.O:
            return self._vector(name, self.d_model)
        if self._entry.layout == "heads":
            return self._finite(name, (len(self.heads_in(role, layer)), self._map.d_head))
        return self._split(role, self._vector(name, self._map.rows(role)))

    def storage_dtype(self, role: Role | str, layer: int) -> str:
        self._check_layer(layer)
        return self.source.dtype(self._map.weight(attention_role(role), layer))

    def tensors(self) -> dict[str, int]:
        names = dict.fromkeys(self._map.weight(role, layer) for layer in self.layers for role in ROLES)
        return {name: self.source.nbytes(name) for name in names}

    def total_bytes(self) -> int:
        return sum(self.source.nbytes(name) for name in self._map.names)

    def _vector(self, name: str, length: int) -> np.ndarray:
        return self._finite(name, (length,))

    def _finite(self, name: str, expected: tuple[int, ...]) -> np.ndarray:
        """A small tensor of a known shape, all numbers finite."""
        if self._map.shape(name) != expected:
            raise HeadspanError(f"{name} of {self.reference} has shape {self._map.shape(name)}, expected {expected}")
        tensor = self.source.read(name)
        if not np.isfinite(tensor).all():
            raise HeadspanError(f"{name} of {self.reference} holds NaN or infinite numbers")
        return tensor

    # -- norms -----------------------------------------------------------------------------------------------

    def norm(self, layer: int) -> Norm | None:
        self._check_layer(layer)
        return self._read_norm([self._map.in_layer(layer, module) for module in self._entry.norm])

    def final_norm(self) -> Norm | None:
        module = self._entry.final_norm
        return self._read_norm([] if module is None else [self._map.in_body(module)])

    def _read_norm(self, modules: list[str]) -> Norm | None:
        if not modules:
            return None
        eps = self._eps()
        if self._entry.weightless_norm:
            return Norm(self._entry.norm_kind, np.ones(self.d_model, dtype=np.float32), None, eps)
        if self.norm_place == "partial" and weight_of(modules[0]) not in self._map.names:
            return None
        module = self._map.first_present(modules)
        gain = self._vector(weight_of(module), self.d_model)
        if self._entry.one_plus and not self._map.config.get("_gguf"):  # GGUF files hold the sum
            gain = gain + 1
        has_bias = bias_of(module) in self._map.names
        return Norm(self._entry.norm_kind, gain, self._vector(bias_of(module), self.d_model) if has_bias else None, eps)

    def _eps(self) -> float:
        key = next((key for key in _EPS if key in self._map.config), None)
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
        name = weight_of(self._map.in_body(self._entry.embedding))
        if name not in self._map.names:
            raise HeadspanError(f"{self.reference} has no embedding: the tensor {name} is not in the checkpoint")
        return self._check_width(name, self.source.read(name))

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

    def vocabulary(self) -> Vocabulary | None:
        return self.source.vocabulary()

    # -- the rest --------------------------------------------------------------------------------------------

    def _make_notes(self) -> list[str]:
        notes = []
        left_out = sorted(set(range(self.n_layers)) - set(self.layers))
        if left_out:
            notes.append(
                f"{len(left_out)} of {self.n_layers} layers have no softmax attention and are left out "
                f"({_ranges(left_out)}); the others keep their numbers"
            )
        qk_norm = self._map.in_layer(self.layers[0], self._entry.qk_norm) + "."
        if any(name.startswith(qk_norm) for name in self._map.names):
            notes.append(
                "queries and keys are normalised after projection (QK-norm): the weights are those in front of it; "
                "its gains do not change what a head's weight spans"
            )
        if not self.value_bias_is_constant:
            notes.append(
                "a value bias is not a constant output here (attention sinks, clipped values or an output gate): "
                "folding leaves it where it is"
            )
        return notes + self._contradictions()

    def _contradictions(self) -> list[str]:
        """What in the checkpoint does not go together, though it can be read."""
        notes = []
        kinds = self.storage_dtypes()
        if len(kinds) > 1 and not self.source.config.get("_gguf"):
            notes.append(
                f"the weights are stored in {len(kinds)} number types ({', '.join(kinds)}): the rank of each is judged "
                "by its own"
            )
        own, embedding = self._map.unembedding, weight_of(self._map.in_body(self._entry.embedding))
        if own != embedding and self._map.tied and embedding in self._map.names and not self._same_rows(own, embedding):
            notes.append(
                f"the config says that the unembedding is the embedding, but {own} holds other numbers than "
                f"{embedding}: tokens are read from {own}"
            )
        return notes

    def _same_rows(self, first: str | None, second: str) -> bool:
        """Whether two tensors are the same, by shape and by rows from all over them; True if it cannot be seen."""
        if getattr(self.source, "commit", None):
            return True  # a shard of the hub that nobody needs is not downloaded for a remark
        try:
            shape = self._map.shape(first or second)
            if shape != self._map.shape(second):
                return False
            starts = np.unique(np.linspace(0, max(0, shape[0] - 1), _SAMPLED).astype(int)).tolist()
            rows = [slice(start, start + 1) for start in starts]
            read = self.source.read
            return all(np.array_equal(read(first or second, row), read(second, row)) for row in rows)
        except (HeadspanError, IndexError):
            return True  # nobody asks for it yet; who does is told

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
        """What is read beside the weights of the heads: their biases and the norms."""
        modules = [self._map.module(role, layer) for layer in self.layers for role in ROLES]
        norms = [self._map.in_layer(layer, module) for layer in self.layers for module in self._entry.norm]
        if self._entry.final_norm is not None:
            norms.append(self._map.in_body(self._entry.final_norm))
        yield from dict.fromkeys([*map(bias_of, modules), *map(weight_of, norms), *map(bias_of, norms)])

    def _is_there(self, name: str) -> bool:
        """Whether a tensor can be read; scores need none of these, so a missing shard must not stop them."""
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


def _clips(config: object) -> bool:
    """True when projections are clamped (OLMo, MPT), so that a value bias is no constant."""
    if not isinstance(config, dict):
        return False
    nested = config.get("attn_config")
    return bool(config.get("clip_qkv")) or _clips(nested)


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0–2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)
