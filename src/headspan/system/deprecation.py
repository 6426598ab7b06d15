"""Names of an earlier version that still work, with a warning, for one version."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module some of whose names have changed: old name -> new name."""

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}", stacklevel=3)
        return getattr(sys.modules[module], names[name])

    return getattr_


def warn_renamed(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn, at the line that uses it, that a name has changed."""
    warnings.warn(
        f"{old} is now {new}; the old name will be removed in the next version", DeprecationWarning, stacklevel + 1
    )
