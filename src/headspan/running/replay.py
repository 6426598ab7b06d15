"""Recompute one layer's attention, with the model's own code and the input of one port changed.

A run of the model is recorded once: the arguments of every attention module, and the outputs of its projections.
A replay calls the module again with replaced projections: the changed port returns what its weights compute from
the changed input, the others return their recorded outputs, for many changed inputs at once. Rotary positions, QK-norm,
soft caps, windows, sinks, ALiBi and masks are therefore the model's own, in every family.

:mod:`headspan.running.replay_checks` verifies this and refuses a model whose edges are not direct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headspan.checkpoints.live import by_modules
from headspan.checkpoints.untrusted import reason
from headspan.models.checkpoint import CheckpointWeights
from headspan.models.families.entry import WHY_NO_DIRECT_EDGE
from headspan.models.families.tensor_map import TensorMap
from headspan.running.opening import RunningModel
from headspan.running.port_inputs import Inlet, Receiver, latent_inlets
from headspan.running.replay_checks import check_direct_edges
from headspan.running.swapped_modules import (
    batched,
    copied,
    epsilon,
    first,
    gain,
    growing,
    mixed,
    standing_in,
    submodule,
    widened,
    without_cache,
)
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass
class Layer:
    """The modules of one attention layer."""

    number: int
    attention: Any
    norm: Any | None  # before attention
    output_norm: Any | None  # between attention and the stream
    inlets: dict[Receiver, Inlet]
    reader: Any  # a module whose input is what the ports read
    output: Any  # the module of O
    multiplier: float = 1.0  # of attention's output


@dataclass
class LayerRecord:
    """Inputs and outputs of one layer in a clean run on one sequence, batch dimension 1."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grows: list[int | None]  # for each tensor passed to attention: its batch dimension
    stream: torch.Tensor  # (1, T, d), before the norm
    normed: torch.Tensor  # (1, T, d), what the ports read
    projected: dict[Any, torch.Tensor]  # by projection module
    inner: dict[Receiver, torch.Tensor | None]  # scale of its latent's norm, per token
    z: torch.Tensor  # (T, heads, m), each head's input to W_O
    scale: torch.Tensor | None  # (T, 1): 1 / root mean square of the attention output, if it is normalised


Recording = dict[int, LayerRecord]


