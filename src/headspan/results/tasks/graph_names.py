"""The edges of a model under the names of EAP-IG: ``input``, ``a0.h3``, ``m0``, ``logits``, ``a0.h3->a1.h0<q>``.

K and V have a name for every query head there, also where heads share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headspan.results.tasks.edge_table import EMBEDDING, LOGITS, EdgeTable, mlp_node
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Head, Port, Role, attention_position

PARALLEL = "parallel_attn_mlp"  # in the config of a file: MLPs run beside the attention


@dataclass(frozen=True)
class Layout:
    """A model in the terms of EAP-IG; a matrix of edges is (sources, targets)."""

    n_layers: int
    n_heads: int
    parallel: bool
    sources: tuple[str, ...]
    targets: tuple[str, ...]  # with the input of a head: a0.h3<q>
    columns: np.ndarray  # of the table, for each target
    mask: np.ndarray  # True for edges

    @classmethod
    def of(cls, table: EdgeTable) -> Layout:
        """The model of a table; raises if EAP-IG cannot express it."""
        heads = [port.head for port in table.writers if isinstance(port.head, Head)]
        n_layers = 1 + max((port.head.layer for port in table.writers), default=-1)
        n_heads = 1 + max((head.index for head in heads), default=-1)
        sources, targets = _sources(n_layers, n_heads), _targets(table, n_layers, n_heads)
        _check_same_ports(table, sources, targets)
        nodes = [node for node in table.ports.of(Role.W) if node.kind == "mlp"]
        parallel = {node.position == attention_position(node.layer) for node in nodes}
        if len(parallel) > 1:
            raise HeadspanError(
                "in graph files all MLPs run after the attention or all beside it, and this model has both kinds"
            )
        place = {str(port): i for i, port in enumerate(table.readers)}
        columns = np.array([place[port] for port in targets.values()])
        return cls(
            n_layers, n_heads, parallel == {True}, tuple(sources), tuple(targets), columns, table.mask[:, columns]
        )

    @property
    def copies(self) -> np.ndarray:
        """For each target, how many targets are the same reader."""
        return np.bincount(self.columns)[self.columns]

    @property
    def config(self) -> dict[str, int]:
        """The shape of the model under the names of TransformerLens, as in a file."""
        return {"n_layers": self.n_layers, "n_heads": self.n_heads, PARALLEL: self.parallel}

    def merged(self, cells: np.ndarray) -> np.ndarray:
        """The sums over the copies of every reader, (writers, readers)."""
        found = np.zeros((self.columns.max() + 1, len(self.sources)), dtype=cells.dtype)
        np.add.at(found, self.columns, np.where(self.mask, cells, 0).T)
        return found.T


def _sources(n_layers: int, n_heads: int) -> dict[str, str]:
    """The writers by their names in a file, in the order of EAP-IG."""
    found = {"input": f"{EMBEDDING}.W"}
    for n in range(n_layers):
        found |= {f"a{n}.h{i}": f"{Head(n, i)}.O" for i in range(n_heads)}
        found[f"m{n}"] = f"{mlp_node(n)}.W"
    return found


def _targets(table: EdgeTable, n_layers: int, n_heads: int) -> dict[str, str]:
    """The readers by their names in a file, in the order of EAP-IG; a shared one once for every query head."""
    found: dict[str, str] = {}
    for n in range(n_layers):
        for role in (Role.Q, Role.K, Role.V):
            for head in (Head(n, i) for i in range(n_heads)):
                read = table.ports.kv_of(head) if role.shared else head
                found[f"a{n}.h{head.index}<{role.value.lower()}>"] = str(Port(read, role))
        found[f"m{n}"] = f"{mlp_node(n)}.R"
    return found | {"logits": f"{LOGITS}.R"}


def _check_same_ports(table: EdgeTable, sources: Mapping[str, str], targets: Mapping[str, str]) -> None:
    """Refuse a model with nodes that EAP-IG has no name for, or without some that every graph has."""
    ours = dict.fromkeys(map(str, (*table.writers, *table.readers)))
    theirs = dict.fromkeys((*sources.values(), *targets.values()))
    if unnamed := [port for port in ours if port not in theirs]:
        raise HeadspanError(
            f"graph files of EAP-IG have no name for {unnamed[0]}, so the circuits of this model cannot be exchanged "
            "with it. Use a circuit in headspan's own JSON"
        )
    if absent := [port for port in theirs if port not in ours]:
        raise HeadspanError(
            "in graph files of EAP-IG every layer has one MLP and the same number of heads, with their own keys and "
            f"values or those of a group in the same layer. This model has no {absent[0]}"
        )
