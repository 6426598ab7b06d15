"""Nodes: directions and subspaces, other than heads, that read or write the residual stream.

A `NodeSet` holds nodes of one kind from one source: the vectors of a file, the features of a sparse autoencoder, the
neurons of a layer, some tokens. All nodes of a set have the same position in the stream for reading (R), and the same
position for writing (W):

* A direction at layer L belongs to the stream at the input of layer L: it reads what everything before layer L
  writes, and what it writes is read by the attention of layer L and everything after it. Its R has the position of
  that attention, and its W the position just before it.
* Without a layer it reads at the end, where every head may have written, and writes at the start.
* Neurons, adapters, features and tokens have their own positions.

A set is read in pieces and names its nodes lazily, so that a million nodes need no more memory than a few.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from headspan.checkpoints.dtypes import exact_array
from headspan.models.weights import AttentionWeights
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import (
    EMBEDDING_POSITION,
    NODE_ROLES,
    UNEMBEDDING_POSITION,
    Node,
    Role,
    attention_position,
    check_node_name,
)

_USUAL = (1e-15, 1e15)  # magnitudes whose squares float32 represents accurately


class Place(NamedTuple):
    """The place of a port: its position in the stream and its layer."""

    position: int
    layer: int


def stream_places(layer: int | None, weights: AttentionWeights) -> dict[Role, Place]:
    """Where a direction reads and writes: at the input of a layer, or over the whole stream if no layer is given."""
    if layer is None:
        return {Role.R: Place(UNEMBEDDING_POSITION, weights.n_layers), Role.W: Place(EMBEDDING_POSITION, -1)}
    whole = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
    if not whole or not 0 <= layer <= weights.n_layers:
        raise HeadspanError(
            f"a node cannot be at layer {str(layer)[:40]}: {weights.reference} has the layers 0 to "
            f"{weights.n_layers - 1}, and {weights.n_layers} means after the last"
        )
    entrance = attention_position(int(layer))
    return {Role.R: Place(entrance, int(layer)), Role.W: Place(entrance - 1, int(layer))}


def centred_writers(weights: AttentionWeights) -> frozenset[Role]:
    """The set with W if folding centres everything that is written to the stream, otherwise empty."""
    return frozenset({Role.W}) if weights.centred else frozenset()


class NodeSet(ABC):
    """Nodes of one kind from one source.

    kind: "direction", "basis", "feature", "adapter", "neuron", "token" …
    label: their source. notes: messages for the user.
    places: the places of R and W; nodes do not have roles that are missing here.
    ids: the members of the ``population`` (all vectors of the file, all neurons of the layer) that are nodes; the
        others can serve for comparison.
    strict: whether a node of length 0 is an error; otherwise the caller handles it.
    """

    kind: str
    label: str
    notes: list[str]
    places: Mapping[Role, Place]
    ids: Sequence[int] | np.ndarray
    population: int
    d_model: int
    strict = False
    variance: float | None = None  # of what each node writes along its vectors, if known
    centred_roles: frozenset[Role] = frozenset()  # roles whose vectors have mean 0, so they lie in d − 1 dimensions

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def name(self, number: int) -> str:
        """The name of a member of the population."""

    @abstractmethod
    def width(self, role: Role) -> int:
        """r: columns of the arrays from `blocks`, 1 for directions."""

    @abstractmethod
    def _read(self, role: Role, ids: np.ndarray) -> np.ndarray:
        """Members of the population, (n, d, r), as stored (or folded, if the model is)."""

    @property
    def stem(self) -> str | None:
        """The common prefix of the names of a large set; two sets with the same stem clash if they share ids."""
        return None

    def find(self, name: str) -> int | None:
        """The id of a node of this set, from its name."""
        return next((int(i) for i in self.ids if self.name(int(i)).upper() == name.strip().upper()), None)

    def nodes(self, role: Role) -> Sequence[Node]:
        """The rows of the port table of a role, created on access."""
        return Rows(self, self.places[role]) if role in self.places else ()

    def blocks(self, role: Role, size: int) -> Iterator[tuple[slice, np.ndarray]]:
        """The nodes of a role in blocks of at most ``size``: their indices in `nodes`, and (n, d, r) float32."""
        for start in range(0, len(self) if role in self.places else 0, max(1, size)):
            part = slice(start, min(start + max(1, size), len(self)))
            yield part, self.members(role, np.asarray(self.ids[part], dtype=np.int64))

    def centre(self, role: Role, vectors: np.ndarray) -> np.ndarray:
        """Vectors (n, d, r), centred if those of the role are."""
        if role not in self.centred_roles:
            return vectors
        with np.errstate(over="ignore", invalid="ignore"):  # `members` reports non-finite numbers
            return vectors - vectors.mean(axis=1, keepdims=True, dtype=np.float64)

    def members(self, role: Role, ids: np.ndarray) -> np.ndarray:
        """Some members of the population, (n, d, r) float32, checked to be finite and, if ``strict``, not zero."""
        found = np.asarray(self._read(role, ids))
        with np.errstate(over="ignore", invalid="ignore"):
            largest = np.abs(found).max(axis=(1, 2)).astype(np.float64) if found.size else np.zeros(len(found))
        if not np.isfinite(largest).all():
            bad = self.name(int(ids[np.flatnonzero(~np.isfinite(largest))[0]]))
            raise HeadspanError(f"{bad[:80]} of {self.label} contains NaN or infinite numbers, so it has no direction")
        if self.strict and (largest == 0).any():
            bad = self.name(int(ids[np.flatnonzero(largest == 0)[0]]))
            raise HeadspanError(f"{bad[:80]} of {self.label} is zero, so it has no direction: leave it out")
        odd = (largest > 0) & ((largest < _USUAL[0]) | (largest > _USUAL[1]))
        if odd.any():  # rescale: only directions matter, and float32 would lose these
            found = found / np.where(odd, largest, 1)[:, None, None]
        return np.ascontiguousarray(found, dtype=np.float32)


class Numbered(NodeSet):
    """Directions that are named by a stem and their number."""

    _stem: str

    @property
    def stem(self) -> str:
        return self._stem

    def name(self, number: int) -> str:
        return f"{self._stem}[{number}]"

    def find(self, name: str) -> int | None:
        match = re.fullmatch(re.escape(self._stem.upper()) + r"\[([0-9]{1,12})\]", name.strip().upper())
        return int(match[1]) if match and int(match[1]) in self.ids else None

    def width(self, role: Role) -> int:
        return 1


class Rows(Sequence[Node]):
    """The rows of a port table, created on access."""

    def __init__(self, nodes: NodeSet, place: Place) -> None:
        self._nodes, self._place = nodes, place

    def __len__(self) -> int:
        return len(self._nodes)

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> list[Node]: ...
    def __getitem__(self, index: int | slice) -> Node | list[Node]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = int(self._nodes.ids[index])
        roles = self._nodes.places
        return Node.at(*self._place, self._nodes.name(number), self._nodes.kind, Role.R in roles, Role.W in roles)


class GivenNodes(NodeSet):
    """The set of one node that was created in Python."""

    strict = True

    def __init__(self, weights: AttentionWeights, given: Node) -> None:
        if given.basis is None:
            raise HeadspanError(f"the node {given.name} has no basis: a result does not keep the vectors of its nodes")
        basis, d = exact_array(given.basis, f"the basis of {given.name}"), weights.d_model
        self.notes, self.d_model, self.centred_roles = [], d, centred_writers(weights)
        columns, note = oriented(basis.shape, d, f"the basis of {given.name}")
        if note and basis.ndim == 2 and 1 not in basis.shape:
            self.notes.append(note)
        self._basis = basis.reshape(d, 1) if basis.ndim == 1 else basis if columns else basis.T
        self.kind = "direction" if self._basis.shape[1] == 1 else "basis"
        self.label, self._name, self.variance = "the given nodes", given.name, given.variance
        self.ids, self.population = range(1), 1
        places = stream_places(given.layer, weights)
        self.places = {
            role: places[role] for role, has in zip(NODE_ROLES, (given.reads, given.writes), strict=True) if has
        }

    def name(self, number: int) -> str:
        return self._name

    def width(self, role: Role) -> int:
        return self._basis.shape[1]

    def _read(self, role: Role, ids: np.ndarray) -> np.ndarray:
        return self.centre(role, np.repeat(self._basis[None], len(ids), axis=0))


def no_layer(first: str, *others: str) -> str:
    """The note on nodes that were given without a layer.

    >>> no_layer("probe", "b", "c")
    'probe and 2 other nodes were given without a layer: they read at the end of the stream and write at its start'
    """
    if not others:
        return f"{first} was given without a layer: it reads at the end of the stream and writes at its start"
    more = "1 other node" if len(others) == 1 else f"{len(others):,} other nodes"
    return f"{first} and {more} were given without a layer: they read at the end of the stream and write at its start"


def oriented(shape: tuple[int, ...], d: int, what: str) -> tuple[bool, str]:
    """Whether the vectors of a (…, a, b) array are columns of length d, and a note on how it was read.

    >>> oriented((768, 5), 768, "probe.npy")
    (True, 'probe.npy of shape (768, 5) was read as 5 columns of 768')
    """
    seen = f"{what} of shape {tuple(shape)}"
    if len(shape) == 1 and shape[0] == d:
        return False, f"{seen} was read as one vector"
    if len(shape) >= 2 and d in shape[-2:]:
        both = shape[-1] == shape[-2]
        columns = shape[-1] != d or (both and len(shape) > 2)  # a matrix has vectors in rows, bases in columns
        count = shape[-1] if columns else shape[-2]
        way, other = ("column", "rows") if columns else ("row", "columns")
        bases = f"{shape[0]} bas{'is' if shape[0] == 1 else 'es'} of " if len(shape) > 2 else ""
        doubt = f", though it could be {other}: transpose it if it is" if both else ""
        return columns, f"{seen} was read as {bases}{count} {way}{'' if count == 1 else 's'} of {d}{doubt}"
    raise HeadspanError(f"{seen} has no axis of d_model {d}: its vectors are not directions of this residual stream")


def check_name(name: Any) -> str:
    """A name without surrounding spaces, if it is valid for a node."""
    return check_node_name(name.strip() if isinstance(name, str) else name)
