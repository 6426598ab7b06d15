"""Whether this runs in a notebook, and what its cells have shown."""

from __future__ import annotations

import sys
from typing import Any

_shown: dict[str, tuple[object, object]] = {}  # message -> the cell that showed it first, and when that last ran


def kernel_shell() -> Any | None:
    """The shell of a Jupyter kernel, also on Colab, or None outside of one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    kinds = {kind.__name__ for kind in type(shell).__mro__}
    return shell if "ZMQInteractiveShell" in kinds else None


def shown_before(message: str) -> bool:
    """Whether a notebook shows this message already: in another cell, or in this one since it was run.

    A cell that is run again loses its output, so the first cell shows its messages again.
    """
    shell = kernel_shell()
    if shell is None:
        return False
    count = getattr(shell, "execution_count", 0)
    metadata = (getattr(shell, "parent_header", None) or {}).get("metadata") or {}
    cell = metadata.get("cellId") or (shell.user_ns.get("In") or [None])[-1]
    first, last = _shown.get(message, (cell, None))
    if first != cell or last == count:
        return True
    _shown[message] = cell, count
    return False
