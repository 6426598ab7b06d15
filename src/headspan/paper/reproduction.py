"""Recompute the paper's numbers for GPT-2 small and compare them with the published ones.

A number agrees if it rounds to the printed one. Some kinds of numbers have a stated tolerance beyond that, and those
that need it are counted separately, with a note: areas of one class that depend on nearly tied scores, KL of a
pair next to the edge of a bin, sums of PK, and head scores, which depend on random sequences.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from headspan.change.compare import shared_edges
from headspan.graphs.selection import wiring
from headspan.models.folding import fold
from headspan.models.weights import AttentionWeights
from headspan.paper.evaluation import evaluate, near_tie_range
from headspan.results.labels import Labels
from headspan.results.scores import Scores
from headspan.results.tabular import Tabular, csv_text, html_table, text_table
from headspan.scoring.inputs import given_weights
from headspan.scoring.run import score
from headspan.statistics.baseline import kl_divergence, summarise
from headspan.statistics.hubs import hubs
from headspan.subspaces.metrics import CS, DEFAULT_METRICS, PK, WEIGHT_METRICS
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.outputs import GENERATOR, MADE_BY, check_folder, writing
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, ROLES, SAME_TYPE_PAIRINGS, Pairing

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike

Tree = dict[str, Any]

AGREES, WITHIN_ROOM, DIFFERS, NOT_AVAILABLE = "agrees", "within tolerance", "differs", "not available"
VERDICTS = (AGREES, WITHIN_ROOM, DIFFERS, NOT_AVAILABLE)
# Printed decimals of each section; counts have none.
DIGITS = {
    "detection_pr_auc": 3,
    "classification_summary": 3,
    "classification_by_class": 3,
    "classification_by_pairing": 3,
    "pk_vs_cs_spearman": 3,
    "kl_random_vs_observed": 3,
    "pk_mean": 3,
    "inlet_top10": 2,
    "outlet_top10": 2,
    "top20_wiring_head_counts": 0,
    "top20_edges_shared_after_preprocessing": 0,
    "unembedding_norm_spearman": 3,
    "unembedding_mean_cosines": 3,
    "head_scores_top10": 3,
}
_ROUNDING = 1e-9

# How wrong a similarity computed in float32 may be, relatively. The definition followed to the letter in float32
# (singular values of the d×d matrix ABᵀ) was wrong by up to 9.6e-7 in the 90 largest Procrustes similarities of VV. Two
# numbers need this allowance, pr_auc.VV.procrustes of name_mover and of backup_name_mover, where pairs of neighbouring
# rank lie 3e-7 to 1e-6 apart; how the original was computed is not known.
_FLOAT32_ERROR = 1e-6
# The same for PK. Three numbers need it: the inlets OQ.1 and OV.9, which are 5.8e-6 and 6.4e-6 of themselves too large
# to round to the printed digit, and KL of OQ, where one pair of 9,504 lies 3.3e-6 of itself below the edge of a bin.
# Bases and products in float32 on a CPU are wrong by at most 6e-7 here; how the original was computed is not known.
_PK_ERROR = 7e-6
_MISSING = "not computable from these weights"
_SEQUENCES = 0.02  # head scores: other random sequences than the paper's


# The files of a reproduction, and their kinds.
FILES = {"reproduction.csv": "csv", "reproduction.md": "markdown", "ours.json": "json"}


class Row(NamedTuple):
    """One published number and ours, with a note if they agree by more than rounding."""

    section: str
    key: str
    published: str
    ours: str
    verdict: str
    note: str = ""


@dataclass(frozen=True, repr=False, eq=False)
class Reproduction(Tabular):
    """Every published number and ours, our numbers in the layout of the published ones, and remarks on the paper."""

    model: dict[str, Any]
    numbers: tuple[Row, ...]
    ours: Tree
    remarks: tuple[str, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One record per published number: section, key, published, ours, verdict, note."""
        return [number._asdict() for number in self.numbers]

    def _headline(self) -> str:
        return f"the paper's numbers from {self.model.get('reference')}: {self.summary}"

    def __repr__(self) -> str:
        """The counts, and the numbers that differ."""
        return text_table(self._headline(), [row for row in self.rows() if row["verdict"] == DIFFERS])

    def _repr_html_(self) -> str:
        return html_table(self.summary, self.by_section())

    @property
    def summary(self) -> str:
        """One line: how many agree to the printed digit, agree within tolerance, differ, are not available."""
        counts = Counter(row.verdict for row in self.numbers)
        return (
            f"{counts[AGREES]} agree to the printed digit, {counts[WITHIN_ROOM]} within a stated tolerance, "
            f"{counts[DIFFERS]} differ, {counts[NOT_AVAILABLE]} not available"
        )

    @property
    def success(self) -> bool:
        """False if a number differs."""
        return not any(row.verdict == DIFFERS for row in self.numbers)

    def by_section(self) -> list[dict[str, Any]]:
        """How many numbers of each section have each verdict."""
        lines: list[dict[str, Any]] = []
        for section in dict.fromkeys(row.section for row in self.numbers):
            counts = Counter(row.verdict for row in self.numbers if row.section == section)
            lines.append({"section": section, **{v: counts[v] for v in VERDICTS}})
        return lines

    @checked
    def write(self, folder: str | os.PathLike[str], *, force: bool = False) -> list[Path]:
        """``reproduction.csv``, ``reproduction.md`` and ``ours.json`` in a folder."""
        check_folder(folder, FILES, force=force)
        contents = {
            "reproduction.csv": csv_text(self.rows(), Row._fields),
            "reproduction.md": "\n".join(_markdown(self)) + "\n",
            "ours.json": json.dumps({"generator": GENERATOR, **self.ours}, indent=1) + "\n",
        }
        for name, text in contents.items():
            with writing(Path(folder) / name, FILES[name], force=force) as temporary:
                temporary.write_text(text, encoding="utf-8", errors="replace")
        return [Path(folder) / name for name in contents]


