"""Heads as links of a chain: orthonormal bases of what they read and write, and the map between them.

On a path s → a → b, head s writes, a transforms what it reads, and b reads the result. The composed map is

    C = U_bᵀ · M̂_a · U_s,    M̂_a = M_a · √(r / ‖M_a‖_F²),    M_a = W_O W_V of head a (d×d, of rank r),

with orthonormal bases U at both ends, so that the scale of their weights does not matter, and every map in between
scaled to the norm of a map that passes r directions on unchanged. The chained score is ‖C‖_F². Without a head in
between it is the Projection Kernel; longer paths have one map per head in between. M̂ is stored as U_O · D · U_Vᵀ with
a d_head × d_head core D, so that a chain is a product of such small matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from headspan.models.weights import AttentionWeights
from headspan.subspaces.bases import orthonormal_bases
from headspan.system.memory import available_memory
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import HeadOrNode, Role, positions_of

WRITES = (Role.O, Role.W)
READS = (Role.Q, Role.K, Role.V, Role.R)
CARRIES = (Role.V, Role.R)  # roles whose input reaches the output; queries and keys only determine attention


class Ends(NamedTuple):
    """Ports of one side: (n, d, m) orthonormal bases with zero columns beyond the rank of each."""

    ports: tuple[HeadOrNode, ...]
    roles: tuple[Role, ...]
    bases: np.ndarray
    ranks: np.ndarray
    centred: np.ndarray  # ports that lie in d − 1 dimensions

    @property
    def positions(self) -> np.ndarray:
        return positions_of(self.ports)

    def place(self, port: HeadOrNode, role: Role) -> int:
        return self._places[port, role]

    @property
    def _places(self) -> dict[tuple[HeadOrNode, Role], int]:
        return {key: i for i, key in enumerate(zip(self.ports, self.roles, strict=True))}

    def take(self, chosen: Sequence[int] | np.ndarray) -> Ends:
        """A subset of the ports."""
        ports, roles = tuple(self.ports[i] for i in chosen), tuple(self.roles[i] for i in chosen)
        return Ends(ports, roles, self.bases[chosen], self.ranks[chosen], self.centred[chosen])


class Links(NamedTuple):
    """Links of a chain: the ports with which they write and read, and the core of their map.

    write, read: indices among the writers and the carriers. cores: (n, m, m), write side × read side, scaled.
    sizes: tr M̂ᵀM̂, the rank r. fourths: tr (M̂ᵀM̂)². gains: the largest squared singular value.
    """

    ports: tuple[HeadOrNode, ...]
    write: np.ndarray
    read: np.ndarray
    cores: np.ndarray
    sizes: np.ndarray
    fourths: np.ndarray
    gains: np.ndarray


class Chains(NamedTuple):
    """Everything needed to compose the paths of one model."""

    d_model: int
    writers: Ends
    carriers: Ends
    links: Links


def chains(weights: AttentionWeights) -> Chains:
    """Bases of all writers and carriers, and the cores of the maps between them."""
    table = weights.ports
    m = max(weights.d_head(Role.O), weights.d_head(Role.V), *_node_widths(weights))
    count = sum(len(table.of(role)) for role in (*WRITES, *CARRIES))
    needed = 8 * count * weights.d_model * m + 16 * len(table.of(Role.O)) * m * m
    if needed > available_memory():
        raise HeadspanError(
            f"the bases of all heads need about {needed / 1e9:.1f} GB of memory, and {available_memory() / 1e9:.1f} GB "
            "are free. Use a machine with more memory"
        )
    writers, inner_w = _ends(weights, WRITES, m)
    carriers, inner_r = _ends(weights, CARRIES, m)
    write, read = _pairs(weights, writers, carriers, inner_w, inner_r)
    cores = np.stack([_core(inner_w[i], inner_r[j], m) for i, j in zip(write, read, strict=True)] or [np.zeros((m, m))])
    cores = cores[: len(write)]
    norms = np.square(cores).sum(axis=(1, 2))
    alive = norms > 0
    write, read, cores, norms = write[alive], read[alive], cores[alive], norms[alive]
    sizes = np.minimum(writers.ranks[write], carriers.ranks[read]).astype(np.float64)
    cores *= np.sqrt(sizes / norms)[:, None, None]
    values = np.linalg.svd(cores, compute_uv=False) if len(cores) else np.zeros((0, m))
    ports = tuple(writers.ports[i] for i in write)
    links = Links(
        ports, write, read, cores.astype(np.float32), sizes, (values**4).sum(axis=1), (values**2).max(axis=1, initial=0)
    )
    return Chains(weights.d_model, writers, carriers, links)


def readers(weights: AttentionWeights, wanted: Iterable[tuple[Role, int]]) -> Ends:
    """Bases of ports that read, by role and index."""
    chosen = {(weights.ports.of(role)[i], role) for role, i in wanted}
    m = max(weights.d_head(Role.Q), weights.d_head(Role.V), *_node_widths(weights))
    return _ends(weights, READS, m, chosen)[0]


def _node_widths(weights: AttentionWeights) -> list[int]:
    """Numbers of columns of what nodes read and write; empty without nodes."""
    return [weights.d_head(role) for role in (Role.R, Role.W) if weights.ports.of(role)]


def _ends(
    weights: AttentionWeights, roles: Sequence[Role], m: int, only: set[tuple[HeadOrNode, Role]] | None = None
) -> tuple[Ends, list[np.ndarray]]:
    """The bases of all ports of some roles, and UᵀW of each, its weight in that basis."""
    found: list[tuple[HeadOrNode, Role]] = []
    bases, ranks, inner = list[np.ndarray](), list[int](), list[np.ndarray]()
    for role in roles:
        for layer in dict.fromkeys(
            port.layer for port in weights.ports.of(role) if only is None or (port, role) in only
        ):
            ports = weights.heads_in(role, layer)
            weight = np.asarray(weights.read(role, layer), dtype=np.float64)
            kept = [i for i, port in enumerate(ports) if only is None or (port, role) in only]
            basis, rank = orthonormal_bases(weight[kept], weights.storage_dtype(role, layer))
            inner += list(np.matmul(basis.transpose(0, 2, 1), weight[kept]))
            padded = np.zeros((len(kept), weights.d_model, m), dtype=np.float32)
            padded[:, :, : basis.shape[2]] = basis
            bases.append(padded)
            ranks += list(map(int, rank))
            found += [(ports[i], role) for i in kept]
    whole = np.concatenate(bases) if bases else np.zeros((0, weights.d_model, m), dtype=np.float32)
    flags = {role: dict(zip(weights.ports.of(role), weights.centred_ports(role), strict=True)) for role in roles}
    centred = np.array([flags[role][port] for port, role in found], dtype=bool)
    ports, its_roles = tuple(port for port, _ in found), tuple(role for _, role in found)
    return Ends(ports, its_roles, whole, np.array(ranks, dtype=np.int64), centred), inner


def _pairs(
    weights: AttentionWeights, writers: Ends, carriers: Ends, inner_w: list[np.ndarray], inner_r: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Which writer belongs to which carrier: a query head to its (shared) values, a neuron or adapter to itself."""
    values = {port: j for j, port in enumerate(carriers.ports) if carriers.roles[j] is Role.V}
    nodes = {str(port): j for j, port in enumerate(carriers.ports) if carriers.roles[j] is Role.R}
    write, read = list[int](), list[int]()
    for i, (port, role) in enumerate(zip(writers.ports, writers.roles, strict=True)):
        j = values.get(weights.ports.resolve(port, Role.V)) if role is Role.O else nodes.get(str(port))
        # A direction writes where it reads and has no map in between: paths start or end there.
        if j is None or port.position < carriers.ports[j].position:
            continue
        if role is Role.O or _columns(inner_w[i]) == _columns(inner_r[j]):
            write.append(i)
            read.append(j)
    return np.array(write, dtype=np.int64), np.array(read, dtype=np.int64)


