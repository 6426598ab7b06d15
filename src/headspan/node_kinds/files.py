"""Directions and bases from files: ``FILE[:name][@layer]``, one node per vector.

An array may be one vector (d,), a matrix of vectors, (n, d) or (d, n), or bases (n, d, r) or (n, r, d). In a file of
named tensors (``.npz``, ``.safetensors``, ``.pt``) all tensors are used, or the named one. The axis of the residual
stream is recognised by d_model. Files are read in pieces; pickles are never loaded.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headspan.checkpoints.arrays_file import ALONE, ARRAY_SUFFIXES, ArraysFile
from headspan.checkpoints.huggingface import TORCH_SUFFIXES
from headspan.checkpoints.safetensors_file import SafetensorsFile
from headspan.models.weights import AttentionWeights
from headspan.node_kinds.node_sets import NodeSet, centred_writers, check_name, no_layer, oriented, stream_places
from headspan.system.inputs import mode_of
from headspan.vocabulary.errors import HeadspanError, quoted
from headspan.vocabulary.heads import Role

_SUFFIXES = (*ARRAY_SUFFIXES, ".safetensors", *TORCH_SUFFIXES)
_LAYER = re.compile(r"(.+)@L?([0-9]{1,6})", re.DOTALL)
_WAYS = 5  # most arrays or shapes listed in a note
_ONE_RUN = 4  # gaps of up to this many members are read rather than skipped


class VectorFile(Protocol):
    """A file of named arrays with access to rows and columns."""

    def names(self) -> Any: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray: ...


def open_vectors(path: Path) -> VectorFile:
    """Open a file of vectors by its suffix."""
    suffix = path.suffix.lower()
    if suffix in ARRAY_SUFFIXES:
        return ArraysFile(path)
    if suffix == ".safetensors":
        return SafetensorsFile(path, integers=True)
    if suffix in TORCH_SUFFIXES:
        from headspan.checkpoints.torch_file import TorchFile

        return TorchFile(path, bare=ALONE)
    raise HeadspanError(f"{path} is not a file of vectors: it should end in {', '.join(_SUFFIXES)}")


def readings(text: str) -> list[tuple[Path, str | None, int | None]]:
    """The possible meanings of ``FILE[:name][@layer]``: file, tensor, layer. Names may contain ``:`` and ``@``."""
    if not text.strip() or "\0" in text:
        raise HeadspanError(f"{text!r} is not a file of vectors: write FILE, FILE:name or FILE:name@layer")
    match = _LAYER.fullmatch(text)
    found: list[tuple[Path, str | None, int | None]] = []
    for rest, layer in ((text, None), *([(match[1], int(match[2]))] if match else [])):
        splits = [(rest, None), *((rest[:i], rest[i + 1 :]) for i, c in enumerate(rest) if c == ":" and i)]
        for file, name in splits:
            path = Path(os.path.expanduser(file))
            mode = mode_of(path) or 0
            if stat.S_ISDIR(mode) and name is None:
                raise HeadspanError(f"{file} is a directory: give a file of vectors, or use `sae` for a directory")
            if stat.S_ISREG(mode):
                found.append((path, name, layer))
    if not found:
        front, _, layer = text.rpartition("@")
        if front and any(c.is_file() for c in (Path(os.path.expanduser(front)), Path(front.rpartition(":")[0]))):
            raise HeadspanError(f"{text[:200]}: {layer[:40]!r} is not a layer; write a whole number from 0, like @8")
        raise HeadspanError(f"{text[:200]}: no such file; write FILE, FILE:name or FILE:name@layer")
    return found


def file_sets(weights: AttentionWeights, text: str) -> list[NodeSet]:
    """The vectors of one file, one set per tensor."""
    meant = readings(text)
    file = open_vectors(meant[0][0])
    path, wanted, layer = next(((p, n, la) for p, n, la in meant if n is None or n in file.names()), meant[-1])
    if path != meant[0][0]:
        file = open_vectors(path)
    names = sorted(map(str, file.names()))
    if not names:
        raise HeadspanError(f"{path} holds no arrays: give a file of vectors")
    if wanted is not None:
        if wanted not in names or names == [ALONE]:
            held = "one array without a name" if names == [ALONE] else ", ".join(name[:40] for name in names[:6])
            raise HeadspanError(f"{path} has no array named {wanted[:80]!r}: it holds {held}")
        names = [wanted]
    sets: list[NodeSet] = []
    wrong: HeadspanError | None = None
    for name in names:
        try:
            sets.append(FileNodes(weights, path, file, name, layer))
        except HeadspanError as error:
            wrong = wrong or error
    if wrong is not None:  # a probe may be stored with its bias
        others = ", ".join(os.path.basename(found.label)[:80] for found in sets[:3])
        raise HeadspanError(f"{wrong}{f'; name the array, {others}' if others else ''}")
    if len(sets) > 1:
        _say_once(path, sets)
    if layer is None:
        sets[0].notes.append(no_layer(str(path)))
    return sets


def _say_once(path: Path, sets: list[NodeSet]) -> None:
    """Merge the notes on how the arrays of a file were read into one."""
    ways = Counter(note.removeprefix(found.label) for found in sets for note in found.notes)
    if len(sets) <= _WAYS:
        shown = [note.removeprefix(f"{path}:") for found in sets for note in found.notes]
    else:
        shown = [f"{count:,}{way.replace(' was read as', ' read as', 1)}" for way, count in ways.most_common(_WAYS)]
    more = f"; {len(ways) - _WAYS:,} more shapes" if len(ways) > _WAYS else ""
    for found in sets:
        found.notes.clear()
    sets[0].notes.append(f"{path} holds {len(sets):,} arrays: {'; '.join(shown)}{more}")


class FileNodes(NodeSet):
    """The vectors or bases of one array of a file."""

    strict = True

    def __init__(self, weights: AttentionWeights, path: Path, file: VectorFile, tensor: str, layer: int | None) -> None:
        self.d_model, self.places = weights.d_model, stream_places(layer, weights)
        self.centred_roles = centred_writers(weights)
        self.label = f"{path}:{quoted(tensor)}" if tensor else str(path)
        self._file, self._tensor = file, tensor
        shape = file.shape(tensor)
        if not 1 <= len(shape) <= 3 or 0 in shape:
            raise HeadspanError(
                f"{self.label} has shape {tuple(shape)}: give one vector, a matrix of vectors or bases (n, d, r)"
            )
        self._columns, note = oriented(shape, self.d_model, self.label)
        self.notes = [note]
        self._axes = len(shape)
        self.population = 1 if len(shape) == 1 else shape[1] if len(shape) == 2 and self._columns else shape[0]
        self._width = 1 if len(shape) < 3 else shape[2] if self._columns else shape[1]
        self.ids = range(self.population)
        self.kind = "direction" if self._width == 1 else "basis"
        self._stem = check_name((tensor or path.stem)[:_STEM])

    @property
    def stem(self) -> str:
        return self._stem

    def name(self, number: int) -> str:
        return self._stem if self.population == 1 else f"{self._stem}[{number}]"

    def find(self, name: str) -> int | None:
        text = name.strip().upper()
        if self.population == 1:
            return 0 if text == self._stem.upper() else None
        match = re.fullmatch(re.escape(self._stem.upper()) + r"\[([0-9]{1,12})\]", text)
        return int(match[1]) if match and int(match[1]) < self.population and str(int(match[1])) == match[1] else None

    def width(self, role: Role) -> int:
        return self._width

    def _read(self, role: Role, ids: np.ndarray) -> np.ndarray:
        return self.centre(role, gather(ids, self._run))

    def _run(self, run: slice) -> np.ndarray:
        """Consecutive members, (n, d, r)."""
        if self._axes == 1:
            return self._file.read(self._tensor).reshape(1, self.d_model, 1)
        if self._axes == 2:
            vectors = (
                self._file.read(self._tensor, columns=run).T if self._columns else self._file.read(self._tensor, run)
            )
            return vectors[:, :, None]
        bases = self._file.read(self._tensor, run)
        return bases if self._columns else bases.transpose(0, 2, 1)


def gather(ids: np.ndarray, read: Callable[[slice], np.ndarray], gap: int = _ONE_RUN) -> np.ndarray:
    """Members by id, using a function that reads consecutive members."""
    parts = [read(run)[ids[where] - run.start] for where, run in runs(ids, gap)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


_STEM = 180  # characters of a file's or tensor's name in the names of its vectors


def runs(ids: np.ndarray, gap: int = _ONE_RUN) -> list[tuple[slice, slice]]:
    """Split ids at gaps: slices of the list, each with the run of members that it spans.

    >>> runs(np.array([3, 4, 6, 90]))
    [(slice(0, 3, None), slice(3, 7, None)), (slice(3, 4, None), slice(90, 91, None))]
    """
    if not len(ids):
        return []
    steps = np.diff(ids)
    cuts = [0, *(np.flatnonzero((steps < 0) | (steps > gap)) + 1).tolist(), len(ids)]
    return [(slice(a, b), slice(int(ids[a]), int(ids[b - 1]) + 1)) for a, b in itertools.pairwise(cuts)]
