"""Collect everything that a report shows into one JSON payload with a schema version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

import numpy as np

import headspan
from headspan.explorer.bands import bands
from headspan.explorer.details import chance_curves, pair_details, tokens_by_role, vocabulary_of
from headspan.explorer.edges import Nulls, about_effects, centred_roles, chance_levels, edges_of
from headspan.explorer.encode import Limits, encode_effects, encode_matrices, finite, metric_order, pack
from headspan.explorer.findings import find
from headspan.explorer.head_values import HeadScores, head_scores, head_values
from headspan.explorer.headline import disagreements, headline
from headspan.explorer.paths import strongest_paths
from headspan.explorer.provenance import provenance_rows, without_paths
from headspan.explorer.tasks import check_tasks, encode_task
from headspan.explorer.tour import tour
from headspan.explorer.watch import example_sets
from headspan.models.weights import AttentionWeights
from headspan.paper.evaluation import Estimate, Measure, classification, detection, metric_agreement
from headspan.plotting.style import EDGE_LOOKS, SEQUENTIAL, label_colours
from headspan.results.effects import Effects, effects_in
from headspan.results.identity import short_name
from headspan.results.labels import Labels
from headspan.results.scores import Scores
from headspan.results.tasks.task_result import Task
from headspan.scoring.model_of_result import check_same_model
from headspan.statistics.baseline import PairingSummary, summary_of
from headspan.statistics.evidence import LEAST_INFLUENCE, rises_above_chance
from headspan.statistics.hubs import hubs
from headspan.statistics.influence_units import UNITS, input_of
from headspan.subspaces.metrics import PK, metric_of
from headspan.system.memory import FEWER_SCORES, check_room
from headspan.system.progress import Update
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, NODE_PAIRINGS, NODE_ROLES, ROLES, SAME_TYPE_PAIRINGS, Pairing, Role
from headspan.vocabulary.words import class_words

SCHEMA = 1
DEFAULT_K = 20
CROWDED = 0.25  # share of all pairs beyond which a diagram is too crowded to read
_BINS = 255

CITATION = {
    "text": (
        "The Projection Kernel between head subspaces is the work of Hiroaki Yamagiwa, Yusuke Takase and "
        "Hidetoshi Shimodaira. Please cite their paper, and name headspan and its version for the numbers."
    ),
    "bibtex": (
        "@misc{yamagiwa-projection-kernel,\n"
        "  title = {Measuring Affinity between Attention-Head Weight Subspaces via the Projection Kernel},\n"
        "  author = {Yamagiwa, Hiroaki and Takase, Yusuke and Shimodaira, Hidetoshi},\n"
        "  note = {Preprint}\n}"
    ),
}


_PAIR_BYTES = 100  # measured: memory to make a page, per pair of the largest matrix


def collect(
    scores: Scores,
    weights: AttentionWeights | None = None,
    *,
    labels: Labels | None = None,
    behaviour: HeadScores | None = None,
    tokens: int = 10,
    tasks: Sequence[Task] = (),
    progress: Update = lambda done, total: None,
) -> dict[str, Any]:
    """The payload of a report. Parts that the result or the weights cannot provide are left out, with a reason."""
    if not scores.arrays:
        raise HeadspanError("this result has no scores. Score the model with at least one similarity and pairing")
    largest = max(values.size for values in scores.arrays.values())
    check_room(f"a report of {len(scores.ports.query):,} heads", _PAIR_BYTES * largest, FEWER_SCORES)
    doubts = [check_same_model(scores, weights) if weights is not None else None]
    if labels is not None:
        doubts.append(labels.doubt(scores.provenance))
        labels = labels.for_model(scores.ports)
    doubts += check_tasks(scores, tasks)
    limits, matrices = Limits.of(scores), encode_matrices(scores)
    measured = effects_in(scores)
    above = rises_above_chance(scores)
    kinds = head_scores(scores, behaviour)
    edges, summaries = _edges_and_summaries(scores, limits, measured, above)
    evaluated = _evaluation(scores, labels)
    first = headline(scores, edges, summaries, measured, above)
    above |= any(entry["passing"]["any"] for entry in edges.values())
    found = [first, *find(scores, summaries, evaluated)] if above else []
    missing: dict[str, str] = {}
    payload: dict[str, Any] = {
        "schema": SCHEMA,
        "generator": {"name": "headspan", "version": headspan.__version__},
        "model": _model(scores, weights),
        "heads": {"query": list(map(str, scores.ports.query)), "kv": list(map(str, scores.ports.kv))},
        "ports": {str(role): [str(port) for port in scores.ports.of(role)] for role in scores.ports.ports},
        "served_by": {str(head): str(kv) for head, kv in scores.ports.served_by.items()},
        "nodes": [
            {"name": str(n), "kind": n.kind, "layer": n.layer, "position": n.position} for n in scores.ports.nodes
        ],
        "ranks": {str(role): ranks.tolist() for role, ranks in scores.role_ranks.items()},
        "centred": centred_roles(scores),
        "metrics": [_metric(scores, metric) for metric in metric_order(scores)],
        "pairings": [str(pairing) for pairing in _ordered(scores)],
        "compared": sum(int(np.count_nonzero(~np.isnan(values))) for values in scores.arrays.values()),
        "default_k": min(DEFAULT_K, limits.overall),
        "default_pairings": _opening_pairings(scores),
        "above_chance": above,
        "chance": chance_levels(scores),
        "effects": about_effects(measured),
        "limits": {"overall": limits.overall, "per_head": limits.per_head},
        "edges": edges,
        "matrices": matrices | encode_effects(measured),
        "distributions": {str(s.pairing): _distribution(scores, s) for s in summaries},
        "agreement": _agreement(scores, matrices),
        "labels": _labels(labels),
        "behaviour": kinds,
        "head_values": (values := head_values(scores, measured)),
        "bands": bands(scores, kinds, values),
        "evaluation": evaluated,
        "examples": example_sets(measured, tasks),
        "tasks": [encode_task(task, scores) for task in tasks],
        "headline": first._asdict(),
        "findings": [finding._asdict() for finding in found],
        "disagreements": disagreements(edges, metric_order(scores)[0], summaries),
        "tour": tour(scores, labels) if above else [],
        "notes": [
            without_paths(str(n))
            for n in (
                *filter(None, doubts),
                *(weights.notes if weights is not None else ()),
                *(measured.notes if measured is not None else ()),
            )
        ],
        "provenance": provenance_rows(scores, SCHEMA),
        "citation": CITATION,
        "palette": {"sequential": _colour_stops()},
        "looks": EDGE_LOOKS,
        "missing": missing,
    }
    payload["nulls"] = [
        n for n in ("reversed", "within", "random") if any(f"q_{n}" in e for e in payload["edges"].values())
    ]
    payload["hubs"] = _hubs(scores)
    payload["hub_pairings"] = [str(p) for p in FLOW_PAIRINGS if any(k.endswith(f"/{p}") for k in payload["hubs"])]
    missing["evaluation"] = (
        "No labels were given. Make the report with labels: a CSV file (head,label) or one of the built-in lists."
    )
    missing["distributions"] = "The comparison with random subspaces needs Projection Kernel scores of forward pairs."
    payload["tokens"], payload["details"] = _from_weights(scores, weights, tokens, progress, missing)
    payload["paths"] = strongest_paths(scores, weights)
    payload["angles_by_chance"] = chance_curves(scores, payload["details"])
    return payload


def _model(scores: Scores, weights: AttentionWeights | None) -> dict[str, Any]:
    table, about = scores.ports, scores.provenance
    layers = sorted({head.layer for head in table.query})
    reference = str(about.get("reference") or "arrays")
    return {
        "reference": without_paths(reference),
        "name": short_name(reference),
        "architecture": str(about.get("architecture") or (weights.architecture if weights is not None else "")),
        "folding": str(about.get("folding", "none")),
        "d_model": scores.d_model,
        "layers": layers,
        "n_heads": table.a_layer(Role.O),
        "n_kv_heads": table.a_layer(Role.V),
        "shared": any(head.kv for head in table.kv),
    }


def _metric(scores: Scores, metric: str) -> dict[str, Any]:
    widest = max(float(ranks.max(initial=1)) for ranks in scores.role_ranks.values())
    sizes = {role: values for (name, role), values in scores.sizes.items() if name == metric}
    largest = metric_of(metric).largest(widest, widest)
    if not metric_of(metric).known:
        held = [
            np.max(values, initial=0.0, where=~np.isnan(values))
            for (name, _), values in scores.arrays.items()
            if name == metric
        ]
        largest = float(max(held)) or 1.0
    about: dict[str, Any] = {
        "key": metric,
        "title": metric_of(metric).title,
        "short": metric_of(metric).short,
        "max": largest,
        "grows": metric_of(metric).grows_with_rank,
        "least": LEAST_INFLUENCE if metric_of(metric).observed else None,
    }
    if metric_of(metric).observed:  # its chance level and its largest value differ from pair to pair
        about["sizes"] = {str(role): [float(f"{size:.7g}") for size in values] for role, values in sizes.items()}
        about |= {"input": input_of(scores), "units": {str(role): unit for role, unit in UNITS.items()}}
        about["centred"] = bool((scores.provenance.get("statistics") or {}).get("centred"))
    return about


def _ordered(scores: Scores) -> list[Pairing]:
    """Pairings by source role, then target role, as the grid of heat maps shows them."""
    order = (*ROLES, *NODE_ROLES)
    return sorted(scores.pairings, key=lambda p: (order.index(p.source), order.index(p.target)))


# ------------------------------------------------------------------ statistics


def _opening_pairings(scores: Scores) -> list[str]:
    """The pairings drawn first: OQ, OK and OV, or OK alone where those would cover most of a small model.

    With nodes, also the pairings of nodes.
    """
    metric = metric_order(scores)[0]
    pairs = {p: len(scores[metric, p].forward().pairs()[2]) for p in FLOW_PAIRINGS if (metric, p) in scores}
    crowded = DEFAULT_K * len(pairs) > CROWDED * sum(pairs.values())
    if not pairs:
        return [str(p) for p in _ordered(scores)[:3]]
    keys = Pairing.parse("OK")
    opening = {keys} if crowded and keys in pairs else set(pairs)
    return [str(p) for p in _ordered(scores) if p in opening or (p in NODE_PAIRINGS and (metric, p) in scores)]


def _edges_and_summaries(
    scores: Scores, limits: Limits, measured: Effects | None, above: bool
) -> tuple[dict[str, Any], list[PairingSummary]]:
    """The kept edges by ``metric/pairing``, and every pairing against chance. Both share the slow tests."""
    edges: dict[str, Any] = {}
    found: dict[Pairing, PairingSummary] = {}
    for metric, pairing in scores.arrays:
        nulls = Nulls.of(scores, metric, pairing)
        edges[f"{metric}/{pairing}"] = edges_of(scores, metric, pairing, limits, measured, nulls, above)
        if metric_of(metric).random_null and not pairing.of_nodes:
            with suppress(HeadspanError):  # one layer only, or subspaces that fill the space
                found[pairing] = summary_of(scores, pairing, random_null=nulls.random, reversed_null=nulls.reversed)
    return edges, [found[pairing] for pairing in _ordered(scores) if pairing in found]


def _distribution(scores: Scores, summary: PairingSummary) -> dict[str, Any]:
    """Histogram over the bins of the KL divergence, without empty bins at either end."""
    values = scores[PK, summary.pairing].forward().pairs()[2]
    high = float(np.minimum(scores.ranks(summary.pairing.source).max(), scores.ranks(summary.pairing.target).max()))
    counts = np.histogram(np.clip(values, 0, high), np.linspace(0, high, _BINS + 1))[0]
    used = np.flatnonzero(counts)
    line = {key: finite(value) for key, value in summary._asdict().items() if key != "pairing"}
    best = scores[PK, summary.pairing].forward().top(1)[0]
    return line | {
        "best": {"source": str(best.source), "target": str(best.target), "score": best.score},
        "high": high,
        "bins": _BINS,
        "first": int(used[0]),
        "counts": counts[used[0] : used[-1] + 1].tolist(),
    }


def _agreement(scores: Scores, matrices: Mapping[str, Any]) -> dict[str, dict[str, list[float | None]]]:
    """Spearman correlation of every two similarities, for the pairings that the scatter plot can show."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for pairing in scores.pairings:
        drawn = [
            m for m in metric_order(scores) if matrices.get(f"{m}/{pairing}", {}).get("pairs", "layers") != "layers"
        ]
        for first, second in combinations(drawn, 2):
            sizes = {len(scores[m, pairing].forward().pairs()[2]) for m in (first, second)}
            if len(sizes) == 1 and sizes.pop() > 2:
                both = metric_agreement(scores, pairing, first, second)
                found.setdefault(str(pairing), {})[f"{first},{second}"] = [finite(value) for value in both]
    return found


