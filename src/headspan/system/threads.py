"""Threads: ours around BLAS calls of one thread each, never BLAS's own inside many small calls.

A small product or factorisation is over before a second BLAS thread has woken up, and on a busy machine waiting for
that thread can make it a hundred times slower. So BLAS gets one thread, and we hand out independent pieces of work to
as many threads as there are cores (numpy lets go of the interpreter lock inside BLAS and LAPACK).
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
    """Looking for BLAS libraries takes milliseconds: done once, and again when a package that brings one is loaded."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def team(workers: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads, one per core, with BLAS limited to one thread for as long as it lives."""
    with one_thread(), ThreadPoolExecutor(workers or cores()) as pool:
        yield pool


_own = threading.local()


def scratch(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A float64 array that this thread gets again when it asks by the same name, with whatever it held.

    Memory that is fresh from the system costs as much as what is computed in it. For use inside one function.
    """
    size = math.prod(shape)
    held = _own.__dict__.get(name)
    if held is None or held.size < size:
        held = _own.__dict__[name] = np.empty(size)
    return held[:size].reshape(shape)


def parallel_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """``map`` on a team, in order; one item more than ``workers`` is taken at most, so that a lazy source stays lazy.

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
