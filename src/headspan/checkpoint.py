"""The attention weights of an opened checkpoint: the table of architectures applied to named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.architectures import BODY_PREFIXES, WHY_NOT_FOLDABLE, Architecture, find_architecture
from headspan.errors import HeadspanError
from headspan.heads import ROLES, HeadTable, Role
from headspan.weights import AttentionWeights, Norm, check_finite

if TYPE_CHECKING:
    from headspan.sources.base import TensorSource
    from headspan.sources.vocabulary import Vocabulary

# The names that configs use for the same number, in the order they are looked up.
_SIZES = {
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_key_value_heads"),
    "d_head": ("head_dim", "d_head"),
}
_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps", "eps")
_SOFTMAX_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_UNEMBEDDING_WRAPPERS = ("", "language_model.", "model.")


class CheckpointWeights(AttentionWeights):
    """Attention weights read from a `TensorSource`, one tensor at a time."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.reference = source.reference
        self._names = frozenset(source.names())
        self.architecture, self._entry, self._config = find_architecture(source.config, self._names)
        self._prefix = self._find_prefix()
        self._read_sizes()
        self.layers = self._find_layers()
        self._check_shapes()
        self.head_table = HeadTable.regular(self.layers, self.n_heads, self.n_kv_heads)
        self.norm_place = self._entry.norm_place
        self.norm_kind = "none" if self.norm_place == "none" else self._entry.norm_kind
        self.not_foldable_reason = WHY_NOT_FOLDABLE.get(self._entry.norm_place)
        self.value_bias_is_constant = not (self._entry.sinks or self._config.get("clip_qkv"))
        self._unembedding_name, self.tied_embedding = self._find_unembedding()
        self.vocab_size = self._find_vocab_size()
        self.notes = [*source.notes, *self._make_notes()]
        self._cached: tuple[str, np.ndarray] | None = None  # a fused tensor serves three roles in a row

    # -- names -----------------------------------------------------------------------------------------------

    def _find_prefix(self) -> str:
        """The prefix under which this checkpoint keeps the layers."""
        entry = self._entry
        module = _weight_name(entry.layer + (entry.fused or entry.q))
        head, _, tail = module.partition("{}")
        for prefix in dict.fromkeys((entry.body, *BODY_PREFIXES, *(p + entry.body for p in BODY_PREFIXES))):
            start = prefix + head
            if any(n.startswith(start) and n.endswith(tail) and n[len(start) : len(n) - len(tail)].isdigit()
                   for n in self._names):  # fmt: skip
                return prefix
        raise HeadspanError(
            f"{self.reference} says it is {self.architecture}, but has no tensor named "
            f"{entry.body}{module.format('N')} for any layer N: are the attention weights in this checkpoint?"
        )

    def _module(self, role: Role, layer: int) -> str:
        entry = self._entry
        module = {Role.Q: entry.q, Role.K: entry.k, Role.V: entry.v, Role.O: entry.o}[role]
        if entry.fused and role is not Role.O:
            module = entry.fused
        if entry.layout == "heads" and role.shared:
            # TransformerLens keeps the shared heads of GQA under a name of their own.
            shared = module.replace("attn.", "attn._")
            if self._prefix + entry.layer.format(layer) + _weight_name(shared) in self._names:
                module = shared
        return self._prefix + entry.layer.format(layer) + module.replace("|", "|" + self._prefix + entry.layer.format(layer))

    def _tensor(self, role: Role, layer: int) -> str:
        self._check_layer(layer)
        return _weight_name(self._module(role, layer))

    # -- sizes -----------------------------------------------------------------------------------------------

    def _size(self, what: str) -> int | list[int] | None:
        """A size from the config; a list where the config counts per layer."""
        for key in _SIZES[what]:
            value = self._config.get(key)
            if value is None:
                continue
            values = value if isinstance(value, list) else [value]
            least = 0 if isinstance(value, list) else 1
            if not values or any(isinstance(v, bool) or not isinstance(v, int) or v < least for v in values):
                raise HeadspanError(f"the config of {self.reference} has {key} = {value!r}: a positive integer is needed")
            return value
        return None

    def _read_sizes(self) -> None:
        if self._entry.layout == "heads":
            self._sizes_of_lens()
            return
        sizes = {what: self._size(what) for what in _SIZES}
        for what in ("d_model", "n_layers", "n_heads"):
            if sizes[what] is None:
                raise HeadspanError(
                    f"the config of {self.reference} does not say {what}: one of {', '.join(_SIZES[what])} is needed"
                )
        self._without: set[int] = set()  # layers that a per-layer count declares to have no heads
        self.d_model, self.n_layers = self._one(sizes, "d_model"), self._one(sizes, "n_layers")
        self.n_heads = self._one(sizes, "n_heads")
        rule = self._entry.kv_heads
        ruled = rule(self._config, self.n_heads) if rule else None
        self.n_kv_heads = ruled or (self.n_heads if sizes["n_kv_heads"] is None else self._one(sizes, "n_kv_heads"))
        if sizes["d_head"] is None and self.d_model % self.n_heads:
            raise HeadspanError(
                f"{self.reference} has {self.n_heads} heads, which does not divide d_model = {self.d_model}, and its "
                "config gives no head_dim"
            )
        self._d_head = self.d_model // self.n_heads if sizes["d_head"] is None else self._one(sizes, "d_head")
        if self.n_heads % self.n_kv_heads:
            raise HeadspanError(
                f"{self.reference} has {self.n_heads} query heads and {self.n_kv_heads} key/value heads: "
                "the second must divide the first"
            )

    def _one(self, sizes: Mapping[str, int | list[int] | None], what: str) -> int:
        """One number for the whole model from a size that may be listed per layer, zeros meaning no attention."""
        value = sizes[what]
        if not isinstance(value, list):
            assert value is not None
            return value
        self._without |= {layer for layer, count in enumerate(value) if count == 0}
        different = sorted(set(value) - {0})
        if len(different) != 1:
            raise HeadspanError(
                f"{self.reference} has layers with different {what} ({different}): only one number for all layers works"
            )
        return different[0]

    def _sizes_of_lens(self) -> None:
        """TransformerLens tensors show all sizes themselves, whatever config came along."""
        self._without = set()
        pattern = self._entry.layer.partition("{}")[0]
        layers = {int(part) for name in self._names if name.startswith(pattern)
                  and (part := name[len(pattern) :].partition(".")[0]).isdigit()}  # fmt: skip
        self.n_layers = max(layers) + 1
        self.layers = (0,)
        self.n_heads, self.d_model, self._d_head = self._shape3(self._tensor(Role.Q, 0))
        self.n_kv_heads = self._shape3(self._tensor(Role.K, 0))[0]

    def _shape3(self, name: str) -> tuple[int, int, int]:
        shape = self._shape(name)
        if len(shape) != 3:
            raise HeadspanError(f"{name} in {self.reference} has shape {shape}, expected (head, d_model, d_head)")
        return shape[0], shape[1], shape[2]

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._names:
            raise HeadspanError(f"{self.reference} has no tensor named {name}: the checkpoint is incomplete")
        return self.source.shape(name)

    def _find_layers(self) -> tuple[int, ...]:
        """The layers with softmax attention; in a hybrid model the others are left out."""
        self.layers = tuple(range(min(self.n_layers, 100_000)))  # provisional: names are asked for below
        if len(self.layers) < self.n_layers:
            raise HeadspanError(f"the config of {self.reference} claims {self.n_layers} layers")
        kinds = self._config.get("layer_types") or self._config.get("layers_block_type") or []
        declared = {i for i, kind in enumerate(kinds) if kind not in _SOFTMAX_LAYERS}
        without = self._without | declared
        if self._entry.hybrid and not without:
            without = {i for i in self.layers if not any(self._tensor(role, i) in self._names for role in ROLES)}
        return tuple(layer for layer in self.layers if layer not in without)

    def _check_shapes(self) -> None:
        """Every tensor of every layer exists and fits; only headers are looked at."""
        for layer in self.layers:
            for name, expected in {self._tensor(role, layer): self._expected(role) for role in ROLES}.items():
                seen = self._shape(name)
                if seen != expected:
                    raise HeadspanError(
                        f"{name} in {self.reference} has shape {seen}, expected {expected} for {self.architecture} with "
                        f"d_model {self.d_model}, {self.n_heads} heads, {self.n_kv_heads} key/value heads of size {self._d_head}"
                    )

    def _expected(self, role: Role) -> tuple[int, ...]:
        n, n_kv, m, d = self.n_heads, self.n_kv_heads, self._d_head, self.d_model
        if self._entry.layout == "heads":
            return (n, m, d) if role is Role.O else (n_kv if role.shared else n, d, m)
        if role is Role.O:
            shape = (d, n * m)
        elif self._entry.fused:
            shape = ((n + 2 * n_kv) * m, d)
        else:
            shape = ((n_kv if role.shared else n) * m, d)
        return shape[::-1] if self._entry.transposed else shape

    # -- weights ---------------------------------------------------------------------------------------------

    def d_head(self, role: Role | str) -> int:
        return self._d_head

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        role = Role(role)
        name = self._tensor(role, layer)
        fused = self._entry.fused is not None and role is not Role.O
        stored = self._read_once(name) if fused else self.source.read(name)
        if self._entry.layout == "heads":
            weights = stored.transpose(0, 2, 1) if role is Role.O else stored
        else:
            stored = stored.T if self._entry.transposed else stored
            if role is Role.O:
                weights = stored.reshape(self.d_model, self.n_heads, self._d_head).transpose(1, 0, 2)
            else:
                weights = self._split(role, stored).transpose(0, 2, 1)
        heads = self.heads_in(role, layer)
        return check_finite(np.ascontiguousarray(weights), role, heads, self.reference)

    def _split(self, role: Role, stored: np.ndarray) -> np.ndarray:
        """The rows of one role, (n, m, …), out of a (rows, …) tensor that may hold all three."""
        n, n_kv, m, rest = self.n_heads, self.n_kv_heads, self._d_head, stored.shape[1:]
        if self._entry.fused is None:
            return stored.reshape(-1, m, *rest)
        if self._entry.layout == "concatenated":
            start, count = {Role.Q: (0, n), Role.K: (n, n_kv), Role.V: (n + n_kv, n_kv)}[role]
            return stored[start * m : (start + count) * m].reshape(count, m, *rest)
        per_group = n // n_kv
        groups = stored.reshape(n_kv, per_group + 2, m, *rest)
        if role is Role.Q:
            return groups[:, :per_group].reshape(n, m, *rest)
        return groups[:, per_group if role is Role.K else per_group + 1]

    def _read_once(self, name: str) -> np.ndarray:
        if self._cached is None or self._cached[0] != name:
            self._cached = None  # let go of the old one before reading the next
            self._cached = (name, self.source.read(name))
        return self._cached[1]

    def bias(self, role: Role | str, layer: int) -> np.ndarray | None:
        role = Role(role)
        self._check_layer(layer)
        name = _bias_name(self._module(role, layer))
        if name not in self._names:
            return None
        stored = self._vector(name) if self._entry.layout != "heads" else self.source.read(name)
        if role is Role.O or self._entry.layout == "heads":
            return stored
        return self._split(role, stored)

    def storage_dtype(self, role: Role | str, layer: int) -> str:
        return self.source.dtype(self._tensor(Role(role), layer))

    def tensors(self) -> dict[str, int]:
        names = dict.fromkeys(self._tensor(role, layer) for layer in self.layers for role in ROLES)
        return {name: self.source.nbytes(name) for name in names}

    def total_bytes(self) -> int:
        return sum(self.source.nbytes(name) for name in self._names)

    def _vector(self, name: str) -> np.ndarray:
        vector = self.source.read(name)
        if vector.ndim != 1 or not np.isfinite(vector).all():
            raise HeadspanError(f"{name} in {self.reference} is not a vector of finite numbers (shape {vector.shape})")
        return vector

    # -- norms -----------------------------------------------------------------------------------------------

    def norm(self, layer: int) -> Norm | None:
        self._check_layer(layer)
        if not self._entry.norm:
            return None
        start = self._prefix + self._entry.layer.format(layer)
        return self._read_norm([start + module.replace("|", "|" + start) for module in self._entry.norm])

    def final_norm(self) -> Norm | None:
        module = self._entry.final_norm
        if module is None:
            return None
        return self._read_norm([self._prefix + module.replace("|", "|" + self._prefix)])

    def _read_norm(self, modules: list[str]) -> Norm:
        eps = next((float(self._config[key]) for key in _EPS if key in self._config), 1e-5)
        if self._entry.weightless_norm:
            return Norm(self._entry.norm_kind, np.ones(self.d_model, dtype=np.float32), None, eps)
        module = next((m for m in modules if _weight_name(m) in self._names), None)
        if module is None:
            raise HeadspanError(f"{self.reference} has no tensor named {_weight_name(modules[-1])}: the norm is missing")
        gain = self._vector(_weight_name(module))
        if gain.shape != (self.d_model,):
            raise HeadspanError(
                f"{_weight_name(module)} in {self.reference} has shape {gain.shape}, expected {(self.d_model,)}"
            )
        if self._entry.one_plus and not self._config.get("_gguf"):  # GGUF files hold the sum
            gain = gain + 1
        bias = _bias_name(module)
        return Norm(self._entry.norm_kind, gain, self._vector(bias) if bias in self._names else None, eps)

    # -- vocabulary ------------------------------------------------------------------------------------------

    def _find_unembedding(self) -> tuple[str | None, bool | None]:
        """The module of the unembedding, and whether it is the embedding itself."""
        for module in self._entry.unembedding:
            for wrapper in _UNEMBEDDING_WRAPPERS:
                if _weight_name(wrapper + module) in self._names:
                    return wrapper + module, False
        embedding = self._embedding_module()
        if self._config.get("tie_word_embeddings", True) and _weight_name(embedding) in self._names:
            return embedding, True
        return None, None

    def _embedding_module(self) -> str:
        return self._prefix + self._entry.embedding

    def _find_vocab_size(self) -> int | None:
        if self._unembedding_name is not None:
            shape = self.source.shape(_weight_name(self._unembedding_name))
            return shape[-1] if self._columns_are_tokens() else shape[0]
        size = self._config.get("vocab_size", self._config.get("d_vocab"))
        return size if isinstance(size, int) else None

    def _columns_are_tokens(self) -> bool:
        return self._entry.layout == "heads" and not self.tied_embedding

    def embedding(self) -> np.ndarray:
        name = _weight_name(self._embedding_module())
        if name not in self._names:
            raise HeadspanError(f"{self.reference} has no embedding: the tensor {name} is not in the checkpoint")
        return self._check_width(name, self.source.read(name))

    def unembedding_rows(self, start: int, stop: int) -> np.ndarray:
        if self._unembedding_name is None:
            names = " or ".join(_weight_name(module) for module in self._entry.unembedding)
            raise HeadspanError(
                f"{self.reference} has no unembedding: neither {names} nor a tied embedding is in the checkpoint"
            )
        name = _weight_name(self._unembedding_name)
        if self._columns_are_tokens():
            return np.ascontiguousarray(self._check_width(name, self._read_once(name).T[start:stop]))
        stop = min(stop, self.source.shape(name)[0])
        return self._check_width(name, self.source.read(name, slice(start, stop)))

    def _check_width(self, name: str, rows: np.ndarray) -> np.ndarray:
        if rows.ndim != 2 or rows.shape[1] != self.d_model:
            raise HeadspanError(
                f"{name} in {self.reference} has shape {self.source.shape(name)}: its vectors are not of d_model = "
                f"{self.d_model}, so tokens are not directions of the residual stream"
            )
        return rows

    def unembedding_bias(self) -> np.ndarray | None:
        name = None if self._unembedding_name is None else _bias_name(self._unembedding_name)
        return self._vector(name) if name in self._names else None

    def vocabulary(self) -> Vocabulary | None:
        return self.source.vocabulary()

    # -- the rest --------------------------------------------------------------------------------------------

    def _make_notes(self) -> list[str]:
        notes = []
        left_out = sorted(set(range(self.n_layers)) - set(self.layers))
        if left_out:
            notes.append(
                f"layers without softmax attention are left out: {_ranges(left_out)}; the others keep their numbers"
            )
        qk_norm = self._prefix + self._entry.layer.format(self.layers[0]) + _weight_name(self._entry.qk_norm)
        if qk_norm in self._names:
            notes.append(
                "queries and keys are normalised after projection (QK-norm): the weights are those in front of it, "
                "and its gains do not change a head's subspace"
            )
        if not self.value_bias_is_constant:
            notes.append("attention rows do not sum to 1 or values are clipped: folding keeps the value bias apart")
        return notes

    def fingerprint(self) -> str:
        return self.source.fingerprint()

    def close(self) -> None:
        self._cached = None
        self.source.close()


def _weight_name(module: str) -> str:
    return module.partition("|")[0] if "|" in module else f"{module}.weight"


def _bias_name(module: str) -> str:
    return module.partition("|")[2] if "|" in module else f"{module}.bias"


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0–2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)
