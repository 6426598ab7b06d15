"""The receivers of a layer: which projection outputs belong to a port, and how its input reaches them.

Most ports are some outputs of one linear module that reads the normed stream. Under latent attention the stream is
first projected to a latent, which its norm divides by one scalar per token. A patched input would change that scalar
for all heads of the layer, so it is kept from the clean run: the patch then changes exactly what the head's
weights (:mod:`headspan.models.families.latent_attention`) read. The rotary key, which all heads of a layer share, is a
separate receiver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headspan.models.families.latent_attention import LatentShape
from headspan.running.swapped_modules import epsilon, some_outputs, widened
from headspan.vocabulary.heads import Role

if TYPE_CHECKING:
    import torch

LATENT_NOTE = (
    "latent attention: the scale of the norms of latents is kept from the clean run, and Q and "
    "K of a head are its position-free rows; the rotary key of a layer (KR) is measured over all its heads"
)


class Receiver(NamedTuple):
    """A kind of port: Q, K or V of every head of a layer, or K of its rotary key (kind ``KR``)."""

    role: Role
    kind: str = "H"

    @property
    def rotary(self) -> bool:
        return self.kind == "KR"

    def __str__(self) -> str:
        return str(self.role) if self.kind == "H" else f"rotary {self.role}"


@dataclass(frozen=True)
class Latent:
    """The path from the normed stream to the module whose outputs are heads."""

    make: Any  # the module that computes the latent
    norm: Any
    rank: int
    factor: float = 1.0  # by which the model multiplies the normed latent
    later: float = 1.0  # by which it multiplies the heads, if their weights include it

    def scale(self, read: torch.Tensor) -> torch.Tensor:
        """The norm's scale of each token's latent, (…, 1)."""
        latent = widened(self.made(read))
        return (latent.square().mean(-1, keepdim=True) + epsilon(self.norm)).rsqrt()

    def normed(self, read: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The latent of an input, multiplied by a given scale instead of its own."""
        latent = self.made(read)
        return self.norm.weight * (widened(latent) * scale).to(latent.dtype) * self.factor

    def made(self, read: torch.Tensor) -> torch.Tensor:
        """The latent of an input, before its norm; no hook of the module is called."""
        return self.make.forward(read)[..., : self.rank]


@dataclass(frozen=True)
class Inlet:
    """One receiver of one layer."""

    module: Any  # the module whose outputs it uses
    rows: torch.Tensor | None  # which outputs; None for all
    heads: int
    latent: Latent | None = None

    def scale(self, read: torch.Tensor) -> torch.Tensor | None:
        return None if self.latent is None else self.latent.scale(read)

    def project(self, read: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """The port's output for an input, (n, T, heads, m) for (n, T, d)."""
        if self.latent is not None and scale is not None:
            read = self.latent.normed(read, scale)
        out = self.module(read) if self.rows is None else some_outputs(self.module, self.rows, read)
        return out.reshape(*out.shape[:2], self.heads, -1)

    def heads_of(self, outputs: torch.Tensor) -> torch.Tensor:
        """The port's part of what its module returned, (n, T, heads, m); latents have one more dimension before T."""
        mine = outputs if self.rows is None else outputs[..., self.rows]
        return mine.reshape(len(outputs), outputs.shape[-2], self.heads, -1)


def latent_inlets(shape: LatentShape, module: Callable[[str], Any]) -> dict[Receiver, Inlet]:
    """The receivers of a layer with latent attention; ``module`` finds one by its name in the layer."""
    import torch

    n, free, value = shape.n_heads, shape.free, shape.value
    both = np.arange(n * (free + value)).reshape(n, -1)
    queries = np.arange(n * (free + shape.rotary)).reshape(n, -1)[:, :free]
    found: dict[Receiver, Inlet] = {}
    for role, rows in ((Role.Q, queries), (Role.K, both[:, :free]), (Role.V, both[:, free:])):
        latent = _latent(shape, role, module)
        found[Receiver(role)] = Inlet(module(shape.module(role)), torch.from_numpy(rows.ravel()), n, latent)
    if shape.rotary:
        rows = torch.arange(shape.kv_rank, shape.kv_rank + shape.rotary)
        found[Receiver(Role.K, "KR")] = Inlet(module(shape.latent_module(Role.K) or ""), rows, 1)
    return found


def _latent(shape: LatentShape, role: Role, module: Callable[[str], Any]) -> Latent | None:
    name = shape.latent_module(role)
    if name is None:
        return None
    norm = list(shape.tensors(role))[1].removesuffix(".weight")
    rank = shape.kv_rank if role is not Role.Q else shape.q_rank or 0
    factor = float(np.sqrt(shape.d_model / rank)) if shape.scaled else 1.0
    factors = (1.0, factor) if role is Role.Q else (factor, 1.0)  # LongCat multiplies queries after their weight
    return Latent(module(name), module(norm), rank, *factors)
