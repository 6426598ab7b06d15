"""The strongest pairs of a very large model, without comparing all of them exactly.

Sketches (:mod:`headspan.subspaces.sketches`) compare all pairs; those that may be among the k strongest of a
pairing are then compared exactly. The certificate: let τ be the largest upper bound among the pairs not compared
exactly, each bound wrong with a probability of at most δ/k. The k truly strongest pairs are fixed before the sketch is
drawn, so with probability at least 1 − δ all their bounds hold; then those above τ were all compared, and every
found pair above τ has its true rank.

The proof needs weights that do not depend on the sketch: an edge in the null space of S has T = 0. The seed is
therefore derived from the fingerprint of the model, a hash over every weight, so that changing a weight changes S.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

import headspan
from headspan.models.weights import AttentionWeights
from headspan.results.scores import Scores
from headspan.scoring.arrangement import Job
from headspan.scoring.contraction import contract
from headspan.scoring.plan import result_bytes
from headspan.subspaces.bases import lower_inverse, orthonormal_bases
from headspan.subspaces.metrics import PK
from headspan.subspaces.sketches import estimates, gaussian_sketch, sketched_bases, sketched_spans, upper_bounds
from headspan.system.progress import Update
from headspan.system.threads import parallel_map
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Pairing, PairSet, Role, pair_mask

DELTA = 0.01
_COLUMNS, _LEAST_COLUMNS = 3, 64  # columns of the sketch per column of the widest head
_EXACT, _LEAST_EXACT = 5, 250  # pairs compared exactly per pair requested
_MORE = 40  # times as many, if that completes the certificate
_AT_ONCE = 64  # sketches that one core orthonormalises at a time
_BASE_BYTES = 300 * 10**6
_ROUNDING = 1e-3  # bound of the error of T: up to 2e-4 for the largest condition number at which sketches are float32
_SEED_DIGITS = 13  # hexadecimal digits, 52 bits: every JSON parser keeps them

Tick = Callable[[], None]
Place: TypeAlias = tuple[Role, int]  # a head: its role and its index among the heads of that role
Work: TypeAlias = tuple[Role, int, list[int], np.ndarray, str]  # role, index of first head, which, weights, dtype


def sketch_size(weights: AttentionWeights, roles: Sequence[Role]) -> int:
    """Columns of the sketch: three times those of the widest head."""
    return max(_LEAST_COLUMNS, _COLUMNS * max(min(weights.d_head(role), weights.d_model) for role in roles))


def sketch_seed(fingerprint: str) -> int:
    """The seed of a model's sketch, from the hash of its content."""
    return int(hashlib.sha256(f"sketch of {fingerprint}".encode()).hexdigest()[:_SEED_DIGITS], 16)


def screen(
    weights: AttentionWeights,
    pairings: Sequence[Pairing],
    pairs: PairSet,
    k: int,
    *,
    memory: int,
    delta: float = DELTA,
    seed: int | None = None,
    size: int | None = None,
    exact: int | None = None,
    progress: Update = lambda done, total: None,
) -> Scores:
    """The k largest Projection Kernels of every pairing, exact, with a certificate in the provenance.

    delta: the probability, over the draw of the sketch, that a certified pair of a pairing has a wrong rank.
    seed: seed of the sketch; by default derived from the content of the model.
    size: columns of the sketch.
    exact: pairs of a pairing to compare exactly at first; up to 40 times as many if that completes the certificate.
    """
    roles = tuple(dict.fromkeys(role for pairing in pairings for role in pairing))
    size = size or sketch_size(weights, roles)
    _check_memory(weights, pairings, roles, size, memory)
    provenance = dict(weights.provenance)  # as it is at the start of the run
    seed = sketch_seed(provenance["fingerprint"]) if seed is None else seed
    tick = _ticks(progress, 2 * len(weights.places) + len(pairings))
    based = _common_side(pairings)
    sketches, ranks = _sketch(weights, roles, based, size, seed, tick)
    searches = []
    for pairing in pairings:
        searches.append(Search(weights, sketches, ranks, pairing, based, pairs, k, delta))
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
    arrays = {(PK, search.pairing): search.values() for search in searches}
    return Scores(arrays, weights.ports, weights.d_model, ranks, provenance)


