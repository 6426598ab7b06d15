"""Passes with edges exchanged: the exact value of one edge, and a circuit with everything else corrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headspan.running.tasks.changes import Changes
from headspan.running.tasks.graph_model import GraphModel, Group, Read, Run
from headspan.running.tasks.objectives import Batch, objective

if TYPE_CHECKING:
    import torch


class CircuitReads:
    """What readers read if only some edges are kept: the live outputs along those, the corrupted ones along others."""

    def __init__(self, graph: GraphModel, kept: np.ndarray, corrupted: Run, memory: int) -> None:
        self.graph, self.kept, self.corrupted, self.memory = graph, kept & graph.table.mask, corrupted, memory
        self._changes: Changes | None = None
        self._mixed: dict[Group, torch.Tensor] = {}

    def __call__(self, group: Group, run: Run) -> Read | None:
        kept = self._kept(group)
        if kept.all():
            return None
        if not kept.any():
            return Read(self.corrupted.stream(group)[None])
        if group not in self._mixed:
            self._mix(group, run)
        return Read(self._mixed.pop(group), np.flatnonzero(~kept.all(1)))

    def _kept(self, group: Group) -> np.ndarray:
        """The edges kept into the readers of a group, (readers, earlier writers)."""
        columns = self.graph.groups[group]
        return self.kept[: int(self.graph.table.before[columns.start]), columns].T

    def _mix(self, group: Group, run: Run) -> None:
        """The streams of all readers at one place that lack some edges, so that changes are read once for them."""
        import torch

        alike = [
            g for g in self.graph.groups if g.block == group.block and (g.receiver is None) == (group.receiver is None)
        ]
        rows = {g: kept[~kept.all(1)] for g in alike if (kept := self._kept(g)).any()}
        kept = np.concatenate(list(rows.values()))
        few = (
            2 * kept.sum(1) <= kept.shape[1]
        )  # add what is kept to the corrupted stream; else remove from the live one
        share = torch.from_numpy(np.where(few[:, None], kept, kept - 1.0)).to(run.stream(group))
        ends = torch.stack([run.stream(group), self.corrupted.stream(group)])
        mixed = ends[torch.from_numpy(few.astype(np.int64)).to(ends.device)]
        if self._changes is None:
            self._changes = Changes(self.graph, run, self.corrupted, self.memory)
        for writers, changes in self._changes.before(kept.shape[1]):
            part = share[:, writers]
            used = part.any(0)
            if 2 * int(used.sum()) <= len(used):
                part, changes = part[:, used], changes[used]
            mixed += (part @ changes.flatten(1)).reshape(mixed.shape)
        self._mixed.update(zip(rows, mixed.split([len(part) for part in rows.values()]), strict=True))


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

    groups = [g for g, columns in graph.groups.items() if columns.start <= column < columns.stop]
    head = np.array([column - graph.groups[groups[0]].start])

    def reads(asked: Group, run: Run) -> Read | None:
        if asked not in groups:
            return None
        return Read((run.stream(asked) + graph.delta(row, corrupted, clean))[None], head)

    with torch.no_grad():
        found = graph.run(batch.clean, reads, after=(groups[0].block, clean))
        assert found.logits is not None and clean.logits is not None
        changed, before = (objective(goal, batch, logits, clean.logits) for logits in (found.logits, clean.logits))
        return (changed - before).double().cpu().numpy()
