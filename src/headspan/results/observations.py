"""What one pass over text says about every port of a model: the statistics that influence is computed from.

Per head, in the basis of its own d_head dimensions:

=============  ==========================================================================================
``spread``     O: covariance of z, the head's input to W_O, between sequences at the same position, (m, m)
``fisher``     Q, K: Fisher information of the attention pattern about the port's output, (m, m), mean over
               queries; each token counts with the square of its scale
``variance``   V: variance of the value vector over tokens, a number
``scale``      Q, K, V: root mean square over tokens of the scale between the stream and the port
``length``     O: mean length of what the head writes
=============  ==========================================================================================

All are means over tokens or sequences, kept with what it takes to merge them exactly: means of z at every position,
means of values, and counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from headspan.results.checks import check_heads, damaged
from headspan.results.identity import identity, same_model, short_name
from headspan.results.metadata import IDENTITY, check_fields, optional, text
from headspan.results.tabular import Tabular
from headspan.subspaces.weight_factors import square_roots
from headspan.system.sealed_file import content_hash
from headspan.vocabulary.errors import HeadspanError, warn
from headspan.vocabulary.heads import ROLES, Role
from headspan.vocabulary.ports import PortTable

READ = (Role.Q, Role.K, Role.V)
_ROUNDING = 1e-4  # of matrices in float32, relative to their diagonal


class RunInput(TypedDict):
    """What a model ran on: its kind (text, random or tokens), and a hash of the token ids."""

    kind: str
    sequences: int
    tokens: int
    sha256: str


@dataclass(repr=False, eq=False)
class Statistics(Tabular):
    """The statistics of a model on some input.

    arrays: by name (``spread/O``, ``fisher/Q`` …), heads in the order of ``ports``.
    counts: how many sequences have each position; ``mean/O`` (positions, heads, m) holds the means of z at each.
    inputs: what the model ran on, one record per run: kind, sequences, tokens, hash of the token ids.
    """

    ports: PortTable
    arrays: dict[str, np.ndarray]
    counts: np.ndarray
    inputs: list[RunInput]
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    protocol: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])

    @property
    def tokens(self) -> int:
        """Tokens that the model ran on."""
        return sum(int(one["tokens"]) for one in self.inputs)

    @property
    def input(self) -> str:
        """What the statistics were collected on, in words."""
        return inputs_text(self.inputs)

    @property
    def kind(self) -> str:
        """One word for what the statistics were collected on: text, random, tokens or mixed."""
        kinds = {str(one["kind"]) for one in self.inputs}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def about(self) -> dict[str, Any]:
        """What a result records of its statistics."""
        digest = content_hash({**self.arrays, "counts": self.counts}, {})
        return {"inputs": [dict(one) for one in self.inputs], "protocol": self.protocol, "hash": digest}

    def roots(self, role: Role | str) -> np.ndarray:
        """(n, m, m): R with R Rᵀ = the matrix of each port; W·R is the factor of influence. Of V (n, 1, 1)."""
        role = Role.parse(role)
        if role is Role.O:
            return square_roots(self.arrays["spread/O"])
        if role is not Role.V:
            return square_roots(self.arrays[f"fisher/{role}"])
        variance = self.arrays["variance/V"].astype(np.float64)
        ratio = np.divide(self.arrays["scale/V"], np.sqrt(variance), out=np.zeros_like(variance), where=variance > 0)
        return ratio[:, None, None]

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per port: its size (the root of the trace of its matrix), scale and mean output length."""
        found: list[dict[str, Any]] = []
        for role in ROLES:
            sizes = np.sqrt(np.square(self.roots(role)).sum(axis=(1, 2)))
            scales, lengths = self.arrays.get(f"scale/{role}"), self.arrays.get(f"length/{role}")
            for i, head in enumerate(self.ports.of(role)):
                found.append(
                    {
                        "head": str(head),
                        "role": str(role),
                        "size": float(sizes[i]),
                        "scale": None if scales is None else float(scales[i]),
                        "length": None if lengths is None else float(lengths[i]),
                    }
                )
        return found

    def _headline(self) -> str:
        return f"statistics of {short_name(str(self.model.get('reference', 'a model')))} on {self.input}"

    @staticmethod
    def merge(*parts: Statistics) -> Statistics:
        """The statistics over all inputs of several runs of one model: what one run over all of them gives."""
        if not parts:
            raise HeadspanError("there are no statistics to merge: give at least one")
        found = parts[0]
        for other in parts[1:]:
            found = _merged(found, other)
        return found

    def _inputs(self) -> Sequence[Any]:
        return [self.model.get("reference")]

    def _check(self, path: Path) -> None:
        """Refuse a file whose arrays do not fit its heads, or hold numbers that no run gives."""
        check_heads(self.ports.ports, path)
        check_fields(self.model, {**IDENTITY, "reference": optional(text())}, "model", path)
        if not self.inputs or min(one["tokens"] for one in self.inputs) < 1:
            raise damaged(path, "it has no input")
        _check_arrays(self, path)