def published() -> Tree:
    """The published numbers, by section."""
    return json.loads((Path(__file__).parents[1] / "data" / "published.json").read_text(encoding="utf-8"))


@renamed(weights="model")
@checked
def reproduce(model: ModelLike, progress: Update | None = None) -> Reproduction:
    """Compute every published number that a model (GPT-2 small) allows and compare.

    Two sections need the unembedding and one needs a forward pass; if the checkpoint lacks what they
    need, their rows say so.
    """
    with progress_bar("computing", progress) as update, given_weights(model) as opened:
        return _reproduce(opened, update)


def _reproduce(weights: AttentionWeights, progress: Update) -> Reproduction:
    _check_is_gpt2_small(weights)
    scores, folded = _all_scores(weights, progress)
    ours, reasons = _from_scores(scores, folded), dict[str, str]()
    for sections, compute in _FROM_EMBEDDING:
        try:
            ours |= compute(weights, progress)
        except HeadspanError as error:
            reasons |= dict.fromkeys(sections, str(error))
    rows = [row for name in DIGITS for row in _compare(name, ours.get(name), reasons.get(name, ""), scores)]
    shared = sum(ours["top20_edges_shared_after_preprocessing"][CS].values())
    remarks = [
        "The paper's text counts 18 CS edges that stay in the top 20 after preprocessing; its own counts for OQ, OK "
        f"and OV are 1 + 4 + 11 = 16, and these weights give {shared}."
    ]
    remarks += filter(None, [Labels.load("gpt2").doubt(weights.provenance)])
    remarks += [
        f"{WITHIN_ROOM}: {row.section} {row.key} is {row.ours}, printed {row.published} ({row.note})"
        for row in rows
        if row.verdict == WITHIN_ROOM
    ]
    return Reproduction(weights.provenance, tuple(rows), ours, tuple(remarks))


def _check_is_gpt2_small(weights: AttentionWeights) -> None:
    seen = (len(weights.layers), weights.n_heads, weights.n_kv_heads, weights.d_model, weights.d_head("O"))
    if seen != (12, 12, 12, 768, 64):
        raise HeadspanError(
            "the published numbers are for GPT-2 small (12 layers of 12 heads, d_model 768, d_head 64), but "
            f"{weights.reference} has {seen[0]} layers of {seen[1]} heads, d_model {seen[3]}, d_head {seen[4]}"
        )


