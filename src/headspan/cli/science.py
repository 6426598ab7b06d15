"""``headspan hubs``, ``baseline``, ``evaluate`` and ``reproduce``: the paper's analyses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from headspan.cli.common import (
    Force,
    LabelsOption,
    Listing,
    Metric,
    Metrics,
    ModelRef,
    NullOption,
    Pairings,
    ResultRef,
    Table,
    k_option,
    listing,
    out_option,
    progress,
)
from headspan.vocabulary.errors import HeadspanError, refuse_ignored

if TYPE_CHECKING:
    from headspan.paper.evaluation import Estimate, Evaluation
    from headspan.paper.reproduction import Reproduction

_SIDE_BY_SIDE = 2  # similarities whose areas and intervals fit in one table


def register(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (hubs, baseline, evaluate, reproduce):
        app.command(command.__name__)(listing(command))


def hubs(
    scores: ResultRef,
    pairing: Pairings = None,
    metric: Metric = None,
    k: Annotated[int, k_option("Heads per list.")] = 10,
    corrected: Annotated[
        bool, typer.Option("--corrected", help="Rank by the z-score corrected for the number of candidates.")
    ] = False,
    labels: LabelsOption = None,
) -> Listing:
    """List heads that many others write to (inlets) or read from (outlets).

    \b
    Examples:
      headspan hubs gpt2
      headspan hubs result.safetensors --pairing OK --corrected --labels gpt2
    """
    from headspan.results.choices import given_labels
    from headspan.scoring.inputs import given_scores
    from headspan.statistics.hubs import HubLists
    from headspan.statistics.hubs import hubs as find_hubs
    from headspan.subspaces.metrics import PK
    from headspan.vocabulary.heads import parse_pairings

    metric = metric or PK
    result = given_scores(scores, [metric], parse_pairings(pairing or "flow"))
    classes = given_labels(labels, result)
    found = find_hubs(result, pairing or ["flow"], metric)
    assert isinstance(found, HubLists)
    rows = found.rows(k, corrected)
    if classes is not None:
        rows = [row | {"labels": classes.joined(row["head"])} for row in rows]
    return Listing(rows, f"hubs by {metric}", {"score": ".2f", "corrected": ".1f"})


def baseline(
    scores: ResultRef,
    pairing: Pairings = None,
    null: NullOption = None,
    k: Annotated[int | None, k_option("Pairs to list per --pairing; 0 lists all. [default: 20]", 0)] = None,
    q: Annotated[float, typer.Option(help="False-discovery rate for counting significant pairs.", min=0, max=1)] = 0.05,
    kl: Annotated[
        bool, typer.Option("--kl", help="Add the paper's KL(random ‖ observed), where it is defined.")
    ] = False,
) -> Listing:
    """Compare Projection Kernels with chance.

    One row per pairing: the shift of the mean in random standard deviations, and the fraction of pairs above the 99.9 %
    point of random subspaces. With --pairing: z, p and q of its pairs.

    \b
    Examples:
      headspan baseline gpt2
      headspan baseline gpt2 --pairing OK --null reversed -k 30
    """
    from headspan.statistics.baseline import baseline as summary
    from headspan.statistics.baseline import remarks

    if pairing and kl:
        raise HeadspanError(
            "--kl gives one number per pairing, so it cannot be shown in a list of pairs. Leave out --pairing"
        )
    if pairing:
        return _pairs_against(scores, pairing, null or "random", 20 if k is None else k, q)
    refuse_ignored("without --pairing", k=k)
    if null is not None:
        raise HeadspanError(
            f"--null {null} needs --pairing; without it the table shows every null. Add, for example, --pairing OK"
        )
    with progress("scoring") as update:
        found = summary(scores, q, kl, update)
    rows = found.rows()
    formats = dict.fromkeys(("mean", "sd", "random_mean", "random_sd", "kl"), ".3f")
    formats |= {"shift": "+.2f", "above": ".1%"}
    formats |= dict.fromkeys(("pairs", "random", "reversed", "within"), ",d")
    title = (
        "pk of forward pairs against chance; number significant at a false-discovery rate of "
        f"{q:g} against random subspaces, reversed pairs, and within the same two layers"
    )
    wide = ("sd", "random_sd", "both_significant", "direction_p")  # left out so that the table fits a terminal
    shown = [{n.removesuffix("_significant"): v for n, v in row.items() if n not in wide} for row in rows]
    return Listing(rows, tables=[(title, shown, formats)], remarks=remarks(found))


def _pairs_against(reference: str, pairings: list[str], null: str, k: int, q: float) -> Listing:
    """The pairs with the largest scores of some pairings, all of them if k is 0."""
    from headspan.scoring.inputs import given_scores
    from headspan.statistics.significance import Null, significance
    from headspan.subspaces.metrics import PK
    from headspan.vocabulary.heads import Pairing, parse_pairings

    chosen = parse_pairings(pairings)
    wanted = parse_pairings([*chosen, *(Pairing(p.target, p.source) for p in chosen)])
    if null not in get_args(Null):
        raise HeadspanError(f"--null is {', '.join(get_args(Null)[:-1])} or {get_args(Null)[-1]}, not {null!r}")
    scores = given_scores(reference, [PK], wanted)
    rows: list[dict[str, Any]] = []
    counts: list[str] = []
    remarks: list[str] = []
    for one in chosen:
        result = significance(scores, one, null=null)  # type: ignore[arg-type]
        rows += result.rows(k or None)
        counts.append(f"{result.count(q):,} pairs of {one}")
        remarks += [result.note] if result.note else []
        remarks += [result.agreement(q)] if result.count(q) and result.agreement(q) else []
        remarks += [] if result.count(q) else [result.nothing(q)]
    if not rows:
        raise HeadspanError(f"{chosen[0]} has no pairs in this result. The baseline needs heads in at least two layers")
    title = f"pk against the {null} null: {', '.join(counts)} at a false-discovery rate of {q:g}"
    tail = ["p = 0 means a value below the range of double precision"] if any(r["p"] == 0 for r in rows) else []
    return Listing(
        rows,
        title,
        {"score": ".3f", "z": ".2f", **dict.fromkeys(("p", "q", "q_within"), ".3g")},
        tail=tail,
        remarks=remarks,
    )


def evaluate(
    scores: ResultRef,
    labels: LabelsOption = None,
    metric: Metrics = None,
    circuit: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Instead of labels, a circuit of headspan, EAP-IG or MIB: do its edges overlap more?"
        ),
    ] = None,
    bootstrap: Annotated[int, typer.Option(help="Bootstrap draws for the 95 % intervals; 0 for none.", min=0)] = 500,
    seed: Annotated[int | None, typer.Option(help="Seed of the bootstrap. [default: 0]", min=0)] = None,
) -> Listing:
    """Measure how well similarities find labelled heads, separate classes of heads, or agree with a circuit.

    With --circuit: exceeds is the fraction of other pairs of the same two layers that an edge of the circuit exceeds,
    on average (0.5 by chance). p: how often circuits of the same shape on random heads exceed as much.

    \b
    Examples:
      headspan evaluate gpt2 --labels gpt2-ioi --metric all
      headspan evaluate result.safetensors --labels my-heads.csv --json
      headspan evaluate result.safetensors --circuit eap_graph.json
    """
    from headspan.paper.evaluation import evaluate as run

    if circuit is not None:
        if labels is not None:
            raise HeadspanError("--labels and --circuit exclude each other. Give only one of them")
        return _circuit_overlap(scores, circuit, metric, bootstrap, seed)
    if labels is None:
        raise HeadspanError(
            "evaluate needs labelled heads. Add --labels gpt2-ioi, --labels behaviour or a CSV file (head,label), "
            "or give a --circuit"
        )
    with progress("scoring and drawing heads") as update:
        result = run(scores, labels, metric, bootstrap=bootstrap, seed=seed, progress=update)
    return Listing(result.rows(), tables=_evaluation_tables(result))


def _circuit_overlap(scores: str, circuit: str, metric: list[str] | None, bootstrap: int, seed: int | None) -> Listing:
    from headspan.statistics.circuit_overlap import circuit_overlap

    with progress("scoring") as update:
        found = circuit_overlap(scores, circuit, metric, bootstrap=bootstrap, seed=seed, progress=update)
    rows = found.rows()
    shown = [
        {"metric": row["metric"], "pairing": row["pairing"],
         "exceeds [95 % interval]": _in_brackets(row["exceeds"], row["low"], row["high"]),
         "p": row["p"], "edges": row["compared"]}
        for row in rows
    ]  # fmt: skip
    return Listing(rows, tables=[(found._headline(), shown, {"p": ".2g"})], tail=found.remarks())


def reproduce(
    model: ModelRef,
    out: Annotated[Path | None, out_option("Folder for the tables as CSV, Markdown and JSON.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every number, not only those that need attention.")
    ] = False,
    force: Force = False,
) -> Listing:
    """Recompute the paper's numbers for GPT-2 small and compare them with the published ones.

    Numbers that agree to the printed digit are counted separately from those that agree only within a stated tolerance,
    which are listed. The exit code is 1 if a number differs.

    \b
    Examples:
      headspan reproduce gpt2
      headspan reproduce path/to/gpt2 --out reproduction
    """
    from headspan.paper.reproduction import FILES, NOT_AVAILABLE
    from headspan.paper.reproduction import reproduce as run
    from headspan.system.outputs import check_folder

    if out is not None:
        check_folder(out, FILES, inputs=[model], force=force)

    with progress("computing") as update:
        result = run(model, update)
    rows = result.rows()
    reasons = dict.fromkeys(row.note for row in result.numbers if row.verdict == NOT_AVAILABLE)
    remarks = [*(f"not available: {reason}" for reason in reasons), *result.remarks]
    if out is not None:
        remarks.append("written: " + ", ".join(map(str, result.write(out, force=force))))
    tables = _reproduction_tables(result, everything)
    return Listing(rows, tables=tables, remarks=[*remarks, result.summary], code=0 if result.success else 1)


def _reproduction_tables(result: Reproduction, everything: bool) -> list[Table]:
    """The number of matches per section, and the numbers of each section that need attention."""
    from headspan.paper.reproduction import DIFFERS, WITHIN_ROOM

    tables: list[Table] = [("published numbers, by section", result.by_section(), {})]
    for section in dict.fromkeys(row.section for row in result.numbers):
        rows = [row for row in result.numbers if row.section == section]
        if not everything:
            rows = [row for row in rows if row.verdict in (DIFFERS, WITHIN_ROOM)]
        lines = [{n: v for n, v in row._asdict().items() if n != "section"} for row in rows]
        if not any(row.note for row in rows):
            lines = [{n: v for n, v in line.items() if n != "note"} for line in lines]
        if lines:
            tables.append((section if everything else f"{section}: numbers that need attention", lines, {}))
    return tables


def _evaluation_tables(result: Evaluation) -> list[Table]:
    """Tables for reading: detection, PR-AUC and ROC-AUC by class averaged over pairings, agreement of pk and cs."""
    found = [
        ("detection: PR-AUC of finding labelled heads", "pairing", result.detection),
        ("detection: average precision of finding labelled heads", "pairing", result.average_precision),
    ]
    for kind, name in (("pr_auc", "PR-AUC"), ("roc_auc", "ROC-AUC")):
        by_metric = {metric: c.by_class[kind] for metric, c in result.classification.items()}
        if by_metric:
            found.append((f"classification: {name} by class, mean over QQ, KK, VV, OO", "class", by_metric))
    tables: list[Table] = []
    for title, first_column, by_metric in found:
        names = next(iter(by_metric.values()))
        if len(by_metric) <= _SIDE_BY_SIDE:
            # Chance is the same for all of them, except for ties between scores.
            rows = [
                {first_column: n, **{m: _with_interval(e[n]) for m, e in by_metric.items()}, "chance": first.chance}
                for n, first in names.items()
            ]
        else:
            pairs = [(n, m, e[n]) for n in names for m, e in by_metric.items()]
            rows = [
                {first_column: n, "metric": m, "area [95 % interval]": _with_interval(e), "chance": e.chance}
                for n, m, e in pairs
            ]
        tables.append((title, rows, {"chance": ".3f"}))
    if result.spearman:
        rows = [{"pairs": name, **rhos} for name, rhos in result.spearman.items()]
        tables.append(("Spearman's ρ of pk and cs", rows, dict.fromkeys(("OQ", "OK", "OV"), ".3f")))
    return tables


def _with_interval(estimate: Estimate) -> str:
    return _in_brackets(estimate.value, estimate.low, estimate.high)


def _in_brackets(value: float, low: float, high: float) -> str:
    return f"{value:.3f}" if math.isnan(low) else f"{value:.3f} [{low:.3f}, {high:.3f}]"
