"""The strongest pairs of a result, a result file or a model.

>>> [str(edge.source) for edge in top("demo", "OK", k=2)]
['L0H3', 'L0H3']
>>> around("demo", "L1H2", k=1).incoming[0].target
Head(layer=1, index=2, kind='H')
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from headspan.results import strongest
from headspan.results.scores import Scores
from headspan.scoring.inputs import ScoresLike, given_scores
from headspan.system.deprecation import renamed
from headspan.vocabulary.heads import FLOW_PAIRINGS, parse_pairings

P = ParamSpec("P")
T = TypeVar("T")


def _of_anything(function: Callable[Concatenate[Scores, P], T]) -> Callable[Concatenate[ScoresLike, P], T]:
    """The same function for a result file and for a model, of which it scores what is asked for."""
    signature = inspect.signature(function)
    own = signature.parameters["scores"]
    signature = signature.replace(
        parameters=[own.replace(annotation="ScoresLike"), *list(signature.parameters.values())[1:]]
    )

    @functools.wraps(function)
    def call(scores: ScoresLike, *args: P.args, **kwargs: P.kwargs) -> T:
        if isinstance(scores, Scores):
            return function(scores, *args, **kwargs)
        given = signature.bind(scores, *args, **kwargs)
        given.apply_defaults()
        metric, pairing = given.arguments["metric"], given.arguments["pairing"]
        pairings = FLOW_PAIRINGS if pairing is None else parse_pairings(pairing)
        given.arguments["scores"] = given_scores(scores, metric, pairings)
        return function(*given.args, **given.kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return renamed(pairings="pairing")(call)


top = _of_anything(strongest.top)
around = _of_anything(strongest.around)
