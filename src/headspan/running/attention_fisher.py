"""How much an attention pattern depends on its queries and keys: the Fisher information about each port.

An attention row p is a probability distribution over keys. If a port's output a changes by a small δ, the KL divergence
between the row before and after is ½ δᵀFδ, where F = Σ_j p_j ∇log p_j (∇log p_j)ᵀ is the Fisher information of the
row about a. The sum over rows, for one token of a port, is E[γγᵀ] with

    γ = ∇_a Σ ε_ij · 2√p_ij,    ε_ij = ±1, independent for every query i and key j,

because 4 Σ_j ∇√p_j (∇√p_j)ᵀ = F. So one backward pass through the layer's attention gives an unbiased estimate for
every token of every Q and K port at once, with the model's own rotary positions, QK-norm, soft caps, windows, sinks
and biases. With orthogonal signs (`orthogonal_signs`) the mean over all sets of signs is exact. This takes a set for
every key of every query and head, so `observe` draws a few sets at random instead.

Where a QK-norm spans all heads of a layer, a port changes the rows of the other heads too, and these are included.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from headspan.running.port_inputs import Receiver
from headspan.running.replay import LayerRecord, Replayer
from headspan.vocabulary.heads import Role

if TYPE_CHECKING:
    import torch

Signs: TypeAlias = "Callable[[tuple[int, int, int], bytes], Iterable[torch.Tensor]]"  # from a shape and a key

_LEAST = 1e-30  # attention that counts; the root of less has no gradient in float32
_SINK = 1e-5  # of a row's attention: if more than this is missing from 1, it went to a sink


def port_gradients(
    replayer: Replayer, layer: int, record: LayerRecord, signs: Iterable[torch.Tensor]
) -> Iterator[dict[Receiver, torch.Tensor]]:
    """γ of every Q and K port of a layer, (T, heads of the port, m), for each set of signs (heads, T, T + 1)."""
    import torch

    inlets = {r: inlet for r, inlet in replayer.layers[layer].inlets.items() if r.role is not Role.V}
    modules = list(dict.fromkeys(inlet.module for inlet in inlets.values()))
    with torch.enable_grad():
        leaves = {module: record.projected[module].detach().clone().requires_grad_() for module in modules}
        # Clones, because some models clip a projection's output in place.
        outputs = {module: leaves.get(module, out).clone() for module, out in record.projected.items()}
        rounding = max(torch.finfo(leaf.dtype).eps for leaf in leaves.values())
        roots = _roots(replayer, replayer.attend(layer, record, outputs)[0][0], rounding)
    for drawn in signs:
        found = torch.autograd.grad(roots, list(leaves.values()), drawn.to(roots), retain_graph=True)
        gradients = dict(zip(leaves, found, strict=True))
        yield {receiver: inlet.heads_of(gradients[inlet.module])[0] for receiver, inlet in inlets.items()}


def _roots(replayer: Replayer, pattern: torch.Tensor, rounding: float) -> torch.Tensor:
    """2√p of attention (heads, T, T), with one more column for what a row gives to a sink."""
    import torch

    total, sink = pattern.sum(-1, keepdim=True), max(_SINK, 16 * rounding)
    if pattern.min() < -sink or total.max() > 1 + sink:
        raise replayer.refusal("its attention weights are not probabilities, so their KL divergence is not defined")
    both = torch.cat([pattern, 1 - total], dim=-1)
    least = torch.full_like(both[:1, :1], _LEAST)
    least[..., -1] = sink
    counts = both > least
    return torch.where(counts, 2 * torch.where(counts, both, 1.0).sqrt(), 0.0)


def random_signs(draws: int, seed: int, shape: tuple[int, int, int], key: bytes) -> Iterator[torch.Tensor]:
    """``draws`` sets of independent signs, the same for the same seed and key."""
    import torch

    seed = int.from_bytes(hashlib.sha256(str(seed).encode() + b"\n" + key).digest()[:8], "big")
    generator = torch.Generator().manual_seed(seed % 2**63)
    for _ in range(draws):
        yield torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1


def orthogonal_signs(shape: tuple[int, int, int], key: bytes = b"") -> Iterator[torch.Tensor]:
    """Sets of signs whose mean of γγᵀ is exact: over all sets, those of any two keys of any two queries are orthogonal.

    One key's sets are a column of a Hadamard matrix. γ of a key mixes all keys of all queries, so no two may share one.
    """
    import torch
    from scipy.linalg import hadamard

    column = np.arange(math.prod(shape)).reshape(shape)
    for signs in hadamard(1 << (column.size - 1).bit_length()):
        yield torch.from_numpy(signs[column])
