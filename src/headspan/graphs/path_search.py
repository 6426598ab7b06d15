"""The strongest chains that end at one port, by branch and bound with small matrix products.

A partial path is stored as the Gram matrix Q (m×m) of its composed map, seen from the far side of its last link. One
hop further, through the overlap K of two bases, the score is tr KᵀQK = ⟨Q, KKᵀ⟩: one matrix product for all partial
paths that end at one link and all possible next hops. Later scores cannot exceed tr Q times the largest squared
singular values of the remaining maps, so paths that cannot reach the list are dropped. A quick search that keeps few
paths comes first, so that the complete search can drop many.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from headspan.graphs.chains import Chains, Ends, Links
from headspan.system.progress import Update
from headspan.system.threads import parallel_map
from headspan.vocabulary.heads import HeadOrNode

_QUICK = 64  # partial paths that the first search keeps at every hop
_SPARE = 8  # extra candidates, since float32 may reorder ties
_CHUNK = 1024  # partial paths multiplied at once


@dataclass(frozen=True)
class Way:
    """The direction of a search from the ends: against the stream (sign 1) or along it (sign −1).

    outer: ports by which a path can be extended; near: the index of every link among them. far: the other side of the
    links; far_of: the index of every link there. cores: (n, m, m), near side × far side. pairings: allowed pairings of
    the hop into a target. starts: which of outer may be the other end of a path.
    """

    ends: Ends
    outer: Ends
    near: np.ndarray
    far: Ends
    far_of: np.ndarray
    cores: np.ndarray
    gains: np.ndarray
    sign: int
    pairings: frozenset[str]
    starts: np.ndarray

    @cached_property
    def outer_order(self) -> np.ndarray:
        """The positions of outer; smaller numbers are farther from the ends."""
        return self.sign * self.outer.positions

    @cached_property
    def link_order(self) -> np.ndarray:
        return self.outer_order[self.near]

    @cached_property
    def useful(self) -> np.ndarray:
        """Which links have anything beyond them that can end a path."""
        return self.link_order > self.outer_order[self.starts].min(initial=np.iinfo(np.int64).max)

    @cached_property
    def _names(self) -> np.ndarray:
        return np.array([str(port) for port in self.outer.ports], dtype=object)

    def before(self, port: HeadOrNode) -> np.ndarray:
        """Which of outer lie beyond a port, seen from the ends; a direction can lie on both sides of itself."""
        return (self.outer_order < self.sign * port.position) & (self._names != str(port))

    def gain(self, group: int) -> float:
        """The largest gain of a link beyond a far port."""
        return float(self.gains[self.before(self.far.ports[group])[self.near] & self.useful].max(initial=0.0))

    def first_hop(self, end: int) -> np.ndarray:
        """The links that can reach an end (or be reached from it) in one hop, as indices."""
        allowed = self.before(self.ends.ports[end])[self.near] & self.useful
        if self.sign > 0:  # this hop is the one into the target
            role = self.ends.roles[end]
            allowed &= np.array([f"{self.outer.roles[i]}{role}" in self.pairings for i in self.near], dtype=bool)
        return np.flatnonzero(allowed)

    def last_hop(self, group: int) -> np.ndarray:
        """Which of outer can end a path after a link of this far port."""
        if self.sign > 0:
            return self.starts
        role = self.far.roles[group]
        return self.starts & np.array([f"{role}{other}" in self.pairings for other in self.outer.roles], dtype=bool)


def against_the_stream(stock: Chains, ends: Ends, pairings: frozenset[str], starts: np.ndarray | None = None) -> Way:
    """From targets to what is written before them; ``starts``: the writers that can start a path."""
    links = stock.links
    allowed = np.ones(len(stock.writers.ports), dtype=bool) if starts is None else starts
    return Way(
        ends, stock.writers, links.write, stock.carriers, links.read, links.cores, links.gains, 1, pairings, allowed
    )


def with_the_stream(stock: Chains, ends: Ends, pairings: frozenset[str], targets: Ends) -> Way:
    """From sources to everything that reads after them; the targets include the carriers."""
    links: Links = stock.links
    near = np.array([targets.place(stock.carriers.ports[i], stock.carriers.roles[i]) for i in links.read], dtype=int)
    cores = links.cores.transpose(0, 2, 1)
    everything = np.ones(len(targets.ports), dtype=bool)
    return Way(ends, targets, near, stock.writers, links.write, cores, links.gains, -1, pairings, everything)


class Found(NamedTuple):
    """Paths with the same number of hops: scores, and (n, hops + 1) indices: end, links, outer."""

    scores: np.ndarray
    places: np.ndarray


@dataclass
class _Best:
    """The best paths so far by number of hops, and the score that a path must exceed."""

    k: int
    depth: int
    floors: dict[int, float] = field(default_factory=dict)
    found: dict[int, Found] = field(default_factory=dict)
    dropped: dict[int, float] = field(default_factory=dict)  # upper bound on the score of any dropped path

    def floor(self, hops: int) -> float:
        kept = self.found.get(hops)
        own = float(kept.scores[-1]) if kept is not None and len(kept.scores) == self.k else 0.0
        return max(own, self.floors.get(hops, 0.0))

    def add(self, hops: int, scores: np.ndarray, places: np.ndarray) -> None:
        if hops in self.found:
            before = self.found[hops]
            scores, places = np.concatenate([before.scores, scores]), np.concatenate([before.places, places])
        order = np.argsort(-scores, kind="stable")[: self.k]
        self.found[hops] = Found(scores[order], places[order])

    def hopeful(self, bounds: np.ndarray, hops: int, gains: np.ndarray | float) -> np.ndarray:
        """Which partial paths can still enter a list; bounds: upper bounds of their scores with ``hops`` hops."""
        found = np.zeros(len(bounds), dtype=bool)
        for more in range(hops, self.depth + 1):
            found |= bounds * gains ** (more - hops) > self.floor(more)
        return found

    def drop(self, bound: float, hops: int, gain: float) -> None:
        for more in range(hops, self.depth + 1):
            self.dropped[more] = max(self.dropped.get(more, 0.0), bound * gain ** (more - hops))


class _Partial(NamedTuple):
    """Partial paths: (n, hops) indices (end, links), (n, m, m) Gram matrices, (n,) bounds."""

    places: np.ndarray
    grams: np.ndarray
    bounds: np.ndarray

    def take(self, chosen: np.ndarray) -> _Partial:
        return _Partial(self.places[chosen], self.grams[chosen], self.bounds[chosen])


def search(way: Way, depth: int, k: int, memory: int, progress: Update) -> tuple[dict[int, Found], dict[int, float]]:
    """The k best paths of 2 to ``depth`` hops (of 1, if depth is 1), and bounds for paths that had to be left out.

    memory: bytes for partial paths and cached overlaps.
    """
    hops = range(min(2, depth), depth + 1)
    overlaps = _Overlaps(way, memory // 2)
    room = max(_QUICK, memory // 2 // (12 * way.cores.shape[2] ** 2))
    quick = _Best(k + _SPARE, depth)
    whole = _Best(k + _SPARE, depth)
    for i, best in enumerate((quick, whole)):
        for end in range(len(way.ends.ports)):
            progress(i * len(way.ends.ports) + end, 2 * len(way.ends.ports))
            _from_one_end(way, end, depth, best, overlaps, room if i else _QUICK)
        whole.floors = {h: quick.floor(h) * (1 - 1e-4) for h in hops}
    return {h: whole.found[h] for h in hops if h in whole.found}, whole.dropped


def _from_one_end(way: Way, end: int, depth: int, best: _Best, overlaps: _Overlaps, room: int) -> None:
    if depth == 1:
        _direct(way, end, best)
        return
    partial = _first(way, end, best, room)
    for hops in range(2, depth + 1):
        groups = np.unique(way.far_of[partial.places[:, -1]]) if len(partial.places) else []
        order = sorted(groups, key=lambda g: -partial.bounds[way.far_of[partial.places[:, -1]] == g].max())
        work = (_Step(way, partial, int(group), hops, depth, best, overlaps, room) for group in order)
        children: list[_Partial] = []
        for found, further in parallel_map(_Step.run, work):
            if found is not None:
                best.add(hops, *found)
            if further is not None:
                children.append(further)
                if sum(len(c.places) for c in children) > 2 * room:
                    children = [_limit(_joined(children), way, hops + 1, best, room)]
        if not children:
            return
        partial = _limit(_joined(children), way, hops + 1, best, room)


def _direct(way: Way, end: int, best: _Best) -> None:
    """Paths of one hop: the Projection Kernel."""
    allowed = way.before(way.ends.ports[end]) & way.starts
    names = [(o, way.ends.roles[end]) if way.sign > 0 else (way.ends.roles[end], o) for o in way.outer.roles]
    allowed &= np.array([f"{writer}{reader}" in way.pairings for writer, reader in names], dtype=bool)
    places = np.flatnonzero(allowed)
    overlap = np.matmul(way.ends.bases[end].T, way.outer.bases[places])
    best.add(1, np.square(overlap).sum(axis=(1, 2)), np.stack([np.full(len(places), end), places], axis=1))


def _first(way: Way, end: int, best: _Best, room: int) -> _Partial:
    """Partial paths of one hop."""
    links = way.first_hop(end)
    m = way.cores.shape[2]
    grams = np.empty((len(links), m, m), dtype=np.float32)
    for start in range(0, len(links), _CHUNK // 4):
        part = links[start : start + _CHUNK // 4]
        overlap = np.matmul(way.ends.bases[end].T, way.outer.bases[way.near[part]])
        grams[start : start + len(part)] = _seen_from_afar(overlap, way.cores[part])
    places = np.stack([np.full(len(links), end), links], axis=1)
    return _limit(_Partial(places, grams, _traces(grams)), way, 2, best, room)


def _seen_from_afar(maps: np.ndarray, cores: np.ndarray) -> np.ndarray:
    """Gram matrices of maps (n, p, m') composed with cores (n, m, m)."""
    width = min(maps.shape[2], cores.shape[1])
    through = np.matmul(maps[:, :, :width], cores[:, :width])
    return np.matmul(through.transpose(0, 2, 1), through)


def _traces(grams: np.ndarray) -> np.ndarray:
    return np.trace(grams, axis1=1, axis2=2)


def _joined(parts: list[_Partial]) -> _Partial:
    return parts[0] if len(parts) == 1 else _Partial(*map(np.concatenate, zip(*parts, strict=True)))


def _limit(partial: _Partial, way: Way, hops: int, best: _Best, room: int) -> _Partial:
    """At most ``room`` partial paths that can still enter a list with ``hops`` hops."""
    overall = float(way.gains.max(initial=0.0))
    partial = partial.take(best.hopeful(partial.bounds, hops, overall))
    if len(partial.places) <= room:
        return partial
    order = np.argsort(-partial.bounds, kind="stable")
    best.drop(float(partial.bounds[order[room]]), hops, overall)
    return partial.take(order[:room])


class _Overlaps:
    """Overlaps K of one far basis with everything before it, and KKᵀ; cached while memory allows."""

    def __init__(self, way: Way, memory: int) -> None:
        self._way, self._left = way, memory
        self._kept: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def of(self, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Indices in outer, K (n, m, m'), and flattened KKᵀ, (n, m·m)."""
        if group in self._kept:
            return self._kept[group]
        way = self._way
        places = np.flatnonzero(way.before(way.far.ports[group]))
        overlap = np.matmul(way.far.bases[group].T, way.outer.bases[places])
        grams = np.matmul(overlap, overlap.transpose(0, 2, 1)).reshape(len(places), way.far.bases.shape[2] ** 2)
        found = places, overlap, grams
        size = overlap.nbytes + grams.nbytes
        if size <= self._left:
            self._left -= size
            self._kept[group] = found
        return found


@dataclass
class _Step:
    """One hop further for all partial paths that end at links of one far port."""

    way: Way
    partial: _Partial
    group: int
    hops: int
    depth: int
    best: _Best
    overlaps: _Overlaps
    room: int

    def run(self) -> tuple[tuple[np.ndarray, np.ndarray] | None, _Partial | None]:
        """The best paths that end here, and the partial paths that continue."""
        here = self.way.far_of[self.partial.places[:, -1]] == self.group
        gain = self.way.gain(self.group)
        mine = self.partial.take(np.flatnonzero(here))
        mine = mine.take(self.best.hopeful(mine.bounds, self.hops, gain))
        outer, overlap, grams = self.overlaps.of(self.group) if len(mine.places) else (np.zeros(0, int), None, None)
        if not len(outer) or overlap is None or grams is None:
            return None, None
        scores = mine.grams.reshape(len(mine.places), -1) @ grams.T
        further = self._further(mine, scores, outer, overlap) if self.hops < self.depth else None
        return self._ended(mine, scores, outer), further

    def _ended(self, mine: _Partial, scores: np.ndarray, outer: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        scores = np.where(self.way.last_hop(self.group)[outer], scores, -1.0)
        flat = scores.ravel()
        count = min(self.best.k, flat.size)
        chosen = np.argpartition(flat, flat.size - count)[flat.size - count :]
        chosen = chosen[flat[chosen] > self.best.floors.get(self.hops, -0.5)]
        rows, columns = np.unravel_index(np.sort(chosen), scores.shape)
        return scores[rows, columns], np.column_stack([mine.places[rows], outer[columns]])

    def _further(self, mine: _Partial, scores: np.ndarray, outer: np.ndarray, overlap: np.ndarray) -> _Partial | None:
        """Partial paths that continue through a link, selected by score times gain, then by their own bound."""
        way = self.way
        column_of = np.full(len(way.outer.ports), -1)
        column_of[outer] = np.arange(len(outer))
        links = np.flatnonzero((column_of[way.near] >= 0) & way.useful)
        columns = column_of[way.near[links]]
        bounds = np.maximum(scores[:, columns], 0) * way.gains[links]
        gain = way.gain(self.group)
        rows, chosen = np.nonzero(self.best.hopeful(bounds.ravel(), self.hops + 1, gain).reshape(bounds.shape))
        if not len(rows):
            return None
        if len(rows) > self.room:
            order = np.argsort(-bounds[rows, chosen], kind="stable")
            self.best.drop(float(bounds[rows, chosen][order[self.room]]), self.hops + 1, gain)
            rows, chosen = rows[order[: self.room]], chosen[order[: self.room]]
        kept: list[_Partial] = []
        used = np.unique(chosen)
        width = min(overlap.shape[2], way.cores.shape[1])
        through = dict(
            zip(used, np.matmul(overlap[columns[used], :, :width], way.cores[links[used], :width]), strict=True)
        )
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            maps = np.stack([through[c] for c in chosen[part]])
            grams = np.matmul(np.matmul(maps.transpose(0, 2, 1), mine.grams[rows[part]]), maps)
            traces = _traces(grams)
            good = self.best.hopeful(traces, self.hops + 1, gain)
            places = np.column_stack([mine.places[rows[part]], links[chosen[part]]])
            kept.append(_Partial(places[good], grams[good], traces[good]))
        return _joined(kept)
