"""What counts as a large effect: at least a floor in the effect's own unit, and more than a random write has.

A *random write* is the same patch with the source's output rotated at random in the residual stream: every token's
output keeps its length, and the outputs of a sequence keep their angles to each other. The rotation is
drawn uniformly, so under LayerNorm a part of 1/d falls on the direction that centring removes, as for any direction.

The largest effect of ``DRAWS`` rotations counts. Effects of narrow heads vary more: where ``SPREADS`` standard
deviations of the logarithms above their mean exceed ``LEAST_RATIO`` times the largest draw, that point counts instead.
The ratio must exceed 1 by a margin because the real patch removes an output that makes up most of the stream and the
rotated one does not; on random weights this alone gives ratios of up to 1.46.
"""

from __future__ import annotations

import numpy as np

from headspan.vocabulary.heads import Role

FLOORS = {Role.Q: 0.05, Role.K: 0.05, Role.V: 0.1}  # by the port that reads, in its unit
UNITS = {Role.Q: "total variation", Role.K: "total variation", Role.V: "relative norm"}
SHORT_UNITS = {"total variation": "TV", "relative norm": "norm"}
DRAWS = 8
LEAST_RATIO = 1.5
SPREADS = 3.5


def rotation(d: int, seed: int, draw: int) -> np.ndarray:
    """A uniformly random orthogonal map of d dimensions, (d, d)."""
    gaussian = np.random.default_rng([seed, draw]).standard_normal((d, d))
    q, r = np.linalg.qr(gaussian)
    return q * np.sign(np.diag(r))


def random_write(draws: np.ndarray) -> np.ndarray:
    """The effect of a random write on each edge, from several draws, (draws, …); NaN where there are none."""
    largest = draws.max(0)
    tested = ~np.isnan(largest)
    if len(draws) < 2 or not tested.any():
        return largest
    logs = np.log(np.maximum(draws[:, tested], np.finfo(np.float32).tiny))
    spread = logs.std(0, ddof=1)
    # A few draws can be close by chance, so an edge's spread is at least that of the edges of its pairing.
    spread = np.maximum(spread, np.median(spread))
    level = largest.copy()
    level[tested] = np.maximum(largest[tested], np.exp(logs.mean(0) + SPREADS * spread) / LEAST_RATIO)
    return level
