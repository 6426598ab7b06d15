"""The numbers of layers and heads of a model and their widths, by layer, from its config, with checks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from headspan.models.families.borrowed_kv import kv_layers
from headspan.models.families.entry import Architecture, Config
from headspan.models.families.latent_attention import LatentShape
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role

# The names that configs use for the same number, in the order they are looked up.
_SIZES = {
    "d_model": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_transformer_layers"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "num_query_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_key_value_heads"),
    "d_head": ("head_dim", "d_head"),
    "d_value": ("v_head_dim",),
}
_LARGEST = {
    "d_model": 2**24,
    "n_layers": 10**5,
    "n_heads": 2**20,
    "n_kv_heads": 2**20,
    "d_head": 2**20,
    "d_value": 2**20,
}


@dataclass(frozen=True)
class LayerSizes:
    """How many heads the attention of one layer has, and how wide they are."""

    n_heads: int
    n_kv_heads: int
    d_head: int  # of queries and keys
    d_value: int  # of values, and of what the output weight reads

    def __str__(self) -> str:
        values = "" if self.d_value == self.d_head else f", {self.d_value} of values"
        return f"{self.n_heads} heads, {self.n_kv_heads} key/value heads and d_head {self.d_head}{values}"

    @property
    def shared(self) -> bool:
        return self.n_kv_heads < self.n_heads

    def heads(self, role: Role) -> int:
        return self.n_kv_heads if role.shared else self.n_heads

    def width(self, role: Role) -> int:
        return self.d_value if role in (Role.V, Role.O) else self.d_head


class ModelSizes:
    """The sizes of a model according to its config; family, entry and config come from ``find_architecture``.

    layers: the sizes of every layer. latents: the shape of latent attention in every layer, otherwise empty.
    kv_layers: for layers without keys and values, the layer that provides them. headless: layers with a count of 0.
    """

    def __init__(
        self, architecture: str, entry: Architecture, config: Config, names: Collection[str], reference: str
    ) -> None:
        self._architecture, self._entry, self._config = architecture, entry, config
        self._names, self._reference = names, reference
        self.headless: set[int] = set()
        self.kv_layers: dict[int, int] = {}
        self.n_layers = self._count_layers()
        self.d_model = self._size("d_model")
        heads = self._sizes("n_heads")
        self.latents = self._latent_shapes(heads) if entry.latent else []
        if self.latents:  # every head has its own keys and values
            each = zip(heads, self.latents, strict=True)
            self.layers = [LayerSizes(count, count, shape.free, shape.value) for count, shape in each]
            return
        shared = self._sizes("n_kv_heads", heads)
        widths = self._sizes("d_head", None if self._says("d_head") else self._evenly(heads))
        values = self._sizes("d_value", widths) if entry.value_size else widths
        self.layers = [LayerSizes(*each) for each in zip(heads, shared, widths, values, strict=True)]
        for size in self.layers:
            self._check_sizes(size)
        self._lend()

    def _lend(self) -> None:
        """Layers that use the keys and values of earlier layers have no key/value heads of their own."""
        self.kv_layers = kv_layers(self._config, self.n_layers, self._reference) if self._entry.lends_kv else {}
        for layer, lender in self.kv_layers.items():
            size, lent = self.layers[layer], self.layers[lender]
            same = (size.d_head, size.d_value) == (lent.d_head, lent.d_value)
            if not same or not lent.n_kv_heads or size.n_heads % lent.n_kv_heads:
                raise HeadspanError(
                    f"layer {layer} of {self._reference} uses the keys and values of layer {lender}, but has "
                    f"{size} where that has {lent}: check its config"
                )
            self.layers[layer] = replace(size, n_kv_heads=0)

    def _evenly(self, heads: list[int]) -> list[int]:
        """Head sizes if the config gives none: d_model divided by the number of heads."""
        odd = next((count for count in heads if count and self.d_model % count), None)
        if odd is not None:
            raise HeadspanError(
                f"{self._reference} has d_model {self.d_model} and {odd} heads: the second must divide "
                f"the first where the config says none of {', '.join(_SIZES['d_head'])}"
            )
        return [self.d_model // max(count, 1) for count in heads]

    def _check_sizes(self, size: LayerSizes) -> None:
        if size.n_kv_heads and size.n_heads % size.n_kv_heads:
            raise HeadspanError(
                f"{self._reference} has {size.n_heads} query heads and {size.n_kv_heads} key/value heads: "
                "the second must divide the first"
            )
        if self._entry.layout == "quarters" and size.n_heads % 4:
            raise HeadspanError(
                f"{self._reference} has {size.n_heads} heads: {self._architecture} stores them in four equal parts"
            )

    def _count_layers(self) -> int:
        """The number of layers. Families with several attentions per layer count each; configs may give either."""
        per_layer, kinds = self._entry.sublayers, self._config.get("layers_block_type")
        if isinstance(kinds, list) and kinds and all(self._config.get(key) is None for key in _SIZES["n_layers"]):
            return len(kinds)  # Nemotron-H lists its layers without a count
        if per_layer == 1 or type(self._config.get("num_layers")) is not int:
            return self._size("n_layers")
        return per_layer * self._config["num_layers"]

    def _latent_shapes(self, heads: list[int]) -> list[LatentShape]:
        """The shape of every layer; a layer without attention gets the largest number of heads."""
        stem, _, output = self._entry.o.rpartition(".")
        stem += "."
        split = any(name.endswith(f"{stem}k_b_proj.weight") for name in self._names)
        options = {"stem": stem, "output": output, "split": split, "scaled": self._entry.latent_scaled}
        options["rotary_norm"] = self._entry.rotary_norm
        found, own = [], self._config.get("_latent_sizes")
        for layer, count in enumerate(heads):
            config = {**self._config, **own.get(layer, {})} if isinstance(own, dict) else self._config
            found.append(LatentShape.of(config, self.d_model, count or max(heads), self._reference, **options))
        return found

    def _says(self, what: str) -> bool:
        return any(self._config.get(key) is not None for key in _SIZES[what])

    def _size(self, what: str) -> int:
        """A size from the config that all layers share."""
        found = self._given(what)
        if isinstance(found, int):
            return found
        raise HeadspanError(
            f"the config of {self._reference} lists {what} layer by layer: one number for all layers is needed"
        )

    def _sizes(self, what: str, default: list[int] | None = None) -> list[int]:
        """A size of every layer. Where the config lists it, 0 means a layer without attention."""
        if default is not None and not self._says(what):
            return default
        found = self._given(what)
        if isinstance(found, int):
            return [found] * self.n_layers
        if len(found) != self.n_layers:
            raise HeadspanError(
                f"the config of {self._reference} lists {what} for {len(found)} layers, but has {self.n_layers}"
            )
        self.headless |= {layer for layer, count in enumerate(found) if count == 0}
        return found

    def _given(self, what: str) -> int | list[int]:
        """The value in the config: a positive number, or a list with at least one positive number."""
        keys = _SIZES[what]
        key = next((key for key in keys if self._config.get(key) is not None), None)
        if key is None:
            raise HeadspanError(
                f"the config of {self._reference} does not give {what}: one of {', '.join(keys)} is needed"
            )
        value = self._config[key]
        other = next((k for k in keys if self._config.get(k) is not None and self._config[k] != value), None)
        if other is not None:
            raise HeadspanError(
                f"the config of {self._reference} contradicts itself: {key} = {repr(value)[:40]}, but "
                f"{other} = {repr(self._config[other])[:40]}"
            )
        counts = list(value) if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
            raise HeadspanError(f"the config of {self._reference} has {key} = {repr(value)[:80]}: an integer is needed")
        if max(counts, default=0) > _LARGEST[what]:
            raise HeadspanError(
                f"the config of {self._reference} has {key} = {repr(value)[:40]}: no model is that large"
            )
        if not any(counts):
            raise HeadspanError(
                f"the config of {self._reference} has {key} = {repr(value)[:80]}: a positive number is needed"
            )
        return counts if isinstance(value, (list, tuple)) else counts[0]