def _columns(inner: np.ndarray) -> int:
    """Columns of a node's weight; nodes of one role are padded to the widest."""
    used = np.flatnonzero(inner.any(axis=0))
    return int(used[-1]) + 1 if used.size else 0


def _core(write: np.ndarray, read: np.ndarray, m: int) -> np.ndarray:
    """U_OᵀW_O (W_VᵀU_V), padded."""
    core = np.zeros((m, m))
    width = min(write.shape[1], read.shape[1])
    product = write[:, :width] @ read[:, :width].T
    core[: product.shape[0], : product.shape[1]] = product
    return core


class Chance(NamedTuple):
    """Mean and standard deviation of the chained score if all links of a path are rotated at random."""

    mean: np.ndarray
    sd: np.ndarray


def chance(
    d: ArrayLike, source: np.ndarray | float, target: np.ndarray | float, sizes: np.ndarray, fourths: np.ndarray
) -> Chance:
    """Chained scores by chance, with an independent uniform rotation between any two links of a chain.

    d: the dimension in which both sides of a hop are rotated, (n, hops) or one for all; see :mod:`dimension`.
    source, target: dimensions of the subspaces at the ends, (n,). sizes, fourths: tr M̂ᵀM̂ and tr (M̂ᵀM̂)² of the maps
    between them, (n, hops − 1). Exact. The mean is source · Π sizes · target / Π d. For the variance, let T be the d×d
    Gram matrix of the chain so far. The mean of T⊗T over rotations is α·δδ + β·(δδ + δδ), with α and β given by (tr T)²
    and tr T²; each further map transforms these two values.

    >>> from headspan.subspaces.random_subspaces import moments
    >>> none = np.zeros((1, 0))
    >>> bool(np.allclose(chance(48, 6, 4, none, none).sd, moments(48, 6, 4).sd))
    True
    """
    source, target = np.broadcast_arrays(np.float64(source), np.float64(target), np.zeros(len(sizes)))[:2]
    hops = np.broadcast_to(np.asarray(d, dtype=np.float64), (len(sizes), sizes.shape[1] + 1)).T
    mean = source * sizes.prod(axis=1) * target / hops.prod(axis=0)
    square, fourth = source**2, source  # E (tr T)² and E tr T²
    for d_hop, size, quartic in zip(hops, sizes.T, fourths.T, strict=False):
        alpha, beta = _turned(d_hop, square, fourth)
        square, fourth = alpha * size**2 + 2 * beta * quartic, alpha * quartic + beta * (size**2 + quartic)
    alpha, beta = _turned(hops[-1], square, fourth)
    variance = alpha * target**2 + 2 * beta * target - mean**2
    return Chance(mean, np.sqrt(np.where(variance > 1e-12 * mean**2, variance, 0.0)))


def _turned(d: np.ndarray, square: np.ndarray, fourth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """α and β of the rotated T⊗T."""
    beta = (fourth * d - square) / (d * np.maximum(d - 1, 1) * (d + 2))
    return (square - 2 * beta * d) / d**2, beta
