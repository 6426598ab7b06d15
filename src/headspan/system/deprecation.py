"""Names that have changed: the old ones still work, with a warning, for one version."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from headspan.vocabulary.errors import warn_outside

P = ParamSpec("P")
T = TypeVar("T")


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Accept the old names of some arguments, ``old="new"``, and warn at the line that uses one.

    >>> import warnings
    >>> @renamed(number="k")
    ... def double(k: int) -> int:
    ...     return 2 * k
    >>> with warnings.catch_warnings(record=True) as seen:
    ...     warnings.simplefilter("always")
    ...     double(number=3), str(seen[0].message)
    (6, 'double(number=) is now double(k=); the old name will be removed in the next version')
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        called = function.__name__

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            given: dict[str, Any] = kwargs
            for old in [old for old in names if old in given]:
                new = names[old]
                if new in given:
                    raise TypeError(f"{called} got {old} and {new}, which are one argument: give only {new}")
                warn_renamed(f"{called}({old}=)", f"{called}({new}=)")
                given[new] = given.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def warn_renamed(old: str, new: str) -> None:
    """Warn, at the line that uses the old name."""
    warn_outside(DeprecationWarning(f"{old} is now {new}; the old name will be removed in the next version"))
