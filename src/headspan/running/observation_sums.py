"""Sums over tokens from which the statistics of a model are made, sequence by sequence, in float64.

A sum can be stored after any sequence and continued later. Means of z are updated position by position, so that the
spread needs no second pass (Welford's method).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from headspan.results.observations import READ, degrees
from headspan.running.attention_fisher import Signs, port_gradients
from headspan.running.edge_effects import scaled_z, stream_norm
from headspan.running.effect_sums import squared_lengths
from headspan.running.port_inputs import Inlet, Receiver
from headspan.running.replay import LayerRecord, Recording, Replayer
from headspan.running.swapped_modules import widened
from headspan.vocabulary.heads import ROLES, Role

if TYPE_CHECKING:
    import torch

Arrays = dict[str, np.ndarray]


class ObservationSums:
    """What was added so far, by name, for all layers."""

    def __init__(self, replayer: Replayer, positions: int, signs: Signs) -> None:
        self.replayer, self.weights, self.signs = replayer, replayer.weights, signs
        self._output_grams = cache(replayer.output_grams)
        count = {role: len(self.weights.heads(role)) for role in ROLES}
        width = {role: self.weights.d_head(role) for role in ROLES}
        n, m = count[Role.O], width[Role.O]
        self.sums: Arrays = {
            "sequences": np.zeros(1),
            "counts": np.zeros(positions),
            "mean/O": np.zeros((positions, n, m)),
            "spread/O": np.zeros((n, m, m)),
            "length/O": np.zeros(n),
            "value/V": np.zeros((count[Role.V], width[Role.V])),
            "square/V": np.zeros(count[Role.V]),
            **{f"fisher/{role}": np.zeros((count[role], width[role], width[role])) for role in (Role.Q, Role.K)},
            **{f"scale/{role}": np.zeros(count[role]) for role in READ},
            "tokens": np.zeros(1),
        }

    @property
    def done(self) -> int:
        """Sequences that were added."""
        return int(self.sums["sequences"][0])

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.sums.values())

    def restore(self, sums: Arrays) -> None:
        """Continue from sums that were stored before; anything else is ignored."""
        if {name: a.shape for name, a in sums.items()} == {name: a.shape for name, a in self.sums.items()}:
            self.sums = {name: np.array(sums[name], dtype=np.float64) for name in self.sums}

    def add(self, ids: np.ndarray, recording: Recording) -> None:
        """Add a sequence that was run."""
        import torch

        length = len(ids)
        self.sums["counts"][:length] += 1
        with torch.no_grad():
            for layer in self.replayer.layers:
                self._add_layer(layer, recording[layer], np.ascontiguousarray(ids, dtype="<i8").tobytes())
        self.sums["tokens"] += length
        self.sums["sequences"] += 1

    def _add_layer(self, layer: int, record: LayerRecord, key: bytes) -> None:
        span = self.weights.ports.span(Role.O, layer)
        self._add_writes(layer, record, span)
        self._add_values(layer, record)
        scales = {receiver: self._scale(layer, receiver, record) for receiver in self.replayer.layers[layer].inlets}
        for receiver, scale in scales.items():
            self._at(layer, receiver, f"scale/{receiver.role}")[...] += scale.square().sum().item()
        self._add_fisher(layer, record, scales, str(layer).encode() + b"\n" + key)

    def _add_writes(self, layer: int, record: LayerRecord, span: slice) -> None:
        """Update the means and squares of z at every position, and the lengths of what heads write."""
        multiplier = self.replayer.layers[layer].multiplier
        z = widened(scaled_z(record))
        lengths = squared_lengths(z, self._output_grams(layer)).sqrt().sum(0)
        self.sums["length/O"][span] += lengths.double().cpu().numpy()
        values = z.double().cpu().numpy() * multiplier
        mean = self.sums["mean/O"][: len(values), span]
        before = values - mean
        mean += before / self.sums["counts"][: len(values), None, None]
        self.sums["spread/O"][span] += np.einsum("thm,thk->hmk", before, values - mean, optimize=True)

    def _add_values(self, layer: int, record: LayerRecord) -> None:
        inlet = self.replayer.layers[layer].inlets[Receiver(Role.V)]
        values = inlet.heads_of(record.projected[inlet.module])[0].double().cpu().numpy()
        span = self.weights.ports.span(Role.V, layer)
        self.sums["value/V"][span] += values.sum(0)
        self.sums["square/V"][span] += np.square(values).sum((0, 2))

    def _add_fisher(self, layer: int, record: LayerRecord, scales: dict[Receiver, torch.Tensor], key: bytes) -> None:
        """Add the mean of γγᵀ over the sets of signs, summed over tokens."""
        import torch

        length, n = len(record.z), self.weights.n_heads
        totals: dict[Receiver, np.ndarray] = {}
        sets = 0
        for gradients in port_gradients(self.replayer, layer, record, self.signs((n, length, length + 1), key)):
            sets += 1
            for receiver, found in gradients.items():
                scaled = found * scales[receiver][:, None, None]
                squares = torch.einsum("thm,thk->hmk", scaled, scaled).double().cpu().numpy()
                totals[receiver] = totals.get(receiver, 0.0) + squares
        for receiver, squares in totals.items():
            rows, m = n // len(squares), squares.shape[1]  # attention rows per query: one for each head of a group
            self._at(layer, receiver, f"fisher/{receiver.role}")[:, :m, :m] += squares / (rows * sets)

    def _scale(self, layer: int, receiver: Receiver, record: LayerRecord) -> torch.Tensor:
        """What a change of the stream is multiplied by before the port's folded weight reads it, per token."""
        scale = stream_norm(self.weights, layer).scale(widened(record.stream))[0, :, 0]
        inlet: Inlet = self.replayer.layers[layer].inlets[receiver]
        inner = record.inner[receiver]
        if inlet.latent is None or inner is None:
            return scale
        return scale * inner[0, :, 0] / inlet.latent.later

    def _at(self, layer: int, receiver: Receiver, name: str) -> np.ndarray:
        """The part of an array that belongs to the heads of a receiver; the rotary key comes last in its layer."""
        span = self.weights.ports.span(receiver.role, layer)
        kinds = [head.kind == "KR" for head in self.weights.heads(receiver.role)[span]]
        first = span.start + kinds.index(receiver.rotary)
        return self.sums[name][first : first + kinds.count(receiver.rotary)]

    def arrays(self) -> tuple[Arrays, np.ndarray]:
        """The statistics as they are stored, and the number of sequences at each position."""
        sums, tokens = self.sums, float(self.sums["tokens"][0])
        counts = sums["counts"].astype(np.int64)
        mean = sums["value/V"] / tokens
        found = {
            "spread/O": sums["spread/O"] / max(degrees(counts), 1),
            "mean/O": sums["mean/O"],
            "length/O": sums["length/O"] / tokens,
            "mean/V": mean,
            "variance/V": np.maximum(sums["square/V"] / tokens - np.square(mean).sum(-1), 0.0),
            **{f"fisher/{role}": sums[f"fisher/{role}"] / tokens for role in (Role.Q, Role.K)},
            **{f"scale/{role}": np.sqrt(sums[f"scale/{role}"] / tokens) for role in READ},
        }
        return {name: values.astype(np.float32) for name, values in found.items()}, counts
