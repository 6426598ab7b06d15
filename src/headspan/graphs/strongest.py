"""The strongest pairs of a result, a result file or a model."""

from __future__ import annotations

import os
from collections.abc import Iterable

from headspan.results import strongest
from headspan.results.labels import Labels
from headspan.results.matrix import Edges
from headspan.results.strongest import Around
from headspan.scoring.inputs import ScoresLike, given_scores
from headspan.subspaces.metrics import PK
from headspan.system.arguments import checked
from headspan.vocabulary.heads import FLOW_PAIRINGS, HeadOrNode, Pairing, Port, parse_pairings


@checked
def around(
    scores: ScoresLike,
    head: HeadOrNode | Port | str,
    k: int = 10,
    metric: str = PK,
    pairings: str | Pairing | Iterable[str | Pairing] | None = None,
) -> Around:
    """Which heads write to a head, and which read from it: the k strongest forward pairs of every pairing.

    Pairings are by default all of the scores in which the source writes and the target reads: OQ, OK, OV.
    A head with a role, ``L5H1.K``, asks for the pairs of that port only. In a result with nodes their names are
    understood too (``refusal``, ``refusal.R``), and a head's pairs with nodes are among those listed.

    Under GQA a query head reads through the key/value head of its group, and a key/value head writes through the query
    heads of its group: their pairs are among those listed.

    >>> around("demo", "L1H2", k=1).incoming[0].target
    Head(layer=1, index=2, kind='H')
    """
    wanted = FLOW_PAIRINGS if pairings is None else parse_pairings(pairings)
    return strongest.around(given_scores(scores, [metric], wanted), head, k, metric, pairings)


@checked
def top(
    scores: ScoresLike,
    pairings: str | Pairing | Iterable[str | Pairing] = "flow",
    k: int = 20,
    metric: str = PK,
    *,
    layer: int | None = None,
    label: str | None = None,
    labels: Labels | str | os.PathLike[str] | None = None,
) -> Edges:
    """The k largest scores of every pairing; ranks count all pairs of the pairing.

    layer: only pairs with a head of this layer. label: only pairs with a head of this class of ``labels``.

    >>> [str(edge.source) for edge in top("demo", "OK", k=2)]
    ['L0H3', 'L0H3']
    """
    found = given_scores(scores, [metric], parse_pairings(pairings))
    return strongest.top(found, pairings, k, metric, layer=layer, label=label, labels=labels)
