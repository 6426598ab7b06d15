"""All requested edges of a model on some sequences: sums over tokens, one target layer at a time, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from headspan.results.head_scores import KINDS
from headspan.running.edge_effects import EdgeReader, SharedDirections, scaled_z
from headspan.running.port_inputs import Receiver
from headspan.running.replay import LayerRecord
from headspan.running.samples import Sample
from headspan.running.swapped_modules import widened
from headspan.system.progress import Update
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Pairing, Role
from headspan.vocabulary.ports import PortTable

if TYPE_CHECKING:
    import torch

Rows: TypeAlias = "slice | np.ndarray"


@dataclass
class EdgeMeasures:
    """Measures of all edges by (name, receiver), (source heads, query heads of the target): NaN if not measured.

    Names: ``effect`` and, for Q and K on samples with marked positions, the new value of each head score.
    """

    arrays: dict[tuple[str, Receiver], np.ndarray]
    clean: dict[str, np.ndarray]  # head scores of the clean run, by query head
    write_norms: np.ndarray  # mean length of a head's output
    measured: dict[int, int] = field(default_factory=dict)  # target layer -> sequences
    interrupted: bool = False


class Measuring:
    """All requested edges of a model on some sequences, one target layer at a time, in bounded memory."""

    def __init__(
        self,
        reader: EdgeReader,
        wanted: dict[Receiver, np.ndarray],
        *,
        shared: SharedDirections | None = None,
        turn: np.ndarray | None = None,
        memory: int = 2**30,
        progress: Update | None = None,
    ) -> None:
        """``wanted[receiver]`` is (source heads, layers): which heads to measure into which target layers.

        With ``turn``, an orthogonal map of the stream (d, d), the patch is rotated by it first; then only effects
        are measured, not head scores.
        """
        import torch

        self.reader, self.replayer, self.weights = reader, reader.replayer, reader.weights
        self.wanted, self.shared, self.memory, self.progress = wanted, shared, memory, progress
        output = next(iter(self.replayer.layers.values())).output.weight
        self.turn = None if turn is None else torch.from_numpy(turn).to(output)
        self.layers = self.weights.layers
        self.n = self.weights.n_heads

    def run(self, samples: Sequence[Sample]) -> EdgeMeasures:
        """Measure; Ctrl-C keeps the target layers that are finished."""
        import torch

        kinds = [kind for kind in KINDS if self.turn is None and all(kind in sample.places for sample in samples)]
        self.kinds = [kind for kind in kinds if sum(sample.counts[kind] for sample in samples)]
        groups = self._groups(samples)
        totals: dict[int, Totals] = {}
        done, steps = 0, len(samples) * len(self.layers)
        norms = np.zeros(len(self.layers) * self.n)
        measured: dict[int, int] = {}
        interrupted = False
        scores: dict[int, Totals] = {}
        try:
            with torch.inference_mode():
                for group in groups:
                    self.reader.record(group)
                    for place, layer in enumerate(self.layers):
                        part, scored = Totals(self.n, self.kinds), Totals(self.n, self.kinds)
                        for index in range(len(group)):
                            norms[place * self.n : (place + 1) * self.n] += self._write_norms(index, layer)
                            self._edges_into(place, index, part, scored)
                            done += 1
                            if self.progress is not None:
                                self.progress(done, steps)
                        totals[layer] = totals[layer] + part if layer in totals else part
                        scores[layer] = scores[layer] + scored if layer in scores else scored
                        measured[layer] = measured.get(layer, 0) + len(group)
        except KeyboardInterrupt:
            if not measured:
                raise
            interrupted = True
        tokens = sum(len(sample.ids) for sample in samples)
        return EdgeMeasures(self._arrays(totals), self._clean(scores), norms / tokens, measured, interrupted)

    # -- sizes -----------------------------------------------------------------------------------------------

    def _groups(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        """Groups of sequences that are recorded together: as many as fit in half of the memory."""
        longest = max(len(sample.ids) for sample in samples)
        d, width = self.weights.d_model, self.n * self.weights.d_head(Role.O)
        each = 4 * longest * (len(self.layers) * (2 * d + 4 * width) + longest)
        least = 2 if self.reader.ablate == "resample" else 1
        size = max(least, self.memory // 2 // each)
        if least * each > self.memory:
            raise HeadspanError(
                f"{least} sequences of {longest} tokens need {least * each / 1e6:,.0f} MB to record. "
                "Allow more memory, or give a shorter length or window"
            )
        if len(samples) <= size:
            return [samples]
        ordered = sorted(samples, key=lambda sample: -len(sample.ids))  # sequences of the same length together
        groups = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        if len(groups[-1]) < least:
            groups[-2] = [*groups[-2], *groups.pop()]
        return list(groups)

    def _chunk(self, length: int) -> int:
        """Number of source heads patched at the same time."""
        d, width = self.weights.d_model, self.n * self.weights.d_head(Role.O)
        each = 4 * length * (4 * d + 6 * width + 4 * self.n * length)
        return int(max(1, min(self.n, self.memory // 2 // each)))

    # -- measuring -------------------------------------------------------------------------------------------

    def _write_norms(self, index: int, layer: int) -> np.ndarray:
        z = scaled_z(self.reader.records[index][layer])
        return _lengths(widened(z), self.replayer.output_grams(layer)).sqrt().sum(0).cpu().numpy()

    def _edges_into(self, place: int, index: int, totals: Totals, scored: Totals) -> None:
        """All requested edges into one layer, in one sequence."""
        if self.turn is not None and not any(wanted[:, place].any() for wanted in self.wanted.values()):
            return
        layer, sample = self.layers[place], self.reader.samples[index]
        record = self.reader.records[index][layer]
        pattern, z = self.replayer.replay(layer, record)
        grams = self.replayer.output_grams(layer)
        scored.add_scores((layer, Receiver(Role.Q)), slice(0, 1), 1, pattern, sample)
        before = Before(pattern, z, grams, record.scale)
        chunk = self._chunk(len(sample.ids))
        for source, source_layer in enumerate(self.layers):
            mine = slice(source * self.n, (source + 1) * self.n)
            ports = {receiver: wanted[mine, place] for receiver, wanted in self.wanted.items()}
            asked = np.flatnonzero(np.any(list(ports.values()), axis=0))
            if not len(asked):
                continue
            exchanged = self.reader.exchanged(index, source_layer)
            for heads in np.split(asked, range(chunk, len(asked), chunk)):
                delta = self.replayer.written(source_layer, exchanged, heads)
                delta = delta if self.turn is None else delta @ self.turn
                read = self.reader.reads(layer, record, delta)
                for receiver, chosen in ports.items():
                    some = np.flatnonzero(chosen[heads])
                    if not len(some):
                        continue
                    port = self.replayer.project(layer, receiver, record, read[some])
                    if self.shared is not None:
                        port = port + self._only_shared(source_layer, heads[some], layer, record, receiver, delta[some])
                    after = self.replayer.replay(layer, record, receiver, port)
                    rows = mine.start + heads[some]
                    totals.compare((layer, receiver), rows, len(self.layers) * self.n, before, after, sample)

    def _only_shared(
        self, source: int, heads: np.ndarray, layer: int, record: LayerRecord, receiver: Receiver, delta: torch.Tensor
    ) -> torch.Tensor:
        import torch

        assert self.shared is not None
        directions = torch.from_numpy(self.shared.of(source, heads, layer, receiver)).to(delta)
        return self.reader.keep_only(layer, record, receiver, delta, directions)

    # -- results ---------------------------------------------------------------------------------------------

    def _arrays(self, totals: dict[int, Totals]) -> dict[tuple[str, Receiver], np.ndarray]:
        heads = len(self.layers) * self.n
        arrays: dict[tuple[str, Receiver], np.ndarray] = {}
        for receiver in self.wanted:
            names = ("effect",) if receiver.role is Role.V else ("effect", *self.kinds)
            for name in names:
                arrays[name, receiver] = np.full((heads, heads), np.nan)
            for layer, part in totals.items():
                place = self.layers.index(layer)
                columns = slice(place * self.n, (place + 1) * self.n)
                for name in names:
                    arrays[name, receiver][:, columns] = part.mean(name, (layer, receiver), heads)
        return arrays

    def _clean(self, scores: dict[int, Totals]) -> dict[str, np.ndarray]:
        own = Receiver(Role.Q)
        return {
            kind: np.concatenate([
                scores[layer].mean(kind, (layer, own), 1)[0] if layer in scores else np.full(self.n, np.nan)
                for layer in self.layers
            ])
            for kind in self.kinds
        }  # fmt: skip


def by_port(
    material: str, measures: EdgeMeasures, pairing: Pairing, table: PortTable, forward: np.ndarray
) -> dict[tuple[str, Pairing], np.ndarray]:
    """Measures of query heads as measures of the port's heads: the mean over a group, and its largest effect."""
    targets = table.of(pairing.target)
    receivers = [Receiver(pairing.target, "KR" if head.kind == "KR" else "H") for head in targets]
    groups = [[table.find(head, Role.O) for head in table.group_of(target)] for target in targets]
    arrays: dict[tuple[str, Pairing], np.ndarray] = {}
    for name in dict.fromkeys(name for name, receiver in measures.arrays if receiver.role is pairing.target):
        values = {receiver: measures.arrays[name, receiver] for receiver in set(receivers)}
        if name != "effect":
            values = {receiver: found - measures.clean[name][None, :] for receiver, found in values.items()}
        grouped = [values[receiver][:, group] for receiver, group in zip(receivers, groups, strict=True)]
        key = material if name == "effect" else name
        mean = np.stack([found.mean(1) for found in grouped], axis=1)
        arrays[key, pairing] = np.where(forward, mean, np.nan).astype(np.float32)
        if name == "effect" and any(len(group) > 1 for group in groups):
            largest = np.stack([found.max(1) for found in grouped], axis=1)
            arrays[f"{material}_largest", pairing] = np.where(forward, largest, np.nan).astype(np.float32)
    return arrays


