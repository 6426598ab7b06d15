"""A task on many prompts: attributions, exact values and the faithfulness of circuits, batch by batch.

Prompts of one length run together, as many as fit the memory. Ctrl-C ends a step: what is complete is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headspan.results.tasks.task_result import FAITHFUL, SHARES, CurvePoint, Values
from headspan.running.tasks.attribution import attribute
from headspan.running.tasks.graph_model import GraphModel, Run
from headspan.running.tasks.objectives import Batch, batches, objective
from headspan.running.tasks.pairs import Prompt
from headspan.running.tasks.patching import circuit_values, exact_values

_MOST_TOKENS = 1024  # of a batch: more are not faster, and progress should move
_ACTIVATIONS = 40  # numbers of d_model per token and layer that a pass with gradients keeps, about


class Measuring:
    """A model, what is measured, and the memory for it."""

    def __init__(self, graph: GraphModel, goal: str, method: str, memory: int, tick: Callable[[], Any]) -> None:
        self.graph, self.goal, self.method, self.memory, self.tick = graph, goal, method, memory, tick

    def room(self, prompts: Sequence[Prompt]) -> int:
        """How many tokens of such prompts a pass may keep in half of the memory."""
        lengths, weights = [len(prompt.clean) for prompt in prompts], self.graph.weights
        numbers = len(self.graph.blocks) * (_ACTIVATIONS * weights.d_model + 4 * weights.n_heads * max(lengths))
        numbers += self.graph.table.mask.size // min(lengths)  # attributions of every prompt of a batch
        return max(1, self.memory // (2 * 4 * numbers))

    def batches(self, prompts: Sequence[Prompt]) -> list[Batch]:
        return batches(prompts, min(_MOST_TOKENS, self.room(prompts)))

    def values(self, batch: Batch, run: Run, clean: Run) -> np.ndarray:
        """The task's value of every prompt in a pass."""
        assert run.logits is not None and clean.logits is not None
        return objective(self.goal, batch, run.logits, clean.logits).detach().double().cpu().numpy()

    def attributions(
        self, prompts: Sequence[Prompt], keep: Callable[[np.ndarray], Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Give ``keep`` those of every edge, (prompts, writers, readers), batch by batch.

        Returns the values of clean and corrupted prompts. After Ctrl-C those that are complete; none is an
        interruption. Prompts of one length come together.
        """
        clean: list[np.ndarray] = []
        corrupted: list[np.ndarray] = []
        try:
            for batch in self.batches(prompts):
                one = attribute(self.graph, batch, self.goal, self.method, self.memory, self.tick)
                both = [self.values(batch, run, one.clean) for run in (one.clean, one.corrupted)]
                keep(one.values)
                clean.append(both[0])
                corrupted.append(both[1])
        except KeyboardInterrupt:
            if not clean:
                raise
        return np.concatenate(clean), np.concatenate(corrupted)

    def exact(self, prompts: Sequence[Prompt], edges: np.ndarray) -> np.ndarray:
        """The exact value of some edges (flat indices), mean over prompts."""
        total = np.zeros(len(edges))
        for batch in self.batches(prompts):
            runs = self.runs(batch)
            for i, place in enumerate(edges):
                row, column = divmod(int(place), len(self.graph.table.readers))
                total[i] += exact_values(self.graph, batch, self.goal, row, column, *runs).sum()
                self.tick()
        return total / len(prompts)

    def runs(self, batch: Batch) -> tuple[Run, Run]:
        """The clean and the corrupted pass over a batch."""
        import torch

        with torch.no_grad():
            return self.graph.run(batch.clean), self.graph.run(batch.corrupted)


class Faithfulness:
    """How much of a task's value circuits keep on some prompts."""

    def __init__(self, measuring: Measuring, prompts: Sequence[Prompt]) -> None:
        self.measuring, self.table = measuring, measuring.graph.table
        self._batches = measuring.batches(prompts)
        self._kept: dict[int, tuple[Run, Run]] = {}  # passes of the first batches, as many as fit
        room, each = measuring.room(prompts), list[list[np.ndarray]]()
        for i, batch in enumerate(self._batches):
            runs = measuring.runs(batch)
            each.append([measuring.values(batch, run, runs[0]) for run in runs])
            room -= batch.clean.numel()
            if room >= 0:
                self._kept[i] = runs
        clean, corrupted = (np.concatenate(part) for part in zip(*each, strict=True))
        self.values = summary(clean, corrupted)

    def of(self, kept: np.ndarray) -> float:
        """(M(circuit) − M(nothing)) / (M(everything) − M(nothing)); NaN if corrupting changes nothing."""
        graph, goal = self.measuring.graph, self.measuring.goal
        memory = self.measuring.memory // 2
        each = [
            circuit_values(graph, batch, goal, kept, *(self._kept.get(i) or self.measuring.runs(batch)), memory)
            for i, batch in enumerate(self._batches)
        ]
        self.measuring.tick()
        apart = self.values["clean"] - self.values["corrupted"]
        return float((np.concatenate(each).mean() - self.values["corrupted"]) / apart) if apart else float("nan")

    def point(self, attribution: np.ndarray, edges: int, share: float | None = None) -> CurvePoint:
        """The circuit of the largest attributions."""
        kept = self.table.circuit(attribution, edges)
        share = edges / self.table.n_edges if share is None else share
        return {"edges": edges, "share": share, "faithfulness": self.of(kept)}

    def curve(self, attribution: np.ndarray) -> list[CurvePoint]:
        """At the shares of the MIB benchmark."""
        return [self.point(attribution, max(1, round(s * self.table.n_edges)), s) for s in SHARES]

    def smallest(self, attribution: np.ndarray, curve: Sequence[CurvePoint]) -> CurvePoint:
        """The smallest circuit with a faithfulness of at least 0.8, by halving between points of the curve."""
        first = next(i for i, point in enumerate(curve) if point["faithfulness"] >= FAITHFUL or point["share"] == 1.0)
        low, best = curve[first - 1]["edges"] if first else 0, curve[first]
        while best["edges"] - low > 1:
            tried = self.point(attribution, (low + best["edges"]) // 2)
            if tried["faithfulness"] >= FAITHFUL:
                best = tried
            else:
                low = tried["edges"]
        return best


def summary(clean: np.ndarray, corrupted: np.ndarray) -> Values:
    """Mean values of a task, and the share of prompts with a positive one."""
    return {
        "prompts": len(clean),
        "clean": float(clean.mean()),
        "corrupted": float(corrupted.mean()),
        "solved": float((clean > 0).mean()),
    }
