"""One thread for many small factorisations; all of them for the large products."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def one_thread() -> AbstractContextManager[Any]:
    """Limit BLAS and LAPACK to one thread inside a ``with`` block.

    A 64×64 factorisation is over before a second thread has woken up: on a busy machine, handing small LAPACK
    calls to many threads can make them tens of times slower.
    """
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=1)
