"""Requests to a hub, retried after temporary errors, a few at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from headspan.checkpoints.hub.wire import BadAnswer, Stalled

AT_ONCE = 8  # requests
TRIES = 6
STALLS = 2  # tries that may end because the server sends too little
_WAIT = 0.5  # seconds before the second try, doubled for every further one
_LONGEST_WAIT = 30.0
BUSY = (408, 425, 429, 500, 502, 503, 504)

Result = TypeVar("Result")

connection = threading.BoundedSemaphore(AT_ONCE)  # held for as long as a request takes, whichever file it is for


def patiently(question: Callable[[], Result], again: Callable[[BaseException], bool] | None = None) -> Result:
    """The result of ``question``, with a limited number of retries; raises its last error.

    again: which errors are temporary; `passing` by default.
    """
    wait, stalls = _WAIT, 0
    for _ in range(TRIES - 1):
        try:
            return question()
        except Exception as error:
            stalls += isinstance(error, Stalled)
            if not (again or passing)(error) or stalls == STALLS:
                raise
            pause = max(wait, _asked_to_wait(error))
        time.sleep(min(pause, _LONGEST_WAIT))
        wait *= 2
    return question()


def passing(error: BaseException) -> bool:
    """Whether an error may be temporary: no answer, or one that says so."""
    return error.again or busy(error) if isinstance(error, BadAnswer) else isinstance(error, OSError)


def busy(error: BaseException) -> bool:
    """Whether the server answered that it is busy."""
    return isinstance(error, BadAnswer) and error.status in BUSY


def unreachable(error: BaseException) -> bool:
    """True if there was no answer at all, not even an error status."""
    return (error.status or 0) >= 500 if isinstance(error, BadAnswer) else isinstance(error, OSError)


def _asked_to_wait(error: BaseException) -> float:
    """Seconds that the server asks us to wait."""
    with suppress(ValueError, TypeError):  # it may be a date
        return min(max(0.0, float(getattr(error, "headers", {}).get("Retry-After", 0))), _LONGEST_WAIT)
    return 0.0
