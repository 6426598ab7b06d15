"""What headspan tells a Python user: its warnings and its log messages."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headspan.vocabulary.errors import HeadspanWarning


@contextmanager
def noticed() -> Iterator[list[str]]:
    """The texts of all `HeadspanWarning`s and log messages inside the block, in order."""
    texts: list[str] = []
    logger, handler = logging.getLogger("headspan"), logging.Handler(logging.INFO)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, HeadspanWarning):
            texts.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", HeadspanWarning)
        warnings.showwarning = show
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield texts
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
