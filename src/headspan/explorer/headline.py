"""The sentence above the diagram: the model's strongest finding with its evidence, or that there is none."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import numpy as np

from headspan.explorer.encode import metric_order, whole
from headspan.explorer.findings import READS, Finding
from headspan.results.effects import Effects
from headspan.results.scores import Scores
from headspan.statistics.baseline import PairingSummary
from headspan.statistics.dimension import dimension_at
from headspan.statistics.evidence import KINDS, kinds_of
from headspan.statistics.influence_units import expected_influence
from headspan.statistics.significance import DISCOVERY_RATE
from headspan.subspaces.metrics import OBSERVED_METRICS, metric_of
from headspan.vocabulary.heads import FLOW_PAIRINGS, Pairing
from headspan.vocabulary.words import listed


class Edge(NamedTuple):
    """The edge of the headline: its place, score and drawing strength, and what is known about it."""

    pairing: Pairing
    place: tuple[int, int]
    score: float
    kinds: tuple[str, ...]
    q: float | None
    q_within: float | None


def headline(
    scores: Scores, edges: dict[str, Any], summaries: list[PairingSummary], measured: Effects | None, above: bool
) -> Finding:
    """The strongest finding as a title, one sentence, and the view that shows it (empty where there is none).

    edges: those of the page, by ``metric/pairing``. above: whether the model rises above chance.
    """
    metric = metric_order(scores)[0]
    flow = [p for p in FLOW_PAIRINGS if edges.get(f"{metric}/{p}", {}).get("forward")]
    best = _strongest(scores, edges, metric, flow)
    if not flow:
        return Finding("No head writes to a later one", _no_forward_pairs(scores), {})
    passing = any(edges[f"{metric}/{p}"]["passing"]["any"] for p in flow)
    if not above and not passing:
        return Finding("Nothing stands above chance", _nothing(edges, metric, flow, measured), {})
    if best is None:
        return Finding("The edges were not compared", "This result holds no edges between heads.", {})
    view = {"at": "wiring", "metric": metric, "pair": _key(scores, best)}
    title = f"{_name(scores, best, 0)} writes what the {READS[best.pairing.target]} of {_name(scores, best, 1)} read"
    if not best.kinds:
        tested = any(edges[f"{metric}/{p}"]["tested"] for p in flow)
        text = _none_passes(scores, edges, metric, flow, best) if tested else _untested(scores, metric, best)
        return Finding(title, text, view)
    return Finding(title, f"{_shared(scores, metric, best)}{_evidence(scores, best, measured)}.", view)


def _strongest(scores: Scores, edges: dict[str, Any], metric: str, flow: list[Pairing]) -> Edge | None:
    """The edge with the most kinds of evidence; among those, the one that is farthest above chance."""
    found: list[tuple[int, float, Edge]] = []
    for pairing in flow:
        raw = edges[f"{metric}/{pairing}"]
        values, strengths = _array(raw, "score", "f4"), _array(raw, "strength", "u1")
        if values is None or strengths is None or not len(values):
            continue
        bits = _array(raw, "evidence", "u1")
        bits = np.zeros(len(values), np.uint8) if bits is None else bits
        counts = np.array([len(kinds_of(n)) for n in range(2 ** len(KINDS))])[bits]
        i = int(np.lexsort((np.arange(len(values))[::-1], values, strengths, counts))[-1])
        q, within = _array(raw, "q_reversed", "f4"), _array(raw, "q_within", "f4")
        row, column = (
            int(np.frombuffer(base64.b64decode(raw[end]), f"<{whole(len(scores.heads(role)))}")[i])
            for end, role in zip(("source", "target"), pairing, strict=True)
        )
        q_reversed, q_within = (None if one is None or np.isnan(one[i]) else float(one[i]) for one in (q, within))
        edge = Edge(pairing, (row, column), float(values[i]), kinds_of(int(bits[i])), q_reversed, q_within)
        found.append((int(counts[i]), float(strengths[i]), edge))
    return max(found, key=lambda one: one[:2])[2] if found else None


def _array(raw: dict[str, Any], name: str, dtype: str) -> np.ndarray | None:
    return np.frombuffer(base64.b64decode(raw[name]), dtype=f"<{dtype}") if raw.get(name) else None


def _name(scores: Scores, edge: Edge, end: int) -> str:
    return str(scores.heads(edge.pairing[end])[edge.place[end]])


def _key(scores: Scores, edge: Edge) -> str:
    return "-".join(f"{_name(scores, edge, end)}.{edge.pairing[end]}" for end in (0, 1))


def _shared(scores: Scores, metric: str, edge: Edge) -> str:
    """What the two heads share, beside chance."""
    target = _name(scores, edge, 1)
    possessive = f"{target}'s {READS[edge.pairing.target]}"
    ranks = [scores.ranks(role)[place] for role, place in zip(edge.pairing, edge.place, strict=True)]
    about = metric_of(metric)
    start = f"{_name(scores, edge, 0)} writes what {possessive} read: "
    if about.observed:
        expected = expected_influence(scores, metric, edge.pairing)[edge.place]
        return f"{start}influence {edge.score:.2f} where {expected:.2f} is expected without interaction"
    d = dimension_at(scores, edge.pairing, *(np.array([i]) for i in edge.place))
    chance = float(about.chance(d, *(np.array([rank]) for rank in ranks))[0][0])
    if about.grows_with_rank:
        return f"{start}{edge.score:.1f} of {min(ranks)} dimensions where chance gives {chance:.1f}"
    return f"{start}{about.short} {edge.score:.3f} where chance gives {chance:.3f}"


def _evidence(scores: Scores, edge: Edge, measured: Effects | None) -> str:
    """The evidence for an edge, and what speaks against it."""
    above, against = [], []
    if "reversed" in edge.kinds:
        above.append(f"stands above reversed pairs (q = {_q(edge.q)})")
        if edge.q_within is not None and edge.q_within > DISCOVERY_RATE:
            against.append(f"does not stand out among the heads of its two layers (q = {_q(edge.q_within)})")
    elif edge.q is not None:
        against.append(f"does not stand above reversed pairs (q = {_q(edge.q)})")
    if measured is not None and edge.pairing in measured.pairings:
        effect, unit = measured.of(edge.pairing)[edge.place], measured.unit(edge.pairing)
        ratio = measured.ratio(edge.pairing)[edge.place]
        if "effect" in edge.kinds:
            above.append(f"has a large effect ({effect:.2f} {unit}, {ratio:.1f} times that of a random output)")
        elif measured.judged(edge.pairing)[edge.place]:
            against.append(f"has no large effect on this input ({effect:.2g} {unit})")
    if "influence" in edge.kinds:
        metric = next(name for name in OBSERVED_METRICS if (name, edge.pairing) in scores)
        expected = expected_influence(scores, metric, edge.pairing)[edge.place]
        ratio = scores[metric, edge.pairing].values[edge.place] / expected
        above.append(f"has {ratio:.1f} times the influence expected without interaction")
    return f"; it {' and '.join(above)}" + (f", but {' and '.join(against)}" if against else "")


def _nothing(edges: dict[str, Any], metric: str, flow: list[Pairing], measured: Effects | None) -> str:
    where = f"{sum(edges[f'{metric}/{p}']['forward'] for p in flow):,} pairs in {listed(flow)}"
    text = f"Nothing stands above chance: none of {where} scores more than random weights would"
    if measured is not None and measured.compared:
        text += ", and no measured effect is large"
    return f"{text}. The lines are the largest of many chance values."


def _none_passes(scores: Scores, edges: dict[str, Any], metric: str, flow: list[Pairing], edge: Edge) -> str:
    """What was looked at, where no edge passes."""
    tested = {kind for p in flow for kind in edges[f"{metric}/{p}"]["tested"]}
    least = [q for p in flow if (q := edges[f"{metric}/{p}"]["least_q"].get("reversed")) is not None]
    looked = {
        "reversed": "stands above reversed pairs" + (f" (the smallest q is {min(least):.2g})" if least else ""),
        "effect": "has a large effect",
        "influence": "has three times the influence expected without interaction",
    }
    pairs = sum(edges[f"{metric}/{p}"]["forward"] for p in flow)
    none = ", and none ".join(looked[kind] for kind in KINDS if kind in tested)
    return f"{_shared(scores, metric, edge)}; but of {pairs:,} pairs in {listed(flow)} none {none}."


def _untested(scores: Scores, metric: str, edge: Edge) -> str:
    return (
        f"{_shared(scores, metric, edge)}; no edge could be tested, because this result has neither reversed pairs nor "
        "effects nor influence."
    )


def _no_forward_pairs(scores: Scores) -> str:
    layers = {head.layer for head in scores.ports.query}
    if len(layers) == 1:
        return (
            "This model has one attention layer, so no head writes to a later one and there are no edges to draw; the "
            "heat maps compare its heads with each other."
        )
    return "This result holds none of the pairings OQ, OK and OV, so there are no edges from a head to a later one."


def _q(q: float | None) -> str:
    return "–" if q is None else "< 1e-30" if q < 1e-30 else f"{q:.2g}"


# ------------------------------------------------------------------------------------------ kinds that disagree


def disagreements(edges: dict[str, Any], metric: str, summaries: list[PairingSummary]) -> dict[str, str]:
    """One sentence for each of OQ, OK and OV where the kinds of evidence do not agree."""
    by_pairing = {summary.pairing: summary for summary in summaries}
    found: dict[str, str] = {}
    for pairing in FLOW_PAIRINGS:
        raw, summary = edges.get(f"{metric}/{pairing}"), by_pairing.get(pairing)
        if raw is None:
            continue
        parts = [*_within(summary, raw), *_effects(raw)]
        if parts:
            found[str(pairing)] = f"{pairing}: {'; '.join(parts)}."
    return found


def _within(summary: PairingSummary | None, raw: dict[str, Any]) -> list[str]:
    above = raw["passing"].get("reversed", 0)
    if not above or summary is None or summary.both_significant is None or summary.both_significant > above / 2:
        return []
    both = summary.both_significant
    text = f"{above:,} {_stand(above)} above reversed pairs, {both or 'none'} of them"
    text = f"{text} among the heads of the same two layers"
    return [text + (", where whole layers score higher forwards" if summary.directed else "")]


def _effects(raw: dict[str, Any]) -> list[str]:
    passing = raw["passing"]
    if "effect" not in passing or "reversed" not in passing:
        return []
    large, above = passing["effect"], passing["reversed"]
    bits = _array(raw, "evidence", "u1")
    both = 0 if bits is None else int(np.count_nonzero((bits & 3) == 3))
    if above and not both:
        return [f"none of the {above:,} above reversed pairs has a large effect"]
    if large and not above:
        have = "has a large effect" if large == 1 else "have large effects"
        return [f"{large:,} {have}, but none stands above reversed pairs"]
    return []


def _stand(count: int) -> str:
    return "stands" if count == 1 else "stand"
