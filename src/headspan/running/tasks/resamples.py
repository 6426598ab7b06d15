"""Attributions of many prompts: their mean, and their sums over bootstrap resamples, without those of every prompt."""

from __future__ import annotations

import numpy as np

RESAMPLES = 200
_LEAST = 20  # resamples, however little memory there is
_PART = 4  # of the memory that the sums may take
_AT_ONCE = 20  # resamples in one product


class Resamples:
    """Bootstrap resamples of prompts that are added a batch at a time.

    How often a resample has each prompt is drawn before the first one runs, so the sums need no more memory for more
    prompts. After an interruption a resample has those of its prompts that were complete.
    """

    def __init__(self, prompts: int, mask: np.ndarray, seed: int, memory: int) -> None:
        self.mask, self.done = mask, 0
        self._edges = np.flatnonzero(mask)
        self.count = int(np.clip(memory // _PART // (4 * len(self._edges)), _LEAST, RESAMPLES))
        rng, equal = np.random.default_rng(seed), np.full(prompts, 1 / prompts)
        self._times = np.stack([rng.multinomial(prompts, equal).astype(np.float32) for _ in range(self.count)])
        self._sums = np.zeros((self.count, len(self._edges)), dtype=np.float32)
        self._total = np.zeros(len(self._edges))

    @property
    def nbytes(self) -> int:
        return self._times.nbytes + self._sums.nbytes + self._total.nbytes

    def add(self, values: np.ndarray) -> None:
        """Add the attributions of the next prompts, (prompts, writers, readers)."""
        flat = values.reshape(len(values), -1)[:, self._edges].astype(np.float32, copy=False)
        times = self._times[:, self.done : self.done + len(flat)]
        for start in range(0, self.count, _AT_ONCE):
            rows = slice(start, start + _AT_ONCE)
            self._sums[rows] += times[rows] @ flat
        self._total += flat.sum(0, dtype=np.float64)
        self.done += len(flat)

    def mean(self) -> np.ndarray:
        """The mean attribution, (writers, readers)."""
        return self._whole(self._total / self.done)

    def inclusion(self, k: int) -> np.ndarray:
        """The share of resamples in which each edge is among the k largest, (writers, readers)."""
        k = min(k, len(self._edges))
        drawn = np.flatnonzero(self._times[:, : self.done].any(1))
        counts = np.zeros(len(self._edges))
        for sums in self._sums[drawn]:
            counts[np.argpartition(-np.abs(sums), k - 1)[:k]] += 1
        return self._whole(counts / max(1, len(drawn)))

    def _whole(self, values: np.ndarray) -> np.ndarray:
        found = np.zeros(self.mask.size, dtype=np.float32)
        found[self._edges] = values
        return found.reshape(self.mask.shape)
