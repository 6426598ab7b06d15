"""The strongest paths through a model: one head writes, others pass it on, and a last head reads it.

>>> found = paths("demo", to="L1H2.K", depth=2, k=1)  # a two-layer model has no paths of two hops
>>> len(found)
0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headspan.graphs.chains import READS, WRITES, Chains, Links, chains, chance, readers
from headspan.graphs.path_search import Found, Way, against_the_stream, search, with_the_stream
from headspan.results.choices import labels_for
from headspan.results.identity import short_name
from headspan.results.labels import Labels, LabelsLike, classes_by_name, with_labels
from headspan.results.scores import Scores, is_result
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import ScoresLike, given_weights
from headspan.statistics.dimension import dimension_between
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.memory import parse_memory
from headspan.system.ordering import shared_ranks
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.ends import End, EndsLike, given_end, words
from headspan.vocabulary.errors import HeadspanError, inform, quoted, warn
from headspan.vocabulary.heads import (
    FLOW_PAIRINGS,
    NODE_PAIRINGS,
    Head,
    HeadOrNode,
    Node,
    Pairing,
    Role,
    parse_pairings,
)
from headspan.vocabulary.words import counted

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike
    from headspan.models.weights import AttentionWeights
    from headspan.node_kinds.opening import NodesLike
    from headspan.results.tasks.circuit import Circuit

DEEPEST = 4
PATH_COLUMNS = ("hops", "rank", "path", "source", "via", "target", "pairing", "score", "product", "chance", "z")
_DEFAULT_MEMORY = "1GB"


@dataclass(frozen=True)
class Path:
    """One path: ``source`` writes, every head (or node) of ``via`` reads with V and writes with O, ``target`` reads.

    rank: among the paths with the same number of hops. score: squared norm of the composed map (see
    :mod:`headspan.graphs.chains`); for one hop it is PK. product: the score expected from the per-hop PKs, if
    every head in between mixed its directions at random. chance, sd: mean and standard deviation of the score if all
    links were rotated at random; z: the distance from that mean in sd (None if it cannot vary). pks: PK of every hop.
    """

    rank: int
    source: HeadOrNode
    via: tuple[HeadOrNode, ...]
    target: HeadOrNode
    pairing: Pairing
    score: float
    product: float
    chance: float
    sd: float
    pks: tuple[float, ...]

    @property
    def hops(self) -> int:
        return len(self.via) + 1

    @property
    def z(self) -> float | None:
        return (self.score - self.chance) / self.sd if self.sd > 0 else None

    def __str__(self) -> str:
        return " → ".join([*map(str, (self.source, *self.via)), f"{self.target}.{self.pairing.target}"])

    def row(self) -> dict[str, Any]:
        """A flat record."""
        return {
            "hops": self.hops, "rank": self.rank, "path": str(self), "source": str(self.source),
            "via": ";".join(map(str, self.via)), "target": str(self.target), "pairing": str(self.pairing),
            "score": self.score, "product": self.product, "chance": self.chance, "z": self.z,
        }  # fmt: skip


class Paths(Tabular, list[Path]):
    """Paths by number of hops, each best first. notes: messages about them for the reader."""

    model: str
    notes: tuple[str, ...]
    classes: dict[str, str]  # of labelled heads, as columns of the rows

    def __init__(self, found: Iterable[Path] = (), model: str = "", notes: Iterable[str] = ()) -> None:
        super().__init__(found)
        self.model, self.notes, self.classes = model, tuple(notes), {}

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per path."""
        return with_labels([path.row() for path in self], self.classes)

    def _headline(self) -> str:
        return counted(len(self), "path")

    def to_circuit(self, name: str = "") -> Circuit:
        """All hops of these paths as a circuit, which ``headspan wiring --circuit`` draws."""
        from headspan.results.tasks.circuit import Circuit, CircuitEdge

        edges: dict[tuple[str, str], CircuitEdge] = {}
        for path in self:
            stations = [path.source, *path.via, path.target]
            for i, (source, target) in enumerate(itertools.pairwise(stations)):
                last = i == len(path.via)
                reads = path.pairing.target if last else _carrier(target)
                edge = CircuitEdge(f"{source}.{_writer(source)}", f"{target}.{reads}", score=path.pks[i])
                edges[edge.source, edge.target] = edge
        return Circuit(name or "strongest paths", self.model, tuple(edges.values()))


