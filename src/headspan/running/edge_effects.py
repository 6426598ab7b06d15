"""Measure direct edges between heads: patch one head's output as seen by one Q, K or V input of a later head.

For an edge from head s to port Q, K or V of head t, with x the stream before t's norm:

1. w is what s adds to the stream (W_O z, with the gain and scale of a norm after attention, without bias).
2. t's port reads x − w + w̃ instead of x. w̃ is the output of s at the same position of another sequence (``resample``),
   its mean over sequences and positions (``mean``), or zero (``zero``).
3. t's norm and this port are recomputed; everything else stays (:mod:`headspan.running.replay`).
4. Q and K: the total variation distance between t's attention rows before and after, averaged over queries and
   sequences. V: the relative change of t's output, in Frobenius norms over all tokens.

All heads of the target layer are measured together for all heads of a source layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.running.port_inputs import Receiver
from headspan.running.replay import LayerRecord, Recording, Replayer
from headspan.running.samples import Sample
from headspan.subspaces.bases import orthonormal_bases
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role

if TYPE_CHECKING:
    import torch

ABLATIONS = ("resample", "mean", "zero")


class EdgeReader:
    """Recorded sequences of a model, and the edges into its layers."""

    def __init__(self, replayer: Replayer, ablate: str = "resample", *, frozen_norm: bool = False) -> None:
        if ablate not in ABLATIONS:
            raise HeadspanError(f"unknown ablation {ablate!r}. Choose {', '.join(ABLATIONS)}")
        self.replayer, self.weights = replayer, replayer.weights
        self.ablate, self.frozen_norm = ablate, frozen_norm
        self.samples: list[Sample] = []
        self.records: list[Recording] = []

    def record(self, samples: Sequence[Sample]) -> None:
        """Run the model on these sequences and keep what edges need."""
        import torch

        if len(samples) == len(self.records) and all(a is b for a, b in zip(samples, self.samples, strict=True)):
            return  # already recorded
        self.records.clear()
        self.samples = list(samples)
        for sample in self.samples:
            self.records.append(self.replayer.record(sample.tensor))
        if self.ablate == "mean":
            everything = {n: [scaled_z(record[n]) for record in self.records] for n in self.replayer.layers}
            self._means = {n: torch.cat(z).mean(0, keepdim=True) for n, z in everything.items()}

    def exchanged(self, index: int, layer: int) -> torch.Tensor:
        """z − z̃ of every head of a layer in one sequence, (T, heads, m), times the token's scale."""
        z = scaled_z(self.records[index][layer])
        if self.ablate == "zero":
            return z
        if self.ablate == "mean":
            return z - self._means[layer]
        other = self.records[self._companion(index)]
        return z - scaled_z(other[layer])[: len(z)]

    def _companion(self, index: int) -> int:
        """The next sequence that is at least as long."""
        n, length = len(self.samples), len(self.samples[index].ids)
        for step in range(1, n):
            if len(self.samples[(index + step) % n].ids) >= length:
                return (index + step) % n
        raise HeadspanError(
            f"resampling needs another sequence of {length} tokens or more. Give more text, or ablate by mean"
        )

    # -- one target layer ------------------------------------------------------------------------------------

    def reads(self, layer: int, record: LayerRecord, delta: torch.Tensor) -> torch.Tensor:
        """What the ports of a layer read after ``delta`` (n, T, d) is subtracted from the stream."""
        if not self.frozen_norm or self.replayer.layers[layer].norm is None:
            return self.replayer.read(layer, record.stream - delta)
        norm = stream_norm(self.weights, layer)
        return record.normed - norm.linear(delta) * norm.scale(record.stream)

    def keep_only(
        self, layer: int, record: LayerRecord, receiver: Receiver, delta: torch.Tensor, directions: torch.Tensor
    ) -> torch.Tensor:
        """What to add to a port (n, T, heads, m) to patch only the component of ``delta`` along ``directions``.

        ``directions`` (n, heads of the port, d, r) have orthonormal columns. The norm's scale is that for ``delta``;
        that of a latent is kept from the clean run.
        """
        import torch

        norm = stream_norm(self.weights, layer)
        weight = norm.folded(torch.from_numpy(port_weights(self.weights, receiver, layer)).to(delta))  # (heads, d, m)
        all_of_it = torch.einsum("ntd,hdm->nthm", delta, weight)
        along = torch.einsum("nhdr,ntd->nhtr", directions, delta)
        kept = torch.einsum("nhtr,nhrm->nthm", along, torch.einsum("nhdr,hdm->nhrm", directions, weight))
        stream = record.stream if self.frozen_norm else record.stream - delta
        left_out = (all_of_it - kept) * norm.scale(stream)[..., None]
        inner, latent = record.inner[receiver], self.replayer.layers[layer].inlets[receiver].latent
        return left_out if inner is None or latent is None else left_out * inner[..., None] / latent.later


