"""One progress bar at a time, on stderr, in a terminal or notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[int, int], None]

_showing = False


@contextmanager
def progress_bar(description: str, given: Update | None = None) -> Iterator[Update]:
    """A bar with the time left, driven by ``update(done, total)``.

    A caller's own function (``given``) replaces the bar. Without a terminal or notebook, and inside the block
    of another bar, nothing is shown.

    >>> with progress_bar("counting") as update:
    ...     update(1, 2)
    """
    global _showing
    if given is not None or _showing or not (_terminal() or _notebook()):
        yield given or (lambda done, total: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    _showing = True
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(description, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        _showing = False


def _terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _notebook() -> bool:
    """True inside a Jupyter kernel, whose stderr shows bars although it is not a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
