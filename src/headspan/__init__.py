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
    "AttentionWeights": "models.weights",
    "open": "models.weights",
    "fold": "models.folding",
    "score": "scoring.run",
    "scores_of": "scoring.run",
    "Scores": "scores",
    "load": "scores",
    "compare": "analysis.comparison",
    "adapt": "models.adapters",
    "diff": "analysis.drift",
    "track": "analysis.tracking",
    "Series": "analysis.series",
    "significance": "analysis.baseline",
    "kl_divergence": "analysis.baseline",
    "hubs": "analysis.hubs",
    "Labels": "analysis.labels",
    "evaluate": "analysis.evaluation",
    "head_tokens": "analysis.tokens",
    "compare_pair": "analysis.pair",
    "head_scores": "analysis.behaviour",
    "effects": "analysis.effects",
    "Effects": "analysis.effects",
    "wiring": "analysis.wiring",
    "report": "explorer",
    "reproduce": "analysis.reproduction",
    "all_tokens": "analysis.tokens",
    "norm_correlations": "analysis.tokens",
    "unembedding_cosines": "analysis.tokens",
    "PairReader": "analysis.pair",
    "attention_patterns": "analysis.behaviour",
    "BehaviourScores": "analysis.behaviour",
    "summarise": "analysis.baseline",
    "detection": "analysis.evaluation",
    "classification": "analysis.evaluation",
}

if TYPE_CHECKING:
    from headspan.analysis.baseline import kl_divergence, significance, summarise
    from headspan.analysis.behaviour import BehaviourScores, attention_patterns, head_scores
    from headspan.analysis.comparison import compare
    from headspan.analysis.drift import diff
    from headspan.analysis.effects import Effects, effects
    from headspan.analysis.evaluation import classification, detection, evaluate
    from headspan.analysis.hubs import hubs
    from headspan.analysis.labels import Labels
    from headspan.analysis.pair import PairReader, compare_pair
    from headspan.analysis.reproduction import reproduce
    from headspan.analysis.series import Series
    from headspan.analysis.tokens import all_tokens, head_tokens, norm_correlations, unembedding_cosines
    from headspan.analysis.tracking import track
    from headspan.analysis.wiring import wiring
    from headspan.errors import HeadspanError
    from headspan.explorer import report
    from headspan.heads import Head, HeadRole, Pairing, Role
    from headspan.models.adapters import adapt
    from headspan.models.folding import fold
    from headspan.models.weights import AttentionWeights, open
    from headspan.scores import Scores, load
    from headspan.scoring.run import score, scores_of

__all__ = [
    "AttentionWeights",
    "BehaviourScores",
    "Effects",
    "Head",
    "HeadRole",
    "HeadspanError",
    "Labels",
    "PairReader",
    "Pairing",
    "Role",
    "Scores",
    "Series",
    "adapt",
    "all_tokens",
    "attention_patterns",
    "classification",
    "compare",
    "compare_pair",
    "detection",
    "diff",
    "effects",
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
    "track",
    "unembedding_cosines",
    "wiring",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"headspan.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'headspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
