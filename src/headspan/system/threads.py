"""Threads: our own pool around single-threaded BLAS calls, instead of BLAS threads inside many small calls.

A small product or factorisation finishes before a second BLAS thread starts, and on a busy machine waiting for that
thread can make it a hundred times slower. So BLAS gets one thread, and independent pieces of work run on as many
threads as there are cores (numpy releases the interpreter lock inside BLAS and LAPACK).
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

_BLAS_USERS = ("numpy", "scipy.linalg", "sklearn", "torch")

Item = TypeVar("Item")
Result = TypeVar("Result")


def one_thread() -> AbstractContextManager[Any]:
    """Limit BLAS and LAPACK to one thread inside a ``with`` block."""
    return _controller(tuple(name in sys.modules for name in _BLAS_USERS)).limit(limits=1)


@lru_cache
def _controller(loaded: tuple[bool, ...]) -> Any:
    """The BLAS libraries; finding them takes milliseconds, so the result is cached until another one may be loaded."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def team(workers: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads, one per core, with BLAS limited to one thread while it exists."""
    with one_thread(), ThreadPoolExecutor(workers or cores()) as pool:
        yield pool


_own = threading.local()


def scratch(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A float64 array that is reused when this thread asks for the same name; its contents are arbitrary.

    New memory from the system costs as much time as the computation in it. For use inside one function.
    """
    size = math.prod(shape)
    held = _own.__dict__.get(name)
    if held is None or held.size < size:
        held = _own.__dict__[name] = np.empty(size)
    return held[:size].reshape(shape)


def parallel_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """``map`` on a team, in order; at most one item more than ``workers`` is taken ahead from a lazy source.

    >>> list(parallel_map(lambda x: x * x, range(4)))
    [0, 1, 4, 9]
    """
    workers = workers or cores()
    if workers == 1:
        with one_thread():
            yield from map(function, items)
        return
    with team(workers) as pool:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
