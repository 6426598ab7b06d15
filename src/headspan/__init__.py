"""What a head's weights span, and how far the spans of two heads overlap.

>>> import headspan as hs
>>> scores = hs.score("demo", metric="pk")
>>> len(scores["pk", "OK"].top(3))
3
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0.dev0"

# Public name -> module that defines it.
# Resolved on first use, so that `import headspan` stays instant.
_EXPORTS = {
    # the vocabulary
    "HeadspanError": "vocabulary.errors",
    "HeadspanWarning": "vocabulary.errors",
    "Head": "vocabulary.heads",
    "Node": "vocabulary.heads",
    "Pairing": "vocabulary.heads",
    "Port": "vocabulary.heads",
    "Role": "vocabulary.heads",
    "Scores": "results.scores",
    "Labels": "results.labels",
    "Metric": "subspaces.metrics",
    # models and results
    "open": "models.opening",
    "fold": "models.folding",
    "adapt": "models.adapters",
    "info": "reading.info",
    "score": "scoring.run",
    "load": "results.saving",
    # what the numbers mean: one verb per command
    "top": "graphs.strongest",
    "around": "graphs.strongest",
    "compare": "change.compare",
    "diff": "change.diff",
    "track": "change.track",
    "Series": "change.series",
    "hubs": "statistics.hubs",
    "baseline": "statistics.baseline",
    "significance": "statistics.significance",
    "evaluate": "paper.evaluation",
    "circuit_overlap": "statistics.circuit_overlap",
    "tokens": "reading.tokens",
    "pair": "reading.pair",
    "behaviour": "running.behaviour",
    "effects": "running.effects",
    "Effects": "running.effects",
    "effects_summary": "running.effects_summary",
    "effects_curve": "running.effects_curve",
    "observe": "running.observe",
    "Statistics": "results.observations",
    "task": "running.tasks.task",
    "Task": "results.tasks.task_result",
    "paths": "graphs.paths",
    "links": "reading.links",
    "Circuit": "results.tasks.circuit",
    "wiring": "plotting.drawn_wiring",
    "figures": "plotting.figures",
    "nodes": "reading.node_overlaps",
    "report": "explorer.report",
    "site": "explorer.site",
    "reproduce": "paper.reproduction",
    "cache": "checkpoints.hub.chunk_room",
    # any two matrices
    "subspace": "subspaces.matrices",
    "principal_angles": "subspaces.matrices",
    "projection_kernel": "subspaces.matrices",
}

# Names of earlier versions -> where they are now. They go with the next version.
_RENAMED = {"HeadRole": ("vocabulary.heads", "Port")}

if TYPE_CHECKING:
    from headspan.change.compare import compare
    from headspan.change.diff import diff
    from headspan.change.series import Series
    from headspan.change.track import track
    from headspan.checkpoints.hub.chunk_room import cache
    from headspan.explorer.report import report
    from headspan.explorer.site import site
    from headspan.graphs.paths import paths
    from headspan.graphs.strongest import around, top
    from headspan.models.adapters import adapt
    from headspan.models.folding import fold
    from headspan.models.opening import open
    from headspan.paper.evaluation import evaluate
    from headspan.paper.reproduction import reproduce
    from headspan.plotting.drawn_wiring import wiring
    from headspan.plotting.figures import figures
    from headspan.reading.info import info
    from headspan.reading.links import links
    from headspan.reading.node_overlaps import nodes
    from headspan.reading.pair import pair
    from headspan.reading.tokens import tokens
    from headspan.results.labels import Labels
    from headspan.results.observations import Statistics
    from headspan.results.saving import load
    from headspan.results.scores import Scores
    from headspan.results.tasks.circuit import Circuit
    from headspan.results.tasks.task_result import Task
    from headspan.running.behaviour import behaviour
    from headspan.running.effects import Effects, effects
    from headspan.running.effects_curve import effects_curve
    from headspan.running.effects_summary import effects_summary
    from headspan.running.observe import observe
    from headspan.running.tasks.task import task
    from headspan.scoring.run import score
    from headspan.statistics.baseline import baseline
    from headspan.statistics.circuit_overlap import circuit_overlap
    from headspan.statistics.hubs import hubs
    from headspan.statistics.significance import significance
    from headspan.subspaces.matrices import principal_angles, projection_kernel, subspace
    from headspan.subspaces.metrics import Metric
    from headspan.vocabulary.errors import HeadspanError, HeadspanWarning
    from headspan.vocabulary.heads import Head, Node, Pairing, Port, Role

__all__ = [
    "Circuit",
    "Effects",
    "Head",
    "HeadspanError",
    "HeadspanWarning",
    "Labels",
    "Metric",
    "Node",
    "Pairing",
    "Port",
    "Role",
    "Scores",
    "Series",
    "Statistics",
    "Task",
    "adapt",
    "around",
    "baseline",
    "behaviour",
    "cache",
    "circuit_overlap",
    "compare",
    "diff",
    "effects",
    "effects_curve",
    "effects_summary",
    "evaluate",
    "figures",
    "fold",
    "hubs",
    "info",
    "links",
    "load",
    "nodes",
    "observe",
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
    "task",
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
        from headspan.system.deprecation import warn_renamed

        module, new = _RENAMED[name]
        place = f"headspan.{new}" if new in _EXPORTS else f"headspan.{module}.{new}"
        warn_renamed(f"headspan.{name}", place)
        return getattr(import_module(f"headspan.{module}"), new)
    raise AttributeError(f"module 'headspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
