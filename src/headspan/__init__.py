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
    "open": "weights",
    "fold": "folding",
    "score": "scoring",
    "Scores": "scores",
    "load": "scores",
}

if TYPE_CHECKING:
    from headspan.errors import HeadspanError
    from headspan.folding import fold
    from headspan.heads import Head, HeadRole, Pairing, Role
    from headspan.scores import Scores, load
    from headspan.scoring import score
    from headspan.weights import open

__all__ = ["Head", "HeadRole", "HeadspanError", "Pairing", "Role", "Scores", "fold", "load", "open", "score"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"headspan.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'headspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