def _all_scores(weights: AttentionWeights, progress: Update) -> tuple[Scores, Scores]:
    """All similarities of the original weights, and those compared after folding."""
    scores = score(weights, DEFAULT_METRICS, "all", progress=progress)
    others = [metric for metric in WEIGHT_METRICS if metric not in scores.metrics]
    more = score(weights, others, FLOW_PAIRINGS + SAME_TYPE_PAIRINGS, progress=progress)
    both = replace(scores, arrays={**scores.arrays, **more.arrays})
    return both, score(fold(weights), DEFAULT_METRICS, FLOW_PAIRINGS, progress=progress)


def _from_scores(scores: Scores, folded: Scores) -> Tree:
    """All sections that depend on the attention weights alone."""
    evaluation = evaluate(scores, Labels.load("gpt2-ioi"), WEIGHT_METRICS)
    lines = {str(line.pairing): line for line in summarise(scores)}
    return {
        **evaluation.tables(),
        "pk_vs_cs_spearman": evaluation.spearman,
        "kl_random_vs_observed": {name: kl_divergence(scores, name) for name in lines},
        "pk_mean": {"QQ": lines["QQ"].mean, "VO": lines["VO"].mean, "random": lines["QQ"].random_mean},
        **hub_lists(scores),
        "top20_wiring_head_counts": {metric: _head_counts(scores, metric) for metric in DEFAULT_METRICS},
        "top20_edges_shared_after_preprocessing": {
            metric: {str(p): shared_edges(scores[metric, p], folded[metric, p]) for p in FLOW_PAIRINGS}
            for metric in DEFAULT_METRICS
        },
    }


def hub_lists(scores: Scores) -> Tree:
    """The strongest hubs as ``inlet_top10`` and ``outlet_top10``: pairing -> [[head, score], …]."""
    found = {str(pairing): hubs(scores, pairing, PK) for pairing in FLOW_PAIRINGS}
    return {
        f"{kind}_top10": {
            name: [[str(line.head), line.score] for line in getattr(hub, kind).top(10)] for name, hub in found.items()
        }
        for kind in ("inlet", "outlet")
    }


def _head_counts(scores: Scores, metric: str) -> dict[str, int]:
    counts = wiring(scores, metric=metric, k=20, labels=Labels.load("gpt2")).head_counts()
    return {"in_class_or_identity": counts.in_class, "out_of_class": counts.out_of_class}


def _from_unembedding(weights: AttentionWeights, progress: Update) -> Tree:
    from headspan.reading.tokens import norm_correlations, unembedding_cosines

    correlations = norm_correlations(weights, progress=progress)
    names = (*map(str, ROLES), "all")
    return {
        "unembedding_norm_spearman": {f: {r: list(by_role[r]) for r in names} for f, by_role in correlations.items()},
        "unembedding_mean_cosines": unembedding_cosines(weights),
    }


def _from_forward_pass(weights: AttentionWeights, progress: Update) -> Tree:
    from headspan.running.behaviour import behaviour

    weights.embedding()  # raises if the checkpoint has no embedding and so cannot be run
    measured = behaviour(weights.reference, bos="no", progress=progress)
    lists = {kind: [head for head, _ in heads] for kind, heads in published()["head_scores_top10"].items()}
    return {"head_scores_top10": {kind: [[h, measured[kind][h]] for h in heads] for kind, heads in lists.items()}}


_FROM_EMBEDDING = (
    (("unembedding_norm_spearman", "unembedding_mean_cosines"), _from_unembedding),
    (("head_scores_top10",), _from_forward_pass),
)


def _compare(section: str, ours: Tree | None, reason: str = "", scores: Scores | None = None) -> Iterator[Row]:
    """One row per published number of a section; ``ours`` is None if it could not be computed, with a ``reason``.

    scores: the scores behind ``ours``, for tolerances that depend on them; without scores there is no tolerance.
    """
    found = dict(_leaves(ours)) if ours is not None else {}
    digits = DIGITS[section]
    for key, (head, printed) in _leaves(published()[section]):
        row = Row(
            section, key, _text(head, printed, digits), "", NOT_AVAILABLE, reason or "not computable from these weights"
        )
        if key not in found or found[key][1] is None:
            yield row
            continue
        seen, value = found[key]
        row = row._replace(ours=_text(seen, value, digits + 1), verdict=DIFFERS, note="")
        room = (0.5 * 10.0**-digits if digits else 0.0) + _ROUNDING
        if seen == head and abs(value - printed) <= room:
            row = row._replace(verdict=AGREES)
        elif seen == head and section in ROOMS and scores is not None:
            low, high, why = ROOMS[section](key, value, scores)
            if low - room <= printed <= high + room:
                note = f"{why} put it anywhere from {low:.4f} to {high:.4f}"
                row = row._replace(verdict=WITHIN_ROOM, note=note)
        yield row


