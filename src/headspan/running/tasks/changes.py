"""What every writer wrote in one pass less what it wrote in another, computed from z where a head wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headspan.running.tasks.graph_model import GraphModel, Run
from headspan.vocabulary.heads import Role

if TYPE_CHECKING:
    import torch

ALL = slice(None)


class Changes:
    """The changes of all writers, (writers, B, T, d).

    They are computed in order, once the pass has come that far, and kept if there is memory for all of them.
    other: None if ``one`` has the differences of two passes.
    """

    def __init__(self, graph: GraphModel, one: Run, other: Run | None, memory: int) -> None:
        x = one.streams[0]
        self.graph, self.one, self.other = graph, one, other
        fits = len(graph.table.writers) * x.numel() * x.element_size() <= memory
        self._kept = x.new_empty(len(graph.table.writers), *x.shape) if fits else None
        self._filled = 0

    def before(self, count: int, tokens: slice = ALL) -> Iterator[tuple[slice, torch.Tensor]]:
        """Of the first ``count`` writers at some tokens, all at once or layer by layer."""
        if self._kept is None:
            yield from ((rows, self._of(rows, tokens)) for rows in self._layers(0, count))
            return
        for rows in self._layers(self._filled, count):
            self._kept[rows] = self._of(rows, ALL)
            self._filled = rows.stop
        yield slice(0, count), self._kept[:count, :, tokens]

    def _layers(self, row: int, stop: int) -> Iterator[slice]:
        """The embedding, the heads of a layer, an MLP …"""
        while row < stop:
            port = self.graph.table.writers[row]
            count = len(self.graph.weights.heads_in(Role.O, port.head.layer)) if port.role is Role.O else 1
            yield slice(row, row + count)
            row += count

    def _of(self, rows: slice, tokens: slice) -> torch.Tensor:
        import torch

        port, graph = self.graph.table.writers[rows.start], self.graph
        with torch.no_grad():
            if port.role is not Role.O:
                return graph.delta(rows.start, self.one, self.other, tokens)[None]
            n = port.head.layer
            return graph.written(n, self.one.apart("z", n, self.other, tokens))