class Search:
    """One pairing: the sketch estimates of its pairs, and the exact values found so far."""

    def __init__(
        self,
        weights: AttentionWeights,
        sketches: Mapping[Role, np.ndarray],
        ranks: Mapping[Role, np.ndarray],
        pairing: Pairing,
        based: Collection[Role],
        pairs: PairSet,
        k: int,
        delta: float,
    ) -> None:
        self.pairing, self.k = pairing, k
        sources, targets = weights.heads(pairing.source), weights.heads(pairing.target)
        needed = pair_mask(pairing, sources, targets, pairs)
        self._shape = needed.shape
        self.rows, self.columns = np.nonzero(needed)
        # Q_A of one side, G_B of the other: the target's, unless only the source has it.
        first, second, places = pairing.source, pairing.target, (self.rows, self.columns)
        if second not in based:
            first, second, places, needed = second, first, places[::-1], needed.T
        factors = {"Q": _orthonormal(sketches[first]), "G": sketches[second]}
        (t,) = contract(factors, [Job("Q", "G", needed)])
        t, size = t[places], sketches[first].shape[1]
        self.estimate, self.upper = np.zeros_like(t), np.zeros_like(t)
        m_of, m2_of = ranks[first][places[0]], ranks[second][places[1]]
        for m in np.unique(m_of[m_of > 0]).tolist():  # a head of rank 0 has no overlap
            for m2 in np.unique(m2_of[m2_of > 0]).tolist():
                chosen = (m_of == m) & (m2_of == m2)
                self.estimate[chosen] = estimates(t[chosen], m, m2, size)
                self.upper[chosen] = upper_bounds(t[chosen] + _ROUNDING, delta / k, m, m2, size)
        self.exact = np.full(t.shape, np.nan)

    def candidates(self, most: int) -> np.ndarray:
        """Pairs to compare exactly next: first the best ``most``, later all that may still be among the strongest."""
        unknown = np.flatnonzero(np.isnan(self.exact))
        if len(unknown) < len(self.exact):
            unknown = unknown[self.upper[unknown] >= self._least()]
            if len(unknown) > most:
                return unknown[:0]  # the certificate would stay incomplete
        return unknown[np.argsort(-self.estimate[unknown], kind="stable")[:most]]

    def certificate(self) -> dict[str, int]:
        """The numbers of pairs: all, compared exactly, found, and certified."""
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


def _common_side(pairings: Sequence[Pairing]) -> set[Role]:
    """The fewest roles that cover one side of every pairing; their sketches must be those of bases.

    The span of a sketch does not depend on the basis inside a head, so the other side needs none.
    """
    shared = set.intersection(*(set(pairing) for pairing in pairings))
    return {min(shared)} if shared else {pairing.target for pairing in pairings}


def _sketch(
    weights: AttentionWeights, roles: Sequence[Role], based: Collection[Role], size: int, seed: int, tick: Tick
) -> tuple[dict[Role, np.ndarray], dict[Role, np.ndarray]]:
    """SᵀU of every head, (n, s, m) float32, and the ranks of U, by role; every layer is read once.

    based: roles for which U is orthonormal; for other roles it has the same span.
    """
    sketch = gaussian_sketch(weights.d_model, size, seed)
    widths = {role: min(weights.d_head(role), weights.d_model) for role in roles}
    shapes = {role: (len(weights.heads(role)), widths[role], size) for role in roles}
    sketches = {role: np.zeros(shape, np.float32).transpose(0, 2, 1) for role, shape in shapes.items()}
    ranks = {role: np.zeros(len(weights.heads(role)), np.int32) for role in roles}

    def make(item: tuple[Role, int, np.ndarray]) -> tuple[Role, int]:
        role, layer, own = item
        span, dtype = weights.ports.span(role, layer), weights.storage_dtype(role, layer)
        make_one = sketched_bases if role in based else sketched_spans
        sketches[role][span], ranks[role][span] = make_one(own, sketch, dtype)
        return role, layer

    last = None
    for _, layer in parallel_map(make, _layers(weights, roles)):
        if layer != last:
            tick()
        last = layer
    return sketches, ranks


def _layers(weights: AttentionWeights, roles: Iterable[Role]) -> Iterator[tuple[Role, int, np.ndarray]]:
    """The weights of some roles, layer by layer."""
    for layer in weights.places:
        for role in roles:
            if weights.ports.span(role, layer).stop:
                yield role, layer, weights.read(role, layer)


