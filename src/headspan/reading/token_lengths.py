"""Lengths of unembedding vectors inside the subspaces of heads, in bounded memory.

The orthonormal bases U of many heads are concatenated, so that comparing a block of the vocabulary with all of them is
one large matrix product; ‖Uᵀf(e)‖ equals ‖P̃f(e)‖, the length of the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from headspan.subspaces.bases import orthonormal_bases
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Head, Port, Role

if TYPE_CHECKING:
    from headspan.models.weights import AttentionWeights, Norm

PREPROCESSINGS = ("identity", "centre", "normalise", "centre-normalise")
DEFAULT_MEMORY = 2**30
MAX_BLOCK = 2048  # tokens per product; more is not faster
_MIN_BLOCK = 64
_BASIS_ENTRIES = 2**23  # entries of float64 weights factorised together


def parse_preprocess(name: str) -> tuple[bool, bool]:
    """(centre, normalise) of a preprocessing; ``_`` and ``-`` are equivalent.

    >>> parse_preprocess("centre_normalise")
    (True, True)
    """
    known = {"identity": (False, False), "centre": (True, False), "normalise": (False, True)}
    known["centre-normalise"] = (True, True)
    spelled = name.strip().lower().replace("_", "-").replace("center", "centre").replace("normalize", "normalise")
    if spelled not in known:
        raise HeadspanError(f"unknown preprocessing {name!r}: choose one of {', '.join(PREPROCESSINGS)}")
    return known[spelled]


def apply_norm(norm: Norm | None, columns: np.ndarray) -> np.ndarray:
    """Apply a norm to each column of (…, d, m) in float64, as the model does to a vector of the stream."""
    columns = np.asarray(columns, dtype=np.float64)
    if norm is None:
        return columns
    if norm.kind == "layer":
        columns = columns - columns.mean(axis=-2, keepdims=True)
    scale = np.sqrt(np.square(columns).mean(axis=-2, keepdims=True) + norm.eps)
    normed = columns / scale * norm.gain.astype(np.float64)[:, None]
    return normed if norm.bias is None else normed + norm.bias.astype(np.float64)[:, None]


def through_norm(norm: Norm | None, directions: np.ndarray) -> np.ndarray:
    """Directions (d, n) after a norm, ignoring length and bias: γ⊙u, with u centred first for LayerNorm."""
    directions = np.asarray(directions, dtype=np.float64)
    if norm is None:
        return directions
    if norm.kind == "layer":
        directions = directions - directions.mean(axis=0)
    return directions * norm.gain.astype(np.float64)[:, None]


class VocabularyRows:
    """The (vocabulary, d) rows of an unembedding or embedding, block by block, kept in memory if they fit."""

    def __init__(self, read: Callable[[int, int], np.ndarray], size: int, what: str) -> None:
        self.size = size
        self._read = read
        self._what = what

    @classmethod
    def unembedding(cls, weights: AttentionWeights, keep: int = DEFAULT_MEMORY // 2) -> VocabularyRows:
        first = weights.unembedding_rows(0, 1)  # raises if there is none
        size = weights.vocab_size
        if size is None or not len(first):
            raise HeadspanError(f"the unembedding of {weights.reference} has no rows, so there are no tokens to rank")
        if size * weights.d_model * 4 > keep:
            return cls(weights.unembedding_rows, size, "unembedding")
        return cls.of(weights.unembedding(), "unembedding")

    @classmethod
    def embedding(cls, weights: AttentionWeights, unembedding: VocabularyRows | None = None) -> VocabularyRows:
        """The rows of the embedding; a tied embedding reuses those of the unembedding."""
        if unembedding is not None and weights.tied_embedding:
            return unembedding
        return cls.of(weights.embedding(), "embedding")

    @classmethod
    def of(cls, matrix: np.ndarray, what: str) -> VocabularyRows:
        return cls(lambda start, stop: matrix[start:stop], len(matrix), what)

    def blocks(self, rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first id, float32 rows) over the whole vocabulary."""
        for start in range(0, self.size, rows):
            block = np.asarray(self._read(start, min(start + rows, self.size)), dtype=np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                total = block.sum(dtype=np.float64)  # finite only if every term is
            if not np.isfinite(total):
                bad = start + int(np.flatnonzero(~np.isfinite(block).all(axis=1))[0])
                raise HeadspanError(f"the {self._what} holds NaN or infinity in the row of token {bad}")
            yield start, block

    @cached_property
    def mean(self) -> np.ndarray:
        """ē, the mean over all rows of the checkpoint (including padding), (d,) float64."""
        sums = [block.sum(axis=0, dtype=np.float64) for _, block in self.blocks(MAX_BLOCK)]
        return np.sum(sums, axis=0) / self.size

    def preprocessed(self, preprocess: str, rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first id, f(e)) over the whole vocabulary; a vector of length 0 stays 0."""
        centre, normalise = parse_preprocess(preprocess)
        mean = self.mean.astype(np.float32) if centre else None
        for start, block in self.blocks(rows):
            block = block if mean is None else block - mean
            if normalise:
                block = block * reciprocal(row_norms(block))[:, None]
            yield start, block


def row_norms(rows: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("td,td->t", rows, rows))


def reciprocal(norms: np.ndarray) -> np.ndarray:
    return np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)


@dataclass(frozen=True)
class Stack:
    """Concatenated orthonormal bases of W̃ of several heads of one role: (d, n·m) float32."""

    heads: tuple[Head, ...]
    role: Role
    bases: np.ndarray
    width: int

    def block_rows(self, memory: int) -> int:
        """Number of tokens per product that fits into memory."""
        return int(np.clip(memory // (4 * self.bases.shape[1]), _MIN_BLOCK, MAX_BLOCK))

    def squared_norms(self, projected: np.ndarray) -> np.ndarray:
        """‖Uᵀe‖² per token and head, (tokens, n), from the (tokens, n·m) product."""
        parts = projected.reshape(len(projected), len(self.heads), self.width)
        return np.einsum("thm,thm->th", parts, parts)


def head_stack(weights: AttentionWeights, head: Head, role: Role) -> Stack:
    """A stack of one head."""
    weight = weights.read_head(Port(head, role))[None]
    return Stack((head,), role, _bases(weights, role, head.layer, weight), weight.shape[2])


def _bases(weights: AttentionWeights, role: Role, layer: int, heads: np.ndarray) -> np.ndarray:
    """Concatenated bases of W̃ of (n, d, m) weights, (d, n·m) float32; columns beyond a head's rank are zero."""
    n, d, m = heads.shape
    norm = weights.final_norm()
    side_by_side = np.empty((d, n, m), dtype=np.float32)
    step = max(1, _BASIS_ENTRIES // (d * m))
    for start in range(0, n, step):
        part = slice(start, start + step)
        bases, _ = orthonormal_bases(apply_norm(norm, heads[part]), weights.storage_dtype(role, layer))
        side_by_side[:, part] = bases.transpose(1, 0, 2)
    return side_by_side.reshape(d, n * m)


def head_stacks(weights: AttentionWeights, roles: Sequence[Role | str], memory: int) -> Iterator[Stack]:
    """The heads of each role in stacks of whole layers, as many as fit into memory."""
    for role in map(Role, roles):
        there = weights.layers_with(role)
        per_layer = max(len(weights.heads_in(role, layer)) for layer in there)
        step = max(1, memory // (4 * weights.d_model * per_layer * weights.d_head(role)))
        for first in range(0, len(there), step):
            layers = there[first : first + step]
            heads = tuple(head for layer in layers for head in weights.heads_in(role, layer))
            bases = [_bases(weights, role, layer, weights.read(role, layer)) for layer in layers]
            yield Stack(heads, role, np.concatenate(bases, axis=1), weights.d_head(role))


_STACK_COLUMNS = 4096  # columns of bases multiplied with a block of the vocabulary at once


def chosen_stacks(weights: AttentionWeights, ports: Sequence[Port]) -> list[Stack]:
    """Some weights of some heads in stacks: one per role, or several if there are many."""
    stacks: list[Stack] = []
    for role in dict.fromkeys(port.role for port in ports):
        wanted = {port.head for port in ports if port.role is role}
        heads, bases = list[Head](), list[np.ndarray]()
        for layer in weights.layers:
            here = [(i, head) for i, head in enumerate(weights.heads_in(role, layer)) if head in wanted]
            if here:
                places = [i for i, _ in here]
                bases.append(_bases(weights, role, layer, weights.read(role, layer)[places]))
                heads += [head for _, head in here]
        width = weights.d_head(role)
        together, step = np.concatenate(bases, axis=1), max(1, _STACK_COLUMNS // width)
        for first in range(0, len(heads), step):
            part = slice(first * width, (first + step) * width)
            stacks.append(Stack(tuple(heads[first : first + step]), role, together[:, part], width))
    return stacks