def stream_norm(weights: AttentionWeights, layer: int) -> StreamNorm:
    """The norm between the stream and a layer's attention; one without gain and scale if there is none."""
    norm = weights.norm(layer)
    return StreamNorm("none", None, 0.0) if norm is None else StreamNorm(norm.kind, norm.gain, norm.eps)


@dataclass(frozen=True)
class StreamNorm:
    """The norm before attention as a linear map and a scale."""

    kind: str
    gain: np.ndarray | None
    eps: float

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """γ ⊙ C x."""
        import torch

        x = x - x.mean(-1, keepdim=True) if self.kind == "layer" else x
        return x if self.gain is None else x * torch.from_numpy(self.gain).to(x)

    def folded(self, weight: torch.Tensor) -> torch.Tensor:
        """C γ W for weights (heads, d, m)."""
        import torch

        if self.gain is not None:
            weight = weight * torch.from_numpy(self.gain).to(weight)[:, None]
        return weight - weight.mean(1, keepdim=True) if self.kind == "layer" else weight

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """The norm's scale per token, (n, T, 1)."""
        if self.gain is None:
            return x.new_ones(*x.shape[:-1], 1)
        x = x - x.mean(-1, keepdim=True) if self.kind == "layer" else x
        return (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def scaled_z(record: LayerRecord) -> torch.Tensor:
    """z of every head, (T, heads, m), times the token's scale of a norm after attention."""
    return record.z if record.scale is None else record.z * record.scale[:, :, None]


def port_weights(weights: AttentionWeights, receiver: Receiver, layer: int) -> np.ndarray:
    """(heads, d, m) of a receiver: the rotary key comes after the other keys and has its own number of columns."""
    of_role = weights.read(receiver.role, layer)
    places = [i for i, h in enumerate(weights.heads_in(receiver.role, layer)) if (h.kind == "KR") == receiver.rotary]
    start = weights.ports.span(receiver.role, layer).start + places[0]
    return np.ascontiguousarray(of_role[places, :, : int(weights.widths(receiver.role)[start])])


class SharedDirections:
    """The first principal directions that a source shares with a port, as vectors of the port's subspace."""

    def __init__(self, weights: AttentionWeights, count: int) -> None:
        if count < 1:
            raise HeadspanError(f"the number of shared directions is {count}. Give 1 or more")
        self.weights, self.count = weights, count
        self._kept: dict[tuple[Receiver, int], np.ndarray] = {}

    def of(self, source_layer: int, heads: slice | np.ndarray, layer: int, receiver: Receiver) -> np.ndarray:
        """(sources, heads of the port, d, count)."""
        source, port = self._bases(Receiver(Role.O), source_layer)[heads], self._bases(receiver, layer)
        products = np.einsum("sda,hdb->shab", source, port, optimize=True)
        _, _, turned = np.linalg.svd(products, full_matrices=False)
        turned = turned[:, :, : self.count].transpose(0, 1, 3, 2)
        return np.einsum("hdb,shbr->shdr", port, turned, optimize=True)

    def _bases(self, port: Receiver, layer: int) -> np.ndarray:
        if (port, layer) not in self._kept:
            if len(self._kept) > 64:
                self._kept.clear()
            weight = port_weights(self.weights, port, layer)
            self._kept[port, layer] = orthonormal_bases(weight, self.weights.storage_dtype(port.role, layer))[0]
        return self._kept[port, layer]
