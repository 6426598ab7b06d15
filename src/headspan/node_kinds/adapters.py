"""LoRA adapters as nodes: the span read by A in modules that read the stream, or written by B in those that write it.

A of the query, key and value projections and of an MLP's input has rows in the stream; B of the attention output and of
an MLP's output has columns there. Each such module is one node, a basis with the rank of the adapter; scaling does not
change its span. The other factor lies inside the block and is not a node.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from headspan.models.adapters import CONFIG, AdaptedSource, Adapter, Patch, is_adapter, name_in
from headspan.models.families.tensor_map import weight_of
from headspan.models.folding import FoldedWeights, through
from headspan.models.mlp import Mlps, checkpoint_of
from headspan.models.weights import AttentionWeights, Norm
from headspan.node_kinds.node_sets import NodeSet, Place, centred_writers, check_name
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import EMBEDDING_POSITION, UNEMBEDDING_POSITION, Role, attention_position

_READS = {Role.Q, Role.K, Role.V}


def adapter_sets(weights: AttentionWeights, directory: str | os.PathLike[str]) -> list[NodeSet]:
    """The modules of a PEFT directory that read or write the stream, one set each."""
    base = checkpoint_of(weights, "the modules of an adapter")
    path = Path(os.path.expanduser(os.fspath(directory)))
    if not str(directory).strip() or not is_adapter(path):
        raise HeadspanError(
            f"{str(directory)[:200]!r} is not an adapter: give the directory that PEFT wrote, with its {CONFIG}"
        )
    source = AdaptedSource(base, Adapter(path))
    where = Modules(weights)
    sets: list[NodeSet] = []
    left: list[str] = []
    for tensor, patch in source.patches.items():
        if not patch.first:
            continue  # the bias of B, which adds a constant
        found = where.of(tensor)
        if found is None:
            left.append(tensor)
            continue
        sets.append(AdapterModule(weights, source.adapter, tensor, patch, found, where))
    unread = [tensor for tensor in left if where.in_unread_mlp(tensor)]
    if not sets and unread:
        raise HeadspanError(where.mlps.not_read or "")
    if not sets:
        raise HeadspanError(f"{path} has no LoRA on a module that reads or writes the residual stream")
    notes = list(source.notes)
    left = [tensor for tensor in left if tensor not in unread]
    if unread:
        notes.append(f"{len(unread)} modules of {path.name} are not nodes: {where.mlps.not_read}")
    if left:
        notes.append(
            f"{len(left)} modules of {path.name} lie inside their blocks and are not nodes, for example {left[0][:80]}"
        )
    if source.replaced:
        notes.append(
            f"{len(source.replaced)} tensors that {path.name} replaces as a whole (modules_to_save) are not nodes"
        )
    scales = sorted({patch.scale for patch in source.patches.values() if patch.first})
    shown = f"{scales[0]:g}" if len(scales) == 1 else f"{scales[0]:g} to {scales[-1]:g}"
    notes.append(f"{path.name} scales B·A by {shown}, which does not change its span")
    sets[0].notes += notes
    return sets


class Modules:
    """Maps each tensor of a checkpoint to its port in the stream."""

    def __init__(self, weights: AttentionWeights) -> None:
        self.weights = weights
        self.mlps = Mlps(weights)
        self._map = self.mlps._map
        self._layer = re.compile(re.escape(self._map.prefix + self._map.entry.layer).replace(r"\{\}", r"(\d{1,6})"))
        self._ports: dict[int, dict[str, tuple[Role, str]]] = {}

    def tensor(self, module: str) -> str | None:
        """The weight of a module by its name in transformers, if the model has it."""
        return name_in(self._map, weight_of(module))

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor as stored."""
        return self._map.shape(tensor)

    def of(self, tensor: str) -> tuple[Role, str, int] | None:
        """Role, part ("attention", "mlp", "embedding" or "unembedding") and layer of a tensor; None inside a block."""
        if tensor == self._map.unembedding and not self._map.tied:
            return Role.R, "unembedding", self._map.n_layers
        if tensor == weight_of(self._map.in_body(self._map.entry.embedding)):
            return Role.W, "embedding", -1
        match = self._layer.match(tensor)
        if match is None or int(match[1]) >= self._map.n_layers:
            return None
        layer = int(match[1])
        if layer not in self._ports:
            self._ports[layer] = self._in_layer(layer)
        found = self._ports[layer].get(tensor)
        return None if found is None else (*found, layer)

    def in_unread_mlp(self, tensor: str) -> bool:
        """Whether a tensor belongs to an MLP that is not read."""
        match = self._layer.match(tensor)
        inside = match is not None and tensor[match.end() :].startswith(("mlp.", "experts.", "router."))
        return inside and self.mlps.not_read is not None

    def in_layer(self, module: str) -> str:
        """A module's name with a short layer prefix: ``L3.self_attn.q_proj``."""
        match = self._layer.match(module)
        return f"L{int(match[1])}.{module[match.end() :]}" if match else module

    def _in_layer(self, layer: int) -> dict[str, tuple[Role, str]]:
        ports: dict[str, tuple[Role, str]] = {}
        if layer in self._map.layers:
            ports |= {self._map.reader(role, layer): (Role.R, "attention") for role in _READS}
            ports[self._map.weight(Role.O, layer)] = (Role.W, "attention")
        for part in () if self.mlps.not_read else self.mlps.parts(layer):
            for expert in range(1 if part.layout.stacked else part.experts):
                names = self.mlps.names(layer, part, expert)
                ports |= dict.fromkeys(names[:-1], (Role.R, "mlp")) | {names[-1]: (Role.W, "mlp")}
        return ports


