"""What a head's weights span, and how far the spans of two heads overlap.

>>> import headspan as hs
>>> scores = hs.score(hs.open("demo"), metrics=["pk"])
>>> len(scores["pk", "OK"].top(3))
3
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.1"

# Public name -> module that defines it, with the name it has there where that is another.
# Resolved on first use, so that `import headspan` stays instant.
_EXPORTS = {
    # the vocabulary
    "HeadspanError": "errors",
    "HeadspanWarning": "errors",
    "Head": "heads",
    "HeadRole": "heads",
    "Pairing": "heads",
    "Role": "heads",
    "Scores": "scores",
    "Labels": "analysis.labels",
    # models and results
    "Node": "models.nodes:GivenNode",
    "open": "models.weights",
    "fold": "models.folding",
    "adapt": "models.adapters",
    "info": "analysis.info",
    "score": "scoring.run",
    "load": "scores",
    # what the numbers mean: one verb per command
    "top": "analysis.neighbours",
    "around": "analysis.neighbours",
    "compare": "analysis.comparison",
    "diff": "analysis.drift",
    "track": "analysis.tracking",
    "Series": "analysis.series",
    "hubs": "analysis.hubs",
    "baseline": "analysis.baseline",
    "significance": "analysis.significance",
    "evaluate": "analysis.evaluation",
    "tokens": "analysis.tokens",
    "pair": "analysis.pair",
    "behaviour": "analysis.behaviour",
    "effects": "analysis.effects",
    "Effects": "analysis.effects",
    "paths": "analysis.paths",
    "Circuit": "analysis.circuit",
    "wiring": "analysis.wiring",
    "nodes": "analysis.nodes",
    "report": "explorer",
    "site": "explorer.site",
    "reproduce": "analysis.reproduction",
    # any two matrices
    "subspace": "scoring.public",
    "principal_angles": "scoring.public",
    "projection_kernel": "scoring.public",
}

# Names of version 0.1 -> where they are now. They go with the next version.
_RENAMED = {
    "head_tokens": ("analysis.tokens", "tokens"),
    "compare_pair": ("analysis.pair", "pair"),
    "head_scores": ("analysis.behaviour", "behaviour"),
    "summarise": ("analysis.baseline", "baseline"),
    "scores_of": ("scoring.run", "scores_of"),
    "AttentionWeights": ("models.weights", "AttentionWeights"),
    "kl_divergence": ("analysis.baseline", "kl_divergence"),
    "all_tokens": ("analysis.tokens", "all_tokens"),
    "norm_correlations": ("analysis.tokens", "norm_correlations"),
    "unembedding_cosines": ("analysis.tokens", "unembedding_cosines"),
    "PairReader": ("analysis.pair", "PairReader"),
    "attention_patterns": ("analysis.behaviour", "attention_patterns"),
    "BehaviourScores": ("analysis.behaviour", "BehaviourScores"),
    "detection": ("analysis.evaluation", "detection"),
    "classification": ("analysis.evaluation", "classification"),
}

if TYPE_CHECKING:
    from headspan.analysis.baseline import baseline
    from headspan.analysis.behaviour import behaviour
    from headspan.analysis.circuit import Circuit
    from headspan.analysis.comparison import compare
    from headspan.analysis.drift import diff
    from headspan.analysis.effects import Effects, effects
    from headspan.analysis.evaluation import evaluate
    from headspan.analysis.hubs import hubs
    from headspan.analysis.info import info
    from headspan.analysis.labels import Labels
    from headspan.analysis.neighbours import around, top
    from headspan.analysis.nodes import nodes
    from headspan.analysis.pair import pair
    from headspan.analysis.paths import paths
    from headspan.analysis.reproduction import reproduce
    from headspan.analysis.series import Series
    from headspan.analysis.significance import significance
    from headspan.analysis.tokens import tokens
    from headspan.analysis.tracking import track
    from headspan.analysis.wiring import wiring
    from headspan.errors import HeadspanError, HeadspanWarning
    from headspan.explorer import report
    from headspan.explorer.site import site
    from headspan.heads import Head, HeadRole, Pairing, Role
    from headspan.models.adapters import adapt
    from headspan.models.folding import fold
    from headspan.models.nodes import GivenNode as Node
    from headspan.models.weights import open
    from headspan.scores import Scores, load
    from headspan.scoring.public import principal_angles, projection_kernel, subspace
    from headspan.scoring.run import score

__all__ = [
    "Circuit",
    "Effects",
    "Head",
    "HeadRole",
    "HeadspanError",
    "HeadspanWarning",
    "Labels",
    "Node",
    "Pairing",
    "Role",
    "Scores",
    "Series",
    "adapt",
    "around",
    "baseline",
    "behaviour",
    "compare",
    "diff",
    "effects",
    "evaluate",
    "fold",
    "hubs",
    "info",
    "load",
    "nodes",
    "open",
    "pair",
    "paths",
    "principal_angles",
    "projection_kernel",
    "report",
    "reproduce",
    "score",
    "significance",
    "site",
    "subspace",
    "tokens",
    "top",
    "track",
    "wiring",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        module, _, spelled = _EXPORTS[name].partition(":")
        return getattr(import_module(f"headspan.{module}"), spelled or name)
    if name in _RENAMED:
        from headspan.system.renamed import warn_renamed

        module, new = _RENAMED[name]
        place = f"headspan.{new}" if new in _EXPORTS else f"headspan.{module}.{new}"
        warn_renamed(f"headspan.{name}", place)
        return getattr(import_module(f"headspan.{module}"), new)
    raise AttributeError(f"module 'headspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