def inputs_text(inputs: Sequence[RunInput]) -> str:
    """What a model ran on, in words.

    >>> inputs_text([{"kind": "random", "sequences": 16, "tokens": 1344, "sha256": ""}])
    '1,344 tokens of random sequences'
    """
    named = {"random": "random sequences", "tokens": "the given sequences"}
    return " and ".join(f"{one['tokens']:,} tokens of {named.get(one['kind'], one['kind'])}" for one in inputs)


StatisticsLike = Statistics | str | os.PathLike[str]  # or their file


def given_statistics(stats: StatisticsLike) -> Statistics:
    """Statistics as given, or from their file."""
    if isinstance(stats, Statistics):
        return stats
    if not os.path.exists(stats):
        raise HeadspanError(f"there is no file {stats}: make statistics with `hs.observe(model, out={str(stats)!r})`")
    return Statistics.load(stats)


def expected_shapes(ports: PortTable, widths: Mapping[Role, int], positions: int) -> dict[str, tuple[int, ...]]:
    """The shape of every array, for heads of these widths."""
    count = {role: len(ports.of(role)) for role in ROLES}
    n, m = count[Role.O], widths[Role.O]
    shapes: dict[str, tuple[int, ...]] = {"spread/O": (n, m, m), "mean/O": (positions, n, m), "length/O": (n,)}
    shapes |= {f"fisher/{role}": (count[role], widths[role], widths[role]) for role in (Role.Q, Role.K)}
    shapes |= {"mean/V": (count[Role.V], widths[Role.V]), "variance/V": (count[Role.V],)}
    return shapes | {f"scale/{role}": (count[role],) for role in READ}


def _check_arrays(found: Statistics, path: Path) -> None:
    """Refuse arrays that do not fit the heads, or hold numbers that no run gives."""
    arrays = found.arrays
    try:
        widths = {Role.O: arrays["mean/O"].shape[2], Role.V: arrays["mean/V"].shape[1]}
        widths |= {role: arrays[f"fisher/{role}"].shape[1] for role in (Role.Q, Role.K)}
        shapes = expected_shapes(found.ports, widths, len(found.counts))
    except (KeyError, IndexError):
        raise damaged(path, "some of its arrays are missing or have the wrong shape") from None
    if {name: values.shape for name, values in arrays.items()} != shapes or found.counts.ndim != 1:
        raise damaged(path, "its arrays do not fit its heads")
    if any(values.dtype != np.float32 for values in arrays.values()) or found.counts.dtype != np.int64:
        raise damaged(path, "its arrays have the wrong type")
    sound = all(np.isfinite(a).all() for a in arrays.values()) and all(
        _is_spread(a) if a.ndim == 3 else bool((a >= 0).all())
        for name, a in arrays.items()
        if not name.startswith("mean/")
    )
    if not sound or (found.counts < 0).any() or degrees(found.counts) < 1 or found.tokens < 1:
        raise damaged(path, "it contains values that no run can have")


