"""Modules that can be called like the function they are named after.

``headspan.hubs`` is a module as soon as anything imports it, and ``hs.hubs(scores, "OK")`` is the call that users know.
Both work when the module itself passes calls on to its function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def make_callable(name: str) -> None:
    """Let the module ``package.thing`` be called like its function ``thing``.

    >>> import headspan as hs, headspan.hubs
    >>> callable(hs.hubs) and callable(headspan.hubs.hubs)
    True
    """

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, name.rpartition(".")[2])(*args, **kwargs)

    sys.modules[name].__class__ = CallableModule
