"""`AttentionWeights`: the d×m weights of every head of a model, read one layer at a time, with its norms.

The interface is the same for a checkpoint (:mod:`headspan.models.checkpoint`), for plain arrays
(:mod:`headspan.models.arrays`) and for folded weights (:mod:`headspan.models.folding`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.models.families.entry import NormKind
from headspan.models.families.latent_attention import Chance, LatentFactors, latent_chance, stacked_root
from headspan.results.tabular import html_table
from headspan.vocabulary.errors import HeadspanError, visible
from headspan.vocabulary.heads import ROLES, Head, Port, Role
from headspan.vocabulary.ports import PortTable
from headspan.vocabulary.words import counted

if TYPE_CHECKING:
    from headspan.checkpoints.tokenizer import Vocabulary


@dataclass(frozen=True)
class Norm:
    """One normalisation: (centre for "layer",) divide by the root mean square, times gain, plus bias.

    ``gain`` (d,) is γ, also in families that store γ − 1.
    """

    kind: NormKind
    gain: np.ndarray
    bias: np.ndarray | None
    eps: float


class AttentionWeights(ABC):
    """The attention weights of one model. Shapes: d = d_model, m = d_head of the role, n = heads of the role."""

    d_model: int
    n_layers: int  # as the model counts them, including layers without attention
    n_heads: int  # of the layer with the most heads
    n_kv_heads: int
    layers: tuple[int, ...]  # layers with attention, by their number in the model
    ports: PortTable
    architecture: str
    reference: str
    norm_kind: str  # "layer", "rms" or "none"
    norm_place: str  # "pre", "output", "sandwich", "partial"; "post", "residual" and "none" cannot be folded
    not_foldable_reason: str | None
    vocab_size: int | None
    tied_embedding: bool | None  # None if there is no unembedding
    value_bias_is_constant: bool  # attention rows sum to 1 and values are not clipped
    notes: list[str]
    centred = False  # whether head outputs are centred: folded LayerNorm, where every reader centres them

    def __repr__(self) -> str:
        shared = f", {self.ports.a_layer(Role.V)} key/value heads" if self.ports.shared else ""
        folded = "" if self.folding == "none" else f", {self.folding}"
        return (
            f"attention weights of {visible(str(self.reference))}: {self.architecture}, "
            f"{counted(len(self.layers), 'layer')} of {self.ports.a_layer(Role.O)} heads{shared}, "
            f"d_model {self.d_model}{folded}"
        )

    def _repr_html_(self) -> str:
        rows = [
            {
                "role": str(role),
                "heads": len(self.heads(role)),
                "a layer": self.ports.a_layer(role),
                "d_head": self.d_head(role),
            }
            for role in ROLES
        ]
        return html_table(repr(self), rows)

    @property
    def foldable(self) -> bool:
        """True if the norms around attention can be moved into the weights exactly."""
        return self.not_foldable_reason is None

    @property
    def places(self) -> tuple[int, ...]:
        """The layers that have weights to read."""
        return self.layers

    def heads(self, role: Role | str) -> tuple[Head, ...]:
        """The heads of a role in layer order; a shared KV head is listed once."""
        return self.ports.of(role)

    def heads_in(self, role: Role | str, layer: int) -> tuple[Head, ...]:
        """The heads of a role in one layer."""
        self._check_layer(layer)
        role = Role.parse(role)
        return self.heads(role)[self.ports.span(role, layer)]

    def read_head(self, port: Port | str) -> np.ndarray:
        """The (d, m) weight of one head, for example of ``"L4H11.O"``; K and V of a query head are its KV head's.

        Under latent attention ``"L4QR11.Q"`` are the rotary query rows of L4H11.
        """
        name, role = Port.parse(port)
        if isinstance(name, Head) and name.kind == "QR":
            return self._rotary_rows(name, role)
        head = self.ports.resolve(name, role)
        place = self.heads_in(role, head.layer).index(head)
        return self.read(role, head.layer)[place, :, : self._widths_in(role, head.layer)[place]]

    def _rotary_rows(self, head: Head, role: Role) -> np.ndarray:
        found = self.rotary_queries(head.layer) if head.layer in self.layers else None
        if found is None or role is not Role.Q or head.index >= len(found):
            raise HeadspanError(
                f"there is no {head}.{role} in {self.reference}: rotary query rows are the Q of heads with latent "
                "attention"
            )
        return found[head.index]

    @abstractmethod
    def d_head(self, role: Role | str) -> int:
        """Columns of the weights of a role."""

    def widths(self, role: Role | str) -> np.ndarray:
        """Columns of every weight of a role, (n,); further columns from :meth:`read` are zero."""
        return np.full(len(self.heads(role)), self.d_head(role), dtype=np.int64)

    def centred_ports(self, role: Role | str) -> np.ndarray:
        """Which weights of a role have columns of mean 0, (n,); these lie in a subspace of d − 1 dimensions."""
        return np.zeros(len(self.heads(role)), dtype=bool)

    def without_partner(self, role: Role | str) -> list[str]:
        """Names of nodes without a second weight to form a circuit with this role; heads always have one."""
        return []

    def without_variance(self) -> list[str]:
        """Names of nodes that write with an unknown variance."""
        return []

    @property
    def held_bytes(self) -> int:
        """Memory in bytes held by these weights, besides what they read."""
        return 0

    def rotary_queries(self, layer: int) -> np.ndarray | None:
        """(n, d, m): the rotary query rows of each head under latent attention, None elsewhere."""
        self._check_layer(layer)
        return None

    def latent_map(self, role: Role | str, layer: int) -> np.ndarray | None:
        """(d, r): the map from the stream to the latent of a role under latent attention, None elsewhere."""
        self._check_layer(layer)
        attention_role(role)
        return None

    def latent_factors(self, role: Role | str, layer: int) -> LatentFactors | None:
        """The stored matrices whose product is the weight of a role under latent attention, None elsewhere."""
        self._check_layer(layer)
        attention_role(role)
        return None

    def same_layer_chance(
        self, first: Role | str, second: Role | str, layer: int, ranks: tuple[int, int] | None = None
    ) -> Chance | None:
        """PK by chance between two heads of one layer that share a latent; None if they do not.

        ranks: dimensions of the two subspaces, by default those of the roles.
        """
        first, second = attention_role(first), attention_role(second)
        if first.writes or second.writes or (first is Role.Q) != (second is Role.Q):
            return None  # queries have their own latent
        inner = self.latent_map(first, layer)
        if inner is None:
            return None
        ranks = ranks or (int(self._widths_in(first, layer)[0]), int(self._widths_in(second, layer)[0]))
        return latent_chance(inner, *ranks)

    def _widths_in(self, role: Role | str, layer: int) -> np.ndarray:
        return self.widths(role)[self.ports.span(Role.parse(role), layer)]

    def layer_of(self, role: Role | str, layer: int) -> int:
        """The layer whose weights the heads of a layer use in a role: an earlier one for borrowed K and V."""
        query = self.heads_in(Role.O, layer)
        return self.ports.kv_of(query[0]).layer if Role.parse(role).shared and query else layer

    def layers_with(self, role: Role | str) -> tuple[int, ...]:
        """The layers that have weights of a role, without those that use keys and values of earlier layers."""
        return tuple(layer for layer in self.layers if self.heads_in(role, layer))

    def partner(self, role: Role | str, layer: int, read: np.ndarray | None = None) -> np.ndarray:
        """The other weights of the circuits of a role; ``read`` passes weights that were already read.

        Under latent attention, the partners of the rotary key are the stacked rotary query rows of all heads. Keys and
        values used by several layers have the stacked heads of all these layers as partners.
        """
        role = Role.parse(role)
        home = self.layer_of(role.partner, layer)
        if home != layer:
            return self.read(role.partner, home)
        read = self.read(role.partner, layer) if read is None else read
        borrowers = sorted({head.layer for head, kv in self.ports.served_by.items() if kv.layer == layer} - {layer})
        if role.shared and borrowers:
            return self._below_each_other(role.partner, (layer, *borrowers), len(self.heads_in(role, layer)))
        rotary = self.rotary_queries(layer) if role in (Role.Q, Role.K) else None
        if rotary is None:
            return read
        if role is Role.Q:
            return read[: len(rotary), :, : self.d_head(Role.Q)]
        found = np.zeros((len(rotary) + 1, self.d_model, self.d_head(Role.K)))
        found[:-1, :, : read.shape[2]] = read
        found[-1, :, : rotary.shape[2]] = stacked_root(rotary)
        return found

    def _below_each_other(self, role: Role, layers: Iterable[int], n: int) -> np.ndarray:
        """(n, r, m) with the Gram matrices of n groups whose weights are stacked over these layers."""
        root = np.zeros((n, 0, self.d_head(role)))
        for layer in layers:
            below = self.read(role, layer).reshape(n, -1, root.shape[2])
            root = np.asarray(np.linalg.qr(np.concatenate([root, below], axis=1), mode="r"))
        return root

    @abstractmethod
    def read(self, role: Role | str, layer: int) -> np.ndarray:
        """All weights of a role in a layer, (n, d, m): W_Qᵀ, W_Kᵀ, W_Vᵀ or W_O; columns span the subspace.

        It may be a view of the stored tensor and must not be modified.
        """

    def observed(self, role: Role | str, layer: int) -> np.ndarray:
        """The folded weights of a role times the roots of their statistics, (n, d, m); see `ObservedWeights`."""
        raise HeadspanError(f"there are no statistics of {self.reference}. Make them with `hs.observe(model)`")

    @abstractmethod
    def bias(self, role: Role | str, layer: int) -> np.ndarray | None:
        """(n, m) for Q, K and V, (d,) for O, or None."""

    @abstractmethod
    def storage_dtype(self, role: Role | str, layer: int) -> str:
        """The dtype in which the weight is stored, which limits its accuracy."""

    @abstractmethod
    def tensors(self) -> dict[str, int]:
        """The tensors that hold the heads, with their bytes as stored."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes of all tensors of the model."""

    @abstractmethod
    def norm(self, layer: int) -> Norm | None:
        """The norm between the stream and this layer's attention."""

    def output_norm(self, layer: int) -> Norm | None:
        """The norm between this layer's attention and the stream, in families that have one."""
        self._check_layer(layer)
        return None

    @abstractmethod
    def final_norm(self) -> Norm | None:
        """The norm before the unembedding."""

    @abstractmethod
    def embedding(self) -> np.ndarray:
        """(vocabulary, d)."""

    def embedding_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows of the embedding."""
        return self.embedding()[check_rows(start, stop)]

    @abstractmethod
    def unembedding_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows of the unembedding, to process a large vocabulary in pieces."""

    def unembedding(self) -> np.ndarray:
        """(vocabulary, d): one direction of the stream per token."""
        return self.unembedding_rows(0, self.vocab_size or 0)

    @abstractmethod
    def unembedding_bias(self) -> np.ndarray | None:
        """(vocabulary,) or None."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash over everything that is read: config, weights, biases and norms.

        It does not include the embedding and the unembedding, because no score depends on them.
        """

    @abstractmethod
    def attention_hash(self) -> str:
        """A hash of the Q, K, V and O weights only; the same for one model in different file formats."""

    def vocabulary(self) -> Vocabulary | None:
        """The tokens of the model's tokenizer, if there is one."""
        return None

    @property
    def folding(self) -> str:
        return "none"

    @property
    def folded_norms(self) -> list[str]:
        """Which norms' gains are in these weights."""
        return []

    @property
    def provenance(self) -> dict[str, Any]:
        """What these weights are and where they come from, as JSON values."""
        return {
            "reference": self.reference,
            "architecture": self.architecture,
            "fingerprint": self.fingerprint(),
            "attention_hash": self.attention_hash(),
            "folding": self.folding,
            "folded_norms": self.folded_norms,
            **self._centring(),
            "storage_dtypes": self.storage_dtypes(),
            "notes": list(self.notes),
            "left_out_layers": sorted(set(range(self.n_layers)) - set(self.layers)),
        }

    def _centring(self) -> dict[str, list[str]]:
        """The roles whose weights are centred, and exceptions; chance depends on the number of dimensions."""
        flags = {role: self.centred_ports(role) for role in self.ports.ports}
        centred = [role for role in flags if flags[role].any()]
        ports = [
            (port, role, flag) for role in centred for port, flag in zip(self.heads(role), flags[role], strict=True)
        ]
        return {
            "centred": list(map(str, centred)),
            "not_centred": [f"{port}.{role}" for port, role, flag in ports if not flag],
        }

    def storage_dtypes(self) -> list[str]:
        """The distinct dtypes in which the weights are stored."""
        return sorted({self.storage_dtype(role, layer) for role in ROLES for layer in self.layers})

    @property
    def reopenable(self) -> bool:
        """True if another process can open the same weights by their reference."""
        return False

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise if these weights changed since they were last hashed, or one of their files is missing."""

    def close(self) -> None:  # noqa: B027 - arrays have nothing to close
        """Close open files."""

    def __enter__(self) -> AttentionWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_layer(self, layer: int) -> None:
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)) or layer not in self.layers:
            raise HeadspanError(
                f"{self.reference} has no attention weights in layer {str(layer)[:40]!r}: {len(self.layers)} of its "
                f"layers do, from {self.layers[0]} to {self.layers[-1]}"
            )


def attention_role(role: Role | str) -> Role:
    """One of Q, K, V and O."""
    found = Role.parse(role)
    if found not in ROLES:
        raise HeadspanError(f"{found} is not a role of attention heads: choose one of {', '.join(map(str, ROLES))}")
    return found


def check_rows(start: int, stop: int) -> slice:
    """A checked slice of rows."""
    for end in (start, stop):
        if isinstance(end, bool) or not isinstance(end, (int, np.integer)) or end < 0:
            raise HeadspanError(f"rows must be whole numbers from 0, not {repr(end)[:40]}")
    return slice(int(start), int(stop))


def check_finite(weights: np.ndarray, role: Role, heads: Sequence[Head], where: str) -> np.ndarray:
    """The (n, d, m) weights unchanged, or an error that names the first head with NaN or infinity."""
    # A sum is finite only if every term is, and needs no temporary array.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = ~np.isfinite(weights.sum(axis=(1, 2)))
    for index in map(int, np.flatnonzero(suspicious)):
        bad = int(np.count_nonzero(~np.isfinite(weights[index])))
        if bad:
            raise HeadspanError(
                f"the weight {role} of head {heads[index]} (layer {heads[index].layer}) in {where} has {bad} NaN or "
                "infinite numbers, so it has no meaningful span"
            )
    return weights
