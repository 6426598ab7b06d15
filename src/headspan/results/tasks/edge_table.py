"""The edges of a whole model: what writes to the residual stream, what reads it, and which comes before which.

Writers are the token embedding, the heads (O) and the MLPs (W). Readers are Q of every head, K and V of every
key/value head (once for a shared one), the MLPs (R) and the logits (R). Every writer before a reader is an edge.

>>> table = EdgeTable.regular(n_layers=1, n_heads=2, n_kv_heads=1)
>>> [str(port) for port in table.writers]
['embedding.W', 'L0H0.O', 'L0H1.O', 'L0MLP.W']
>>> [str(port) for port in table.readers]
['L0H0.Q', 'L0H1.Q', 'L0KV0.K', 'L0KV0.V', 'L0MLP.R', 'logits.R']
>>> int(table.mask.sum())
11
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headspan.system.ordering import descending
from headspan.vocabulary.ends import Ends
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import (
    EMBEDDING_POSITION,
    UNEMBEDDING_POSITION,
    Head,
    HeadOrNode,
    Node,
    Port,
    Role,
    attention_position,
    mlp_position,
)
from headspan.vocabulary.ports import PortTable

EMBEDDING, LOGITS = "embedding", "logits"
_BESIDE_HEADS = re.compile(rf"{EMBEDDING}|{LOGITS}|L[0-9]{{1,6}}(MLP|BLOCK)", re.IGNORECASE)


def mlp_node(layer: int, *, parallel: bool = False) -> Node:
    """The MLP of a layer, ``L3MLP``."""
    return Node.at(mlp_position(layer, parallel), layer, f"L{layer}MLP", "mlp")


def block_node(layer: int) -> Node:
    """A block without attention as one node, ``L3BLOCK``: what it reads and all that it adds."""
    return Node.at(attention_position(layer), layer, f"L{layer}BLOCK", "block")


def beside_heads(name: str) -> bool:
    """True for a name that the embedding, the logits, an MLP or a block has in a table.

    >>> beside_heads("L3MLP"), beside_heads("refusal")
    (True, False)
    """
    return _BESIDE_HEADS.fullmatch(name.strip()) is not None


@dataclass(frozen=True)
class EdgeTable:
    """Writers and readers in stream order.

    writers: everything before a reader comes first in this order, so its writers are the first ``before`` of them.
    """

    writers: tuple[Port, ...]
    readers: tuple[Port, ...]

    @classmethod
    def of(cls, ports: PortTable, others: Sequence[Node]) -> EdgeTable:
        """The heads of a model and the MLPs or blocks beside them, with the embedding and the logits."""
        embedding = Node.at(EMBEDDING_POSITION, -1, EMBEDDING, EMBEDDING, reads=False)
        logits = Node.at(UNEMBEDDING_POSITION, -1, LOGITS, LOGITS, writes=False)
        writers = [Port(head, Role.O) for head in ports.of(Role.O)] + [Port(node, Role.W) for node in others]
        readers = [Port(head, role) for role in (Role.Q, Role.K, Role.V) for head in ports.of(role)]
        readers += [Port(node, Role.R) for node in others]
        return cls(
            (Port(embedding, Role.W), *sorted(writers, key=_order)),
            (*sorted(readers, key=_order), Port(logits, Role.R)),
        )

    @classmethod
    def regular(cls, n_layers: int, n_heads: int, n_kv_heads: int, *, parallel: bool = False) -> EdgeTable:
        """Every layer with the same heads and one MLP."""
        ports = PortTable.regular(range(n_layers), n_heads, n_kv_heads)
        return cls.of(ports, [mlp_node(layer, parallel=parallel) for layer in range(n_layers)])

    @cached_property
    def before(self) -> np.ndarray:
        """How many writers come before each reader."""
        positions = [port.head.position for port in self.writers]
        return np.searchsorted(positions, [port.head.position for port in self.readers], side="left")

    @cached_property
    def mask(self) -> np.ndarray:
        """True for edges, (writers, readers)."""
        return np.arange(len(self.writers))[:, None] < self.before[None]

    @cached_property
    def between_heads(self) -> np.ndarray:
        """True for edges from a head to a head, (writers, readers)."""
        ends = [np.array([isinstance(port.head, Head) for port in side]) for side in (self.writers, self.readers)]
        return self.mask & ends[0][:, None] & ends[1][None]

    @cached_property
    def ports(self) -> PortTable:
        """The same heads and nodes by role, with the KV head of every query head of its layer.

        >>> table = EdgeTable.regular(n_layers=1, n_heads=4, n_kv_heads=2)
        >>> str(table.ports.resolve("L0H3", "K")), str(table.ports.resolve("logits", "R"))
        ('L0KV1', 'logits')
        """
        found: dict[Role, list[HeadOrNode]] = {}
        for head, role in (*self.readers, *self.writers):
            found.setdefault(role, []).append(head)
        query, kv = ([head for head in found.get(role, []) if isinstance(head, Head)] for role in (Role.O, Role.V))
        return PortTable({role: tuple(heads) for role, heads in found.items()}, PortTable.of_heads(query, kv).served_by)

    def between(self, ends: Ends) -> np.ndarray:
        """True for the edges with these ends, (writers, readers)."""
        found = self.mask.copy()
        for i, (end, ports) in enumerate(((ends.start, self.writers), (ends.stop, self.readers))):
            if end is not None:
                here = np.array([str(port.head) in end.ports.get(port.role, ()) for port in ports], dtype=bool)
                found &= np.expand_dims(here, 1 - i)
        return found

    @property
    def n_edges(self) -> int:
        return int(self.mask.sum())

    @cached_property
    def _places(self) -> dict[str, tuple[str, int]]:
        sides = (("writer", self.writers), ("reader", self.readers))
        return {str(port): (side, i) for side, ports in sides for i, port in enumerate(ports)}

    def place(self, source: str, target: str) -> tuple[int, int]:
        """Row and column of an edge by the names of its ports; raises for what is not an edge."""
        (side, row), (other, column) = (self._place(name) for name in (source, target))
        if (side, other) != ("writer", "reader") or not self.mask[row, column]:
            raise HeadspanError(
                f"{source[:60]} → {target[:60]} is not an edge: an edge goes from a writer to a later reader"
            )
        return row, column

    def _place(self, name: str) -> tuple[str, int]:
        found = self._places.get(name)
        if found is None:
            raise HeadspanError(
                f"{name[:60]!r} is not a port of this model: it has {self.writers[0]}, {self.writers[1]} to "
                f"{self.writers[-1]} and {self.readers[0]} to {self.readers[-1]}"
            )
        return found

    def edge(self, row: int, column: int) -> tuple[str, str]:
        """The names of the ports of an edge."""
        return str(self.writers[row]), str(self.readers[column])

    def strongest(self, values: np.ndarray, count: int, among: np.ndarray | None = None) -> np.ndarray:
        """Flat indices of the edges (of some) with the largest values by size, largest first; ties in table order."""
        flat = np.flatnonzero(self.mask if among is None else self.mask & among)
        return flat[descending(np.abs(values.ravel()[flat]))[:count]]

    def circuit(self, values: np.ndarray, count: int) -> np.ndarray:
        """True for the ``count`` edges with the largest values by size, (writers, readers)."""
        kept = np.zeros(self.mask.size, dtype=bool)
        kept[self.strongest(values, count)] = True
        return kept.reshape(self.mask.shape)


def _order(port: Port) -> tuple[int, int, str, int]:
    """In the stream: by position, heads before nodes, then Q, K, V."""
    head: HeadOrNode = port.head
    rank = "QKVORW".index(str(port.role))
    if isinstance(head, Head):
        return head.position, rank, head.kind, head.index
    return head.position, 10, head.name, 0
