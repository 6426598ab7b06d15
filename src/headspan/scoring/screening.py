"""The strongest pairs of a very large model, without comparing all of them exactly.

All pairs are compared by sketches (:mod:`headspan.scoring.sketches`), and those that may be among the k strongest of a
pairing again exactly. The certificate: let τ be the largest upper bound among the pairs that were not compared
exactly, each bound wrong with a probability of at most δ/k. The k truly strongest pairs are fixed before the sketch is
drawn, so but for a probability of δ all their bounds hold; then those of them above τ were all compared, and every
found pair above τ stands at its true place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import headspan
from headspan.errors import HeadspanError
from headspan.heads import Pairing, PairSet, Role, pair_mask
from headspan.models.weights import AttentionWeights
from headspan.scores import Scores
from headspan.scoring.contraction import Job, contract
from headspan.scoring.plan import result_bytes
from headspan.scoring.sketches import estimates, gaussian_sketch, upper_bounds
from headspan.scoring.subspaces import orthonormal_bases, sketched_bases
from headspan.system.threads import parallel_map

DELTA = 0.01
_COLUMNS, _LEAST_COLUMNS = 3, 64  # of the sketch, for every column of the widest head
_EXACT, _LEAST_EXACT = 20, 1000  # pairs compared exactly, for every pair that is asked for
_MORE = 10  # times as many, where they make the certificate whole
_BASE_BYTES = 300 * 10**6

Tick = Callable[[], None]


def sketch_size(weights: AttentionWeights, roles: Sequence[Role]) -> int:
    """Columns of the sketch: three times those of the widest head."""
    return max(_LEAST_COLUMNS, _COLUMNS * max(min(weights.d_head(role), weights.d_model) for role in roles))


def screen(
    weights: AttentionWeights,
    pairings: Sequence[Pairing],
    pairs: PairSet,
    k: int,
    *,
    memory: int,
    delta: float = DELTA,
    seed: int = 0,
    size: int | None = None,
    exact: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scores:
    """The k largest Projection Kernels of every pairing, exact, with a certificate in the provenance.

    delta: the probability, over the draw of the sketch, that a certified pair of a pairing has a wrong place.
    size, seed: columns of the sketch, and its seed.
    exact: pairs of a pairing to compare exactly at first; ten times as many where they make the certificate whole.
    """
    roles = tuple(dict.fromkeys(role for pairing in pairings for role in pairing))
    size = size or sketch_size(weights, roles)
    _check_memory(weights, pairings, roles, size, memory)
    provenance = dict(weights.provenance)  # as it is when the run begins
    tick = _ticks(progress, 2 * len(weights.places) + len(pairings))
    sketches, ranks = _sketch(weights, roles, size, seed, tick)
    searches = []
    for pairing in pairings:
        searches.append(Search(weights, sketches, ranks, pairing, pairs, k, delta))
        tick()
    sketches.clear()
    exact = exact or max(_EXACT * k, _LEAST_EXACT)
    for most in (exact, _MORE * exact):
        _compare_exactly(weights, searches, most, memory // 2, tick)
    weights.check_unchanged()
    about = {"k": k, "delta": delta, "columns": size, "seed": seed}
    about |= {str(search.pairing): search.certificate() for search in searches}
    provenance |= {
        "headspan": headspan.__version__,
        "pairs": pairs,
        "d_head": {str(role): weights.d_head(role) for role in roles},
        "screen": about,
    }
    arrays = {("pk", search.pairing): search.values() for search in searches}
    return Scores(arrays, weights.ports, weights.d_model, ranks, provenance)


class Search:
    """One pairing: what the sketches say of its pairs, and which of them are known exactly."""

    def __init__(
        self,
        weights: AttentionWeights,
        sketches: Mapping[Role, np.ndarray],
        ranks: Mapping[Role, np.ndarray],
        pairing: Pairing,
        pairs: PairSet,
        k: int,
        delta: float,
    ) -> None:
        self.pairing, self.k = pairing, k
        sources, targets = weights.heads(pairing.source), weights.heads(pairing.target)
        needed = pair_mask(pairing, sources, targets, pairs)
        (t,) = contract(
            {"Q": _orthonormal(sketches[pairing.source]), "G": sketches[pairing.target]}, [Job("Q", "G", needed)]
        )
        self._shape = needed.shape
        self.rows, self.columns = np.nonzero(needed)
        t = t[self.rows, self.columns]
        self.estimate, self.upper = np.zeros_like(t), np.zeros_like(t)
        first, second, size = ranks[pairing.source], ranks[pairing.target], sketches[pairing.source].shape[1]
        for m in np.unique(first[first > 0]).tolist():  # a head of rank 0 overlaps with nothing
            for m2 in np.unique(second[second > 0]).tolist():
                chosen = (first[self.rows] == m) & (second[self.columns] == m2)
                self.estimate[chosen] = estimates(t[chosen], m, m2, size)
                self.upper[chosen] = upper_bounds(t[chosen], delta / k, m, m2, size)
        self.exact = np.full(t.shape, np.nan)

    def candidates(self, most: int) -> np.ndarray:
        """Pairs to compare exactly next: the first ``most``; later whatever may still be among the strongest."""
        unknown = np.flatnonzero(np.isnan(self.exact))
        if len(unknown) < len(self.exact):
            unknown = unknown[self.upper[unknown] >= self._least()]
            if len(unknown) > most:
                return unknown[:0]  # the certificate would stay in part
        return unknown[np.argsort(-self.estimate[unknown], kind="stable")[:most]]

    def certificate(self) -> dict[str, int]:
        """How many pairs there are, were compared exactly, were found, and are certain."""
        strongest = np.sort(self.exact[self._best()])[::-1]
        doubt = self.upper[np.isnan(self.exact)].max(initial=-1.0)
        return {
            "pairs": len(self.exact),
            "compared": int(np.count_nonzero(~np.isnan(self.exact))),
            "found": len(strongest),
            "certified": int(np.count_nonzero(strongest > doubt)),
        }

    def values(self) -> np.ndarray:
        """The strongest pairs as a matrix of scores, NaN elsewhere."""
        best = self._best()
        values = np.full(self._shape, np.nan, dtype=np.float32)
        values[self.rows[best], self.columns[best]] = self.exact[best]
        return values

    def _best(self) -> np.ndarray:
        known = np.flatnonzero(~np.isnan(self.exact))
        return known[np.argsort(-self.exact[known], kind="stable")[: self.k]]

    def _least(self) -> float:
        """The k-th largest exact value so far."""
        best = self._best()
        return float(self.exact[best[-1]]) if len(best) == self.k else -1.0


def _sketch(
    weights: AttentionWeights, roles: Sequence[Role], size: int, seed: int, tick: Tick
) -> tuple[dict[Role, np.ndarray], dict[Role, np.ndarray]]:
    """SᵀU of every head, (n, s, m) float32, and the ranks of U, by role; every layer is read once."""
    sketch = gaussian_sketch(weights.d_model, size, seed)
    widths = {role: min(weights.d_head(role), weights.d_model) for role in roles}
    sketches = {role: np.zeros((len(weights.heads(role)), size, widths[role]), np.float32) for role in roles}
    ranks = {role: np.zeros(len(weights.heads(role)), np.int32) for role in roles}

    def read() -> Iterator[tuple[Role, int, np.ndarray, str]]:
        for layer in weights.places:
            for role in roles:
                if weights.ports.span(role, layer).stop:
                    yield role, layer, weights.read(role, layer), weights.storage_dtype(role, layer)

    def make(item: tuple[Role, int, np.ndarray, str]) -> tuple[Role, int]:
        role, layer, own, dtype = item
        span = weights.ports.span(role, layer)
        sketches[role][span], ranks[role][span] = sketched_bases(own, sketch, dtype)
        return role, layer

    last = None
    for _, layer in parallel_map(make, read()):
        if layer != last:
            tick()
        last = layer
    return sketches, ranks


def _orthonormal(sketches: np.ndarray) -> np.ndarray:
    """Orthonormal bases of the columns of every (s, m) sketch; columns of zeros stay so."""
    grams = np.matmul(sketches.transpose(0, 2, 1), sketches, dtype=np.float64)
    empty = np.einsum("nii->ni", grams) == 0
    np.einsum("nii->ni", grams)[empty] = 1.0
    inverse = np.linalg.inv(np.linalg.cholesky(grams)).astype(np.float32)  # a sketch of U is well conditioned
    return np.matmul(sketches, inverse.transpose(0, 2, 1))


def _compare_exactly(weights: AttentionWeights, searches: Sequence[Search], most: int, memory: int, tick: Tick) -> None:
    """Fill in the exact PK of the candidates of every search: a block of source layers after the other, each against
    the target layers one by one, bases of the heads that are needed only."""
    wanted = [(search, search.candidates(most)) for search in searches]
    sources = {(s.pairing.source, int(i)) for s, chosen in wanted for i in np.unique(s.rows[chosen])}
    for block in _blocks(weights, sources, memory):
        bases = dict(_bases(weights, block))
        against: dict[tuple[Role, int], list[tuple[Search, int]]] = {}
        for search, chosen in wanted:
            for c in chosen:
                if (search.pairing.source, int(search.rows[c])) in bases:
                    target = search.pairing.target, int(search.columns[c])
                    against.setdefault(target, []).append((search, int(c)))

        def compare(
            item: tuple[tuple[Role, int], np.ndarray],
            bases: Mapping[Any, np.ndarray] = bases,
            against: Mapping[Any, list[tuple[Search, int]]] = against,
        ) -> None:
            target, basis = item
            for search, c in against[target]:
                product = bases[search.pairing.source, int(search.rows[c])].T @ basis
                search.exact[c] = np.square(product, dtype=np.float64).sum()

        for _ in parallel_map(compare, _bases(weights, set(against), tick)):
            pass


def _bases(
    weights: AttentionWeights, heads: set[tuple[Role, int]], tick: Tick = lambda: None
) -> Iterator[tuple[tuple[Role, int], np.ndarray]]:
    """Orthonormal bases, (d, m) float32, of some heads, named by role and place in its list."""
    for layer in weights.places:
        for role in sorted({role for role, _ in heads}):
            span = weights.ports.span(role, layer)
            chosen = [i for i in range(span.start, span.stop) if (role, i) in heads]
            if chosen:
                own = weights.read(role, layer)[[i - span.start for i in chosen]]
                bases, _ = orthonormal_bases(own, weights.storage_dtype(role, layer))
                for i, basis in zip(chosen, bases.astype(np.float32), strict=True):
                    yield (role, i), basis
        tick()


def _blocks(weights: AttentionWeights, heads: set[tuple[Role, int]], memory: int) -> Iterator[set[tuple[Role, int]]]:
    """Heads in the order of their layers, as many at a time as have room."""
    block: set[tuple[Role, int]] = set()
    used = 0
    for role, i in sorted(heads, key=lambda head: (weights.heads(head[0])[head[1]].layer, head)):
        size = 4 * weights.d_model * weights.d_head(role)
        if block and used + size > memory:
            yield block
            block, used = set(), 0
        block.add((role, i))
        used += size
    if block:
        yield block


def _check_memory(
    weights: AttentionWeights, pairings: Sequence[Pairing], roles: Sequence[Role], size: int, memory: int
) -> None:
    per_head = {role: 4 * size * weights.d_head(role) for role in roles}
    sketches = sum(len(weights.heads(role)) * per_head[role] for role in roles)
    orthonormal = max(len(weights.heads(p.source)) * per_head[p.source] for p in pairings)
    layer = max(len(weights.heads_in(r, i)) * weights.d_head(r) for r in roles for i in weights.places)
    # Of every pair: its score in each pairing, T, and in turn an estimate, a bound, places and what is exact.
    values = 12 * result_bytes(weights.ports, ("pk",), tuple(pairings))
    needed = _BASE_BYTES + sketches + 2 * orthonormal + 48 * layer * weights.d_model + values
    if needed > memory:
        raise HeadspanError(
            f"{memory / 1e9:.2f} GB is too little for screening this model: about {needed / 1e9:.2f} GB are needed; "
            "give more with --memory, or choose fewer pairings"
        )


def _ticks(progress: Callable[[int, int], None], total: int) -> Tick:
    done = 0

    def tick() -> None:
        nonlocal done
        done = min(done + 1, total)
        progress(done, total)

    return tick
