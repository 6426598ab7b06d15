"""Examples: what a patched edge does on one short sequence, token by token.

A report shows them on the card of an edge. :func:`headspan.running.examples.watched` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headspan.results.checks import damaged
from headspan.results.plain_values import encode, read_parts
from headspan.vocabulary.heads import FLOW_PAIRINGS, Head, Pairing, Role
from headspan.vocabulary.ports import PortTable

PREFIX = "example/"  # of the names of its arrays in a result
PER_PAIRING = 20  # edges of each pairing that have an example
MOST_TOKENS, LONGEST = 64, 60  # tokens of a sequence, and letters of a token
_SLACK = 2e-3  # attention weights are kept in half precision


class Watched(NamedTuple):
    """An edge with an example, and the query head that is shown: the one that changes most of a shared K or V."""

    pairing: Pairing
    source: Head
    target: Head
    head: Head


@dataclass(frozen=True, eq=False)
class Examples:
    """What some edges do on one sequence.

    tokens: the text of each token. about: what the sequence is: ``text``, ``random``, ``tokens`` or the name of a task.
    edges: those of Q and K first, then those of V. before: attention of each of ``heads`` in the clean run, after: of
    the target of each Q or K edge with the edge patched, by `rows`. change: for each V edge and token, the length of
    the change of the target's output relative to that of its output.
    """

    tokens: list[str]
    about: str
    edges: list[Watched]
    before: np.ndarray
    after: np.ndarray
    change: np.ndarray

    @cached_property
    def heads(self) -> list[Head]:
        """The heads whose attention is kept, in the order of ``before``."""
        return list(dict.fromkeys(edge.head for edge in self.edges if edge.pairing.target is not Role.V))

    def rows(self, pairing: Pairing | str, source: Head, target: Head) -> tuple[np.ndarray, np.ndarray]:
        """Attention before and after of a Q or K edge, (queries, keys) each."""
        i, edge = self._find(pairing, source, target)
        before = self.before[self.heads.index(edge.head)]
        return square(before, len(self.tokens)), square(self.after[i], len(self.tokens))

    def changes(self, source: Head, target: Head) -> np.ndarray:
        """Relative change of the target's output of a V edge, (tokens,)."""
        return self.change[self._find("OV", source, target)[0]]

    def _find(self, pairing: Pairing | str, source: Head, target: Head) -> tuple[int, Watched]:
        """The place of an edge among those of its kind."""
        values = Pairing.parse(pairing).target is Role.V
        mine = [edge for edge in self.edges if (edge.pairing.target is Role.V) is values]
        return next((i, e) for i, e in enumerate(mine) if e[:3] == (Pairing.parse(pairing), source, target))

    def put_into(self, extra: dict[str, np.ndarray]) -> Any:
        """Add the arrays to those of a result; the rest as JSON."""

        def put(place: str, array: np.ndarray) -> dict[str, str]:
            name = f"{PREFIX}{place.strip('/')}"
            extra[name] = array
            return {"array": name}

        return encode(self, put)

    @classmethod
    def found_in(cls, extra: Mapping[str, np.ndarray], held: Any, ports: PortTable) -> Examples | None:
        """The inverse of `put_into`; None for a result without examples."""
        if held is None:
            return None
        where = Path("this result")
        arrays = {name: values for name, values in extra.items() if name.startswith(PREFIX)}
        found: Examples = read_parts(cls, held, arrays, where)
        found.check(ports, where)
        return found

    def check(self, ports: PortTable, path: Path) -> None:
        """Refuse examples that no run can have made."""
        n, values = len(self.tokens), [edge.pairing.target is Role.V for edge in self.edges]
        known = all(
            e.pairing in FLOW_PAIRINGS
            and e.source in ports.of(e.pairing.source)
            and e.target in ports.of(e.pairing.target)
            and e.head in ports.group_of(e.target)
            for e in self.edges
        )
        if not (2 <= n <= MOST_TOKENS and all(len(token) <= LONGEST for token in (*self.tokens, self.about))):
            raise damaged(path, f"its examples need 2 to {MOST_TOKENS} tokens of at most {LONGEST} letters")
        if not known or values != sorted(values) or len({e[:3] for e in self.edges}) < len(self.edges):
            raise damaged(path, "its examples are not of its edges")
        cells = self.before.shape[-1] if self.before.ndim == 2 else 0
        shapes = (len(self.heads), cells), (len(values) - sum(values), cells), (sum(values), n)
        arrays = self.before, self.after, self.change
        if tuple(array.shape for array in arrays) != shapes or cells not in (n * n, triangle(n)):
            raise damaged(path, "its examples do not fit their edges")
        attention = np.concatenate([self.before, self.after]).astype(np.float32)
        if not (np.isfinite(self.change).all() and (self.change >= 0).all()):
            raise damaged(path, "its examples have changes that no run can have")
        if not ((attention >= 0).all() and (attention <= 1 + _SLACK).all()):  # false for NaN
            raise damaged(path, "its examples have attention outside 0 to 1")


def triangle(n: int) -> int:
    """Cells of a causal pattern of n tokens."""
    return n * (n + 1) // 2


def flat(patterns: np.ndarray, *, causal: bool) -> np.ndarray:
    """Patterns (…, T, T) as they are kept: row by row, up to the diagonal where no token attends to a later one."""
    n = patterns.shape[-1]
    return patterns[(..., *np.tril_indices(n))] if causal else patterns.reshape(*patterns.shape[:-2], n * n)


def square(cells: np.ndarray, n: int) -> np.ndarray:
    """The inverse of `flat` for one pattern, in float32.

    >>> square(np.array([1.0, 0.25, 0.75]), 2).tolist()
    [[1.0, 0.0], [0.25, 0.75]]
    """
    if len(cells) == n * n:
        return cells.reshape(n, n).astype(np.float32)
    found = np.zeros((n, n), dtype=np.float32)
    found[np.tril_indices(n)] = cells
    return found
