"""Latent attention (DeepSeek-V2/V3 and related models): d×m weights of heads with keys and values from a latent.

A layer compresses the stream into a latent of r dimensions and normalises it, and every head computes its key and value
from it: K_h = B_h^K·diag(g)·A and V_h = B_h^V·diag(g)·A, and often Q_h = Qb_h·diag(g_q)·Qa likewise. The inner norm
only divides a token's latent by a scalar, so these products are exactly what a head reads, up to one positive scalar
per token; its gains g are part of the weight. Layers of one model may differ in all these sizes (Dots 3).

Queries and keys have two parts. The *position-free* rows are Q and K of a head (``L3H5``). The rotary rows are kept
separate. Those of the key are shared by all heads of a layer and are listed once, as an extra key head ``L3KR``
(stacking them into every key would raise every KK within the layer). Those of the queries, one set per head, are its
partners and can be read as ``L3QR5.Q``. OQ therefore covers position-free rows only, and OK has a column for the
rotary key of every layer.

Heads of one layer share a latent, so their KK, VV, KV (and QQ) have their own chance level, far above that of random
subspaces of the stream. :func:`latent_chance` estimates it by passing random subspaces through the same latent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Head, Role
from headspan.vocabulary.ports import PortTable

_DRAWS = 24  # random subspaces per layer for its chance level: 276 pairs
_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Chance(NamedTuple):
    """Mean and standard deviation of PK by chance."""

    mean: float
    sd: float


class LatentFactors(NamedTuple):
    """The stored matrices whose products are the weights of the heads of one latent, and their dtypes."""

    stored: np.ndarray  # (d, r), from the stream to the latent, without gains
    heads: np.ndarray  # (n, m, r), from the latent to each head
    gains: np.ndarray  # (r,)
    factor: float  # some families multiply the gains by this
    dtypes: tuple[str, str, str]  # of stored, heads, gains

    def product(self) -> np.ndarray:
        """(n, d, m), the weights."""
        return _through(self.heads, self.stored * (self.gains * np.float32(self.factor)))


@dataclass(frozen=True)
class LatentShape:
    """Sizes of latent attention in one layer. q_rank is None if queries are computed from the stream directly."""

    d_model: int
    n_heads: int
    q_rank: int | None
    kv_rank: int
    free: int  # position-free rows of a query or key
    rotary: int
    value: int
    stem: str = "self_attn."  # prefix of the names of a layer's tensors
    output: str = "o_proj"
    split: bool = False  # GGUF files that store the maps to keys and to values separately
    scaled: bool = False  # LongCat, Dots 3: latents are multiplied by √(d / r)
    rotary_norm: str | None = None  # Dots 3: the norm of the rotary key, whose gains are part of its weight

    @classmethod
    def of(cls, config: Mapping[str, Any], d_model: int, n_heads: int, reference: str, **options: Any) -> LatentShape:
        """Read the sizes from a config, which must have all of them."""
        sizes: list[Any] = [config.get(key) for key in _KEYS]
        sizes[3] = d_model // n_heads if sizes[3] is None else sizes[3]  # MiniCPM3 leaves it out
        q_rank = config.get("q_lora_rank")
        for key, size, least in zip((*_KEYS, "q_lora_rank"), (*sizes, q_rank or 1), (1, 1, 0, 1, 1), strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= 2**20:
                raise HeadspanError(
                    f"the config of {reference} has {key} = {repr(size)[:80]}: latent attention needs a number there"
                )
        kv_rank, free, rotary, value = sizes
        return cls(d_model, n_heads, q_rank or None, kv_rank, free, rotary, value, **options)

    def width(self, role: Role) -> int:
        """Columns of the weights of a role; for keys, the wider of their two kinds."""
        if role is Role.Q:
            return self.free
        return max(self.free, self.rotary) if role is Role.K else self.value

    def tensors(self, role: Role) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer that form a role's weights, with their shapes."""
        n, whole = self.n_heads, self.free + self.rotary
        if role is Role.O:
            return {self._name(self.output): (self.d_model, n * self.value)}
        if role is Role.Q and self.q_rank is None:
            return {self._name("q_proj"): (n * whole, self.d_model)}
        if role is Role.Q:
            return {
                self._name("q_a_proj"): (self.q_rank or 0, self.d_model),
                self._name("q_a_layernorm"): (self.q_rank or 0,),
                self._name("q_b_proj"): (n * whole, self.q_rank or 0),
            }
        found: dict[str, tuple[int, ...]] = {
            self._name("kv_a_proj_with_mqa"): (self.kv_rank + self.rotary, self.d_model),
            self._name("kv_a_layernorm"): (self.kv_rank,),
        }
        if not self.split:
            found |= {self._name("kv_b_proj"): (n * (self.free + self.value), self.kv_rank)}
        elif role is Role.K:
            found |= {self._name("k_b_proj"): (n, self.kv_rank, self.free)}
        else:
            found |= {self._name("v_b_proj"): (n, self.value, self.kv_rank)}
        if self.rotary_norm is not None and self.rotary and role is Role.K:
            found |= {self._name(self.rotary_norm): (self.rotary,)}
        return found

    def module(self, role: Role) -> str:
        """The module whose rows are the heads of a role."""
        return list(self.tensors(role))[:3][-1].removesuffix(".weight")

    def latent_module(self, role: Role) -> str | None:
        """The module that computes the latent of a role; None if there is none."""
        names = list(self.tensors(role))
        return names[0].removesuffix(".weight") if len(names) > 1 else None

    def _name(self, module: str) -> str:
        return f"{self.stem}{module}.weight"