def _orthonormal(sketches: np.ndarray) -> np.ndarray:
    """Orthonormal bases of the columns of every (s, m) sketch; columns of zeros stay so."""
    return np.concatenate([*parallel_map(_orthonormal_part, np.array_split(sketches, -(-len(sketches) // _AT_ONCE)))])


def _orthonormal_part(sketches: np.ndarray) -> np.ndarray:
    wide = sketches.astype(np.float64)
    empty = np.all(wide == 0, axis=1)
    grams = np.matmul(wide.transpose(0, 2, 1), wide)
    np.einsum("nii->ni", grams)[empty] = 1.0
    try:
        inverse = lower_inverse(np.linalg.cholesky(grams))  # float64 can hold the squares of these condition numbers
        found = np.matmul(inverse, wide.transpose(0, 2, 1)).transpose(0, 2, 1)
    except np.linalg.LinAlgError:  # heads constructed to vanish in this sketch
        found = np.where(empty[:, None], 0.0, np.linalg.qr(wide)[0])
    return np.ascontiguousarray(found.astype(np.float32).transpose(0, 2, 1)).transpose(0, 2, 1)


def _compare_exactly(weights: AttentionWeights, searches: Sequence[Search], most: int, memory: int, tick: Tick) -> None:
    """Fill in the exact PK of the candidates of every search: blocks of source layers in turn, each against
    the target layers one by one, with bases of the needed heads only."""
    wanted = [(search, search.candidates(most)) for search in searches]
    sources = {(s.pairing.source, int(i)) for s, chosen in wanted for i in np.unique(s.rows[chosen])}
    for block in _blocks(weights, sources, memory):
        bases = dict(pair for layer in parallel_map(_bases, _chosen(weights, block)) for pair in layer)
        against: dict[Place, list[tuple[Search, int]]] = {}
        for search, chosen in wanted:
            for c in chosen:
                if (search.pairing.source, int(search.rows[c])) in bases:
                    target = search.pairing.target, int(search.columns[c])
                    against.setdefault(target, []).append((search, int(c)))

        def compare(
            work: Work,
            bases: Mapping[Place, np.ndarray] = bases,
            against: Mapping[Place, list[tuple[Search, int]]] = against,
        ) -> None:
            for target, basis in _bases(work):
                for search, c in against[target]:
                    product = bases[search.pairing.source, int(search.rows[c])].T @ basis
                    search.exact[c] = np.square(product, dtype=np.float64).sum()

        for _ in parallel_map(compare, _chosen(weights, set(against), tick)):
            pass


def _chosen(weights: AttentionWeights, heads: set[Place], tick: Tick = lambda: None) -> Iterator[Work]:
    """The weights of some heads, grouped by role and layer."""
    for layer in weights.places:
        for role in sorted({role for role, _ in heads}):
            span = weights.ports.span(role, layer)
            chosen = [i for i in range(span.start, span.stop) if (role, i) in heads]
            if chosen:
                yield role, span.start, chosen, weights.read(role, layer), weights.storage_dtype(role, layer)
        tick()


def _bases(work: Work) -> list[tuple[Place, np.ndarray]]:
    """Their orthonormal bases, (d, m) float32."""
    role, first, chosen, own, dtype = work
    places = [i - first for i in chosen]
    return [((role, first + i), orthonormal_bases(own[i : i + 1], dtype, np.float32)[0][0]) for i in places]


def _blocks(weights: AttentionWeights, heads: set[Place], memory: int) -> Iterator[set[Place]]:
    """Heads in the order of their layers, as many at a time as fit in memory."""
    block: set[Place] = set()
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
    # Per pair: its score in each pairing, T, and in turn an estimate, a bound, indices and exact values.
    values = 12 * result_bytes(weights.ports, (PK,), tuple(pairings))
    needed = _BASE_BYTES + sketches + 2 * orthonormal + 48 * layer * weights.d_model + values
    if needed > memory:
        raise HeadspanError(
            f"{memory / 1e9:.2f} GB is too little memory to screen this model: it needs about {needed / 1e9:.2f} GB. "
            "Allow more with `memory`, or choose fewer pairings"
        )


def _ticks(progress: Update, total: int) -> Tick:
    done = 0

    def tick() -> None:
        nonlocal done
        done = min(done + 1, total)
        progress(done, total)

    return tick