def _hubs(scores: Scores) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for metric, pairing in scores.arrays:
        if pairing in FLOW_PAIRINGS and len(scores[metric, pairing].forward().pairs()[2]):
            hub = hubs(scores, pairing, metric)
            kinds = ("outlet", "inlet", "outlet_corrected", "inlet_corrected")
            found[f"{metric}/{pairing}"] = {kind: pack(getattr(hub, kind).values, "f4") for kind in kinds}
    return found


# ------------------------------------------------------- labels and evaluation


def _labels(labels: Labels | None) -> dict[str, Any] | None:
    if labels is None:
        return None
    return {
        "source": without_paths(labels.source),
        "count": len(labels),
        "colours": label_colours(labels.names),
        "words": {name: class_words(name) for name in labels.names},
        "heads": {str(head): list(names) for head, names in labels.classes.items()},
    }


def _evaluation(scores: Scores, labels: Labels | None) -> dict[str, Any] | None:
    if labels is None:
        return None
    found: dict[str, Any] = {"detection": [], "average_precision": [], "pr_auc": [], "roc_auc": [], "note": None}
    same_type = [p for p in SAME_TYPE_PAIRINGS if p in scores.pairings]
    for metric in metric_order(scores):
        title = metric_of(metric).title
        flow = [p for p in FLOW_PAIRINGS if (metric, p) in scores]
        try:
            if flow:
                measures: dict[str, Measure] = {"detection": "pr_auc", "average_precision": "average_precision"}
                for table, measure in measures.items():
                    estimates = detection(scores, labels, metric, pairing=flow, measure=measure)
                    found[table].append(_line(title, estimates))
            if same_type:
                classes = classification(scores, labels, metric, pairing=same_type).by_class
                for kind in ("pr_auc", "roc_auc"):
                    found[kind].append(_line(title, classes[kind]))
        except HeadspanError as error:
            found["note"] = without_paths(str(error))
    return found