def _writer(port: HeadOrNode) -> Role:
    return Role.O if isinstance(port, Head) else Role.W


def _carrier(port: HeadOrNode) -> Role:
    return Role.V if isinstance(port, Head) else Role.R


@renamed(pairings="pairing", weights="model")
@checked
def paths(
    scores: ScoresLike | None = None,
    to: EndsLike | None = None,
    from_: EndsLike | None = None,
    depth: int = 3,
    k: int = 10,
    pairing: str | Pairing | Iterable[str | Pairing] | None = None,
    *,
    model: ModelLike | None = None,
    labels: LabelsLike | None = None,
    nodes: NodesLike | None = None,
    memory: int | str = _DEFAULT_MEMORY,
    progress: Update | None = None,
) -> Paths:
    """The k strongest paths of every number of hops from 2 to ``depth`` (of 1 hop, if depth is 1).

    Parameters
    ----------
    scores
        A model, or a result (then with ``model``, the model that it was made from).
    to
        Where paths end: a head (``"L5H1"``: what its queries, keys and values read), one port of it (``"L5H1.K"``), a
        layer (``"L5"``), a class of ``labels``, a node, or a list of them. With shared keys and values ``"L17H3.K"`` is
        what its KV head reads.
    from_
        Where paths begin, in the same words: a head by what it writes. Without ``to`` and ``from_``: anywhere.
    depth
        Most hops of a path, 1 to 4.
    pairing
        The last hop, for example ``"OK"`` for paths that end in keys. All by default.
    model
        With a result: the model that it was made from.
    labels
        Head classes, or the name or CSV file of some; they become columns of the rows.
    nodes
        Other readers and writers of the stream, as for :func:`headspan.score`; a result does not hold the vectors of
        its nodes, so give them again. A plain neuron and a
        transcoder feature can be inside a path; other nodes can only start or end it.
    memory
        Memory limit for partial paths. What does not fit is left out, and the notes of the result report it.
    """
    if not 1 <= depth <= DEEPEST:
        raise HeadspanError(f"depth must be from 1 to {DEEPEST}, not {depth}")
    if k < 1:
        raise HeadspanError(f"k is {k}. Give 1 or more")
    room = parse_memory(memory)
    if scores is None:
        scores, model = model, None
    result = _result(scores)
    opened = _weights(scores, result, model)
    if nodes is not None:
        from headspan.node_kinds.beside_heads import add_nodes
        from headspan.node_kinds.opening import node_sets

        opened = add_nodes(opened, node_sets(opened, nodes))
        for sentence in opened.added.notes:
            inform(sentence)
    if result is not None and result.ports.nodes:
        _check_nodes(result, opened, [name for names in (to, from_) for name in words(names)])
    classes = labels_for(labels, opened.ports, opened.provenance, result)
    with progress_bar("following paths", progress) as update:
        found = strongest(opened, to, from_, depth, k, pairing, room, update, classes)
    found.classes = classes_by_name(classes)
    return found


def _result(scores: ScoresLike | None) -> Scores | None:
    if isinstance(scores, Scores):
        return scores
    return Scores.load(scores) if is_result(scores) else None


def _weights(scores: ScoresLike | None, result: Scores | None, model: ModelLike | None) -> AttentionWeights:
    """The weights to compose; a result does not hold them."""
    from headspan.scoring.model_of_result import weights_of

    if result is not None:
        if model is None:
            made = result.provenance.get("reference", "its model")
            raise HeadspanError(
                "paths need weights, which a result does not hold. Add `model`, the model that it was made from: "
                f"{str(made)[:80]}"
            )
        return weights_of(result, model)
    opened = given_weights(cast("ModelLike", scores))  # refuses None, and reports a missing file first
    if model is not None:
        raise HeadspanError("`model` is only for a saved result, and a model is given already. Leave out `model`")
    return opened


