"""The effect of one edge through the directions that its two heads share most.

For r = 1, 2, 4, … directions: the effect of patching only the component of the source's output along the first r
principal directions of the port, and for comparison along r random directions of the source's output. Both end at
the full effect, the first exactly if the weights are folded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.models.folding import fold
from headspan.results.large_effects import UNITS
from headspan.results.tabular import Tabular
from headspan.running.edge_effects import EdgeReader, SharedDirections, port_weights
from headspan.running.effect_sums import Before, Totals
from headspan.running.effects import LENGTH, SEQUENCES, VOCABULARY
from headspan.running.opening import RunningModel, running
from headspan.running.port_inputs import LATENT_NOTE, Receiver
from headspan.running.replay import Replayer
from headspan.running.samples import Sample, random_samples, token_pool
from headspan.subspaces.bases import orthonormal_bases
from headspan.system.arguments import checked
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, Port, Role

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike
    from headspan.models.weights import AttentionWeights


@dataclass(frozen=True, repr=False, eq=False)
class EffectCurve(Tabular):
    """``shared[i]`` and ``random[i]`` (mean over draws; ``random_largest[i]`` of them) for ``directions[i]``."""

    source: str
    target: str
    whole: float
    directions: list[int]
    shared: list[float]
    random: list[float]
    random_largest: list[float]
    unit: str
    notes: list[str] = field(default_factory=list[str])

    def _headline(self) -> str:
        return f"effect of {self.source} on {self.target} by the number of directions, {self.unit}"

    def rows(self) -> list[dict[str, Any]]:
        """One record per number of directions: directions, shared, random, random_largest, whole, effect_unit."""
        columns = ("directions", "shared", "random", "random_largest")
        table = zip(self.directions, self.shared, self.random, self.random_largest, strict=True)
        return [dict(zip(columns, row, strict=True)) | {"whole": self.whole, "effect_unit": self.unit} for row in table]


@checked
def effects_curve(
    model: ModelLike,
    source: Port | str,
    target: Port | str,
    *,
    draws: int = 4,
    ablate: str = "resample",
    bos: str = "auto",
    seed: int = 0,
    device: str | None = None,
) -> EffectCurve:
    """The effect of one edge, ``"L0H3.O"`` to ``"L1H0.K"``, through its leading directions (``pair --effects``).

    The model runs on random sequences repeated twice.
    """
    start, end = (Port.parse(name) for name in (source, target))
    if start.role is not Role.O or end.role not in {pairing.target for pairing in FLOW_PAIRINGS}:
        raise HeadspanError(f"{start} → {end} is not an edge. Give an output (.O) and an input (.Q, .K or .V)")
    with running(model, device=device) as ready:
        replayer = Replayer(ready)
        weights, notes = replayer.weights, list(ready.notes)
        place, port = weights.ports.find(start.head, Role.O), weights.ports.resolve(end.head, end.role)
        if start.head.layer >= port.layer:
            raise HeadspanError(
                f"{start} → {end} is not a forward edge. The source's layer must come before the target's"
            )
        if not weights.foldable:
            notes.append(f"directions are those of the raw weights: {weights.not_foldable_reason}")
        folded = fold(weights) if weights.foldable else weights
        if replayer.latent:
            notes.append(LATENT_NOTE)
        receiver = Receiver(end.role, "KR" if port.kind == "KR" else "H")
        counts, directions = _directions(folded, start.head, port, receiver, draws, seed)
        reader = EdgeReader(replayer, ablate)
        own = place % weights.n_heads
        samples = _samples(ready, bos, seed, notes)
        totals = _measured(reader, samples, start.head.layer, own, port.layer, receiver, directions)
    found = totals.mean("effect", (port.layer, receiver), 1 + len(directions))
    heads = weights.ports.group_of(port)
    values = found[:, [head.index for head in heads]].mean(1)
    table = values[1:].reshape(len(counts), 1 + draws)
    shared, random, largest = table[:, 0], table[:, 1:].mean(1), table[:, 1:].max(1)
    ends = (str(start), f"{port}.{end.role}", float(values[0]))
    return EffectCurve(*ends, counts, shared.tolist(), random.tolist(), largest.tolist(), UNITS[end.role], notes)


def _samples(model: RunningModel, bos: str, seed: int, notes: list[str]) -> list[Sample]:
    pool, begin = token_pool(model, VOCABULARY, None, notes), model.start_token(bos)
    room = (model.context or 10**9) - (begin is not None)
    return random_samples(model, pool, SEQUENCES, min(LENGTH, room // 2), seed, begin)


def _measured(
    reader: EdgeReader,
    samples: list[Sample],
    source_layer: int,
    head: int,
    layer: int,
    receiver: Receiver,
    directions: list[np.ndarray],
) -> Totals:
    """Sums for the full edge, then for each set of directions."""
    import torch

    replayer = reader.replayer
    replayer.check(torch.as_tensor(samples[0].ids.astype(np.int64)))
    totals, rows = Totals(reader.weights.n_heads, ()), 1 + len(directions)
    with torch.inference_mode():
        reader.record(samples)
        for index, sample in enumerate(samples):
            record = reader.records[index][layer]
            before = Before(*replayer.replay(layer, record), replayer.output_grams(layer), record.scale)
            delta = replayer.written(source_layer, reader.exchanged(index, source_layer), slice(head, head + 1))
            whole = replayer.project(layer, receiver, record, reader.reads(layer, record, delta))
            for row in range(rows):
                port = whole
                if row:
                    some = torch.as_tensor(directions[row - 1]).to(delta)[None, None].expand(1, whole.shape[2], -1, -1)
                    port = whole + reader.keep_only(layer, record, receiver, delta, some)
                after = replayer.replay(layer, record, receiver, port)
                totals.compare((layer, receiver), slice(row, row + 1), rows, before, after, sample)
    return totals


def _directions(
    weights: AttentionWeights, source: Any, port: Any, receiver: Receiver, draws: int, seed: int
) -> tuple[list[int], list[np.ndarray]]:
    """For each count of directions: the shared ones, then random ones of the source, as orthonormal columns."""
    m = port_weights(weights, receiver, port.layer).shape[2]
    counts = sorted({2**i for i in range(m.bit_length()) if 2**i < m} | {m})
    shared = SharedDirections(weights, m).of(source.layer, slice(source.index, source.index + 1), port.layer, receiver)
    shared = shared[0, port.index]
    written = weights.read(Role.O, source.layer)[source.index : source.index + 1]
    basis = orthonormal_bases(written, weights.storage_dtype(Role.O, source.layer))[0][0]
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    for count in counts:
        found.append(shared[:, :count])
        for _ in range(draws):
            turned, _ = np.linalg.qr(rng.normal(size=(basis.shape[1], min(count, basis.shape[1]))))
            found.append(basis @ turned)
    return counts, found
