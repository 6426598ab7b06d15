"""What counts as a large effect: at least a floor in the effect's own unit, and more than a random write has.

A *random write* is the same exchange with what the source writes turned by a random rotation of the residual stream:
every token's write keeps its length, and the writes of a sequence keep their angles to each other. The rotation is
drawn uniformly, so under LayerNorm a part of 1/d falls on the direction that centring removes, as for any direction.

Of ``DRAWS`` rotations the largest effect counts. Narrow heads scatter: where ``SPREADS`` standard deviations of the
logarithms above their mean are more than ``LEAST_RATIO`` times the largest draw, that point counts instead. The ratio
has to be above 1 by a margin because a write that makes up most of the stream is taken out of it by the real exchange
and not by the turned one; on random weights this alone makes ratios of up to 1.46.
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
    """What a random write does to each edge, from the effects of several, (draws, …); NaN where there are none."""
    largest = draws.max(0)
    tested = ~np.isnan(largest)
    if len(draws) < 2 or not tested.any():
        return largest
    logs = np.log(np.maximum(draws[:, tested], np.finfo(np.float32).tiny))
    spread = logs.std(0, ddof=1)
    # Few draws can lie close together by chance: an edge scatters at least as much as the edges of its pairing do.
    spread = np.maximum(spread, np.median(spread))
    level = largest.copy()
    level[tested] = np.maximum(largest[tested], np.exp(logs.mean(0) + SPREADS * spread) / LEAST_RATIO)
    return level