def _check_nodes(scores: Scores, opened: AttentionWeights, ends: Iterable[Any]) -> None:
    """A result has only the names of its nodes and a hash of their vectors, so the nodes must be given again."""
    held = scores.provenance.get("nodes_hash")
    if opened.ports.nodes:
        if held != opened.provenance["nodes_hash"]:
            warn("these nodes are not those of the result. The paths use the nodes given now")
        return
    for name in ends:
        if isinstance(name, str) and (node := scores.ports.node(name) or scores.ports.node(name.rpartition(".")[0])):
            raise HeadspanError(
                f"{node} is a node of the result, which does not hold its vector. Name it again as for score, "
                "for example `nodes='probe.npy@8'`"
            )


def strongest(
    weights: AttentionWeights,
    to: EndsLike | None = None,
    from_: EndsLike | None = None,
    depth: int = 3,
    k: int = 10,
    pairings: str | Pairing | Iterable[str | Pairing] | None = None,
    memory: int = 10**9,
    progress: Update = lambda done, total: None,
    labels: Labels | None = None,
) -> Paths:
    """The search of :func:`paths` on opened weights; the paths of all ends are ranked together."""
    table = weights.ports
    last = _last_hops(pairings)
    sources = None if from_ is None else _sources(weights, given_end(from_, table, labels))
    end = None if to is None else given_end(to, table, labels)
    targets, notes = _targets(weights, end, last), [] if end is None else sorted(set(end.notes(table)))
    stock = chains(weights)
    if to is None and sources is not None:
        ends = stock.writers.take([stock.writers.place(*one) for one in sources])
        wanted = [(role, i) for role in READS for i in range(len(table.of(role)))]
        way = with_the_stream(stock, ends, last, readers(weights, wanted))
    else:
        ends = readers(weights, targets)
        starts = None
        if sources is not None:
            starts = np.zeros(len(stock.writers.ports), dtype=bool)
            starts[[stock.writers.place(*one) for one in sources]] = True
        way = against_the_stream(stock, ends, last, starts)
    found, dropped = search(way, depth, k, memory, progress)
    listed = [path for hops, some in sorted(found.items()) for path in _described(way, stock, some, hops, k)]
    left = [_left_out(hops, dropped[hops], listed, k) for hops in sorted(found) if hops in dropped]
    nothing = [] if listed else ["there is no such path: there is nothing between these in the stream"]
    return Paths(
        listed, short_name(str(weights.reference)), [*notes, *(sentence for sentence in left if sentence), *nothing]
    )


def _last_hops(pairings: str | Pairing | Iterable[str | Pairing] | None) -> frozenset[str]:
    """The pairings that the last hop may have."""
    asked = [pairings] if pairings is None or isinstance(pairings, (str, Pairing)) else list(pairings)
    every = any(word is None or str(word).strip().lower() == "all" for word in asked)
    chosen = (*FLOW_PAIRINGS, *NODE_PAIRINGS) if every else parse_pairings([word for word in asked if word is not None])
    wrong = [str(pairing) for pairing in chosen if not pairing.flow]
    if wrong or not chosen:
        raise HeadspanError(
            f"a hop goes from what writes to what reads, and {', '.join(wrong) or 'nothing'} does not. Give "
            "OQ, OK or OV, or OR, WQ, WK, WV or WR of nodes"
        )
    return frozenset(map(str, chosen))


def _sources(weights: AttentionWeights, start: End) -> list[tuple[HeadOrNode, Role]]:
    """The possible starts of a path: the outputs of query heads and nodes."""
    table = weights.ports
    for port, role in start.named:
        if role is not None and role not in WRITES:
            raise HeadspanError(f"a path begins with an output. Give {port}.{_writer(port)} instead of {port}.{role}")
        if isinstance(port, Node) and not any(str(node) == str(port) for node in table.of(Role.W)):
            raise HeadspanError(f"{port} only reads, so a path cannot begin with it. Give it as the end, with `to`")
    found = [(port, role) for role in WRITES for port in table.of(role) if str(port) in start.ports.get(role, ())]
    if not found:
        raise HeadspanError(f"nothing of {quoted(start.text)} writes, so no path begins there. Choose another start")
    return found


