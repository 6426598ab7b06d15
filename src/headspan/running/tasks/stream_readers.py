"""How each reader of the stream computes what it reads: a port of a head, an MLP, or the logits.

A reader can be given an input of its own, so that one reader sees another stream than the rest of the model does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headspan.models.families.mlp_table import NORMS
from headspan.running.edge_effects import StreamNorm
from headspan.running.port_inputs import Inlet, Receiver
from headspan.running.replay import Layer, Replayer
from headspan.running.swapped_modules import epsilon, outputs_of, submodule
from headspan.vocabulary.heads import Role

if TYPE_CHECKING:
    import torch


GATE = Receiver(Role.Q, "gate")
_GATES = ("gate_proj", "g_proj")  # of attention: one number or d_head numbers per head


@dataclass(frozen=True)
class MlpReader:
    """Where the MLP of a block reads: a module, and the norm before it if that belongs to attention too."""

    module: Any  # its first input is replaced
    norm: Any | None  # of a parallel block: the module's input is this norm of the block's input


def whole_inlets(layer: Layer) -> dict[Receiver, Inlet]:
    """The receivers of a layer, where Q has all that its module computes for a head: gates and rotary rows too.

    A gate of each head with a module of its own is a second receiver of Q: what the head reads as Q decides it too.
    """
    query = layer.inlets[Receiver(Role.Q)]
    fused = any(inlet.module is query.module for receiver, inlet in layer.inlets.items() if receiver.role is not Role.Q)
    found = {**layer.inlets, Receiver(Role.Q): query if fused else replace(query, rows=None)}
    gate = next((module for name in _GATES if (module := submodule(layer.attention, name)) is not None), None)
    return found if gate is None else {**found, GATE: Inlet(gate, None, query.heads)}


def normed_latent(inlet: Inlet, read: torch.Tensor) -> torch.Tensor:
    """What the module of a receiver reads: the normed stream, or the normed latent of it."""
    return read if inlet.latent is None else inlet.latent.normed(read, inlet.latent.scale(read))


def per_head(inlet: Inlet, read: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Outputs of some heads of a receiver, each for its own normed input: (B, T, heads, m) for (heads, B, T, d)."""
    import torch

    read = normed_latent(inlet, read)
    weight, bias = outputs_of(inlet.module, inlet.rows)
    weight = weight.reshape(inlet.heads, -1, weight.shape[1])[heads]
    out = torch.einsum("hbti,hmi->bthm", read, weight)
    return out if bias is None else out + bias.reshape(inlet.heads, -1)[heads]


def pulled_back(inlet: Inlet, normed: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient at the normed stream as each head alone reads it: (B, T, heads, d) for (B, T, heads, m)."""
    import torch

    weight, _ = outputs_of(inlet.module, inlet.rows)
    found = torch.einsum("bthm,hmi->bthi", gradient, weight.reshape(inlet.heads, -1, weight.shape[1]))
    if inlet.latent is None:
        return found
    latent = inlet.latent
    gained = found * (latent.norm.weight * latent.factor)
    found = norm_derivative("rms", epsilon(latent.norm), latent.made(normed), gained)
    return found @ outputs_of(latent.make)[0][: latent.rank]


def through_norm(norm: StreamNorm, stream: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient at the stream for one at the normed stream, (B, T, heads, d)."""
    import torch

    if norm.gain is None:
        return gradient
    return norm_derivative(norm.kind, norm.eps, stream, gradient * torch.from_numpy(norm.gain).to(gradient))


def norm_derivative(kind: str, eps: float, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The transposed derivative of a norm without gain at x (B, T, d), applied to (B, T, heads, d)."""
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()[:, :, None]
    direction = x[:, :, None]
    along = (gradient * direction).mean(-1, keepdim=True)
    found = scale * gradient - scale**3 * along * direction
    return found - found.mean(-1, keepdim=True) if kind == "layer" else found


def mlp_reader(replayer: Replayer, number: int, block: Any, *, parallel: bool) -> MlpReader | None:
    """The MLP of a block with attention; None if the block has none."""
    layer = replayer.layers[number]
    attention = {id(layer.norm), id(layer.output_norm)}
    if replayer.weights.norm_place != "output":
        for name in NORMS:
            norm = submodule(block, name)
            if norm is not None and id(norm) not in attention:
                return MlpReader(norm, None)
    for name in ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe"):
        module = submodule(block, name)
        if module is not None:
            return MlpReader(module, layer.norm if parallel else None)
    return None
