"""Edges of a model by explicit hooks: every reader has its own leaf, and autograd goes through the model's code."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from headspan.running.swapped_modules import first, stream_of, with_first
from headspan.running.tasks.graph_model import GraphModel, Group
from headspan.vocabulary.heads import Role


class Oracle:
    """One model, with the writes and the logits of a pass, and the gradient at what each reader alone reads."""

    def __init__(self, graph: GraphModel) -> None:
        self.graph, self.replayer = graph, graph.replayer

    def forward(
        self, ids: Any, leaves: dict[Group, Any] | None = None, embedding: Any = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Logits at the last token, and what every writer wrote. Leaves are added to what single readers read."""
        seen: dict[Any, Any] = {}
        with ExitStack() as stack:
            for n, block in enumerate(self.graph.blocks):
                self._hook_block(stack, n, block, seen, leaves, embedding if n == 0 else None)
                if n in self.replayer.layers:
                    self._hook_attention(stack, n, seen, leaves)
            if leaves is not None:
                end = Group(len(self.graph.blocks))
                stack.enter_context(
                    _hooked(
                        self.graph.blocks[-1].register_forward_hook(
                            lambda module, args, out: _with_stream(out, stream_of(out) + leaves[end][0])
                        )
                    )
                )
            logits = self.graph.model.model(input_ids=ids, use_cache=False).logits[:, -1]
        return logits, self._writes(seen)

    def _hook_block(self, stack: Any, n: int, block: Any, seen: Any, leaves: Any, embedding: Any) -> None:
        alone = n not in self.replayer.layers

        def enter(module: Any, args: Any, kwargs: Any) -> Any:
            x = first((args, kwargs)) if embedding is None else embedding
            seen["in", n] = x
            return with_first(args, kwargs, x + leaves[Group(n)][0] if alone and leaves is not None else x)

        def leave(module: Any, args: Any, out: Any) -> Any:
            x = stream_of(out)
            if alone and leaves is not None:
                x = x - leaves[Group(n)][0]
            seen["out", n] = x
            return _with_stream(out, x)

        stack.enter_context(_hooked(block.register_forward_pre_hook(enter, with_kwargs=True)))
        stack.enter_context(_hooked(block.register_forward_hook(leave)))

    def _hook_attention(self, stack: Any, n: int, seen: Any, leaves: Any) -> None:
        layer = self.replayer.layers[n]
        stack.enter_context(
            _hooked(layer.output.register_forward_pre_hook(lambda module, args: seen.__setitem__(("z", n), args[0])))
        )
        if layer.output_norm is not None:
            stack.enter_context(
                _hooked(
                    layer.output_norm.register_forward_hook(
                        lambda module, args, out: seen.__setitem__(("ratio", n), out / args[0])
                    )
                )
            )
        if leaves is None:
            return
        modules: dict[Any, list[Any]] = {}
        for receiver, inlet in self.graph.inlets[n].items():
            modules.setdefault(inlet.module, []).append((receiver, inlet))
        inside: list[bool] = []
        for module, inlets in modules.items():

            def changed(module: Any, args: Any, out: Any, inlets: Any = inlets) -> Any:
                if inside:
                    return None
                inside.append(True)
                out = out.clone()
                for receiver, inlet in inlets:
                    read = seen["in", n] + leaves[Group(n, receiver)]
                    read = read if layer.norm is None else layer.norm(read)
                    if inlet.latent is not None:
                        read = (
                            inlet.latent.norm(inlet.latent.make(read)[..., : inlet.latent.rank]) * inlet.latent.factor
                        )
                    every = module(read)  # (heads, B, T, outputs)
                    rows = torch.arange(out.shape[-1]) if inlet.rows is None else inlet.rows
                    for head, mine in enumerate(rows.reshape(inlet.heads, -1)):
                        out[..., mine] = every[head][..., mine].reshape(*out.shape[:-1], -1)
                inside.pop()
                return out

            stack.enter_context(_hooked(module.register_forward_hook(changed)))
        if n in self.graph.mlps:
            reader = self.graph.mlps[n]

            def read(module: Any, args: Any, kwargs: Any) -> Any:
                given, leaf = first((args, kwargs)), leaves[Group(n)][0]
                x = given + leaf.reshape(given.shape) if reader.norm is None else reader.norm(seen["in", n] + leaf)
                return with_first(args, kwargs, x)

            stack.enter_context(_hooked(reader.module.register_forward_pre_hook(read, with_kwargs=True)))

    def _writes(self, seen: dict[Any, Any]) -> dict[Any, Any]:
        """By port of the table."""
        found: dict[str, Any] = {"embedding.W": seen["in", 0]}
        for n in range(len(self.graph.blocks)):
            rest = seen["out", n] - seen["in", n]
            if n in self.replayer.layers:
                layer, z = self.replayer.layers[n], seen["z", n]
                heads = self.graph.weights.heads_in(Role.O, n)
                width = z.shape[-1] // len(heads)
                nothing = layer.output.forward(torch.zeros_like(z))
                for head in heads:
                    alone = torch.zeros_like(z)
                    mine = slice(head.index * width, (head.index + 1) * width)
                    alone[..., mine] = z[..., mine]
                    written = (layer.output.forward(alone) - nothing) * seen.get(("ratio", n), 1.0) * layer.multiplier
                    found[f"{head}.O"], rest = written, rest - written
            found[f"L{n}{'MLP' if n in self.replayer.layers else 'BLOCK'}.W"] = rest
        return found

    def leaves(self, shape: Any, dtype: Any) -> dict[Group, Any]:
        """Zeros to differentiate with respect to, (readers, B, T, d) for each group."""
        return {
            group: torch.zeros(columns.stop - columns.start, *shape, dtype=dtype, requires_grad=True)
            for group, columns in self.graph.groups.items()
        }


def _with_stream(out: Any, x: Any) -> Any:
    return (x, *out[1:]) if isinstance(out, tuple) else x


class _hooked:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None:
        self.handle.remove()
