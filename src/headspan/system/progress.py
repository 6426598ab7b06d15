"""One progress bar at a time, on stderr, in a terminal or notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headspan.vocabulary.notebook import kernel_shell

_PATIENCE, _BETWEEN = 1.0, 0.2  # seconds before a notebook shows a bar, and between two updates of it

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
    in_notebook = kernel_shell() is not None
    if given is not None or _showing or not (_terminal() or in_notebook):
        yield given or (lambda done, total: None)
        return
    _showing = True
    try:
        with (_in_cell if in_notebook else _in_terminal)(description) as update:
            yield update
    finally:
        _showing = False


@contextmanager
def _in_terminal(description: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _in_cell(description: str) -> Iterator[Update]:
    """A widget, or without ipywidgets a line of text that is rewritten; work of a second leaves no trace in the cell.

    rich would keep the warnings of the work inside its own widget, and show a warning for every bar without ipywidgets.
    """
    started = shown = time.monotonic()
    place: _Widget | _Line | None = None

    def update(done: int, total: int) -> None:
        nonlocal shown, place
        now = time.monotonic()
        if total and now - started > _PATIENCE and now - shown > _BETWEEN:
            place, shown = place or _place(description), now
            left = (now - started) * (total - done) / max(1, done)
            place.show(done / total, f"{100 * done // total} %, {left:.0f} s left")

    try:
        yield update
    finally:
        if place is not None:
            place.close()


class _Widget:
    def __init__(self, description: str) -> None:
        from IPython import display
        from ipywidgets import FloatProgress, HBox, Label

        self._bar, self._text = FloatProgress(max=1.0), Label()
        self._box = HBox([Label(description), self._bar, self._text])
        display.display(self._box)  # pyright: ignore[reportUnknownMemberType]

    def show(self, share: float, text: str) -> None:
        self._bar.value, self._text.value = share, text

    def close(self) -> None:
        self._box.close_all()


class _Line:
    def __init__(self, description: str) -> None:
        self._description, self._widest = description, 0

    def show(self, share: float, text: str) -> None:
        line = f"{self._description}: {text}"
        self._widest = max(self._widest, len(line))
        print(f"\r{line.ljust(self._widest)}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print(f"\r{' ' * self._widest}\r", end="", file=sys.stderr, flush=True)


def _place(description: str) -> _Widget | _Line:
    try:
        return _Widget(description)
    except ImportError:
        return _Line(description)


def _terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
