"""Select edges by a rule or from a circuit, and build the graph of their heads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from headspan.graphs.graph import Wiring, WiringNode
from headspan.results.choices import given_labels, given_pairings
from headspan.results.effects import compared_effects
from headspan.results.matrix import Edge, Edges, ScoreMatrix
from headspan.results.scores import Scores
from headspan.results.tasks.circuit import Circuit, edges_of
from headspan.scoring.inputs import ScoresLike, given_scores, scores_of_circuit
from headspan.statistics.hubs import HubScores, hubs
from headspan.statistics.significance import DISCOVERY_RATE, Null, Significance, significance
from headspan.subspaces.metrics import PK, metric_of, one_metric
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.ordering import descending, occurrence
from headspan.vocabulary.ends import EndsLike, given_ends
from headspan.vocabulary.errors import HeadspanError, refuse_ignored, visible, warn
from headspan.vocabulary.heads import Head, HeadOrNode, Pairing, parse_pairings

if TYPE_CHECKING:
    from headspan.results.labels import Labels, LabelsLike

Rule = Literal["top", "top-per-target", "significance", "threshold"]
RULES: tuple[Rule, ...] = get_args(Rule)


@renamed(pairings="pairing", used="large_effect")
@checked
def wiring(
    scores: ScoresLike,
    pairing: str | Pairing | Iterable[str | Pairing] | None = None,
    metric: str | Iterable[str] = PK,
    k: int | None = None,
    rule: Rule = "top",
    q: float | None = None,
    null: Null | None = None,
    minimum: float | None = None,
    labels: LabelsLike | None = None,
    *,
    from_: EndsLike | None = None,
    to: EndsLike | None = None,
    large_effect: bool = False,
    circuit: Circuit | str | os.PathLike[str] | None = None,
) -> Wiring:
    """The graph of the strongest forward pairs, or of the edges of a circuit.

    Parameters
    ----------
    pairing
        ``"flow"`` (OQ, OK, OV; the default), ``"all"``, or a list; every pairing chooses its own edges.
    k
        How many edges per pairing (rule ``top``, the paper's) or per target head (``top-per-target``); 20 by default.
    rule
        ``top``; ``top-per-target``; ``significance``: the q-value is at most ``q`` (0.05 by default) under ``null``
        (``random`` subspaces by default, for ``pk``, the ``reversed`` pairs, or the heads ``within`` the same two
        layers; see :mod:`headspan.statistics.significance`); ``threshold``: the score is at least ``minimum``.
        An argument that a rule does not use is refused.
    minimum
        With any rule, leave out pairs that score less than this.
    labels
        Head classes to attach to the nodes, or the name or CSV file of some.
    from_, to
        Choose among edges that start or end here: a head (``"L5H1"``), a port (``"L5H1.K"``), a layer (``"L5"``), a
        class of ``labels``, a node, or a list of them.
    large_effect
        Keep only edges with a large effect, as measured in the result (see :mod:`headspan.results.large_effects`).
    circuit
        A circuit or its file, of headspan (:mod:`headspan.results.tasks.circuit`), EAP-IG or MIB: its edges, whatever
        their scores, in place of those of a rule. Edges of the embedding, of MLPs and of the logits are left out if the
        result has no such nodes.
    """
    metric = one_metric(metric)
    if circuit is not None:
        _no_rule(rule, pairing, k, q, null, minimum, from_, to)
        return _drawn(*scores_of_circuit(scores, [metric], circuit), metric, labels, large_effect)
    pairing = "flow" if pairing is None else pairing
    chosen = parse_pairings(pairing)
    _check(rule, k, q, null, minimum)
    k = 20 if k is None else k
    rate, against = DISCOVERY_RATE if q is None else q, null or "random"
    scores = given_scores(scores, [metric], _needed(chosen, metric))
    chosen = given_pairings(pairing, scores, metric)
    labels = given_labels(labels, scores)
    ends = given_ends(from_, to, scores.ports, labels)
    ends.check(chosen)
    measured = compared_effects(scores) if large_effect else None
    if measured is not None:
        asked, chosen = chosen, tuple(one for one in chosen if not one.of_nodes)
        if not chosen:
            raise HeadspanError(
                f"Effects are measured between heads, and {', '.join(map(str, asked))} has other nodes. "
                "Leave out `large_effect`"
            )
    edges, found = Edges(), list[Significance]()
    for one in chosen:
        matrix = scores[metric, one].forward()
        with np.errstate(invalid="ignore"):
            allowed = np.ones(matrix.values.shape, dtype=bool) if minimum is None else matrix.values >= minimum
            if rule == "significance":
                found.append(significance(scores, one, null=against, metric=metric))
                allowed &= found[-1].q <= rate
            if measured is not None:
                allowed &= measured.large(one)
        edges += _choose(matrix, allowed, k, rule, ends.mask(one, matrix.sources, matrix.targets))
    names = tuple(labels.names) if labels is not None else ()
    nodes = _nodes(edges, scores, metric, chosen, labels)
    why = _doubts(found, rate) if edges else _why_empty(scores, metric, chosen, rule, k, rate, minimum, found)
    most = min(k, scores.provenance["screen"]["k"]) if scores.screened else k  # a screened result has only its k pairs
    described = _describe(rule, most, rate, against, minimum) + (", large effect" if large_effect else "")
    described = " ".join([described, str(ends)]).rstrip()
    return Wiring(metric, chosen, described, edges, nodes, names, scores, tuple(why))


def _no_rule(rule: str, *choices: Any) -> None:
    """A circuit defines its own edges."""
    if rule != "top" or any(value is not None for value in choices):
        raise HeadspanError(
            "a circuit defines its own edges. Leave out `pairing`, `k`, `rule`, `q`, `null`, `minimum`, `from_` and "
            "`to`, or `circuit`"
        )


def _drawn(
    scores: Scores,
    circuit: Circuit,
    metric: str,
    labels: LabelsLike | None,
    large_effect: bool,
) -> Wiring:
    """The wiring of a circuit: its edges with their scores in this result."""
    total = len(circuit.edges)
    circuit, missing = circuit.without_missing(scores.ports)
    if missing:
        warn(
            f"{missing} of {total} edges of the circuit {circuit.name[:60]!r} involve the embedding, MLPs or logits, "
            "which this result does not have. They are left out"
        )
    labels = given_labels(labels, scores)
    measured = compared_effects(scores) if large_effect else None
    edges, differ = Edges(), 0
    for edge, pairing, source, target in edges_of(circuit, scores.ports):
        matrix = scores[metric, pairing].forward()
        if measured is not None and not measured.large(pairing)[matrix.find(source, target)]:
            continue
        score = matrix.at(source, target)
        rank = matrix.rank_of(source, target)
        edges.append(Edge(metric, pairing, rank, source, target, score))  # type: ignore[arg-type]
        known = edge.score if edge.metric == metric else None
        differ += known is not None and abs(known - score) > 1e-3 * max(1.0, abs(score))
    if differ:
        warn(
            f"{differ} of the {len(edges)} edges have other scores in the circuit {circuit.name[:60]!r} than in this "
            "result: it may have been made from another model"
        )
    edges = Edges(sorted(edges, key=lambda edge: (str(edge.pairing), edge.rank)))
    chosen = tuple(dict.fromkeys(edge.pairing for edge in edges))
    names = tuple(labels.names) if labels is not None else ()
    described = f"circuit {visible(circuit.name)[:60]}".rstrip() + (", large effect" if large_effect else "")
    notes = () if edges else ("the circuit has no edges to show here",)
    return Wiring(metric, chosen, described, edges, _nodes(edges, scores, metric, chosen, labels), names, scores, notes)


def _needed(pairings: tuple[Pairing, ...], metric: str) -> tuple[Pairing, ...]:
    """The pairings to score: two of the nulls and the colours of the drawing also need the reversed pairings."""
    if metric_of(metric).flow_only:
        return pairings
    return parse_pairings([*pairings, *(Pairing(p.target, p.source) for p in pairings if not p.of_nodes)])


def _why_empty(
    scores: Scores,
    metric: str,
    pairings: Iterable[Pairing],
    rule: str,
    k: int,
    q: float,
    minimum: float | None,
    found: Iterable[Significance],
) -> Iterator[str]:
    """For every pairing without edges, why there are none and what to choose instead."""
    if rule in ("top", "top-per-target") and k == 0:
        yield f"no edges were requested ({rule} 0). Give a larger k"
        return
    if (alone := scores.ports.one_layer) and not any(pairing.of_nodes for pairing in pairings):
        yield f"{alone}: there are no edges to draw"
        return
    yield from (result.nothing(q) for result in found if result.smallest_q > q)
    for pairing in pairings:
        best = scores[metric, pairing].forward().top(1)
        if not best:
            yield f"{pairing} has no forward pairs"
        elif minimum is not None and best[0].score < minimum:
            yield f"no {pairing} pair scores {minimum:g} or more; the largest {metric} is {best[0].score:.4g}"


def _doubts(found: Iterable[Significance], q: float) -> Iterator[str]:
    """A note on edges above the reversed pairs: how many are evidence about two heads."""
    for result in found:
        if result.direction is not None and result.count(q):
            yield result.agreement(q)
            if result.direction.favours_forward:
                yield f"{result.matrix.pairing}: {result.direction.sentence}"


def _check(rule: str, k: int | None, q: float | None, null: str | None, minimum: float | None) -> None:
    if rule not in RULES:
        raise HeadspanError(f"unknown edge rule {rule!r}. Choose one of {', '.join(RULES)}")
    if k is not None and k < 0:
        raise HeadspanError(f"k is {k}. Give 0 or more")
    if rule == "significance" or rule == "threshold":
        refuse_ignored(f"on the rule {rule}", k=k)
    if rule != "significance":
        refuse_ignored(f"on the rule {rule}, only on the rule significance", null=null, q=q)
    if q is not None and not 0 < q <= 1:
        raise HeadspanError(f"q must be between 0 and 1, not {q}. Give for example 0.01")
    if rule == "threshold" and minimum is None:
        raise HeadspanError("the rule threshold needs a smallest score. Give `minimum`, for example 20")


def _choose(matrix: ScoreMatrix, allowed: np.ndarray, k: int, rule: Rule, between: np.ndarray) -> Iterable[Edge]:
    """The edges of one pairing among those ``between`` given ends, best first; ranks count all pairs of the pairing."""
    rows, columns, values = matrix.pairs()
    order = descending(values)
    ranks = np.flatnonzero(between[rows[order], columns[order]])
    order = order[ranks]
    rows, columns, values = rows[order], columns[order], values[order]
    keep = allowed[rows, columns]
    if rule == "top":
        keep &= np.arange(len(values)) < k
    elif rule == "top-per-target":
        keep &= occurrence(columns) < k
    for i in np.flatnonzero(keep):
        source, target = matrix.sources[int(rows[i])], matrix.targets[int(columns[i])]
        yield Edge(matrix.metric, matrix.pairing, int(ranks[i]) + 1, source, target, float(values[i]))


def _describe(rule: str, k: int, q: float, null: str, minimum: float | None) -> str:
    text = {
        "top": f"top {k} per pairing",
        "top-per-target": f"top {k} per target",
        "significance": f"q ≤ {q:g} ({null} null)",
        "threshold": "",
    }[rule]
    return ", ".join(part for part in (text, "" if minimum is None else f"score ≥ {minimum:g}") if part)


def _nodes(
    edges: Edges, scores: Scores, metric: str, pairings: Iterable[Pairing], labels: Labels | None
) -> tuple[WiringNode, ...]:
    """Every head and node at the end of an edge, in stream order, query heads before shared heads."""
    heads = {edge.source for edge in edges} | {edge.target for edge in edges}
    whole = edges and not scores.screened  # hubs need every pair
    found = {str(pairing): hubs(scores, pairing, metric) for pairing in pairings} if whole else {}
    inlets = {pairing: _by_head(hub.inlet) for pairing, hub in found.items()}
    outlets = {pairing: _by_head(hub.outlet) for pairing, hub in found.items()}
    return tuple(
        WiringNode(
            head,
            labels.of(head) if labels is not None and isinstance(head, Head) else (),
            {pairing: values[head] for pairing, values in inlets.items() if head in values},
            {pairing: values[head] for pairing, values in outlets.items() if head in values},
        )
        for head in sorted(heads, key=_stream_order)
    )


def _stream_order(port: HeadOrNode) -> tuple[Any, ...]:
    return (port.position, port.kv, port.index, "") if isinstance(port, Head) else (port.position, True, 0, port.name)


def _by_head(hub: HubScores) -> dict[HeadOrNode, float]:
    return {head: float(value) for head, value in zip(hub.heads, hub.values, strict=True) if not np.isnan(value)}