class Room(NamedTuple):
    """The tolerance of a number for a reason other than the rounding of the printed one."""

    low: float
    high: float
    why: str


def _near_tie_room(key: str, value: float, scores: Scores) -> Room:
    """The area of a single class if float32 errors may reorder nearly tied pairs; means have no tolerance."""
    kind, pairing, metric, name = key.split(".")
    if name == "average":
        return Room(value, value, "")
    ends = near_tie_range(scores, Labels.load("gpt2-ioi"), metric, pairing, name, _FLOAT32_ERROR)
    low, high = (float(end.pr[0] if kind == "pr_auc" else end.roc[0]) for end in ends)
    return Room(low, high, f"near-ties: score errors of {_FLOAT32_ERROR:g} (float32)")


def _kl_room(key: str, value: float, scores: Scores) -> Room:
    """KL if score errors may move pairs next to the edge of a bin into the neighbouring bin."""
    name = (PK, Pairing.parse(key))
    values = scores.arrays[name].astype(np.float64)
    errors = np.linspace(-_PK_ERROR, _PK_ERROR, 5)
    found = [kl_divergence(replace(scores, arrays={name: values * (1 + error)}), key) for error in errors]
    return Room(min(found), max(found), f"pairs at the edge of a bin: score errors of {_PK_ERROR:g}")


def _sum_room(key: str, value: float, scores: Scores) -> Room:
    return Room(value * (1 - _PK_ERROR), value * (1 + _PK_ERROR), f"score errors of {_PK_ERROR:g}")


def _sequence_room(key: str, value: float, scores: Scores) -> Room:
    return Room(value - _SEQUENCES, value + _SEQUENCES, "other random sequences")


ROOMS: dict[str, Callable[[str, float, Scores], Room]] = {
    "classification_by_pairing": _near_tie_room,
    "kl_random_vs_observed": _kl_room,
    "inlet_top10": _sum_room,
    "outlet_top10": _sum_room,
    "head_scores_top10": _sequence_room,
}
"""Why a number of a section may differ from the printed one, besides rounding."""


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, Any]]]:
    """(dotted key, (head, number)) of every number; head is empty except in lists of heads with scores."""
    if isinstance(tree, dict):
        for name, branch in cast("Tree", tree).items():
            yield from _leaves(branch, (*path, name))
    elif isinstance(tree, list):
        values = cast("list[Any]", tree)
        listed = isinstance(values[0], list)  # heads with scores; otherwise a mean and a standard deviation
        names = map(str, range(1, len(values) + 1)) if listed else ("mean", "sd")
        for name, value in zip(names, values, strict=True):
            yield ".".join((*path, name)), (value[0], value[1]) if listed else ("", value)
    else:
        yield ".".join(path), ("", tree)


def _text(head: str, value: float, digits: int) -> str:
    number = str(value) if isinstance(value, int) else f"{value:.{digits}f}"
    return f"{head} {number}".strip()


def _markdown(result: Reproduction) -> Iterator[str]:
    yield "# Published numbers for GPT-2 small, recomputed\n"
    yield f"<!-- {MADE_BY} -->\n"
    yield f"Model: {result.model.get('reference')}, fingerprint {result.model.get('fingerprint')}\n"
    yield f"**{result.summary}**\n"
    yield from (f"{remark}\n" for remark in result.remarks)
    for section in dict.fromkeys(row.section for row in result.numbers):
        yield f"\n## {section}\n"
        digits = DIGITS[section]
        yield f"Printed with {digits} decimals.\n" if digits else "Counts, which agree if they are equal.\n"
        yield "| key | published | ours | verdict | note |\n|---|---:|---:|---|---|"
        for row in (row for row in result.numbers if row.section == section):
            yield f"| {row.key} | {row.published} | {row.ours} | {row.verdict} | {row.note} |"
