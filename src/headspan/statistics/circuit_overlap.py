"""Do the edges of a circuit overlap more than other pairs of the same layers?

Every edge between heads is compared with the pairs of its *block*: the same pairing, the same two layers. ``exceeds``
is the mean, over the edges, of the fraction of pairs outside the circuit in its block that score less (ties count
half). It is 0.5 by chance, whatever layers the circuit prefers. A shared key or value head counts once, and a block
without a pair outside the circuit says nothing and is left out.

Edges that share a head are not independent: a hub overlaps with everything. So the null exchanges heads, not edges. The
heads of every layer get random new names, the same for all that they read and write, and the circuit keeps its shape.
Shared heads move together with their group. p is the fraction of such circuits that exceed at least as much, counting
the observed one, so it is valid for a circuit of any shape. The interval draws the heads of the circuit with
replacement.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from headspan.results.matrix import ScoreMatrix
from headspan.results.scores import Scores
from headspan.results.tabular import Tabular
from headspan.results.tasks.circuit import Circuit, edges_of
from headspan.scoring.inputs import ScoresLike, scores_of_circuit
from headspan.statistics.areas import check_draws, estimate_from, resampled
from headspan.subspaces.metrics import DEFAULT_METRICS, parse_metrics
from headspan.system.arguments import checked
from headspan.system.ordering import groups, mean_ranks
from headspan.system.progress import Update
from headspan.vocabulary.errors import HeadspanError, visible
from headspan.vocabulary.heads import ROLES, Head, HeadOrNode, Pairing
from headspan.vocabulary.ports import PortTable

LEAST = 5  # edges for an interval
_DRAWS = 9_999  # random names
_AT_ONCE = 2**20  # edges looked up at once
_ALL = "all"


class Overlap(NamedTuple):
    """How much more than chance (0.5) some edges overlap; low and high are NaN without an interval.

    edges: distinct edges between heads; compared: those with pairs outside the circuit in their block.
    """

    exceeds: float
    low: float
    high: float
    p: float
    edges: int
    compared: int


@dataclass(frozen=True, repr=False, eq=False)
class CircuitOverlap(Tabular):
    """By metric, then for ``all`` edges and those of each pairing."""

    name: str
    left_out: int  # edges with another end than a head
    found: dict[str, dict[str, Overlap]]

    def rows(self) -> list[dict[str, Any]]:
        """One row per metric and pairing: exceeds, low, high, chance, p, edges, compared."""
        return [
            {"metric": metric, "pairing": pairing, "exceeds": one.exceeds, "low": one.low, "high": one.high,
             "chance": 0.5, "p": one.p, "edges": one.edges, "compared": one.compared}
            for metric, by_pairing in self.found.items()
            for pairing, one in by_pairing.items()
        ]  # fmt: skip

    def remarks(self) -> list[str]:
        """What was not compared, and what the numbers do not say."""
        every = next(iter(self.found.values()))[_ALL]
        alone = every.edges - every.compared
        found = ["exceeds is 0.5 by chance; the interval draws the heads of the circuit, so it is wide for few heads."]
        if 0 < every.compared < LEAST:
            found.append(f"No interval for fewer than {LEAST} edges.")
        if self.left_out:
            found.append(f"{self.left_out:,} edges with another end than a head were left out.")
        if alone:
            found.append(f"{alone:,} edges have no other pair between their layers and were left out.")
        return found

    def _headline(self) -> str:
        circuit = f"circuit {visible(self.name)[:60]}".rstrip()
        return f"{circuit}: fraction of other pairs of the same layers that its edges exceed"


@checked
def circuit_overlap(
    scores: ScoresLike,
    circuit: Circuit | str | os.PathLike[str],
    metric: str | Sequence[str] | None = None,
    *,
    bootstrap: int = 500,
    seed: int | None = None,
    progress: Update | None = None,
) -> CircuitOverlap:
    """Whether the edges of a circuit overlap more than other pairs of the same two layers and pairing.

    Parameters
    ----------
    circuit
        A circuit or its file, of headspan, EAP-IG or MIB. Edges of the embedding, MLPs, logits and other nodes are
        left out, because only heads have others of their kind in the same layer.
    metric
        By default all similarities of a result, and pk and cs of a model.
    bootstrap, seed
        Draws for the 95 % interval, 0 for none, and the seed of these and of the permutations.
    """
    check_draws(bootstrap, seed or 0)
    wanted = None if metric is None else parse_metrics(metric if isinstance(metric, str) else list(metric))
    scores, circuit = scores_of_circuit(
        scores, wanted or DEFAULT_METRICS, circuit, progress, whole="comparing a circuit with other pairs"
    )
    heads_only, left_out = circuit.between_heads()
    edges = dict.fromkeys(
        (pairing, source, target)
        for _, pairing, source, target in edges_of(heads_only, scores.ports)
        if isinstance(source, Head) and isinstance(target, Head)
    )
    if not edges:
        raise HeadspanError(f"the circuit {circuit.name[:60]!r} has no edges between heads. Give one that has some")
    found = {name: _overlaps(scores, name, list(edges), bootstrap, seed or 0) for name in wanted or scores.metrics}
    return CircuitOverlap(circuit.name, left_out, found)


Ends: TypeAlias = tuple[Pairing, Head, Head]


def _overlaps(scores: Scores, metric: str, edges: list[Ends], bootstrap: int, seed: int) -> dict[str, Overlap]:
    """The overlap of all edges, and of those of each pairing if there are several."""
    blocks = [_Blocks(scores[metric, pairing], part) for pairing, part in _by_pairing(edges)]
    sums = _sums_by_chance(scores.ports, blocks, seed)
    observed = np.array([block.weights.ravel()[block.flat].sum() for block in blocks])
    parts = {str(block.pairing): [i] for i, block in enumerate(blocks)} if len(blocks) > 1 else {}
    found: dict[str, Overlap] = {}
    for name, members in {_ALL: list(range(len(blocks))), **parts}.items():
        exceeded = np.concatenate([blocks[i].exceeded for i in members])
        ends = [ends for i in members for ends in blocks[i].compared]
        count = sum(blocks[i].count for i in members)
        if not len(ends):
            none = float("nan")
            found[name] = Overlap(none, none, none, none, count, 0)
            continue
        mine, by_chance = observed[members].sum(), sums[:, members].sum(axis=1)
        at_least = int((by_chance >= mine - 1e-9 * abs(mine)).sum())
        low, high = _interval(exceeded, ends, bootstrap, seed)
        p = (1 + at_least) / (1 + len(sums))
        found[name] = Overlap(float(exceeded.mean()), low, high, p, count, len(ends))
    return found


def _by_pairing(edges: Iterable[Ends]) -> list[tuple[Pairing, list[tuple[Head, Head]]]]:
    found: dict[Pairing, list[tuple[Head, Head]]] = {}
    for pairing, source, target in edges:
        found.setdefault(pairing, []).append((source, target))
    return sorted(found.items(), key=lambda item: str(item[0]))


class _Blocks:
    """The edges of one pairing, and the other pairs of their blocks.

    exceeded: for each edge in ``compared``, the fraction of other pairs that score less. weights: for every pair of a
    block its rank over the number of other pairs, so that the sum over any edges orders circuits as their mean does.
    """

    def __init__(self, matrix: ScoreMatrix, edges: list[tuple[Head, Head]]) -> None:
        self.pairing, self.count = matrix.pairing, len(edges)
        self.sources, self.targets = matrix.sources, matrix.targets
        rows, columns = (np.array(side) for side in zip(*(matrix.find(*ends) for ends in edges), strict=True))
        before, after = _layers(matrix.sources), _layers(matrix.targets)
        self.weights = np.zeros(matrix.values.shape)
        kept, exceeded = list[np.ndarray](), list[np.ndarray]()
        for mine in groups(before[rows] * (after.max() + 1) + after[columns]):
            place = np.ix_(before == before[rows[mine[0]]], after == after[columns[mine[0]]])
            values = matrix.values[place].astype(np.float64)
            if np.isnan(values).any():
                raise HeadspanError(
                    f"this result has no {matrix.metric} for some {matrix.pairing} pairs between the layers of "
                    f"{edges[mine[0]][0]} and {edges[mine[0]][1]}. Score the model again with all pairs"
                )
            others = values.size - len(mine)
            if others:
                self.weights[place] = mean_ranks(values.ravel()).reshape(values.shape)
                among_all = self.weights[rows[mine], columns[mine]]
                among_own = mean_ranks(matrix.values[rows[mine], columns[mine]].astype(np.float64))
                self.weights[place] /= others
                exceeded.append((among_all - among_own) / others)
                kept.append(mine)
        chosen = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
        self.exceeded = np.concatenate(exceeded) if exceeded else np.zeros(0)
        self.compared = [edges[i] for i in chosen]
        self.flat = rows[chosen] * len(matrix.targets) + columns[chosen]


def _layers(ports: Sequence[HeadOrNode]) -> np.ndarray:
    """A number for every port, the same for those of one layer and kind."""
    numbers: dict[tuple[int, str], int] = {}
    return np.array([numbers.setdefault((port.position, port.kind), len(numbers)) for port in ports])


def _interval(exceeded: np.ndarray, ends: list[tuple[Head, Head]], times: int, seed: int) -> tuple[float, float]:
    """The 95 % interval of the mean; an edge counts as often as both of its heads were drawn."""
    if not times or len(ends) < LEAST:
        return float("nan"), float("nan")
    heads = {head: i for i, head in enumerate(dict.fromkeys(head for pair in ends for head in pair))}
    drawn = resampled(np.ones(len(heads), dtype=bool), times, seed)
    sources, targets = (np.array([heads[head] for head in side]) for side in zip(*ends, strict=True))
    weights = drawn[sources] * drawn[targets]
    total = weights.sum(axis=0)
    means = (exceeded @ weights)[total > 0] / total[total > 0]
    estimate = estimate_from(np.concatenate([[exceeded.mean()], means]), 0.95)
    return estimate.low, estimate.high


def _sums_by_chance(ports: PortTable, blocks: list[_Blocks], seed: int) -> np.ndarray:
    """The sums of the weights of the edges after random renaming of heads, (draws, blocks)."""
    heads = {head: i for i, head in enumerate(dict.fromkeys(h for role in ROLES for h in ports.of(role)))}
    renaming = _Renaming(ports, heads)
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    step = max(1, _AT_ONCE // max(len(heads), *(len(block.flat) for block in blocks)))
    places = [(_places(heads, block.sources), _places(heads, block.targets)) for block in blocks]
    for start in range(0, _DRAWS, step):
        names = renaming.draw(min(step, _DRAWS - start), rng)
        sums = np.zeros((len(names), len(blocks)))
        for i, (block, (rows, columns)) in enumerate(zip(blocks, places, strict=True)):
            if block.compared:
                first, last = (np.array([heads[h] for h in side]) for side in zip(*block.compared, strict=True))
                sums[:, i] = block.weights[rows[names[:, first]], columns[names[:, last]]].sum(axis=1)
        found.append(sums)
    return np.concatenate(found)


def _places(heads: Iterable[Head], side: Sequence[HeadOrNode]) -> np.ndarray:
    """The place of every head on one side of a matrix; 0 for those that are not there."""
    known = {head: i for i, head in enumerate(side)}
    return np.array([known.get(head, 0) for head in heads])


class _Renaming:
    """Random new names for the heads of every layer: key/value heads with the query heads that they serve."""

    def __init__(self, ports: PortTable, heads: Mapping[Head, int]) -> None:
        self._count = len(heads)
        served: dict[Head, list[Head]] = {}
        for query, kv in ports.served_by.items():
            served.setdefault(kv, []).append(query)
        alike: dict[tuple[Any, ...], list[Head]] = {}
        for head in ports.kv:
            if head.kind != "KR":  # the rotary key of a whole layer keeps its name
                shape = tuple(sorted(Counter(query.layer for query in served.get(head, ())).items()))
                alike.setdefault((head.layer, head.kind, shape), []).append(head)
        self._classes: list[tuple[np.ndarray, list[np.ndarray]]] = []
        for (_, _, shape), members in alike.items():
            queries = [[[heads[q] for q in served[kv] if q.layer == layer] for kv in members] for layer, _ in shape]
            self._classes.append((np.array([heads[head] for head in members]), list(map(np.array, queries))))
        rotary = [head for head in heads if head.kind == "QR"]
        self._rotary = np.array([heads[head] for head in rotary], dtype=np.int64)
        self._query = np.array([heads[Head(head.layer, head.index)] for head in rotary], dtype=np.int64)

    def draw(self, times: int, rng: np.random.Generator) -> np.ndarray:
        """(times, heads): the index of the new name of every head."""
        found = np.tile(np.arange(self._count), (times, 1))
        for members, queries in self._classes:
            order = rng.random((times, len(members))).argsort(axis=1)
            found[:, members] = members[order]
            for served in queries:  # (key/value heads, query heads of each)
                inside = rng.random((times, *served.shape)).argsort(axis=2)
                found[:, served] = served[order[:, :, None], inside]
        back = np.zeros(self._count, dtype=np.int64)
        back[self._query] = self._rotary
        found[:, self._rotary] = back[found[:, self._query]]
        return found