def _targets(weights: AttentionWeights, end: End | None, last: frozenset[str]) -> list[tuple[Role, int]]:
    """The ports at which paths can end, by role and index."""
    table = weights.ports
    read = [role for role in READS if table.of(role) and any(pairing[1] == role.value for pairing in last)]
    if end is None:
        return [(role, i) for role in read for i in range(len(table.of(role)))]
    for port, role in end.named:
        if role is not None and role not in READS:
            other = f"{port}.R" if isinstance(port, Node) else f"{port}, or {port}.K"
            raise HeadspanError(f"a path ends with an input. Give {other} instead of {port}.{role}")
        if isinstance(port, Node) and not any(str(node) == str(port) for node in table.of(Role.R)):
            raise HeadspanError(
                f"{port} only writes, so a path cannot end with it. Give it as the beginning, with `from_`"
            )
    possible = [role for role in READS if end.ports.get(role)]
    chosen = [role for role in possible if role in read]
    if not chosen:
        raise HeadspanError(
            f"{quoted(end.text)} reads with {', '.join(map(str, possible)) or 'nothing'}, and the last hop must be "
            f"{', '.join(sorted(last))}. Choose one that matches"
        )
    return [(role, i) for role in chosen for i in np.flatnonzero(end.among(table.of(role), role)).tolist()]


def _described(way: Way, stock: Chains, found: Found, hops: int, k: int) -> list[Path]:
    """Paths with exact scores (float64) and their chance, best first."""
    if not len(found.places):
        return []
    links, forward = stock.links, way.sign < 0
    pks, scores, products = zip(*(_exact(way, links, places) for places in found.places), strict=True)
    scores = np.array(scores)
    order = np.argsort(-scores, kind="stable")[:k]
    middle = found.places[:, 1:-1]
    first, second = way.ends.ranks[found.places[:, 0]], way.outer.ranks[found.places[:, -1]]
    # Both sides of every hop, starting from the end.
    left = np.column_stack([way.ends.centred[found.places[:, 0]], way.far.centred[way.far_of[middle]]])
    right = np.column_stack([way.outer.centred[way.near[middle]], way.outer.centred[found.places[:, -1]]])
    d = dimension_between(stock.d_model, left, right)
    by_chance = chance(d, first, second, links.sizes[middle], links.fourths[middle])
    listed: list[Path] = []
    for rank, i in zip(shared_ranks(scores[order]).tolist(), order, strict=True):
        end, *via, other = map(int, found.places[i])
        ends = (way.ends, end), (way.outer, other)
        (sources, source), (targets, target) = ends if forward else ends[::-1]
        stations = [links.ports[link] for link in (via if forward else via[::-1])]
        writer = _writer(stations[-1] if stations else sources.ports[source])
        listed.append(
            Path(
                rank, sources.ports[source], tuple(stations), targets.ports[target],
                Pairing(writer, targets.roles[target]), float(scores[i]), float(products[i]),
                float(by_chance.mean[i]), float(by_chance.sd[i]), pks[i] if forward else pks[i][::-1],
            )
        )  # fmt: skip
    return listed


def _exact(way: Way, links: Links, places: np.ndarray) -> tuple[tuple[float, ...], float, float]:
    """For one path, in float64: PK of every hop, ‖C‖², and the score expected from the PKs."""
    end, *via, other = places
    basis = way.ends.bases[end].astype(np.float64)
    chain, product, pks = np.eye(basis.shape[1]), 1.0, list[float]()
    for link in via:
        near, far = way.near[link], way.far_of[link]
        core = way.cores[link].astype(np.float64)
        overlap = (basis.T @ way.outer.bases[near].astype(np.float64))[:, : core.shape[0]]
        chain = chain @ overlap @ core[: overlap.shape[1]]
        pks.append(float(np.square(overlap).sum()))
        product *= pks[-1] * links.sizes[link] / (way.outer.ranks[near] * way.far.ranks[far])
        basis = way.far.bases[far].astype(np.float64)
    overlap = basis.T @ way.outer.bases[other].astype(np.float64)
    pks.append(float(np.square(overlap).sum()))
    return tuple(pks), float(np.square(chain @ overlap).sum()), float(product * pks[-1])


def _left_out(hops: int, bound: float, listed: list[Path], k: int) -> str | None:
    """A note if paths that belong to the list may have been left out because of limited memory."""
    scores = [path.score for path in listed if path.hops == hops]
    if len(scores) >= k and scores[-1] >= bound:
        return None
    return (
        f"memory was too small to follow all paths of {hops} hops: some that score less than {bound:.3g} "
        "may be missing. Allow more with memory="
    )