class ModuleNodes(NodeSet):
    """Nodes in the place of one module that reads or writes the stream."""

    def __init__(self, weights: AttentionWeights, at: tuple[Role, str, int], where: Modules) -> None:
        self._weights, self._where = weights, where
        self._role, self._place, self._layer = at
        self.notes, self.d_model = [], weights.d_model
        position = {
            "attention": attention_position(max(self._layer, 0)), "mlp": where.mlps.position(max(self._layer, 0)),
            "embedding": EMBEDDING_POSITION, "unembedding": UNEMBEDDING_POSITION,
        }[self._place]  # fmt: skip
        self.places = {self._role: Place(position, self._layer)}
        norm = self._norm()
        reads = {Role.R} if norm is not None and norm.kind == "layer" else set()
        self.centred_roles = (centred_writers(weights) | reads) & {self._role}

    def _norm(self) -> Norm | None:
        """The norm before a module that reads, for folded weights."""
        weights = self._weights
        if not isinstance(weights, FoldedWeights) or self._role is Role.W:
            return None
        if self._place == "mlp":
            return self._where.mlps.norm(self._layer)
        return weights.inner.norm(self._layer) if self._place == "attention" else weights.inner.final_norm()

    def _through(self, basis: np.ndarray) -> np.ndarray:
        """The basis with the norms between the module and the stream, for folded weights."""
        weights = self._weights
        if not isinstance(weights, FoldedWeights):
            return basis
        if self._role is Role.R:
            return through(basis, self._norm())
        if self._place == "mlp":
            return self._where.mlps.folded_in(basis, Role.W, self._layer)
        return weights.written(self._layer, basis) if self._place == "attention" else self.centre(Role.W, basis)


class AdapterModule(ModuleNodes):
    """One module of an adapter."""

    kind = "adapter"

    def __init__(
        self, weights: AttentionWeights, adapter: Adapter, tensor: str, patch: Patch, at: tuple[Role, str, int],
        where: Modules,
    ) -> None:  # fmt: skip
        super().__init__(weights, at, where)
        self._adapter, self._patch, self.label = adapter, patch, str(adapter.directory)
        module = where.in_layer(tensor.removesuffix(".weight"))
        self._name = check_name(f"{adapter.directory.resolve().name}/{module}"[-180:])
        self.ids, self.population = range(1), 1

    def name(self, number: int) -> str:
        return self._name

    def width(self, role: Role) -> int:
        shape = self._adapter.file.shape(self._patch.first)
        return shape[0]

    def _read(self, role: Role, ids: np.ndarray) -> np.ndarray:
        # A is (r, in) and B is (out, r), however the base stores its weight.
        stored = self._adapter.factor(self._patch.first if role is Role.R else self._patch.second)
        basis = self._through((stored.T if role is Role.R else stored)[None])
        return np.repeat(basis, len(ids), axis=0)
