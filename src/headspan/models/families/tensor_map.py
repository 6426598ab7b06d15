"""The tensors of one checkpoint by purpose: the table entry of its family, applied to its config and names.

Only names, shapes and the config are used; no tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headspan.checkpoints.base import TensorSource
from headspan.checkpoints.untrusted import config_part
from headspan.models.families.lookup import find_architecture
from headspan.models.families.sizes import ModelSizes
from headspan.models.families.table import BODY_PREFIXES
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Role

_SOFTMAX_LAYERS = ("full_attention", "sliding_attention", "reference_sliding_attention", "chunked_attention",
                   "indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse", "attention")  # fmt: skip
_PACKED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "weight.absmax", "SCB")
_SCALES = ("weight_scale", "weight_scale_inv")
_INTEGERS = ("int", "uint", "qint", "quint", "bool")
_UNEMBEDDING_WRAPPERS = ("", "language_model.", "model.", "text_model.", "thinker.", "llm.")


class TensorMap:
    """The tensor names of a checkpoint by purpose, and its sizes, checked against the shapes."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.names = frozenset(source.names())
        self.architecture, self.entry, self.config = find_architecture(source.config, self.names)
        self.notes: list[str] = []
        found = ModelSizes(self.architecture, self.entry, self.config, self.names, source.reference)
        self.d_model, self.n_layers = found.d_model, found.n_layers
        self.sizes, self.kv_layers, self._headless = found.layers, found.kv_layers, found.headless
        self.latents = found.latents
        self.latent = self.latents[0] if self.latents else None  # all layers have tensors of the same names
        self.prefix = self._find_prefix()
        self.layers = self._find_layers()
        self._check_shapes()
        self.unembedding, self.tied = self._find_unembedding()

    @property
    def even(self) -> bool:
        """True if all layers have the same number of heads, all of the same size."""
        return len({self.sizes[layer] for layer in self.layers}) == 1

    # -- layers ----------------------------------------------------------------------------------------------

    def _find_layers(self) -> tuple[int, ...]:
        """The layers with softmax attention. Other kinds are left out; the rest keep their numbers."""
        numbered = self._numbered_layers()
        held = [layer for layer in numbered if layer < self.n_layers]
        if len(held) < len(numbered):
            self.notes.append(
                f"the checkpoint holds {len(numbered) - len(held)} more layers with attention (up to layer "
                f"{numbered[-1]}) than the {self.n_layers} of its config: they are left out"
            )
        kinds = self.config.get("layer_types") or self.config.get("layers_block_type") or ()
        if not isinstance(kinds, (list, tuple)):
            raise HeadspanError(f"the config of {self.source.reference} has layer_types that are not a list")
        if kinds and len(kinds) not in (self.n_layers, self.n_layers + self._extra_layers()):
            raise HeadspanError(
                f"the config of {self.source.reference} lists the kinds of {len(kinds)} layers (layer_types), but has "
                f"{self.n_layers} layers"
            )
        other = {layer for layer, kind in enumerate(kinds) if kind not in _SOFTMAX_LAYERS} | self._headless
        if self.entry.hybrid and not other:
            return tuple(held)  # the config lists the layers with attention in its own way
        if self.n_layers > len(held) + len(other):
            missing = next(layer for layer in range(self.n_layers) if layer not in held and layer not in other)
            raise self._incomplete(self.weight(Role.Q, missing))
        layers = tuple(layer for layer in held if layer not in other)
        if not layers:
            raise HeadspanError(f"{self.source.reference} has no layer with softmax attention")
        return layers

    # -- names -----------------------------------------------------------------------------------------------

    def _find_prefix(self) -> str:
        """The prefix of the layers: the name of the body, nothing, or that of a wrapper."""
        entry = self.entry
        inner = entry.body.partition(".")[2]  # of a body saved without its head (OPT: decoder.)
        for prefix in dict.fromkeys(
            (entry.body, inner, *BODY_PREFIXES, *(outer + entry.body for outer in BODY_PREFIXES))
        ):
            self.prefix = prefix
            if self._numbered_layers():
                return prefix
        packed = next((name for name in sorted(self.names) if name.endswith((".qweight", ".weight_packed"))), None)
        if packed or self._quantisation():
            raise self._quantised(packed or f"no tensor {weight_of(self.module(Role.Q, 'N'))}")
        self.prefix = entry.body
        raise HeadspanError(
            f"{self.source.reference} says it is {self.architecture}, but no layer N has a tensor "
            f"{weight_of(self.module(Role.Q, 'N'))}: are the attention weights in this checkpoint?"
        )

    def _numbered_layers(self) -> list[int]:
        """The layers with a query weight (or a weight that computes a latent, which marks latent attention)."""
        marker = self.latent.latent_module(Role.K) if self.latent else None
        per_layer = self.entry.sublayers
        found = []
        for sub in range(per_layer):
            module = self.in_layer("\0", marker) if marker else self.module(Role.Q, "\0")
            name = weight_of(module).replace("{sub}", str(sub))
            found += [per_layer * number + sub for number in self._numbers(name)]
        return sorted(found)

    def _numbers(self, name: str) -> list[int]:
        """The layer numbers for which there is a tensor of this name."""
        start, _, end = name.partition("\0")
        found = (name[len(start) : len(name) - len(end)] for name in self.names
                 if name.startswith(start) and name.endswith(end))  # fmt: skip
        numbers = [number for number in found if number.isdecimal() and len(number) < 7]
        odd = next((number for number in numbers if str(int(number)) != number), None)
        if odd is not None:
            raise HeadspanError(
                f"{self.source.reference} has a tensor {start}{odd}{end}: layers are numbered 0, 1, 2 …, but {odd!r} "
                f"could mean {int(odd)}"
            )
        return sorted(map(int, numbers))

    def _extra_layers(self) -> int:
        """Extra layers at the end for multi-token prediction, which some configs count separately."""
        extra = self.config.get("num_nextn_predict_layers")
        return extra if type(extra) is int and 0 < extra < 100 else 0

    def in_layer(self, layer: int | str, module: str) -> str:
        """The full name of a module of a layer."""
        if self.entry.sublayers > 1 and isinstance(layer, int):
            layer, sub = divmod(layer, self.entry.sublayers)
            module = module.replace("{sub}", str(sub))
        return self._under(self.prefix + self.entry.layer.format(layer), module)

    def in_body(self, module: str) -> str:
        """The full name of a module of the body, such as the embedding."""
        return self._under(self.prefix, module)

    @staticmethod
    def _under(start: str, module: str) -> str:
        return "|".join(start + part if part else "" for part in module.split("|"))

    def module(self, role: Role, layer: int | str) -> str:
        """The module that holds a role's weights, alone or fused; for borrowed keys and values, the lender's."""
        entry, layer = self.entry, self._home(role, layer)
        if self.latent is not None:
            return self.in_layer(layer, self.latent.module(role))
        name = {Role.Q: entry.q, Role.K: entry.k, Role.V: entry.v, Role.O: entry.o}[role]
        if entry.fused and role is not Role.O:
            name = entry.fused
        elif entry.layout == "heads" and role.shared and self.sizes[0].shared:
            name = name.replace("attn.", "attn._")  # TransformerLens' name for heads that are shared
        if role is Role.V and entry.keys_as_values and weight_of(self.in_layer(layer, name)) not in self.names:
            name = entry.k
        return self.in_layer(layer, name)

    def _home(self, role: Role, layer: int | str) -> Any:
        """The layer that stores the weights which a layer uses in a role."""
        return self.kv_layers.get(layer, layer) if role.shared else layer  # type: ignore[arg-type]

    def weight(self, role: Role, layer: int) -> str:
        return weight_of(self.module(role, layer))

    def reader(self, role: Role, layer: int) -> str:
        """The weight with which a role reads the stream; under latent attention often the map into the latent."""
        inner = self.latent.latent_module(role) if self.latent else None
        return self.weight(role, layer) if inner is None else weight_of(self.in_layer(layer, inner))

    def tensors(self, role: Role, layer: int) -> dict[str, tuple[int, ...]]:
        """The tensors that form the weights of a role, with their expected shapes."""
        if self.latent is not None:
            return {self.in_layer(layer, name): shape for name, shape in self.latents[layer].tensors(role).items()}
        return {self.weight(role, layer): self._expected(role, layer)}

    def bias(self, role: Role, layer: int) -> str | None:
        name = bias_of(self.module(role, layer))
        return name if name in self.names else None

    def first_present(self, modules: Sequence[str]) -> str:
        """The first of several modules whose weight is in the checkpoint."""
        for module in modules:
            if weight_of(module) in self.names:
                return module
        raise self._incomplete(weight_of(modules[-1]))

    def _find_unembedding(self) -> tuple[str | None, bool | None]:
        """The tensor of the unembedding and whether it is the embedding itself; None if there is none."""
        tie = self.config.get("tie_word_embeddings")
        own = self._first_of(weight_of(module) for module in self.entry.unembedding)
        if own:
            return own, bool(tie)  # files of tied models may hold a copy
        embedding = weight_of(self.in_body(self.entry.embedding))
        return (embedding, True) if tie is not False and embedding in self.names else (None, None)

    def unembedding_bias(self) -> str | None:
        """The bias of the logits, which may be one level above the unembedding (BERT)."""
        modules = self.entry.unembedding
        return self._first_of(bias_of(m) for module in modules for m in (module, module.rpartition(".")[0]) if m)

    def _first_of(self, names: Iterable[str]) -> str | None:
        """The first of several names outside the body that is in the checkpoint."""
        wrapped = (wrapper + name for name in names for wrapper in _UNEMBEDDING_WRAPPERS if name)
        return next((name for name in wrapped if name in self.names), None)

    # -- shapes ----------------------------------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.names:
            raise self._incomplete(name)
        return self.source.shape(name)

    def _incomplete(self, name: str) -> HeadspanError:
        return HeadspanError(f"{self.source.reference} has no tensor {name}: the checkpoint is incomplete")

    def _check_shapes(self) -> None:
        """Check that every weight of every layer exists and has the shape that the config implies."""
        self._check_not_packed()
        for layer in self.layers:
            for name, expected in {n: s for role in ROLES for n, s in self.tensors(role, layer).items()}.items():
                seen = self.shape(name)
                if seen != expected and self._quantisation():
                    raise self._quantised(name)
                if seen != expected:
                    raise HeadspanError(
                        f"{name} of {self.source.reference} has shape {seen}, expected {expected} for "
                        f"{self.architecture} with d_model {self.d_model}, {self.sizes[layer]}"
                    )

    def _check_not_packed(self) -> None:
        """Refuse formats with packed integers or scales next to a weight (GPTQ, AWQ, bitsandbytes).

        Scaled float8 (DeepSeek-V3) is supported, because the source multiplies the scales in.
        """
        for start in (n.removesuffix("weight") for role in ROLES for n in self.tensors(role, self.layers[0])):
            name = start + "weight"
            dtype = self.source.dtype(name) if name in self.names else ""
            scaled = _SCALES if dtype.startswith("float8") and self.source.reads_scales else ()
            packed = next((start + end for end in _PACKED if end not in scaled and start + end in self.names), None)
            if packed:
                raise self._quantised(packed)
            if dtype.startswith(_INTEGERS):
                raise self._quantised(f"{name} as {dtype}")

    def _quantisation(self) -> str:
        """The quantisation method in the config (gptq, awq, bitsandbytes …)."""
        method = config_part(self.config, "quantization_config").get("quant_method")
        return method[:40] if isinstance(method, str) else ""

    def _quantised(self, name: str) -> HeadspanError:
        kind = f"{self._quantisation()} ".lstrip()
        return HeadspanError(
            f"{self.source.reference} holds {kind}quantised weights ({name}) in a format that is not read: "
            "give the unquantised model or a GGUF file"
        )

    def _expected(self, role: Role, layer: int) -> tuple[int, ...]:
        size, d = self.sizes[self._home(role, layer)], self.d_model
        n, m = size.heads(role), size.width(role)
        if self.entry.layout == "heads":
            return (n, m, d) if role is Role.O else (n, d, m)
        shape = (d, n * m) if role is Role.O else (self.rows(role, layer), d)
        return shape[::-1] if self.entry.transposed else shape

    def rows(self, role: Role, layer: int) -> int:
        """Rows of the tensor that holds the Q, K or V weights of a layer."""
        size = self.sizes[self._home(role, layer)]
        if self.entry.fused:
            return sum(size.heads(part) * size.width(part) for part in (Role.Q, Role.K, Role.V))
        gate = 2 if role is Role.Q and self.entry.gated else 1
        return gate * size.heads(role) * size.width(role)


def weight_of(module: str) -> str:
    """The name of a module's weight.

    >>> weight_of("lm_head"), weight_of("ln1.w|ln1.b")
    ('lm_head.weight', 'ln1.w')
    """
    return module.partition("|")[0] if "|" in module else f"{module}.weight"


def bias_of(module: str) -> str:
    """The name of a module's bias, which need not exist."""
    return module.partition("|")[2] if "|" in module else f"{module}.bias"