@dataclass(frozen=True)
class Before:
    """A layer's attention and z in the clean run, batch dimension 1."""

    pattern: torch.Tensor
    z: torch.Tensor
    grams: torch.Tensor
    scale: torch.Tensor | None

    def change(self, z: torch.Tensor) -> torch.Tensor:
        """Squared length of the change of every head's output, (n, heads)."""
        return self._square(z - self.z)

    def size(self) -> torch.Tensor:
        return self._square(self.z)

    def _square(self, z: torch.Tensor) -> torch.Tensor:
        z = z if self.scale is None else z * self.scale[:, :, None]
        return _lengths(z, self.grams).sum(1)


def _lengths(z: torch.Tensor, grams: torch.Tensor) -> torch.Tensor:
    """Squared lengths of outputs from z (…, T, heads, m)."""
    import torch

    return (torch.einsum("...thm,hmk->...thk", z, grams) * z).sum(-1).clamp_min(0)


class Totals:
    """Sums over tokens, by (name, layer and port), (sources, heads of the layer)."""

    def __init__(self, heads: int, kinds: Sequence[str]) -> None:
        self.heads, self.kinds = heads, kinds
        self.sums: dict[tuple[str, tuple[int, Receiver]], np.ndarray] = {}

    def add(self, name: str, key: tuple[int, Receiver], rows: Rows, sources: int, values: torch.Tensor) -> None:
        total = self.sums.setdefault((name, key), np.zeros((sources, self.heads)))
        total[rows] += values.double().cpu().numpy()  # rows are all different

    def compare(
        self,
        key: tuple[int, Receiver],
        rows: Rows,
        sources: int,
        before: Before,
        after: tuple[torch.Tensor, torch.Tensor],
        sample: Sample,
    ) -> None:
        """Add what changed between the clean run and a replay; overwrites the replay's attention."""
        pattern, z = after
        if key[1].role is Role.V:
            self.add("change", key, rows, sources, before.change(z))
            self.add("size", key, rows, sources, before.size().expand(len(z), -1))
            return
        self.add_scores(key, rows, sources, pattern, sample)
        moved = pattern.sub_(before.pattern).abs_().sum((-2, -1)) / 2
        self.add("moved", key, rows, sources, moved)
        self.add("queries", key, rows, sources, moved.new_full(moved.shape, len(sample.ids)))

    def add_scores(
        self, key: tuple[int, Receiver], rows: Rows, sources: int, pattern: torch.Tensor, sample: Sample
    ) -> None:
        """Attention on the positions of every kind, and the number of queries."""
        import torch

        for kind in self.kinds:
            queries, keys = (torch.as_tensor(index, device=pattern.device) for index in sample.places[kind])
            found = pattern[:, :, queries, keys].sum(-1)
            self.add(kind, key, rows, sources, found)
            self.add(f"{kind} queries", key, rows, sources, torch.full_like(found, sample.counts[kind]))

    def __add__(self, other: Totals) -> Totals:
        both = Totals(self.heads, self.kinds)
        both.sums = {key: value + other.sums[key] for key, value in self.sums.items()}
        return both

    def mean(self, name: str, key: tuple[int, Receiver], sources: int) -> np.ndarray:
        """The measure computed from the sums; NaN where nothing was added."""
        above, below = {"effect": ("change", "size") if key[1].role is Role.V else ("moved", "queries")}.get(
            name, (name, f"{name} queries")
        )
        if (above, key) not in self.sums:
            return np.full((sources, self.heads), np.nan)
        top, bottom = self.sums[above, key], self.sums[below, key]
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = top / bottom
        return np.sqrt(ratio) if above == "change" else ratio