def latent_ports(shapes: Mapping[int, LatentShape]) -> PortTable:
    """Every head of the layers with its own Q, K, V and O, and the rotary key of each layer after its keys."""
    heads = {layer: tuple(Head(layer, i) for i in range(shape.n_heads)) for layer, shape in shapes.items()}
    rotary = {layer: (Head(layer, 0, "KR"),) if shape.rotary else () for layer, shape in shapes.items()}
    every = tuple(head for layer in shapes for head in heads[layer])
    keys = tuple(head for layer in shapes for head in heads[layer] + rotary[layer])
    return PortTable({Role.Q: every, Role.K: keys, Role.V: every, Role.O: every})


def latent_notes(shapes: Mapping[int, LatentShape], effects: bool) -> list[str]:
    """Notes on a model with these layers; ``effects``: whether they can be measured."""
    each = list(shapes.values())
    q_ranks = [shape.q_rank for shape in each if shape.q_rank is not None]
    queries = f" and its queries from one of {_sizes(q_ranks)}" if q_ranks else ""
    kept = "; effects keep the divisors of these norms fixed at their clean values" if effects else ""
    found = [
        f"latent attention: the keys and values of a layer are computed from a latent of "
        f"{_sizes([shape.kv_rank for shape in each])} dimensions{queries}; a head's weights are the products, gains of "
        "the norms inside included, and two heads of one layer overlap by chance far more than random subspaces of the "
        f"stream do{kept}"
    ]
    if any(shape.rotary for shape in each):
        found.append(
            f"Q and K are the {_sizes([shape.free for shape in each])} position-free rows of each head; the "
            f"{_sizes([shape.rotary for shape in each])} rotary key rows, which all heads of a layer share, are one "
            "more key head (L0KR), and its partners, the rotary query rows, can be read as L0QR0.Q"
        )
    return found


def _sizes(sizes: list[int]) -> str:
    """``[512, 1024, 512]`` as ``512 or 1024``."""
    return " or ".join(map(str, dict.fromkeys(sizes)))