class Replayer:
    """A running model whose attention layers can be recomputed with one port changed."""

    def __init__(self, model: RunningModel, what: str = "effects") -> None:
        """``what`` is measured, in the words of a refusal."""
        self.model, self.what = model, what
        source = by_modules(model.model)
        self.weights = CheckpointWeights(source)
        self.weights.reference = model.reference
        self._where = TensorMap(source)
        place = self.weights.norm_place
        if place in WHY_NO_DIRECT_EDGE:
            raise self.refusal(WHY_NO_DIRECT_EDGE[place])
        if self._where.entry.streams:
            raise self.refusal(
                "it has several residual streams, and scalars per token determine how much of a head's output "
                f"reaches a later head, while {what} assume that all of it does"
            )
        if self._where.kv_layers:
            raise self.refusal(
                f"its last layers use the keys and values of earlier ones (num_kv_shared_layers), while {what} assume "
                "that every layer computes its own"
            )
        if not self.weights.even:
            raise self.refusal(
                f"its layers have different numbers or sizes of heads, and {what} are measured "
                "between layers of one shape only"
            )
        if self._where.entry.rotary_norm:
            raise self.refusal("its rotary keys have their own norm, which is supported for latents only")
        self.layers = {layer: self._find(layer) for layer in self.weights.layers}
        self._shapes: dict[int, dict[int, list[int | None]]] = {}

    def refusal(self, why: str) -> HeadspanError:
        return HeadspanError(f"no {self.what} for {self.model.reference} ({self.weights.architecture}): {why}")

    # -- modules ---------------------------------------------------------------------------------------------

    def _find(self, number: int) -> Layer:
        where, entry = self._where, self._where.entry
        norm = next((found for name in entry.norm if (found := self._in_layer(number, name))), None)
        output_norm = next((found for name in entry.output_norm if (found := self._in_layer(number, name))), None)
        if entry.output_norm and output_norm is None:
            raise self.refusal("the norm after its attention was not found")
        attention = self._module(where.module(Role.Q, number).rpartition(".")[0])
        inlets, reader = self._inlets(number)
        return Layer(number, attention, norm, output_norm, inlets, reader, self._module(where.module(Role.O, number)))

    def _inlets(self, number: int) -> tuple[dict[Receiver, Inlet], Any]:
        """The receivers of a layer, and a module whose input is what they read."""
        where = self._where
        if where.latent is not None:
            found = latent_inlets(where.latent, lambda name: self._module(where.in_layer(number, name)))
            return found, self._module(where.in_layer(number, where.latent.latent_module(Role.K) or ""))
        modules = {role: self._module(where.module(role, number)) for role in (Role.Q, Role.K, Role.V)}
        heads = {role: len(self.weights.heads_in(role, number)) for role in modules}
        return {Receiver(r): Inlet(m, self._rows(r, number), heads[r]) for r, m in modules.items()}, modules[Role.Q]

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        return tuple(next(iter(self.layers.values())).inlets)

    @property
    def latent(self) -> bool:
        """Whether keys and values are computed from a latent."""
        return self._where.latent is not None

    def _in_layer(self, number: int, name: str) -> Any | None:
        return submodule(self.model.model, self._where.in_layer(number, name))

    @property
    def blocks(self) -> list[tuple[Any, list[Layer]]]:
        """The blocks of the model, each with its attention layers: none, one, or two (LongCat)."""
        each = self._where.entry.sublayers
        found = []
        for start in range(0, self.weights.n_layers, each):
            name = self._where.prefix + self._where.entry.layer.format(start // each)
            inside = [self.layers[n] for n in range(start, start + each) if n in self.layers]
            found.append((self._module(name.rstrip(".")), inside))
        return found

    def _module(self, name: str) -> Any:
        try:
            return self.model.model.get_submodule(name)
        except AttributeError:
            raise self.refusal(f"it has no module {name}, which is expected in its family") from None

    def _rows(self, role: Role, layer: int) -> torch.Tensor | None:
        import torch

        rows = self.weights.port_rows(role, layer).ravel()
        return None if len(rows) == self._where.rows(role, layer) else torch.from_numpy(rows)

    # -- recording -------------------------------------------------------------------------------------------

    def record(self, ids: torch.Tensor) -> Recording:
        """One clean run on token ids (T,)."""
        import torch

        length = len(ids)
        with torch.no_grad():  # not inference_mode, whose tensors cannot be part of a graph
            seen = self.run(ids[None])
            if length not in self._shapes:  # running two copies shows which dimensions are the batch's
                twice = self.run(ids[None].repeat(2, 1))
                self._shapes[length] = {
                    n: growing(seen[n, "attention"][:2], twice[n, "attention"][:2]) for n in self.layers
                }
        return {n: self._layer_record(n, seen, self._shapes[length][n]) for n in self.layers}

    def _layer_record(self, n: int, seen: Mapping[Any, Any], grows: list[int | None]) -> LayerRecord:
        layer = self.layers[n]
        args, kwargs, _ = seen[n, "attention"]
        normed = first(seen[n, "reader"])
        stream = first(seen[n, "norm"]) if layer.norm is not None else normed
        z = first(seen[n, "output"])
        z = z.reshape(z.shape[1], self.weights.n_heads, -1)
        projected = {inlet.module: seen[n, receiver][2] for receiver, inlet in layer.inlets.items()}
        inner = {receiver: inlet.scale(normed) for receiver, inlet in layer.inlets.items()}
        return LayerRecord(args, kwargs, grows, stream, normed, projected, inner, z, self.output_scale(layer, seen))

    def output_scale(self, layer: Layer, seen: Mapping[Any, Any]) -> torch.Tensor | None:
        """The scale of the norm after attention, per token."""
        if layer.output_norm is None:
            return None
        before = widened(first(seen[layer.number, "output_norm"])[0])
        return (before.square().mean(-1, keepdim=True) + epsilon(layer.output_norm)).rsqrt()

    def run(self, ids: torch.Tensor) -> dict[Any, tuple[tuple[Any, ...], dict[str, Any], Any]]:
        """Args, kwargs and output of the modules of interest in one run."""
        seen: dict[Any, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

        def keep(label: Any) -> Callable[..., None]:
            copy = copied if isinstance(label[1], Receiver) else lambda out: out  # some models clip it in place
            return lambda module, args, kwargs, out: seen.__setitem__(label, (args, kwargs, copy(out)))

        handles = []
        for n, layer in self.layers.items():
            watched: dict[Any, Any] = {"attention": layer.attention, "reader": layer.reader, "output": layer.output}
            watched |= {receiver: inlet.module for receiver, inlet in layer.inlets.items()}
            watched |= {k: m for k, m in (("norm", layer.norm), ("output_norm", layer.output_norm)) if m is not None}
            handles += [m.register_forward_hook(keep((n, k)), with_kwargs=True) for k, m in watched.items()]
        for number, (block, _) in enumerate(self.blocks):
            handles.append(block.register_forward_hook(keep((number, "block")), with_kwargs=True))
        try:
            self.call(ids, output_attentions=True)
        finally:
            for handle in handles:
                handle.remove()
        needed = ("attention", "output", *self.receivers)
        absent = next(((n, k) for n in self.layers for k in needed if (n, k) not in seen), None)
        if absent is not None:
            raise self.refusal(f"layer {absent[0]} was not run through its {absent[1]} module")
        return seen

    def call(self, ids: torch.Tensor, **options: Any) -> Any:
        """What the model returns for token ids (B, T); whatever it raises is one message."""
        model = self.model.model
        try:
            return model(input_ids=ids.to(model.device), return_dict=True, **without_cache(model), **options)
        except (MemoryError, HeadspanError):
            raise
        except Exception as error:
            raise HeadspanError(f"{self.model.reference} cannot be run: {reason(error)}") from error

    # -- what heads write ------------------------------------------------------------------------------------

    def written(self, layer: int, z: torch.Tensor, heads: slice | np.ndarray = slice(None)) -> torch.Tensor:
        """What a layer's heads add to the stream, (heads, T, d), for z (T, all heads, m) times the token's scale."""
        import torch

        weight = self._output_weight(layer)[heads]
        found = torch.einsum("thm,hdm->htd", z[:, heads].to(weight.dtype), weight)
        return self.gained(self.layers[layer], found)

    def _output_weight(self, layer: int) -> torch.Tensor:
        """W_O of every head, (heads, d, m), a view of the module's own weight."""
        weight = self.layers[layer].output.weight
        weight = weight.T if self._where.entry.transposed else weight
        return weight.reshape(weight.shape[0], self.weights.n_heads, -1).permute(1, 0, 2)

    def gained(self, layer: Layer, written: torch.Tensor) -> torch.Tensor:
        if layer.output_norm is not None:
            written = written * gain(layer.output_norm, one_plus=self._where.entry.one_plus)
        return written if layer.multiplier == 1.0 else written * layer.multiplier

    def output_grams(self, layer: int) -> torch.Tensor:
        """W_OᵀW_O of every head with the gains that follow, (heads, m, m): gives the norm of an output from z alone."""
        weight = self._output_weight(layer).transpose(1, 2)  # (heads, m, d)
        weight = self.gained(self.layers[layer], weight)
        return widened(weight) @ widened(weight).transpose(1, 2)

    # -- replaying -------------------------------------------------------------------------------------------

    def read(self, layer: int, stream: torch.Tensor) -> torch.Tensor:
        """What the ports of a layer read from a stream (n, T, d): the norm before attention, if there is one."""
        norm = self.layers[layer].norm
        return stream if norm is None else norm(stream)

    def project(self, layer: int, receiver: Receiver, record: LayerRecord, read: torch.Tensor) -> torch.Tensor:
        """The output of a port for an input, (n, T, heads of the port, m) for (n, T, d)."""
        return self.layers[layer].inlets[receiver].project(read, record.inner[receiver])

    def replay(
        self,
        layer: int,
        record: LayerRecord,
        receiver: Receiver | None = None,
        projected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention (n, heads, T, T) and z (n, T, heads, m) with one port returning ``projected`` (n, T, heads, m)."""
        n = 1 if projected is None else len(projected)
        # Copies, because some models clip a projection's output in place.
        outputs = {module: out.repeat(n, *[1] * (out.ndim - 1)) for module, out in record.projected.items()}
        if receiver is not None and projected is not None:
            inlet = self.layers[layer].inlets[receiver]
            outputs[inlet.module] = mixed(outputs[inlet.module], projected.flatten(2), inlet.rows)
        return self.attend(layer, record, outputs, n)

    def attend(
        self, layer: int, record: LayerRecord, outputs: Mapping[Any, torch.Tensor], n: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention (n, heads, T, T) and z (n, T, heads, m) with these outputs of the projection modules."""
        from torch.utils import _pytree as pytree

        modules = self.layers[layer]
        leaves, tree = pytree.tree_flatten((record.args, record.kwargs))
        leaves = [batched(leaf, dim, n) for leaf, dim in zip(leaves, record.grows, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        caught: list[torch.Tensor] = []

        def catch(z: torch.Tensor) -> torch.Tensor:
            caught.append(z)
            return z.new_zeros(()).expand(*z.shape[:-1], self.weights.d_model)

        with ExitStack() as stack:
            for module, value in outputs.items():
                stack.enter_context(standing_in(module, lambda *a, value=value, **k: value))
            stack.enter_context(standing_in(modules.output, catch))
            out = modules.attention(*args, **kwargs)
        out = out if isinstance(out, tuple) else (out,)
        z = caught[0] if caught else out[0]
        length = record.z.shape[0]
        shape = (n, self.weights.n_heads, length, length)
        patterns = [x for x in out if getattr(x, "shape", None) == shape]
        if not patterns:
            raise self.refusal("its attention modules do not return the attention weights")
        return widened(patterns[-1]), widened(z).reshape(n, length, self.weights.n_heads, -1)

    def check(self, ids: torch.Tensor) -> None:
        """Refuse a model without direct edges; set the multiplier of attention's output."""
        check_direct_edges(self, ids)
