"""Edge attribution: an estimate of what corrupting each edge does to a task, from gradients (EAP and EAP-IG).

The attribution of an edge is the change of its writer's output (corrupted less clean), times the gradient of the task
at the stream as the reader alone reads it, summed over tokens. EAP takes the gradient in the clean run. EAP-IG averages
it over runs whose token embeddings lie between the corrupted and the clean ones. Gradients are collected at the ports'
own outputs (d_head numbers per token) and drawn back to the stream one layer at a time during the backward pass, so
that no array of all writers and tokens is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.running.edge_effects import stream_norm
from headspan.running.tasks.graph_model import Changes, GraphModel, Group, Run
from headspan.running.tasks.objectives import Batch, objective
from headspan.running.tasks.stream_readers import pulled_back, through_norm

if TYPE_CHECKING:
    import torch

METHODS = {"ig": "EAP-IG, gradients averaged between corrupted and clean embeddings", "eap": "EAP, one gradient"}
STEPS = 5


class Attribution:
    """Attributions of every edge on one batch."""

    def __init__(self, graph: GraphModel, batch: Batch, goal: str, memory: int) -> None:
        import torch

        self.graph, self.batch, self.goal = graph, batch, goal
        with torch.no_grad():
            self.clean, self.corrupted = graph.run(batch.clean), graph.run(batch.corrupted)
        self._changes = Changes(graph, self.corrupted, self.clean, memory // 2)
        self.values = np.zeros((len(batch.prompts), *graph.table.mask.shape))

    def add(self, share: float, weight: float) -> None:
        """Add a run whose embeddings are corrupted + share · (clean − corrupted)."""
        import torch

        one, other = self.clean.streams[0], self.corrupted.streams[0]
        start = (other + share * (one - other)).detach().requires_grad_()
        waiting: dict[int, dict[Group, torch.Tensor]] = {}
        runs: list[Run] = []

        def arrived(group: Group, gradient: torch.Tensor) -> None:
            with torch.no_grad():
                if group.receiver is None:
                    self._contract([(group, self._at_stream(group, gradient, runs[0]))], weight)
                    return
                layer = waiting.setdefault(group.block, {})
                layer[group] = gradient
                if len(layer) == len(self.graph.inlets[group.block]):
                    done = waiting.pop(group.block)
                    self._contract([(g, self._at_stream(g, x, runs[0])) for g, x in done.items()], weight)

        def seen(group: Group, tensor: torch.Tensor) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: arrived(group, gradient))

        with torch.enable_grad():
            runs.append(self.graph.run(self.batch.clean, embedding=start, seen=seen))
            assert runs[0].logits is not None and self.clean.logits is not None
            value = objective(self.goal, self.batch, runs[0].logits, self.clean.logits).sum()
            torch.autograd.grad(value, start)
        with torch.no_grad():  # a port that does not change the value has no gradient
            for layer in waiting.values():
                self._contract([(g, self._at_stream(g, x, runs[0])) for g, x in layer.items()], weight)

    def _at_stream(self, group: Group, gradient: torch.Tensor, run: Run) -> torch.Tensor:
        """The gradient at the stream as each reader of a group alone reads it, (B, readers, T, d)."""
        graph, n = self.graph, group.block
        stream = run.streams[n].detach()
        if group.receiver is not None:
            inlet = graph.inlets[n][group.receiver]
            mine = inlet.heads_of(gradient.reshape(len(stream), -1, gradient.shape[-1]))
            normed = graph.replayer.read(n, stream) if inlet.latent is not None else stream
            found = through_norm(stream_norm(graph.weights, n), stream, pulled_back(inlet, normed, mine))
        else:
            found = gradient.reshape(stream.shape)[:, :, None]
            if n in graph.mlps and graph.mlps[n].norm is not None:
                found = through_norm(stream_norm(graph.weights, n), stream, found)
        return found.transpose(1, 2)

    def _contract(self, gradients: list[tuple[Group, torch.Tensor]], weight: float) -> None:
        """Multiply the gradients of readers at one place of the stream with the changes of all earlier writers."""
        import torch

        columns = np.concatenate([np.arange(*self.graph.groups[g].indices(10**9)) for g, _ in gradients])
        together = torch.cat([found for _, found in gradients], 1)
        used = torch.nonzero(together.abs().amax((0, 1, 3)))
        if not len(used):
            return
        first, last = int(used[0]), int(used[-1]) + 1
        together = together[:, :, first:last].flatten(2)
        before = int(self.graph.table.before[columns[0]])
        for rows, changes in self._changes.before(before):
            changes = changes[:, :, first:last].flatten(2).transpose(0, 1)
            found = torch.bmm(changes, together.transpose(1, 2))
            self.values[:, rows.start : rows.stop, columns] += weight * found.double().cpu().numpy()


def attribute(
    graph: GraphModel, batch: Batch, goal: str, method: str, memory: int, steps: int = STEPS,
    tick: Callable[[], Any] = lambda: None,
) -> Attribution:  # fmt: skip
    """Attributions of every edge on every prompt of a batch, (B, writers, readers) in ``values``."""
    found = Attribution(graph, batch, goal, memory)
    points = [1.0] if method == "eap" else [step / steps for step in range(steps)]
    for share in points:
        found.add(share, 1 / len(points))
        tick()
    return found
