"""The findings that follow the headline of a report, in words and numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from headspan.explorer.encode import metric_order
from headspan.paper.evaluation import metric_agreement
from headspan.results.effects import effects_in
from headspan.results.large_effects import LEAST_RATIO
from headspan.results.scores import Scores
from headspan.statistics.baseline import PairingSummary
from headspan.statistics.hubs import HubHead, HubScores, hubs
from headspan.subspaces.metrics import PK
from headspan.vocabulary.heads import FLOW_PAIRINGS, ROLES, Pairing
from headspan.vocabulary.words import counted

READS = {"Q": "queries", "K": "keys", "V": "values"}
WANTED = 4
_STRONGEST = 20  # strongest edges per pairing that are checked for a large effect


class Finding(NamedTuple):
    """A title, one or two sentences, and the page state that shows it."""

    title: str
    text: str
    view: dict[str, str]


def find(scores: Scores, summaries: list[PairingSummary], evaluation: dict[str, Any] | None) -> list[Finding]:
    """At most four findings besides the headline; kinds that the result cannot support are left out."""
    flow = [pairing for pairing in FLOW_PAIRINGS if (metric_order(scores)[0], pairing) in scores]
    kinds: tuple[Callable[[], list[Finding]], ...] = (
        lambda: large_effects(scores, flow),
        lambda: largest_hub(scores, flow),
        lambda: labelled_heads(evaluation),
        lambda: above_reversed(summaries),
        lambda: against_chance(summaries),
        lambda: agreement(scores, flow),
        lambda: compared(scores),
    )
    return list(islice(chain.from_iterable(kind() for kind in kinds), WANTED))  # lazy: stops when there are enough


_NOTABLE, _BY_LOT = 0.5, 0.001  # random standard deviations, and the share of random pairs above their 99.9 % point


def large_effects(scores: Scores, flow: list[Pairing]) -> list[Finding]:
    """Which of the strongest edges have a large effect, if effects were measured and compared."""
    measured = effects_in(scores)
    if measured is None or not measured.compared:
        return []
    metric = metric_order(scores)[0]
    best = [edge for p in flow if p in measured.pairings for edge in scores[metric, p].forward().top(_STRONGEST)]
    large = {p: measured.large(p) for p in measured.pairings}
    places = {p: (measured.matrix(p).sources.index, measured.matrix(p).targets.index) for p in large}
    confirmed = [e for e in best if large[e.pairing][places[e.pairing][0](e.source), places[e.pairing][1](e.target)]]
    if not best:
        return []
    title = f"{len(confirmed)} of the {len(best)} strongest edges have a large effect"
    names = ", ".join(f"{e.source} → {e.target}.{e.pairing.target}" for e in confirmed[:3])
    floors = " or ".join(dict.fromkeys(f"{measured.floor(p):g} ({measured.unit(p)})" for p in large))
    text = (
        f"Measured by running the model, for the {_STRONGEST} strongest of each pairing: patching the source's output "
        f"has an effect of at least {floors}, and {LEAST_RATIO:g} times that of a random output"
        + (f"; for example {names}." if names else ".")
    )
    view = {"at": "wiring", "metric": metric, "rule": "top", "k": str(_STRONGEST), "large": ""}
    return [Finding(title, text, view | {"pairings": ",".join(map(str, large))})]


def largest_hub(scores: Scores, flow: list[Pairing]) -> list[Finding]:
    """The hub farthest above random choice. (A plain sum would favour layers with many choosers.)"""
    metric = metric_order(scores)[0]
    best: tuple[float, HubHead, HubScores] | None = None
    for pairing in flow:
        if not len(scores[metric, pairing].forward().pairs()[2]):
            continue
        both = hubs(scores, pairing, metric)
        for corrected, plain in ((both.outlet_corrected, both.outlet), (both.inlet_corrected, both.inlet)):
            for top in corrected.top(1):
                if best is None or top.score > best[0]:
                    best = (top.score, top, plain)
    if best is None or best[0] <= 0:
        return []
    z, top, plain = best
    what = "source" if plain.kind == "outlet" else "target"
    title = f"{top.head} is a preferred {what} in {plain.pairing}"
    text = (
        f"Its {plain.kind} adds up to {plain.of(top.head):.1f} (rank {plain.rank_of(top.head)}), {z:.1f} standard "
        "deviations above random choice: more than any other head here."
    )
    view = {"at": "hubs", "hubs": str(plain.pairing), "head": str(top.head)}
    return [Finding(title, text, view)]


def labelled_heads(evaluation: dict[str, Any] | None) -> list[Finding]:
    if not evaluation or not evaluation["average_precision"]:
        return []
    # Average precision rather than the area: without a point at (0, 1), heads found by the first pair add no area.
    best = max(evaluation["average_precision"], key=lambda row: row["average"])
    found, chance = best["average"], best["chance"]
    title = "The strongest pairs lead to labelled heads" if found > chance else "Labelled heads are not found"
    text = (
        f"Going down the list of pairs by {best['metric']} finds the labelled heads with a mean average precision of "
        f"{found:.3f}; heads in random order would give {chance:.3f}."
    )
    return [Finding(title, text, {"at": "evaluation"})]


def above_reversed(summaries: list[PairingSummary]) -> list[Finding]:
    rows = [s for s in summaries if s.pairing in FLOW_PAIRINGS and s.reversed_significant is not None]
    if not rows:
        return []
    total = sum(s.reversed_significant or 0 for s in rows)
    pairs = sum(s.pairs for s in rows)
    if not total:
        text = f"At q ≤ 0.05 none of {pairs:,} forward pairs exceeds the pairs in the impossible direction."
        return [Finding("No single connection stands out from reversed pairs", text, {"at": "wiring"})]
    parts = ", ".join(f"{s.reversed_significant:,} in {s.pairing}" for s in rows)
    text = f"Of {pairs:,} forward pairs these exceed the pairs in the impossible direction at q ≤ 0.05: {parts}. "
    view = {"at": "wiring", "rule": "significance", "q": "0.05", "null": "reversed", "metric": PK}
    title = f"{total:,} connection{'' if total == 1 else 's'} above reversed pairs"
    return [Finding(title, text + _head_specific(rows), view)]


def _head_specific(rows: list[PairingSummary]) -> str:
    """How many of the pairs above the reversed pairs are evidence about single heads, and where whole layers differ."""
    tested = [s for s in rows if s.both_significant is not None]
    if not tested:
        return "Layers have too few heads to compare, so there is no evidence about single heads."
    both = sum(s.both_significant or 0 for s in tested)
    text = f"{both:,} of them also {'stands' if both == 1 else 'stand'} out among the heads of the same two layers."
    directed = [str(s.pairing) for s in rows if s.directed]
    if directed:
        text += (
            f" Whole layers score higher forwards than reversed in {', '.join(directed)}, so the rest may do so "
            "without being connected."
        )
    return text


def against_chance(summaries: list[PairingSummary]) -> list[Finding]:
    """Ranked by the shift of the mean: the KL over occupied bins can be 0 for the pairing farthest from chance."""
    if len(summaries) < 2:
        return []
    most, least = (choose(summaries, key=lambda s: abs(s.shift)) for choose in (max, min))
    if abs(most.shift) < _NOTABLE and most.above < 10 * _BY_LOT:
        return []  # the pairs as a whole look like chance; a few edges may still stand out
    text = (
        f"Mean {most.mean:.2f} where random subspaces have {most.random_mean:.2f}: {abs(most.shift):.1f} random "
        f"standard deviations {'above' if most.shift >= 0 else 'below'}, with {most.above:.0%} of the pairs above the "
        f"random 99.9 % point. The closest to chance is {least.pairing}: mean {least.mean:.2f}, {least.above:.0%}."
    )
    return [Finding(f"{most.pairing} is farthest from chance", text, {"at": "distributions"})]


def agreement(scores: Scores, flow: list[Pairing]) -> list[Finding]:
    """Spearman correlation of the first two similarities, over the pairs that both have."""
    if len(scores.metrics) < 2:
        return []
    first, second = metric_order(scores)[:2]
    rows = []
    for pairing in flow:
        pairs = [scores[m, pairing].forward().pairs()[2] for m in (first, second) if (m, pairing) in scores]
        if len(pairs) == 2 and len(pairs[0]) == len(pairs[1]) > 2:
            rows.append((pairing, *metric_agreement(scores, pairing, first, second)))
    rows = [row for row in rows if np.isfinite(row[1]) and np.isfinite(row[2])]
    if not rows:
        return []
    everywhere, high = np.mean([row[1] for row in rows]), np.mean([row[2] for row in rows])
    text = (
        f"Spearman ρ is {everywhere:.2f} over all forward pairs and {high:.2f} over those in the top 3 % of either "
        f"(means of {', '.join(str(row[0]) for row in rows)})."
    )
    verdict = (
        "agree" if min(everywhere, high) > 0.5 else "disagree at the top" if everywhere > 0.3 else "rank differently"
    )
    return [Finding(f"{first.upper()} and {second.upper()} {verdict}", text, {"at": "scatter"})]


def compared(scores: Scores) -> list[Finding]:
    """What was compared: a finding that every result has, so that no report opens empty."""
    heads = " and ".join(f"{len(scores.heads(role))} {role}" for role in (ROLES[0], ROLES[1]))
    text = f"{heads} subspaces in {scores.d_model} dimensions, {counted(len(scores.pairings), 'pairing')}."
    return [Finding("What was compared", text, {"at": "wiring"})]
