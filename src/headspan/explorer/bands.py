"""How far the largest and the smallest of many heads would lie from the others by chance, for the plot of heads.

For hubs chance is known, so the band is simulated: `extremes_at_random`. For all other measures (head scores, effects,
drift) there is no model of chance. Their band describes the crowd only: the middle half of the heads is taken as the
middle of a normal distribution, on either side of the median separately because most measures are skewed, and the band
ends where the extremes of that many normal values would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from headspan.results.scores import Scores
from headspan.statistics.hubs import EXTREME, extremes_at_random
from headspan.vocabulary.heads import FLOW_PAIRINGS

_QUARTILE = 0.6744897501960817  # of a standard normal distribution
_LEAST = 8  # heads


def bands(
    scores: Scores, behaviour: Mapping[str, Mapping[str, float]] | None, values: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[float]]:
    """The ends of the band of every measure: hubs by ``hub:pk/OK/outlet``, the others by the page's name for them."""
    found: dict[str, tuple[float, float] | None] = {}
    for metric, pairing in scores.arrays:
        matrix = scores[metric, pairing].forward().values
        if pairing in FLOW_PAIRINGS and not np.isnan(matrix).all():
            found[f"hub:{metric}/{pairing}/inlet"] = extremes_at_random(matrix)
            found[f"hub:{metric}/{pairing}/outlet"] = extremes_at_random(matrix.T)
    for kind, by_head in (behaviour or {}).items():
        found[f"behaviour:{kind}"] = crowd_band(by_head.values(), most=1.0)
    for key, entry in values.items():
        found[f"value:{key}"] = crowd_band(entry["values"].values(), most=1.0 if key == "drift" else np.inf)
    return {key: [float(f"{end:.7g}") for end in band] for key, band in found.items() if band is not None}


def crowd_band(values: Iterable[float], least: float = 0.0, most: float = np.inf) -> tuple[float, float] | None:
    """Where the extremes of normal values would be whose median and quartiles are those of ``values``.

    least, most: the smallest and the largest possible value. None for fewer than eight values, or where the median is
    one of the quartiles.

    >>> low, high = crowd_band(5 + np.random.default_rng(0).normal(size=1000))
    >>> 8.5 < high < 9.5 and 0.5 < low < 1.5
    True
    """
    from scipy.special import ndtri

    array = np.array(list(values), dtype=np.float64)
    if len(array) < _LEAST:
        return None
    low, middle, high = np.quantile(array, [0.25, 0.5, 0.75])
    if low == middle or high == middle:
        return None
    reach = float(ndtri(EXTREME ** (1 / len(array)))) / _QUARTILE
    return max(least, float(middle - reach * (middle - low))), min(most, float(middle + reach * (high - middle)))
