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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headspan.results.checks import check_heads, damaged
from headspan.results.identity import identity, same_model, short_name
from headspan.results.metadata import STATISTICS, check_fields
from headspan.results.tabular import Tabular
from headspan.subspaces.metrics import square_roots
from headspan.system.outputs import check_output
from headspan.system.sealed_file import check_seal, content_hash, read_sealed, write_sealed
from headspan.vocabulary.errors import HeadspanError, warn
from headspan.vocabulary.heads import ROLES, Head, Role
from headspan.vocabulary.ports import PortTable

SCHEMA = 1
KIND = "statistics"
READ = (Role.Q, Role.K, Role.V)
_ROUNDING = 1e-4  # of matrices in float32, relative to their diagonal


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
    inputs: list[dict[str, Any]]
    model: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that the model ran on."""
        return sum(int(one["tokens"]) for one in self.inputs)

    @property
    def input(self) -> str:
        """What the statistics were collected on, in words."""
        named = {"text": "text", "random": "random sequences", "tokens": "the given sequences"}
        return " and ".join(f"{one['tokens']:,} tokens of {named.get(one['kind'], one['kind'])}" for one in self.inputs)

    @property
    def kind(self) -> str:
        """One word for what the statistics were collected on: text, random, tokens or mixed."""
        kinds = {str(one["kind"]) for one in self.inputs}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def about(self) -> dict[str, Any]:
        """What a result records of its statistics."""
        digest = content_hash({**self.arrays, "counts": self.counts}, {})
        return {"inputs": self.inputs, "protocol": self.protocol, "hash": digest}

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
        found = []
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

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write everything to one safetensors file, which appears only when it is complete."""
        target = check_output(path, KIND, inputs=[self.model.get("reference")], force=force, ending=".safetensors")
        head = {
            "schema": SCHEMA,
            "kind": KIND,
            "ports": {str(role): list(map(str, self.ports.of(role))) for role in ROLES},
            "served_by": {str(head): str(kv) for head, kv in self.ports.served_by.items()},
            "inputs": self.inputs,
            "model": self.model,
            "protocol": self.protocol,
            "provenance": self.provenance,
        }
        write_sealed(target, {**self.arrays, "counts": self.counts}, head)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read the file that :meth:`save` wrote; other files are refused, and edits are reported."""
        place = Path(path)
        missing = f"there is no file {path}: make one with headspan observe MODEL --out {path}"
        head, tensors = read_sealed(path, "file of statistics", missing)
        if not isinstance(head, dict) or head.get("kind") != KIND:
            raise HeadspanError(f"{path} does not hold statistics: make them with headspan observe")
        if type(head.get("schema")) is not int or head["schema"] > SCHEMA:
            raise HeadspanError(f"{path} was written by a newer version of headspan: upgrade headspan")
        if not {*STATISTICS} - {"hash"} <= {*head}:
            raise damaged(place, "its metadata is incomplete")
        check_fields(head, STATISTICS, "metadata", place)
        try:
            ports: dict[Role, tuple[Any, ...]] = {
                role: tuple(map(Head.parse, head["ports"][str(role)])) for role in ROLES
            }
            served = {Head.parse(query): Head.parse(kv) for query, kv in head["served_by"].items()}
        except (KeyError, HeadspanError):
            raise damaged(place, "its lists of heads are malformed") from None
        check_heads(ports, place)
        counts = tensors.pop("counts", np.zeros(0))
        found = cls(
            PortTable(ports, served),
            tensors,
            counts,
            head["inputs"],
            head["model"],
            head["protocol"],
            head["provenance"],
        )
        _check_arrays(found, place)
        check_seal(head, {**tensors, "counts": counts}, place, found.provenance, expected=True)
        return found


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
        dict(first.provenance),
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
