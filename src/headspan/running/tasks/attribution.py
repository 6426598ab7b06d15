"""Edge attribution: an estimate of what corrupting each edge does to a task, from gradients (EAP and EAP-IG).

The attribution of an edge is the change of its writer's output (corrupted less clean), times the gradient of the task
at the stream as the reader alone reads it, summed over tokens. EAP takes the gradient in the clean run. EAP-IG averages
it over runs whose token embeddings lie between the corrupted and the clean ones. Gradients are collected at the ports'
own outputs (d_head numbers per token) and drawn back to the stream one layer and some tokens at a time during the
backward pass, and a head's change is computed from z, so that no array of all writers and tokens is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.running.edge_effects import stream_norm
from headspan.running.tasks.changes import Changes
from headspan.running.tasks.graph_model import GraphModel, Group, Run
from headspan.running.tasks.objectives import Batch, objective
from headspan.running.tasks.stream_readers import pulled_back, through_norm

if TYPE_CHECKING:
    import torch

METHODS = {"ig": "EAP-IG, gradients averaged between corrupted and clean embeddings", "eap": "EAP, one gradient"}
STEPS = 5
_AT_ONCE = 2**22  # numbers in the gradients at the stream: a few arrays of 16 MB


class Attribution:
    """Attributions of every edge on one batch."""

    def __init__(self, graph: GraphModel, batch: Batch, goal: str, memory: int) -> None:
        import torch

        self.graph, self.batch, self.goal = graph, batch, goal
        with torch.no_grad():
            self.clean, self.corrupted = graph.run(batch.clean), graph.run(batch.corrupted)
        self._changes = Changes(graph, self.corrupted.minus(self.clean), None, memory // 2)
        dtype = np.float64 if self.clean.streams[0].element_size() == 8 else np.float32  # large: prompts × edges
        self.values = np.zeros((len(batch.prompts), *graph.table.mask.shape), dtype)

    def add(self, share: float, weight: float) -> None:
        """Add a run whose embeddings are corrupted + share · (clean − corrupted)."""
        import torch

        one, other = self.clean.streams[0], self.corrupted.streams[0]
        start = (other + share * (one - other)).detach().requires_grad_()
        waiting: dict[int, dict[Group, torch.Tensor]] = {}
        runs: list[Run] = []

        def arrived(group: Group, gradient: torch.Tensor) -> None:
            if group.receiver is None:
                self._contract({group: gradient}, runs[0], weight)
                return
            layer = waiting.setdefault(group.block, {})
            layer[group] = gradient
            if len(layer) == len(self.graph.inlets[group.block]):
                self._contract(waiting.pop(group.block), runs[0], weight)

        def seen(group: Group, tensor: torch.Tensor) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: arrived(group, gradient))

        with torch.enable_grad():
            runs.append(self.graph.run(self.batch.clean, embedding=start, seen=seen))
            assert runs[0].logits is not None and self.clean.logits is not None
            value = objective(self.goal, self.batch, runs[0].logits, self.clean.logits).sum()
            torch.autograd.grad(value, start)
        for layer in waiting.values():  # a port that does not change the value has no gradient
            self._contract(layer, runs[0], weight)

    def _contract(self, gradients: dict[Group, torch.Tensor], run: Run, weight: float) -> None:
        """Multiply the gradients of readers at one place of the stream with the changes of all earlier writers."""
        import torch

        places = {group: (self.graph.groups[group].start, self.graph.groups[group].stop) for group in gradients}
        columns = np.concatenate([np.arange(*place) for place in dict.fromkeys(places.values())])
        before = int(self.graph.table.before[columns[0]])
        size, length, d_model = self.clean.streams[0].shape
        with torch.no_grad():
            given = {group: gradient.reshape(size, length, -1) for group, gradient in gradients.items()}
            used = torch.nonzero(torch.stack([gradient.abs().amax((0, 2)) for gradient in given.values()]).amax(0))
            if not len(used):
                return
            step, last = max(1, _AT_ONCE // (size * len(columns) * d_model)), int(used[-1]) + 1
            for first in range(int(used[0]), last, step):
                tokens = slice(first, min(first + step, last))
                at_stream: dict[tuple[int, int], torch.Tensor] = {}
                for group, place in places.items():
                    mine = self._at_stream(group, given[group], run, tokens)
                    at_stream[place] = at_stream[place] + mine if place in at_stream else mine  # of Q and its gate
                together = torch.cat([found.transpose(1, 2) for found in at_stream.values()], 1).flatten(2)
                at_stream.clear()
                for rows, changes in self._changes.before(before, tokens):
                    found = torch.bmm(changes.flatten(2).transpose(0, 1), together.transpose(1, 2))
                    self.values[:, rows.start : rows.stop, columns] += weight * found.double().cpu().numpy()

    def _at_stream(self, group: Group, gradient: torch.Tensor, run: Run, tokens: slice) -> torch.Tensor:
        """The gradient at the stream as each reader of a group alone reads it, (B, T, readers, d)."""
        graph, n = self.graph, group.block
        stream, gradient = run.streams[n].detach()[:, tokens], gradient[:, tokens]
        if group.receiver is not None:
            inlet = graph.inlets[n][group.receiver]
            normed = graph.replayer.read(n, stream) if inlet.latent is not None else stream
            found = pulled_back(inlet, normed, inlet.heads_of(gradient))
            return through_norm(stream_norm(graph.weights, n), stream, found)
        if n in graph.mlps and graph.mlps[n].norm is not None:
            return through_norm(stream_norm(graph.weights, n), stream, gradient[:, :, None])
        return gradient[:, :, None]


def shares_of(method: str) -> list[float]:
    """Where gradients are taken: the share of the clean embeddings in a mixture with the corrupted ones."""
    return [1.0] if method == "eap" else [step / STEPS for step in range(STEPS)]


def attribute(
    graph: GraphModel, batch: Batch, goal: str, method: str, memory: int, tick: Callable[[], Any] = lambda: None
) -> Attribution:
    """Attributions of every edge on every prompt of a batch, (B, writers, readers) in ``values``."""
    found = Attribution(graph, batch, goal, memory)
    shares = shares_of(method)
    for share in shares:
        found.add(share, 1 / len(shares))
        tick()
    return found
