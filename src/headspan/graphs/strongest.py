"""The strongest pairs of a result, a result file or a model.

>>> [str(edge.source) for edge in top("demo", "OK", k=2)]
['L0H3', 'L0H3']
>>> around("demo", "L1H2", k=1).incoming[0].target
Head(layer=1, index=2, kind='H')
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from headspan.results import strongest
from headspan.results.labels import LabelsLike
from headspan.results.matrix import Edges
from headspan.results.strongest import Around
from headspan.scoring.inputs import ScoresLike, given_scores
from headspan.subspaces.metrics import PK
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.vocabulary.ends import EndsLike
from headspan.vocabulary.heads import FLOW_PAIRINGS, HeadOrNode, Pairing, Port, parse_pairings


@renamed(pairings="pairing")
@checked
def top(
    scores: ScoresLike,
    pairing: str | Pairing | Iterable[str | Pairing] = "flow",
    k: int = 20,
    metric: str | Iterable[str] = PK,
    *,
    from_: EndsLike | None = None,
    to: EndsLike | None = None,
    layer: int | None = None,
    label: str | None = None,
    labels: LabelsLike | None = None,
    side: Literal["source", "target"] | None = None,
) -> Edges:
    found = given_scores(scores, metric, parse_pairings(pairing))
    return strongest.top(
        found, pairing, k, metric, from_=from_, to=to, layer=layer, label=label, labels=labels, side=side
    )


@renamed(pairings="pairing")
@checked
def around(
    scores: ScoresLike,
    head: HeadOrNode | Port | str,
    k: int = 10,
    metric: str | Iterable[str] = PK,
    pairing: str | Pairing | Iterable[str | Pairing] | None = None,
) -> Around:
    found = given_scores(scores, metric, FLOW_PAIRINGS if pairing is None else parse_pairings(pairing))
    return strongest.around(found, head, k, metric, pairing)


top.__doc__, around.__doc__ = strongest.top.__doc__, strongest.around.__doc__