def _is_spread(matrices: np.ndarray) -> bool:
    """Whether matrices are symmetric, and no entry is larger than those on the diagonal allow, up to rounding."""
    diagonal = np.diagonal(matrices, axis1=1, axis2=2)
    if (diagonal < 0).any():
        return False
    root = np.sqrt(diagonal)
    most = root[:, :, None] * root[:, None] + np.finfo(np.float32).tiny
    uneven = np.abs(matrices - matrices.transpose(0, 2, 1))
    return bool((np.abs(matrices) <= (1 + _ROUNDING) * most).all() and (uneven <= _ROUNDING * most).all())


def degrees(counts: np.ndarray) -> int:
    """Degrees of freedom of the spread: sequences beyond the first at every position."""
    return int(np.maximum(counts - 1, 0).sum())


def _merged(first: Statistics, second: Statistics) -> Statistics:
    if doubt := same_model(first.model, second.model, "the first statistics", "the others"):
        warn(doubt)
    shapes = [{name: a.shape for name, a in one.arrays.items() if name != "mean/O"} for one in (first, second)]
    if not first.ports.same_heads(second.ports) or shapes[0] != shapes[1]:
        raise HeadspanError("statistics of models with different heads cannot be merged: give those of one model")
    again = {one["sha256"] for one in first.inputs} & {one["sha256"] for one in second.inputs}
    if again:
        raise HeadspanError("both statistics contain the same input, which would count twice: leave one of them out")
    n, n2 = first.tokens, second.tokens
    share = n / (n + n2), n2 / (n + n2)
    a, b = ({name: values.astype(np.float64) for name, values in one.arrays.items()} for one in (first, second))
    arrays = {name: share[0] * a[name] + share[1] * b[name] for name in a if name.startswith(("fisher/", "length/"))}
    arrays |= {
        name: np.sqrt(share[0] * a[name] ** 2 + share[1] * b[name] ** 2) for name in a if name.startswith("scale")
    }
    apart = a["mean/V"] - b["mean/V"]
    arrays["mean/V"] = share[0] * a["mean/V"] + share[1] * b["mean/V"]
    within = share[0] * a["variance/V"] + share[1] * b["variance/V"]
    arrays["variance/V"] = within + share[0] * share[1] * np.square(apart).sum(-1)
    counts, arrays["mean/O"], arrays["spread/O"] = _merged_spread(first.counts, second.counts, a, b)
    return Statistics(
        first.ports,
        {name: arrays[name].astype(np.float32) for name in first.arrays},
        counts,
        [*first.inputs, *second.inputs],
        identity(first.model),
        {key: value for key, value in first.protocol.items() if second.protocol.get(key) == value},
        list(dict.fromkeys([*first.notes, *second.notes])),
    )


def _merged_spread(
    counts: np.ndarray, other_counts: np.ndarray, a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts and means by position, and the covariance about them, of two samples together."""
    longest = max(len(counts), len(other_counts))
    n, n2 = (_longer(c, longest) for c in (counts, other_counts))
    mean, mean2 = (_longer(one["mean/O"], longest) for one in (a, b))
    total = np.maximum(n + n2, 1)
    apart = (mean - mean2) * np.sqrt(n * n2 / total)[:, None, None]
    squares = a["spread/O"] * degrees(n) + b["spread/O"] * degrees(n2)
    squares += np.einsum("phm,phk->hmk", apart, apart, optimize=True)
    both = (n[:, None, None] * mean + n2[:, None, None] * mean2) / total[:, None, None]
    return n + n2, both, squares / max(degrees(n + n2), 1)


def _longer(values: np.ndarray, length: int) -> np.ndarray:
    """The same with zeros after the last position."""
    return np.pad(values, [(0, length - len(values)), *[(0, 0)] * (values.ndim - 1)])
