"""A running model as a graph: every writer's output is kept, and every reader can read a stream of its own.

The model runs through its own code. Hooks keep what each node writes, and exchange the input of single readers: the
output of a projection for some heads, the input of an MLP, the stream after the last block. What an MLP writes is all
that its block adds besides its heads, so the writes always sum to the stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headspan.models.families.mlp_table import is_parallel
from headspan.results.tasks.edge_table import EdgeTable, block_node, mlp_node
from headspan.running.opening import RunningModel
from headspan.running.port_inputs import Inlet, Receiver
from headspan.running.replay import Replayer
from headspan.running.swapped_modules import epsilon, first, mixed, standing_in, stream_of, with_first
from headspan.running.tasks.stream_readers import GATE, MlpReader, mlp_reader, normed_latent, per_head, whole_inlets
from headspan.vocabulary.heads import Role

if TYPE_CHECKING:
    import torch

WHAT = "task circuits"
QUERY = Receiver(Role.Q)
_TOLERANCE = 1e-3  # of a stream, relative to its spread: sums of float32 in another order


class Group(NamedTuple):
    """Readers that read the same stream in the model: one receiver of a layer, an MLP or block, or the logits."""

    block: int  # the number of blocks for the logits
    receiver: Receiver | None = None  # None for an MLP, a block or the logits


class Read(NamedTuple):
    """What some heads of a group read instead of the stream, (heads, B, T, d); all of them together if None."""

    stream: torch.Tensor
    heads: np.ndarray | None = None


Reads = Callable[[Group, "Run"], Read | None]


@dataclass
class Run:
    """One pass over a batch: what every node wrote, and the streams that readers read."""

    logits: torch.Tensor | None = None
    streams: dict[int, torch.Tensor] = field(default_factory=dict)  # before each block, and after the last
    middle: dict[int, torch.Tensor] = field(default_factory=dict)  # what the MLP of a block reads
    z: dict[int, torch.Tensor] = field(default_factory=dict)  # (B, T, heads, m) with the scale of a norm after it
    added: dict[int, torch.Tensor] = field(default_factory=dict)  # by a block besides its heads
    outputs: dict[int, Any] = field(default_factory=dict)  # of each block, as it returned them

    def stream(self, group: Group) -> torch.Tensor:
        """What the readers of a group read in this pass."""
        return (
            self.middle[group.block]
            if group.receiver is None and group.block in self.middle
            else self.streams[group.block]
        )

    def apart(self, what: str, n: int, other: Run | None, tokens: slice = slice(None)) -> torch.Tensor:
        """The streams, z or additions of a block less those of another pass; None if this one has differences."""
        mine = getattr(self, what)[n][:, tokens]
        return mine if other is None else mine - getattr(other, what)[n][:, tokens]

    def minus(self, other: Run) -> Run:
        """What nodes wrote in this pass less what they wrote in another; both forget all but embeddings and logits."""
        found = Run(streams={0: self.apart("streams", 0, other)})
        for what in ("z", "added"):
            for n in list(getattr(self, what)):
                getattr(found, what)[n] = self.apart(what, n, other)
                del getattr(self, what)[n], getattr(other, what)[n]
        for run in (self, other):
            run.streams, run.middle, run.outputs = {0: run.streams[0]}, {}, {}
        return found


class GraphModel:
    """A model with an output head, its edges, and passes in which readers read what they are given."""

    def __init__(self, model: RunningModel) -> None:
        self.model = model
        self.replayer = replayer = Replayer(model, WHAT)
        self.weights = replayer.weights
        if model.model.get_output_embeddings() is None:
            raise replayer.refusal(
                "it has no output head, so it gives no logits. Give a model for causal language modelling"
            )
        if any(len(layers) > 1 for _, layers in replayer.blocks):
            raise replayer.refusal("its blocks have two attention layers each")
        self.blocks = [block for block, _ in replayer.blocks]
        self.inlets = {n: whole_inlets(layer) for n, layer in replayer.layers.items()}
        self.parallel = is_parallel(self.weights.architecture, self.weights._map.config)
        self.mlps: dict[int, MlpReader] = {}
        for n in replayer.layers:
            found = mlp_reader(replayer, n, self.blocks[n], parallel=self.parallel)
            if found is not None:
                self.mlps[n] = found
        nodes = [mlp_node(n, parallel=self.parallel) for n in self.mlps]
        nodes += [block_node(n) for n in range(len(self.blocks)) if n not in replayer.layers]
        self.table = EdgeTable.of(self.weights.ports, nodes)
        self.groups = self._grouped()

    def _grouped(self) -> dict[Group, slice]:
        """Which readers of the table belong to each group: they are adjacent. Those of a gate are Q as well."""
        found: dict[Group, list[int]] = {}
        for i, port in enumerate(self.table.readers):
            head = port.head
            block = head.layer if head.layer >= 0 else len(self.blocks)
            receiver = None if port.role is Role.R else Receiver(port.role, "KR" if head.kind == "KR" else "H")
            found.setdefault(Group(block, receiver), []).append(i)
        groups = {group: slice(places[0], places[-1] + 1) for group, places in found.items()}
        gates = {Group(n, GATE): groups[Group(n, QUERY)] for n, inlets in self.inlets.items() if GATE in inlets}
        return groups | gates

    # -- running ---------------------------------------------------------------------------------------------

    def run(
        self,
        ids: torch.Tensor,
        reads: Reads | None = None,
        *,
        embedding: torch.Tensor | None = None,
        after: tuple[int, Run] | None = None,
        seen: Callable[[Group, torch.Tensor], None] | None = None,
    ) -> Run:
        """One pass over token ids (B, T).

        reads: what the readers of a group read instead of the stream. embedding: in place of the token embeddings.
        after: a block and an earlier pass; the blocks before it return what they returned then.
        seen: called with the tensor whose gradient is that of a group: outputs of a projection, or an MLP's input. What
        nodes write is not kept then.
        """
        found = Run()
        start = 0
        with ExitStack() as stack:
            if after is not None:
                start, earlier = after
                for n in range(start):
                    stack.enter_context(standing_in(self.blocks[n], lambda *a, out=earlier.outputs[n], **k: out))
                found.streams.update({n: earlier.streams[n] for n in range(start)})
                found.z.update({n: earlier.z[n] for n in earlier.z if n < start})
                found.added.update({n: earlier.added[n] for n in range(start) if n in earlier.added})
            for n in range(start, len(self.blocks)):
                stack.enter_context(self._watched(n, found, reads, embedding if n == 0 else None, seen))
            stack.enter_context(self._watched_end(found, reads, seen))
            found.logits = self._logits(ids)
        return found

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits at the last token, (B, vocabulary)."""
        last_only = "logits_to_keep" in inspect.signature(self.model.model.forward).parameters
        return self.replayer.call(ids, **({"logits_to_keep": 1} if last_only else {})).logits[:, -1]

    @contextmanager
    def _watched(
        self, n: int, found: Run, reads: Reads | None, embedding: torch.Tensor | None, seen: Any
    ) -> Iterator[None]:
        """Hooks on one block."""
        import torch

        block, attends = self.blocks[n], n in self.replayer.layers
        own = Group(n)

        def enter(module: Any, args: Any, kwargs: Any) -> Any:
            x = first((args, kwargs)) if embedding is None else embedding
            found.streams[n] = x
            if attends:
                return with_first(args, kwargs, x)
            inside = x.view_as(x)
            read = reads(own, found) if reads is not None else None
            if seen is not None:
                seen(own, inside)
            return with_first(args, kwargs, inside if read is None else read.stream[0])

        def leave(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
            x, after = found.streams[n], stream_of(out)
            if attends and seen is None:
                with torch.no_grad():
                    found.added[n] = after - x - self.attention_output(n, found.z[n])
            elif not attends:  # the stream passes by what the block adds to its own input
                added = after - first((args, kwargs))
                found.added[n], after = added.detach(), x + added
                out = (after, *out[1:]) if isinstance(out, tuple) else after
            found.outputs[n] = out
            return out

        handles = [
            block.register_forward_pre_hook(enter, with_kwargs=True),
            block.register_forward_hook(leave, with_kwargs=True),
        ]
        try:
            if attends:
                handles += self._inside(n, found, reads, seen)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _inside(self, n: int, found: Run, reads: Reads | None, seen: Any) -> list[Any]:
        """Hooks on the projections, the output and the MLP of a block with attention."""
        layer = self.replayer.layers[n]
        by_module: dict[Any, list[tuple[Receiver, Inlet]]] = {}
        for receiver, inlet in self.inlets[n].items():
            by_module.setdefault(inlet.module, []).append((receiver, inlet))
        handles = [
            module.register_forward_hook(partial(self._project, n, inlets, found, reads, seen))
            for module, inlets in by_module.items()
        ]

        def keep_z(module: Any, args: Any) -> None:
            z = args[0].detach()
            found.z[n] = z.reshape(*z.shape[:2], self.weights.n_heads, -1)

        if seen is None:
            handles.append(layer.output.register_forward_pre_hook(keep_z))
        if seen is None and layer.output_norm is not None:

            def keep_scale(module: Any, args: Any) -> None:
                scale = (args[0].detach().square().mean(-1, keepdim=True) + epsilon(module)).rsqrt()
                found.z[n] = found.z[n] * scale[:, :, None]

            handles.append(layer.output_norm.register_forward_pre_hook(keep_scale))
        if n in self.mlps:
            handles.append(
                self.mlps[n].module.register_forward_pre_hook(
                    partial(self._mlp_input, n, found, reads, seen), with_kwargs=True
                )
            )
        return handles

    def _project(
        self, n: int, inlets: Sequence[tuple[Receiver, Inlet]], found: Run, reads: Any, seen: Any,
        module: Any, args: Any, out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Give heads of one projection the outputs for what they read instead."""
        import torch

        shape, out = out.shape, out.view_as(out)
        for receiver, inlet in inlets:
            group = Group(n, receiver)
            read = reads(group, found) if reads is not None else None
            if read is None:
                continue
            normed = self.replayer.read(n, read.stream)
            if read.heads is None:
                mine = self._whole(inlet, normed[0])
            else:
                heads = torch.from_numpy(read.heads).to(out.device)
                mine = inlet.heads_of(out.reshape(shape[0], -1, shape[-1])).clone()
                mine[:, :, heads] = per_head(inlet, normed, heads).to(mine)
            out = mixed(out.clone(), mine.reshape(*shape[:-1], -1), inlet.rows)
        if seen is not None:
            for receiver, _ in inlets:
                seen(Group(n, receiver), out)
            return out.clone()  # some models clip it in place, and its own gradient is needed
        return out

    @staticmethod
    def _whole(inlet: Inlet, read: torch.Tensor) -> torch.Tensor:
        """The outputs of all heads for one input, by the module itself: the same input gives the same bits."""
        out = inlet.module.forward(normed_latent(inlet, read))
        return out if inlet.rows is None else out[..., inlet.rows]

    def _mlp_input(self, n: int, found: Run, reads: Any, seen: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Give an MLP what it reads instead."""
        reader, given = self.mlps[n], first((args, kwargs))
        x = found.streams[n] if reader.norm is not None else given.reshape(found.streams[n].shape)
        found.middle[n] = x
        read = reads(Group(n), found) if reads is not None else None
        if read is not None:
            x = read.stream[0]
            x = x if reader.norm is None else reader.norm(x)
        else:
            x = given.view_as(given)
        if seen is not None:
            seen(Group(n), x)
        return with_first(args, kwargs, x.reshape(given.shape))

    @contextmanager
    def _watched_end(self, found: Run, reads: Reads | None, seen: Any) -> Iterator[None]:
        """A hook after the last block: what the logits read."""
        end = Group(len(self.blocks))

        def leave(module: Any, args: Any, out: Any) -> Any:
            x = stream_of(out)
            found.streams[end.block] = x
            read = reads(end, found) if reads is not None else None
            x = x.view_as(x) if read is None else read.stream[0]
            if seen is not None:
                seen(end, x)
            return (x, *out[1:]) if isinstance(out, tuple) else x

        handle = self.blocks[-1].register_forward_hook(leave)
        try:
            yield
        finally:
            handle.remove()

    # -- what nodes write ------------------------------------------------------------------------------------

    def written(self, layer: int, z: torch.Tensor) -> torch.Tensor:
        """What the heads of a layer write, (heads, B, T, d), for z or a difference of z (B, T, heads, m)."""
        return self.replayer.written(layer, z.flatten(0, 1)).unflatten(1, z.shape[:2])

    def attention_output(self, layer: int, z: torch.Tensor) -> torch.Tensor:
        """What all heads of a layer write together, (B, T, d)."""
        weight = self.replayer._output_weight(layer)  # (heads, d, m)
        flat = weight.permute(0, 2, 1).reshape(-1, weight.shape[1])
        found = z.flatten(2).to(weight.dtype) @ flat
        return self.replayer.gained(self.replayer.layers[layer], found)

    def delta(self, row: int, one: Run, other: Run | None, tokens: slice = slice(None)) -> torch.Tensor:
        """What one writer wrote in a pass less what it wrote in another, (B, T, d)."""
        port = self.table.writers[row]
        n = port.head.layer
        if row == 0:
            return one.apart("streams", 0, other, tokens)
        if port.role is Role.W:
            return one.apart("added", n, other, tokens)
        head = self.weights.heads_in(Role.O, n).index(port.head)
        apart = one.apart("z", n, other, tokens)
        return self.replayer.written(n, apart.flatten(0, 1), slice(head, head + 1))[0].unflatten(0, apart.shape[:2])

    def check(self, clean: torch.Tensor, corrupted: torch.Tensor) -> None:
        """Refuse a model in which something else reads the stream.

        If every node reads the corrupted stream, every node must write what it wrote in the corrupted run, so that the
        streams of both runs differ in the embedding alone.
        """
        import torch

        self.replayer.check(clean[0])
        end = Group(len(self.blocks))
        with torch.no_grad():
            other = self.run(corrupted)
            found = self.run(clean, lambda group, run: None if group == end else Read(other.stream(group)[None]))
            apart = found.stream(end) - other.stream(end) - (found.streams[0] - other.streams[0])
            if not apart.abs().max() <= _TOLERANCE * other.stream(end).std():
                raise self.replayer.refusal(
                    "something besides the queries, keys and values of its heads, its MLPs and its logits reads the "
                    "stream"
                )