def _line(metric: str, estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """The values of one similarity, and the average expected by chance."""
    values = {name: finite(estimate.value) for name, estimate in estimates.items()}
    return {"metric": metric, **values, "chance": finite(estimates["average"].chance)}


# ---------------------------------------------------------------- the rest


def _from_weights(
    scores: Scores, weights: AttentionWeights | None, tokens: int, progress: Update, missing: dict[str, str]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Tokens and pair details. Without an unembedding there are no tokens, and the page says why."""
    if weights is None:
        missing["tokens"] = "A result does not contain tokens. To show them, make the report from the model."
        missing["angles"] = (
            "A result does not contain angles. To show them, make the report from the model. For one pair run"
        )
        return None, None
    by_role, rows = None, None
    if tokens < 1:
        missing["tokens"] = "This report was made without tokens."
    else:
        try:
            rows = vocabulary_of(weights)
            by_role = tokens_by_role(scores, weights, rows, tokens, progress)
        except HeadspanError as error:
            missing["tokens"] = f"No tokens: {without_paths(str(error))}."
    details = pair_details(scores, weights, rows, progress)
    return by_role, details


def _colour_stops(count: int = 17) -> list[str]:
    """The colour map of the figures, sampled at even steps."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps[SEQUENTIAL](i / (count - 1))) for i in range(count)]
