"""Passes with edges exchanged: the exact value of one edge, and a circuit with everything else corrupted."""

from __future__ import annotations

import numpy as np

from headspan.running.tasks.changes import Changes
from headspan.running.tasks.graph_model import GraphModel, Group, Read, Run
from headspan.running.tasks.objectives import Batch, objective


class CircuitReads:
    """What readers read if only some edges are kept: the live outputs along those, the corrupted ones along others."""

    def __init__(self, graph: GraphModel, kept: np.ndarray, corrupted: Run, memory: int) -> None:
        self.graph, self.kept, self.corrupted, self.memory = graph, kept & graph.table.mask, corrupted, memory
        self._changes: Changes | None = None

    def __call__(self, group: Group, run: Run) -> Read | None:
        import torch

        columns = self.graph.groups[group]
        before = int(self.graph.table.before[columns.start])
        kept = self.kept[:before, columns].T  # (readers, writers)
        if kept.all():
            return None
        live, other = run.stream(group), self.corrupted.stream(group)
        if not kept.any():
            return Read(other[None])
        heads = np.flatnonzero(~kept.all(1))
        kept = kept[heads]
        if 2 * kept.sum() <= kept.size:
            stream, chosen, sign = other, kept, 1.0
        else:
            stream, chosen, sign = live, ~kept, -1.0
        stream = stream.repeat(len(heads), 1, 1, 1)
        if self._changes is None:
            self._changes = Changes(self.graph, run, self.corrupted, self.memory)
        for rows, changes in self._changes.before(before):
            share = torch.from_numpy(sign * chosen[:, rows].astype(np.float64)).to(stream)
            stream += (share @ changes.flatten(1)).reshape(stream.shape)
        return Read(stream, heads)


def circuit_values(
    graph: GraphModel, batch: Batch, goal: str, kept: np.ndarray, clean: Run, corrupted: Run, memory: int = 10**9
) -> np.ndarray:
    """The task's value of every prompt with these edges kept and all others corrupted."""
    import torch

    with torch.no_grad():
        found = graph.run(batch.clean, CircuitReads(graph, kept, corrupted, memory))
        assert found.logits is not None and clean.logits is not None
        return objective(goal, batch, found.logits, clean.logits).double().cpu().numpy()


def exact_values(
    graph: GraphModel, batch: Batch, goal: str, row: int, column: int, clean: Run, corrupted: Run
) -> np.ndarray:
    """The change of the task's value of every prompt if this edge alone carries the corrupted output."""
    import torch

    group = next(g for g, columns in graph.groups.items() if columns.start <= column < columns.stop)
    head = np.array([column - graph.groups[group].start])

    def reads(asked: Group, run: Run) -> Read | None:
        if asked != group:
            return None
        return Read((run.stream(group) + graph.delta(row, corrupted, clean))[None], head)

    with torch.no_grad():
        found = graph.run(batch.clean, reads, after=(group.block, clean))
        assert found.logits is not None and clean.logits is not None
        changed, before = (objective(goal, batch, logits, clean.logits) for logits in (found.logits, clean.logits))
        return (changed - before).double().cpu().numpy()