class LatentReader:
    """Composes the weights of heads from the tensors of a layer; ``tensor`` reads a tensor by layer and name."""

    def __init__(self, shapes: Mapping[int, LatentShape], tensor: Callable[[int, str], np.ndarray]) -> None:
        self.shapes, self._tensor = shapes, tensor

    def read(self, role: Role, layer: int) -> np.ndarray:
        """(n, d, m) of a role. The rotary key comes last, and narrower weights are padded with zero columns."""
        shape = self.shapes[layer]
        if role is Role.O:
            stored = self._tensor(layer, shape.module(role))
            return stored.reshape(shape.d_model, shape.n_heads, shape.value).transpose(1, 0, 2)
        if role is Role.Q:
            return self._queries(layer, slice(0, shape.free))
        inner = self.latent_map(role, layer)
        assert inner is not None  # keys and values always have a latent
        made = _through(self._heads_of_latent(role, layer), inner)
        return made if role is Role.V or not shape.rotary else self._with_rotary(layer, made)

    def rotary_queries(self, layer: int) -> np.ndarray | None:
        """(n, d, m) of the rotary query rows, None where there are none."""
        shape = self.shapes[layer]
        return self._queries(layer, slice(shape.free, shape.free + shape.rotary)) if shape.rotary else None

    def latent_map(self, role: Role, layer: int) -> np.ndarray | None:
        """(d, r): the map from the stream to the latent of a role, including gains; None without a latent."""
        module = self.shapes[layer].latent_module(role)
        if module is None:
            return None
        gains = self._gains(role, layer)
        return self._tensor(layer, module)[: len(gains)].T * gains

    def factors(self, role: Role, layer: int, dtype: Callable[[int, str], str]) -> LatentFactors | None:
        """The factors of the weights of a role, None without a latent; ``dtype`` gives the dtype of a module."""
        module = self.shapes[layer].latent_module(role)
        if module is None:
            return None
        gains = self._stored_gains(role, layer)
        inner = self._tensor(layer, module)[: len(gains)].T
        names = [name.removesuffix(".weight") for name in self.shapes[layer].tensors(role)]
        kinds = dtype(layer, names[0]), dtype(layer, names[2]), dtype(layer, names[1])
        return LatentFactors(inner, self._heads_of_latent(role, layer), gains, self._gain_factor(role, layer), kinds)

    def _gains(self, role: Role, layer: int) -> np.ndarray:
        """(r,): gains of the inner norm, times the factor that some families use."""
        return self._stored_gains(role, layer) * np.float32(self._gain_factor(role, layer))

    def _stored_gains(self, role: Role, layer: int) -> np.ndarray:
        return self._tensor(layer, list(self.shapes[layer].tensors(role))[1].removesuffix(".weight"))

    def _gain_factor(self, role: Role, layer: int) -> float:
        shape = self.shapes[layer]
        rank = shape.q_rank if role is Role.Q else shape.kv_rank
        return float(np.sqrt(shape.d_model / (rank or 1))) if shape.scaled else 1.0

    def bias(self, role: Role, layer: int, stored: Callable[[int, str], np.ndarray | None]) -> np.ndarray | None:
        """(n, m): the contribution of a bias of the latent, scaled per token like the rest; ``stored`` finds it."""
        shape = self.shapes[layer]
        module = shape.latent_module(role)
        if role is Role.O or module is None:
            return None
        given = stored(layer, module)
        if given is None:
            return None
        gains = self._gains(role, layer)
        made = self._heads_of_latent(role, layer) @ (given[: len(gains)] * gains)
        if role is not Role.K or not shape.rotary:
            return made
        filled = np.zeros((shape.n_heads + 1, shape.width(role)), dtype=made.dtype)
        filled[:-1, : shape.free] = made
        filled[-1, : shape.rotary] = given[len(gains) :] * self._rotary_gains(layer)
        return filled

    def _rotary_gains(self, layer: int) -> np.ndarray | float:
        """Gains of the norm of the rotary key; 1 if there is none."""
        shape = self.shapes[layer]
        return 1.0 if shape.rotary_norm is None else self._tensor(layer, shape.stem + shape.rotary_norm)

    def _queries(self, layer: int, rows: slice) -> np.ndarray:
        shape, inner = self.shapes[layer], self.latent_map(Role.Q, layer)
        if inner is not None:
            return _through(self._heads_of_latent(Role.Q, layer, rows), inner)
        stored = self._tensor(layer, shape.module(Role.Q))
        return stored.reshape(shape.n_heads, -1, shape.d_model)[:, rows].transpose(0, 2, 1)

    def _heads_of_latent(self, role: Role, layer: int, rows: slice | None = None) -> np.ndarray:
        """(n, m, r): the map from the latent to each head."""
        shape = self.shapes[layer]
        stored = self._tensor(layer, shape.module(role))
        if role is Role.Q:
            return stored.reshape(shape.n_heads, -1, stored.shape[1])[:, rows or slice(0, shape.free)]
        if shape.split:
            return stored.transpose(0, 2, 1) if role is Role.K else stored
        both = stored.reshape(shape.n_heads, shape.free + shape.value, shape.kv_rank)
        return both[:, : shape.free] if role is Role.K else both[:, shape.free :]

    def _with_rotary(self, layer: int, keys: np.ndarray) -> np.ndarray:
        shape = self.shapes[layer]
        module = shape.latent_module(Role.K)
        assert module is not None
        rotary = self._tensor(layer, module)[shape.kv_rank :].T * self._rotary_gains(layer)
        filled = np.zeros((shape.n_heads + 1, shape.d_model, shape.width(Role.K)), dtype=keys.dtype)
        filled[:-1, :, : shape.free] = keys
        filled[-1, :, : shape.rotary] = rotary
        return filled


def _through(heads: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """(n, d, m): heads (n, m, r) composed with the map (d, r) from the stream to their latent."""
    n, m, r = heads.shape
    made = np.matmul(heads.reshape(n * m, r), inner.T)
    return made.reshape(n, m, -1).transpose(0, 2, 1)


def stacked_root(weights: np.ndarray) -> np.ndarray:
    """(d, m) with the Gram matrix of (n, d, m) weights stacked: their triangular factor, padded with zeros."""
    root = np.asarray(np.linalg.qr(weights.reshape(-1, weights.shape[2]).astype(np.float64), mode="r"))
    found = np.zeros(weights.shape[1:])
    found[: len(root)] = root
    return found


def latent_chance(inner: np.ndarray, m: int, m2: int, seed: int = 0, draws: int = _DRAWS) -> Chance:
    """PK by chance of two heads that share a latent (d, r), from random m- and m2-dimensional subspaces of the latent.

    The map of the latent is not isotropic, so this is more than m·m2/r.

    >>> rng = np.random.default_rng(0)
    >>> 3.9 < latent_chance(np.linalg.qr(rng.normal(size=(256, 64)))[0], 16, 16).mean < 4.1
    True
    """
    # Rotating the stream does not change PK, so the triangular factor of the map can replace it.
    root = np.asarray(np.linalg.qr(np.asarray(inner, dtype=np.float64), mode="r"))
    rng = np.random.default_rng(seed)
    bases = [np.linalg.qr(np.matmul(root, rng.normal(size=(draws, root.shape[1], width))))[0] for width in (m, m2)]
    products = np.einsum("adm,bdn->abmn", *bases, optimize=True)
    found = np.square(products).sum(axis=(2, 3)).ravel()
    return Chance(float(found.mean()), float(found.std(ddof=1)))
