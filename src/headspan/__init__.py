"""What a head's weights span, and how far the spans of two heads overlap.

>>> import headspan as hs
>>> scores = hs.score(hs.open("demo"), metrics=["pk"])
>>> len(scores["pk", "OK"].top(3))
3
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it. Resolved on first use, so that `import headspan` stays instant.
_EXPORTS = {
    "HeadspanError": "errors",
    "Head": "heads",
    "HeadRole": "heads",
    "Pairing": "heads",
    "Role": "heads",
    "AttentionWeights": "weights",
    "open": "weights",
    "fold": "folding",
    "score": "scoring",
    "scores_of": "scoring",
    "Scores": "scores",
    "load": "scores",
    "compare": "comparison",
    "significance": "baseline",
    "kl_divergence": "baseline",
    "hubs": "hubs",
    "Labels": "labels",
    "evaluate": "evaluation",
    "head_tokens": "tokens",
    "compare_pair": "pairs",
    "head_scores": "behaviour",
    "wiring": "wiring",
    "report": "report",
    "reproduce": "reproduction",
    "all_tokens": "tokens",
    "norm_correlations": "tokens",
    "unembedding_cosines": "tokens",
    "PairReader": "pairs",
    "attention_patterns": "behaviour",
    "BehaviourScores": "behaviour",
    "summarise": "baseline",
    "detection": "evaluation",
    "classification": "evaluation",
}

if TYPE_CHECKING:
    from headspan.baseline import kl_divergence, significance, summarise
    from headspan.behaviour import BehaviourScores, attention_patterns, head_scores
    from headspan.comparison import compare
    from headspan.errors import HeadspanError
    from headspan.evaluation import classification, detection, evaluate
    from headspan.folding import fold
    from headspan.heads import Head, HeadRole, Pairing, Role
    from headspan.hubs import hubs
    from headspan.labels import Labels
    from headspan.pairs import PairReader, compare_pair
    from headspan.report import report
    from headspan.reproduction import reproduce
    from headspan.scores import Scores, load
    from headspan.scoring import score, scores_of
    from headspan.tokens import all_tokens, head_tokens, norm_correlations, unembedding_cosines
    from headspan.weights import AttentionWeights, open
    from headspan.wiring import wiring

__all__ = [
    "AttentionWeights",
    "BehaviourScores",
    "Head",
    "HeadRole",
    "HeadspanError",
    "Labels",
    "PairReader",
    "Pairing",
    "Role",
    "Scores",
    "all_tokens",
    "attention_patterns",
    "classification",
    "compare",
    "compare_pair",
    "detection",
    "evaluate",
    "fold",
    "head_scores",
    "head_tokens",
    "hubs",
    "kl_divergence",
    "load",
    "norm_correlations",
    "open",
    "report",
    "reproduce",
    "score",
    "scores_of",
    "significance",
    "summarise",
    "unembedding_cosines",
    "wiring",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"headspan.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'headspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
