"""A model's weights with a limited number of nodes added: directions, neurons, features, adapters, tokens.

The bases of nodes are kept in memory, each with its own number of columns. :meth:`WithNodes.read` returns them as
(n, d, r), padded with zero columns if nodes of one role differ in r. Everything else comes from the model's weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.models.wrapped import WrappedWeights
from headspan.system.memory import check_room
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import NODE_ROLES, Node, Role, check_node_name
from headspan.vocabulary.ports import PortTable

if TYPE_CHECKING:
    from headspan.node_kinds.node_sets import NodeSet

MOST_NODES = 2000  # a result stores every pair
_AT_ONCE = 256  # nodes of a set read at a time


@dataclass(frozen=True)
class AddedNodes:
    """Nodes with their bases, by role and in stream order: what a cluster's workers need besides the model.

    bases: the (d, r) weight of every node, where r may differ; centred: whether its columns have mean 0; sets: one line
    about the origin of each set; variances: of what nodes write, by name, as far as they are known.
    """

    nodes: Mapping[Role, tuple[Node, ...]]
    bases: Mapping[Role, tuple[np.ndarray, ...]]
    sets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    centred: Mapping[Role, tuple[bool, ...]] = field(default_factory=dict)
    variances: Mapping[str, float] = field(default_factory=dict)

    def digest(self) -> str:
        """A hash of the nodes and their bases."""
        found = hashlib.sha256()
        for role in self.nodes:
            for node, basis in zip(self.nodes[role], self.bases[role], strict=True):
                found.update(_identity(role, node, basis))
        if self.variances:
            found.update(json.dumps(dict(sorted(self.variances.items()))).encode())
        return found.hexdigest()


def add_nodes(weights: AttentionWeights, sets: Iterable[NodeSet]) -> WithNodes:
    """The weights of a model with the nodes of some sets. Too many nodes are refused before anything is read."""
    sets = list(sets)
    if weights.ports.nodes:
        raise HeadspanError("these weights already have nodes: give all nodes at once")
    count = sum(map(len, sets))
    if count > MOST_NODES:
        raise HeadspanError(
            f"{count:,} nodes are too many for a result that holds every pair (at most {MOST_NODES:,}): "
            "choose fewer, or find the strongest of any number with `hs.nodes(model)`"
        )
    if not count:
        raise HeadspanError("no nodes were given: name at least one file, or leave nodes out")
    _check_names(sets)
    check_room(
        f"holding {count:,} nodes",
        sum(8 * weights.d_model * found.width(role) * len(found.nodes(role)) for found in sets for role in NODE_ROLES),
        "Choose fewer, or use a machine with more",
    )
    return WithNodes(weights, _gather(weights, sets))


def _gather(weights: AttentionWeights, sets: Iterable[NodeSet]) -> AddedNodes:
    """The bases of all nodes, in stream order."""
    rows: dict[Role, list[tuple[Node, np.ndarray, bool]]] = {role: [] for role in NODE_ROLES}
    lines: dict[str, tuple[dict[str, str], Any]] = {}  # label -> kinds of its nodes by name, and their hash
    notes: list[str] = []
    variances: dict[str, float] = {}
    for found in sets:
        if found.variance is not None:
            variances |= dict.fromkeys(map(str, found.nodes(Role.W)), float(found.variance))
        kinds, digest = lines.setdefault(found.label, ({}, hashlib.sha256()))
        for role in NODE_ROLES:
            for node, basis in _read(found, role):
                rows[role].append((node, basis, role in found.centred_roles))
                digest.update(_identity(role, node, basis))
                kinds[node.name] = node.kind
        notes += found.notes
    for role in NODE_ROLES:
        rows[role].sort(key=lambda row: (row[0].position, row[0].layer))
        layers = [node.layer for node, *_ in rows[role]]
        if layers != sorted(layers):
            raise HeadspanError("nodes of a later layer come before those of an earlier one: check their layers")
    present = [role for role in NODE_ROLES if rows[role]]
    return AddedNodes(
        {role: tuple(node for node, _, _ in rows[role]) for role in present},
        {role: tuple(basis for _, basis, _ in rows[role]) for role in present},
        tuple(_line(label, kinds, digest.hexdigest()) for label, (kinds, digest) in lines.items()),
        tuple(dict.fromkeys(notes)),
        {role: tuple(centred for _, _, centred in rows[role]) for role in present},
        variances,
    )


def _read(found: NodeSet, role: Role) -> Iterator[tuple[Node, np.ndarray]]:
    nodes = found.nodes(role)
    if not len(nodes):
        return
    for rows, block in found.blocks(role, _AT_ONCE):
        for node, basis in zip(nodes[rows], block, strict=True):
            used = np.flatnonzero(basis.any(axis=0))  # a dead neuron has no direction and rank 0
            kept = basis[:, : int(used[-1]) + 1 if used.size else 1]
            if not np.isfinite(kept).all():
                raise HeadspanError(
                    f"the node {node.name} contains NaN or infinite numbers, so it has no meaningful span"
                )
            yield node, np.array(kept, order="C")


def _identity(role: Role, node: Node, basis: np.ndarray) -> bytes:
    about = [str(role), node.name, node.kind, node.layer, node.position, basis.shape, basis.dtype.name]
    return json.dumps(about).encode() + np.ascontiguousarray(basis).tobytes()


def _line(label: str, kinds: Mapping[str, str], digest: str) -> str:
    """The description of a set in a result: its name, the number of nodes of each kind, and a hash of their bases."""
    counts = ", ".join(f"{count:,} of kind {kind}" for kind, count in Counter(kinds.values()).items())
    return f"{_without_folders(label)}: {counts}, sha256 {digest[:16]}"


def _without_folders(label: str) -> str:
    """A label that starts with a path, cut to its last part, since folder names are private."""
    for end in (len(label), *(i for i, letter in enumerate(label) if letter == ":" and i)):
        with suppress(OSError, ValueError):
            if Path(label[:end]).exists():
                return os.path.basename(os.path.abspath(label[:end])) + label[end:]
    return label


def _check_names(sets: Iterable[NodeSet]) -> None:
    """Refuse two nodes with the same name; the two roles of a node are rows of one set."""
    seen: dict[str, int] = {}
    for place, found in enumerate(sets):
        for role in NODE_ROLES:
            here: set[str] = set()
            for node in found.nodes(role):
                if node.name in here or seen.get(check_node_name(node.name), place) != place:
                    raise HeadspanError(f"two nodes are named {node.name!r}: give one of them another name")
                here.add(node.name)
                seen[node.name] = place


class WithNodes(WrappedWeights):
    """The weights of a model with nodes that read (R) or write (W) its residual stream."""

    def __init__(self, weights: AttentionWeights, added: AddedNodes) -> None:
        super().__init__(weights)
        self.added = added
        self.ports = PortTable({**weights.ports.ports, **added.nodes}, weights.ports.served_by)
        self.not_foldable_reason = "nodes were added to it: fold the model first, then add them"
        self._digest = added.digest()

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(sorted({*self.layers, *(node.layer for node in self.ports.nodes)}))

    # -- what nodes add ----------------------------------------------------------------------------------------

    def widths(self, role: Role | str) -> np.ndarray:
        role = Role.parse(role)
        if role not in NODE_ROLES:
            return self.inner.widths(role)
        return np.array([basis.shape[1] for basis in self.added.bases.get(role, ())], dtype=np.int64)

    def centred_ports(self, role: Role | str) -> np.ndarray:
        role = Role.parse(role)
        if role not in NODE_ROLES:
            return self.inner.centred_ports(role)
        nodes = self.added.nodes.get(role, ())
        return np.array(self.added.centred.get(role, [False] * len(nodes)), dtype=bool)

    def d_head(self, role: Role | str) -> int:
        role = Role.parse(role)
        if role not in NODE_ROLES:
            return self.inner.d_head(role)
        return int(self.widths(role).max(initial=1))

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        role = Role.parse(role)
        if role not in NODE_ROLES:
            return self.inner.read(role, layer)
        return self._stacked(self.added.bases.get(role, ())[self.ports.span(role, layer)], self.d_head(role))

    def observed(self, role: Role | str, layer: int) -> np.ndarray:
        """Of a node that reads, its vectors; of one that writes, its vectors times their standard deviation."""
        role = Role.parse(role)
        if role not in NODE_ROLES:
            return self.inner.observed(role, layer)
        found = self.read(role, layer)
        if role is Role.R:
            return found
        nodes = self.ports.of(role)[self.ports.span(role, layer)]
        return found * np.sqrt([self.added.variances[str(node)] for node in nodes])[:, None, None]

    def without_variance(self) -> list[str]:
        return [str(node) for node in self.ports.of(Role.W) if str(node) not in self.added.variances]

    def partner(self, role: Role | str, layer: int, read: np.ndarray | None = None) -> np.ndarray:
        """The other weight of a node; for a direction any single column, since only its length matters."""
        role = Role.parse(role)
        if role not in NODE_ROLES:
            return self.inner.partner(role, layer, read)
        nodes = self.ports.of(role)[self.ports.span(role, layer)]
        others = dict(zip(map(str, self.ports.of(role.partner)), self.added.bases.get(role.partner, ()), strict=True))
        any_column = np.eye(self.d_model, 1)
        widths = self.widths(role)[self.ports.span(role, layer)]
        found = [any_column if width == 1 else others[str(node)] for node, width in zip(nodes, widths, strict=True)]
        return self._stacked(found, self.d_head(role))

    def without_partner(self, role: Role | str) -> list[str]:
        role = Role.parse(role)
        if role not in NODE_ROLES:
            return self.inner.without_partner(role)
        others = dict(zip(map(str, self.ports.of(role.partner)), self.widths(role.partner), strict=True))
        own = zip(map(str, self.ports.of(role)), self.widths(role), strict=True)
        return [name for name, width in own if width > 1 and others.get(name) != width]

    def _stacked(self, bases: Iterable[np.ndarray], width: int) -> np.ndarray:
        """(n, d, width), padded with zero columns."""
        bases = list(bases)
        dtype = np.float64 if any(basis.dtype == np.float64 for basis in bases) else np.float32
        found = np.zeros((len(bases), self.d_model, width), dtype=dtype)
        for i, basis in enumerate(bases):
            found[i, :, : basis.shape[1]] = basis
        return found

    def storage_dtype(self, role: Role | str, layer: int) -> str:
        role = Role.parse(role)
        if role not in NODE_ROLES:
            return self.inner.storage_dtype(role, layer)
        here = self.added.bases.get(role, ())[self.ports.span(role, layer)]
        names = {basis.dtype.name for basis in here}
        # Use the coarsest of several types: what it cannot distinguish from rounding does not count as a direction.
        return max(names, key=lambda name: -np.dtype(name).itemsize) if names else "float32"

    @property
    def held_bytes(self) -> int:
        return self.inner.held_bytes + sum(basis.nbytes for bases in self.added.bases.values() for basis in bases)

    @property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the model, with its own fingerprint, plus the nodes and a hash of their bases."""
        return {**self.inner.provenance, **self._centring(), "nodes": list(self.added.sets), "nodes_hash": self._digest}

    def _check_layer(self, layer: int) -> None:
        if layer not in self.places:
            self.inner._check_layer(layer)
