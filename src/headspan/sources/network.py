"""Requests to a hub: tried again when they may succeed later, a few at a time, and never more in memory than asked for.

The package that sends them is the one of huggingface_hub, which has changed between its versions: errors are told apart
by their names and by the answers that they carry.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

AT_ONCE = 8  # requests
TRIES = 6
TIMEOUT = 30.0  # seconds
_WAIT = 0.5  # seconds before the second try, doubled for every further one
_LONGEST_WAIT = 30.0
BUSY = (408, 425, 429, 500, 502, 503, 504)
_NO_ANSWER = {"ConnectionError", "ConnectError", "Timeout", "TimeoutException", "TransportError", "RequestException"}

Answer = TypeVar("Answer")

connection = threading.BoundedSemaphore(AT_ONCE)  # held for as long as a request takes, whichever file it is for


class BadAnswer(Exception):
    """An answer that is not what was asked for.

    again: whether the same request may get a better one.
    """

    def __init__(self, told: str, response: Any, again: bool) -> None:
        super().__init__(told)
        self.response, self.again = response, again


def patiently(ask: Callable[[], Answer], again: Callable[[BaseException], bool] | None = None) -> Answer:
    """What ``ask`` returns, in as many tries as it takes within reason; its last error otherwise.

    again: which errors may pass; `passing` if none is given.
    """
    wait = _WAIT
    for _ in range(TRIES - 1):
        try:
            return ask()
        except Exception as error:
            if not (again or passing)(error):
                raise
            pause = max(wait, _asked_to_wait(error))
        time.sleep(min(pause, _LONGEST_WAIT))
        wait *= 2
    return ask()


def passing(error: BaseException) -> bool:
    """Whether an error may be over soon: no answer, or one that says so."""
    if isinstance(error, BadAnswer):
        return error.again
    if _code(error) is not None:
        return busy(error)
    if (other := cause(error)) is not error:
        return passing(other)
    return unreachable(error) and type(error).__name__ != "FileMetadataError"  # an answer without an etag


def cause(error: BaseException) -> BaseException:
    """Why there is no file, where an error says only that there is none on this machine."""
    local = type(error).__name__ == "LocalEntryNotFoundError"
    return error.__cause__ if local and error.__cause__ is not None else error


def busy(error: BaseException) -> bool:
    """Whether there was an answer, which says that the server has no time now."""
    return _code(error) in BUSY


def unreachable(error: BaseException) -> bool:
    """True when no answer came at all, as against an answer that says no."""
    from huggingface_hub.utils import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return (_code(error) or 0) >= 500
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, (OSError, OfflineModeIsEnabled)) or bool(kinds & _NO_ANSWER)


@contextmanager
def streamed(address: str, headers: dict[str, str]) -> Iterator[Any]:
    """The answer to a GET, whose body is not read yet; what was not read when the block ends never is."""
    from huggingface_hub.utils import get_session

    session: Any = get_session()
    with connection:
        if callable(getattr(session, "stream", None)):  # httpx, from huggingface_hub 1.0; requests has a setting
            with session.stream("GET", address, headers=headers, timeout=TIMEOUT) as answer:
                yield answer
        else:
            with session.get(address, headers=headers, timeout=TIMEOUT, stream=True) as answer:
                yield answer


def body(answer: Any, most: int) -> bytes:
    """The body of a streamed answer; of one that is longer than ``most`` bytes a little more than that."""
    content = bytearray()
    pieces = answer.iter_bytes() if hasattr(answer, "iter_bytes") else answer.iter_content(1 << 16)
    for piece in pieces:
        content += piece
        if len(content) > most:
            break
    return bytes(content)


def _code(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _asked_to_wait(error: BaseException) -> float:
    """Seconds that the server asks us to wait."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    with suppress(ValueError, TypeError):  # it may be a date
        return float(headers.get("Retry-After", 0))
    return 0.0
