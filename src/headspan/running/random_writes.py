"""Effects of random outputs: the second pass over edges whose effect is at or above its floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headspan.results.large_effects import LEAST_RATIO, random_write, rotation
from headspan.running.edge_effects import EdgeReader
from headspan.running.effect_sums import EdgeMeasures, Measuring, by_port
from headspan.running.port_inputs import Receiver
from headspan.running.samples import Sample
from headspan.system.progress import Update
from headspan.vocabulary.heads import Pairing, Role, forward_mask


class RandomWrites:
    """Compares measured edges with random outputs (:mod:`headspan.results.large_effects`), one rotation per draw."""

    def __init__(
        self,
        reader: EdgeReader,
        floors: Mapping[Pairing, float],
        draws: int,
        seed: int,
        memory: int,
    ) -> None:
        self.reader, self.floors, self.draws = reader, floors, draws
        self.seed, self.memory = seed, memory
        self.table = reader.weights.ports

    @property
    def protocol(self) -> dict[str, Any]:
        """What a result stores of it; nothing if no random output was drawn."""
        if not self.draws:
            return {}
        floors = {str(pairing): floor for pairing, floor in self.floors.items()}
        return {"floors": floors, "random_writes": self.draws, "least_ratio": LEAST_RATIO}

    def on(
        self, material: str, samples: Sequence[Sample], measured: EdgeMeasures, progress: Sequence[Update]
    ) -> dict[tuple[str, Pairing], np.ndarray]:
        """By (``random_turned`` …, pairing): effects of random outputs, NaN for edges below their floor."""
        with np.errstate(invalid="ignore"):
            tested = {p: self._effects(measured, p) >= floor for p, floor in self.floors.items()}
        wanted = self._wanted(tested)
        drawn = {p: np.full((self.draws, *mask.shape), np.nan, dtype=np.float32) for p, mask in tested.items()}
        for draw, tell in enumerate(progress):
            if not any(mask.any() for mask in tested.values()):
                break
            turn = rotation(self.reader.weights.d_model, self.seed, draw)
            again = Measuring(self.reader, wanted, turn=turn, memory=self.memory, progress=tell).run(samples)
            if again.interrupted:
                raise KeyboardInterrupt
            for pairing, mask in tested.items():
                drawn[pairing][draw][mask] = self._effects(again, pairing)[mask]
        return {(f"{material}_turned", p): random_write(found) for p, found in drawn.items()} if self.draws else {}

    def _effects(self, measured: EdgeMeasures, pairing: Pairing) -> np.ndarray:
        """Effects on the heads of a port, in float32 as they are stored."""
        forward = forward_mask(self.table.of(Role.O), self.table.of(pairing.target))
        return by_port("effect", measured, pairing, self.table, forward)["effect", pairing]

    def _wanted(self, tested: Mapping[Pairing, np.ndarray]) -> dict[Receiver, np.ndarray]:
        """For each receiver, the source heads and target layers with an edge to test."""
        layers = self.reader.weights.layers
        wanted: dict[Receiver, np.ndarray] = {}
        for pairing, mask in tested.items():
            targets = self.table.of(pairing.target)
            for receiver in self.reader.replayer.receivers:
                if receiver.role is pairing.target:
                    mine = np.array([(head.kind == "KR") == receiver.rotary for head in targets])
                    into = [mine & np.array([head.layer == layer for head in targets]) for layer in layers]
                    wanted[receiver] = np.stack([mask[:, columns].any(1) for columns in into], axis=1)
        return wanted
