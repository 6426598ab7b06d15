"""The MLPs of a checkpoint: what each neuron reads and writes, expert by expert, with the norms folded in or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headspan.checkpoints.untrusted import config_part
from headspan.models.checkpoint import CheckpointWeights
from headspan.models.families.mlp_table import (
    DENSE,
    EXPERTS,
    INTERLEAVED,
    NORMS,
    OUTPUT_NORMS,
    OWN_NORMS,
    SHARED,
    Layout,
    is_parallel,
)
from headspan.models.families.tensor_map import weight_of
from headspan.models.folding import FoldedWeights, through, written_through
from headspan.models.weights import AttentionWeights, Norm
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role, mlp_position


def checkpoint_of(weights: AttentionWeights, what: str) -> CheckpointWeights:
    """The checkpoint of some weights; raises if they have none."""
    inner = weights.inner if isinstance(weights, FoldedWeights) else weights
    if not isinstance(inner, CheckpointWeights):
        raise HeadspanError(
            f"{weights.reference} holds the weights of attention only: open the model itself for {what}"
        )
    return inner


def has_parallel_blocks(weights: AttentionWeights) -> bool:
    """Whether MLPs read the same stream as the attention of their layer."""
    inner = weights.inner if isinstance(weights, FoldedWeights) else weights
    return isinstance(inner, CheckpointWeights) and is_parallel(inner.architecture, inner._map.config)


@dataclass(frozen=True)
class Part:
    """One dense MLP, the experts of a layer, or the MLP that they share."""

    layout: Layout
    experts: int  # 1 for a dense or shared MLP
    neurons: int  # of each expert


class Mlps:
    """The MLPs of a model. The neurons of a part are numbered consecutively over its experts."""

    def __init__(self, weights: AttentionWeights) -> None:
        self.weights = weights
        self.checkpoint = checkpoint_of(weights, "its neurons")
        self._map = self.checkpoint._map
        self._family = str(self._map.config.get("model_type") or self._map.architecture)
        self.folded = weights.folding != "none"
        self.parallel = is_parallel(self._map.architecture, self._map.config)
        self._parts: dict[int, list[Part]] = {}
        self._norms: dict[tuple[str, int], Norm | None] = {}
        self._kept: tuple[tuple[int, Part, Role, int], np.ndarray] | None = None

    def position(self, layer: int) -> int:
        return mlp_position(layer, self.parallel)

    def written_in(self, layer: int, part: Part) -> int:
        """The layer in which an MLP's output is added to the stream: LongCat adds its experts at the end of a block."""
        last = layer + self._map.entry.sublayers - 1
        return layer if last == layer or not (part.layout.experts or part.layout.shared) else last

    # -- parts -----------------------------------------------------------------------------------------------

    @property
    def not_read(self) -> str | None:
        """Why the MLPs of this model are not supported; None if they are."""
        key = OWN_NORMS.get(self._map.architecture)
        if key is None or not self._map.config.get(key):
            return None
        return (
            f"the MLPs of {self.weights.reference} are a mixture whose parts have their own norms, which is not "
            "supported: use its heads, tokens, added directions or adapters of its attention"
        )

    def parts(self, layer: int) -> list[Part]:
        """The MLPs of a layer; empty if it has only kinds that are not in the table."""
        if not 0 <= layer < self._map.n_layers:
            raise HeadspanError(
                f"{self.weights.reference} has no layer {layer}: its layers are 0 to {self._map.n_layers - 1}"
            )
        if self.not_read is not None:
            raise HeadspanError(self.not_read)
        if layer not in self._parts:
            further = layer % self._map.entry.sublayers > 0  # the experts of a block belong to the first of its layers
            layouts = [self._first(layer, table) for table in ((DENSE,) if further else (DENSE, EXPERTS, SHARED))]
            self._parts[layer] = [self._measured(layer, layout) for layout in layouts if layout is not None]
        return self._parts[layer]

    def _first(self, layer: int, table: tuple[Layout, ...]) -> Layout | None:
        for layout in table:
            if all(self._name(layer, module, 0) in self._map.names for module in (*layout.reads, layout.down)):
                parameter = layout.stacked and layout.fused  # GGUF files store gate and up separately, as Linear does
                turned = layout.turned or (parameter and self._stored_turned(layer, layout))
                turned = turned or (self._map.entry.transposed and not layout.experts)
                return replace(layout, turned=turned, interleaved=parameter and self._family in INTERLEAVED)
        return None

    def _stored_turned(self, layer: int, layout: Layout) -> bool:
        """Whether stacked experts are stored (expert, in, out): gpt-oss, Llama 4, and Qwen3-VL in published files.

        The shapes show this without ambiguity: gate and up together have twice as many neurons as down.
        """
        reads, writes = (self._map.shape(self._name(layer, module, 0)) for module in (layout.reads[0], layout.down))
        return reads[1:2] == writes[2:] == (self.weights.d_model,)

    def _name(self, layer: int, module: str, expert: int) -> str:
        return weight_of(self._map.in_layer(layer, module.replace("{}", str(expert))))

    def names(self, layer: int, part: Part, expert: int) -> list[str]:
        """The tensors of one expert: those that read, then the one that writes."""
        return [self._name(layer, module, expert) for module in (*part.layout.reads, part.layout.down)]

    def _measured(self, layer: int, layout: Layout) -> Part:
        """The layout with its numbers of experts and neurons, after checking shapes against d_model."""
        count = 1
        if layout.flat:
            return self._measured_flat(layer, layout)
        if layout.stacked:
            shape = self._map.shape(self._name(layer, layout.down, 0))
            count = shape[0] if shape else 0
        elif layout.experts:
            while self._name(layer, layout.down, count) in self._map.names:
                count += 1
        d, neurons, first = self.weights.d_model, 0, 0
        for expert in range(1 if layout.stacked else count):
            name = self._name(layer, layout.down, expert)
            shape = self._map.shape(name)[1 if layout.stacked else 0 :]
            neurons = shape[0 if layout.turned else 1] if len(shape) == 2 else 0
            first = first or neurons
            if neurons != first:  # ERNIE-4.5-VL: those for images are smaller
                raise HeadspanError(
                    f"the experts of layer {layer} of {self.weights.reference} have {first} neurons and {neurons}: "
                    "all experts of a layer must have the same number"
                )
            wanted = {name: ((neurons, d) if layout.turned else (d, neurons))}
            rows = 2 * neurons if layout.fused else neurons
            wanted |= {self._name(layer, m, expert): (d, rows) if layout.turned else (rows, d) for m in layout.reads}
            for tensor, expected in wanted.items():
                seen = self._map.shape(tensor)
                if seen != ((count, *expected) if layout.stacked else expected) or not neurons:
                    raise HeadspanError(
                        f"{tensor} of {self.weights.reference} has shape {seen}, which does not fit an MLP of d_model "
                        f"{d} and {neurons} neurons"
                    )
        return Part(layout, count, neurons)

    def _measured_flat(self, layer: int, layout: Layout) -> Part:
        count = config_part(self._map.config, "ffn_config").get("moe_num_experts")
        shapes = {self._map.shape(self._name(layer, module, 0)) for module in (*layout.reads, layout.down)}
        rows, d = next(iter(shapes)) if len(shapes) == 1 and len(next(iter(shapes))) == 2 else (0, 0)
        if type(count) is not int or count < 1 or d != self.weights.d_model or not rows or rows % count:
            raise HeadspanError(
                f"the experts of layer {layer} of {self.weights.reference} have shapes {sorted(shapes)}, which do not "
                f"fit d_model {self.weights.d_model} and {count} experts (moe_num_experts of ffn_config)"
            )
        return Part(layout, count, rows // count)

    # -- norms -----------------------------------------------------------------------------------------------

    def norm(self, layer: int) -> Norm | None:
        """The norm between the stream and the MLP of a layer."""
        if ("in", layer) not in self._norms:
            self._norms["in", layer] = self._find_norm(layer)
        return self._norms["in", layer]

    def _find_norm(self, layer: int) -> Norm | None:
        entry = self._map.entry
        if entry.norm_place in ("post", "residual", "none"):
            return None
        if entry.weightless_norm:
            return self.checkpoint._read_norm(["weightless"])
        if self._norms_behind(layer):
            return None
        behind = entry.output_norm if layer in self.checkpoint.layers else ()
        names = [n for n in NORMS if n not in behind]
        return self._norm_of(layer, names) or self._attention_norm(layer)

    def _norms_behind(self, layer: int) -> bool:
        """Whether the norms of a layer come after attention and MLP; layers of another kind may differ."""
        return self._map.entry.norm_place == "output" and layer in self.checkpoint.layers

    def _attention_norm(self, layer: int) -> Norm | None:
        # If there are two (GGUF files of Falcon), the first belongs to attention.
        return self._norm_of(layer, list(reversed(self._map.entry.norm))) if self.parallel else None

    def output_norm(self, layer: int) -> Norm | None:
        """The norm between the MLP of a layer and the stream."""
        if ("out", layer) not in self._norms:
            # Chameleon uses the usual name of the norm before the MLP for the norm after it.
            others = [n for n in NORMS if n not in self._map.entry.output_norm] if self._norms_behind(layer) else []
            self._norms["out", layer] = self._norm_of(layer, [*OUTPUT_NORMS, *others])
        return self._norms["out", layer]

    def _norm_of(self, layer: int, names: list[str]) -> Norm | None:
        module = next((m for m in names if weight_of(self._map.in_layer(layer, m)) in self._map.names), None)
        return None if module is None else self.checkpoint._read_norm([self._map.in_layer(layer, module)])

    # -- weights ---------------------------------------------------------------------------------------------

    def width(self, part: Part, role: Role) -> int:
        """Number of directions of one neuron: it writes one, and reads two if it is gated."""
        return 2 if role is Role.R and part.layout.gate is not None else 1

    def read(self, layer: int, part: Part, role: Role, expert: int) -> np.ndarray:
        """All neurons of one expert, (n, d, r): rows of gate and up, or columns of down. The last result is cached."""
        key = (layer, part, role, expert)
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            self._kept = (key, self._read(*key))
        return self._kept[1]

    def _read(self, layer: int, part: Part, role: Role, expert: int) -> np.ndarray:
        layout = part.layout
        modules = layout.reads if role is Role.R else (layout.down,)
        at_once = 1 if layout.stacked else part.neurons
        rows = slice(expert * at_once, (expert + 1) * at_once) if layout.stacked or layout.flat else None
        found = []
        for module in modules:
            stored = self.checkpoint.source.read(self._name(layer, module, expert), rows)
            stored = stored[0] if layout.stacked else stored
            # As (out, in): neurons are the rows of weights that read and the columns of weights that write.
            stored = stored.T if layout.turned or (layout.flat and role is Role.W) else stored
            found += self._split(layout, stored) if role is Role.R else [stored.T]
        neurons = np.stack(found, axis=2)
        return self.folded_in(neurons, role, layer) if self.folded else neurons

    def _split(self, layout: Layout, rows: np.ndarray) -> list[np.ndarray]:
        if not layout.fused:
            return [rows]
        return [rows[::2], rows[1::2]] if layout.interleaved else np.split(rows, 2)

    def folded_in(self, vectors: np.ndarray, role: Role, layer: int) -> np.ndarray:
        """Vectors (n, d, r) that the MLP of a layer reads or writes, with the norms around it folded in."""
        if role is Role.R:
            return through(vectors, self.norm(layer))
        return written_through(vectors, self.output_norm(layer), self.weights.centred)
