"""Commands for the paper's science: hubs, baseline, evaluate, reproduce."""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.common import Csv, Force, Json, ModelRef, ResultRef, note, print_table, progress, show
from headspan.errors import HeadspanError

if TYPE_CHECKING:
    from headspan.analysis.baseline import PairingSummary, Significance
    from headspan.analysis.evaluation import Estimate, Evaluation
    from headspan.analysis.labels import Labels
    from headspan.heads import Pairing
    from headspan.scores import Scores


class NullChoice(str, Enum):
    random = "random"
    reversed = "reversed"


LabelsOption = Annotated[
    str | None,
    typer.Option("--labels", help="Head classes: gpt2-ioi, gpt2-identity, gpt2 (both), or a CSV file head,label."),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (hubs, baseline, evaluate, reproduce):
        app.command()(command)


def hubs(
    reference: ResultRef,
    pairings: Annotated[str, typer.Option(help="Pairings, like OK or OQ,OK; flow means OQ,OK,OV.")] = "flow",
    metric: Annotated[str, typer.Option(help="Similarity.")] = "pk",
    top: Annotated[int, typer.Option(help="Heads per list.", min=1)] = 10,
    corrected: Annotated[
        bool, typer.Option("--corrected", help="Rank by the z-score corrected for the number of candidates.")
    ] = False,
    labels: LabelsOption = None,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """Heads that many others write to (inlets) or read from (outlets).

    \b
    Examples:
      headspan hubs gpt2
      headspan hubs result.safetensors --pairings OK --corrected --labels gpt2
    """
    from headspan.analysis.hubs import hubs as find_hubs
    from headspan.heads import parse_pairings
    from headspan.scoring.run import scores_of

    chosen = parse_pairings(pairings)
    with progress("scoring") as update:
        scores = scores_of(reference, [metric], chosen, progress=update)
    classes = _labels(labels)
    _tell_doubt(classes, scores)
    rows: list[dict[str, Any]] = []
    lists: dict[str, dict[str, list[list[Any]]]] = {}
    for pairing in chosen:
        found = find_hubs(scores, pairing, metric)
        for kind, raw, z in (
            ("inlet", found.inlet, found.inlet_corrected),
            ("outlet", found.outlet, found.outlet_corrected),
        ):
            best = (z if corrected else raw).top(top)
            name = f"{kind}_corrected_top{top}" if corrected else f"{kind}_top{top}"
            lists.setdefault(name, {})[str(pairing)] = [[line.head, line.score] for line in best]
            for line in best:
                row = {"kind": kind, "pairing": str(pairing), "rank": line.rank, "head": str(line.head)}
                row |= {"score": raw.of(line.head), "corrected": z.of(line.head)}
                rows.append(row | ({"labels": " ".join(classes.of(line.head))} if classes else {}))
    formats = {"score": ".2f", "corrected": ".1f"}
    print_table(rows, title=f"hubs by {metric}", formats=formats, as_json=json, as_csv=csv, json_value=lists)


def baseline(
    reference: ResultRef,
    pairing: Annotated[
        str | None, typer.Option(help="List the pairs of this pairing instead of one line per pairing.")
    ] = None,
    null: Annotated[
        NullChoice | None,
        typer.Option(help="With --pairing: random subspaces, or pairs in the direction no information can flow."),
    ] = None,
    top: Annotated[int, typer.Option(help="Pairs to list; 0 lists all.", min=0)] = 20,
    q: Annotated[float, typer.Option(help="False-discovery rate for counting significant pairs.", min=0, max=1)] = 0.05,
    kl: Annotated[
        bool, typer.Option("--kl", help="Add the paper's KL(random ‖ observed), where it means something.")
    ] = False,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """How far are Projection Kernels from chance?

    One line per pairing: the shift of the mean in random standard deviations, and the share of pairs above the 99.9 %
    point of random subspaces. With --pairing: z, p and q of its pairs.

    \b
    Examples:
      headspan baseline gpt2
      headspan baseline gpt2 --pairing OK --null reversed --top 30
    """
    from headspan.analysis.baseline import significance, summarise
    from headspan.heads import Pairing
    from headspan.scoring.run import scores_of

    one = Pairing.parse(pairing) if pairing else None
    _check_baseline(one, null, kl)
    wanted = "all" if one is None else list(dict.fromkeys([one, Pairing(one.target, one.source)]))
    with progress("scoring") as update:
        scores = scores_of(reference, ["pk"], wanted, progress=update)
    if one is not None:
        against = (null or NullChoice.random).value
        result = significance(scores, one, null=against)
        rows = _pair_rows(result, top)
        title = f"pk {one} against the {against} null: {result.count(q)} pairs at a false-discovery rate of {q:g}"
        formats = {"score": ".3f", "z": ".2f", "p": ".3g", "q": ".3g"}
        print_table(rows, title=title, formats=formats, as_json=json, as_csv=csv)
        if result.note:
            note(result.note)
        if not result.count(q):
            note(result.nothing(q))
        return
    rows = [_baseline_row(line, kl) for line in summarise(scores, q, kl)]
    formats = dict.fromkeys(("mean", "sd", "random_mean", "random_sd", "kl"), ".3f")
    formats |= {"pairs": ",d", "shift": "+.2f", "above": ".1%"}
    title = f"pk of forward pairs against chance; significant pairs at a false-discovery rate of {q:g}"
    print_table(rows, title=title, formats=formats, as_json=json, as_csv=csv)


def _baseline_row(line: PairingSummary, kl: bool) -> dict[str, Any]:
    """One line of the table; a KL that leaves out most of the random mass is not shown."""
    row = line._asdict() | {"pairing": str(line.pairing), "kl": None if math.isnan(line.kl) else line.kl}
    return row if kl else {name: value for name, value in row.items() if name != "kl"}


def _check_baseline(pairing: Pairing | None, null: NullChoice | None, kl: bool) -> None:
    """Options that would change nothing are refused."""
    if pairing is None and null is not None:
        raise HeadspanError(
            f"--null {null.value} chooses the null for the pairs of one pairing, and the table of all pairings counts "
            "both: add --pairing, for example --pairing OK"
        )
    if pairing is not None and kl:
        raise HeadspanError("--kl is one number per pairing and has no place in a list of pairs: leave out --pairing")


def evaluate(
    reference: ResultRef,
    labels: Annotated[str, typer.Option(help="gpt2-ioi, gpt2-identity, gpt2 (both), or a CSV file head,label.")],
    metrics: Annotated[
        str | None, typer.Option(help="Similarities, or all; those of the result, or pk,cs, by default.")
    ] = None,
    bootstrap: Annotated[int, typer.Option(help="Draws for the 95 % intervals; 0 for none.", min=0)] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the draws.", min=0)] = 0,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """How well similarities find labelled heads and tell classes of heads apart.

    \b
    Examples:
      headspan evaluate gpt2 --labels gpt2-ioi --metrics all
      headspan evaluate result.safetensors --labels my-heads.csv --json
    """
    from headspan.analysis.evaluation import evaluate as run
    from headspan.analysis.labels import Labels
    from headspan.heads import FLOW_PAIRINGS, SAME_TYPE_PAIRINGS
    from headspan.scores import is_result
    from headspan.scoring.metrics import parse_metrics
    from headspan.scoring.run import scores_of

    classes = Labels.load(labels)
    chosen = parse_metrics(metrics) if metrics else (None if is_result(reference) else ("pk", "cs"))
    with progress("scoring") as update:
        scores = scores_of(reference, chosen or (), FLOW_PAIRINGS + SAME_TYPE_PAIRINGS, progress=update)
    _tell_doubt(classes, scores)
    result = run(scores, classes, chosen, bootstrap=bootstrap, seed=seed, say=note)
    if json or csv:
        tables = result.tables() | ({"pk_vs_cs_spearman": result.spearman} if result.spearman else {})
        if bootstrap:
            tables["intervals"] = result.tables(lambda estimate: [estimate.low, estimate.high])
        print_table(result.rows(), as_json=json, as_csv=csv, json_value=tables)
        return
    _print_evaluation(result)


def reproduce(
    model: ModelRef,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables as CSV, Markdown and JSON.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="List every number, not only those to look at.")] = False,
    force: Force = False,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """Compute the paper's numbers for GPT-2 small again and compare them with the published ones.

    Exit code 1 if a number differs.

    \b
    Examples:
      headspan reproduce gpt2
      headspan reproduce path/to/gpt2 --out reproduction
    """
    from headspan.analysis.reproduction import AGREES, DIFFERS, FILES, NOT_AVAILABLE
    from headspan.analysis.reproduction import reproduce as run
    from headspan.models.weights import open
    from headspan.system.outputs import check_folder

    if out is not None:
        check_folder(out, FILES, inputs=[model], force=force)
    with open(model) as weights, progress("computing") as update:
        result = run(weights, update)
    rows = [row._asdict() for row in result.rows]
    if json or csv:
        print_table(rows, as_json=json, as_csv=csv)
    else:
        print_table(result.by_section(), title="published numbers, by section")
        special = [row for row in rows if row["verdict"] == DIFFERS or (row["verdict"] == AGREES and row["note"])]
        if everything or special:
            print_table(rows if everything else special, title="every number" if everything else "look at these")
    # With --json or --csv the output is for a program: remarks go to stderr.
    tell = note if json or csv else show
    for reason in dict.fromkeys(row["note"] for row in rows if row["verdict"] == NOT_AVAILABLE):
        tell(f"not available: {reason}")
    for remark in result.remarks:
        tell(remark)
    if out is not None:
        tell("written: " + ", ".join(map(str, result.write(out, force=force))))
    tell(result.summary)
    if not result.success:
        raise typer.Exit(1)


def _labels(name: str | None) -> Labels | None:
    from headspan.analysis.labels import Labels

    return Labels.load(name) if name else None


def _tell_doubt(labels: Labels | None, scores: Scores) -> None:
    if labels is not None and (doubt := labels.doubt(scores.provenance)):
        note(doubt)


def _pair_rows(result: Significance, top: int) -> list[dict[str, Any]]:
    """The pairs with the largest scores, all of them if top is 0."""
    matrix = result.matrix
    edges = matrix.top(top or matrix.values.size)
    if not edges:
        raise HeadspanError(f"{matrix.pairing} has no pairs in this result: the baseline needs heads in two layers")
    position = {head: i for i, head in enumerate(matrix.sources)}, {head: i for i, head in enumerate(matrix.targets)}
    rows = []
    for edge in edges:
        at = position[0][edge.source], position[1][edge.target]
        row: dict[str, Any] = {"rank": edge.rank, "source": str(edge.source), "target": str(edge.target)}
        row |= {"score": edge.score, "z": float(result.z[at]), "p": float(result.p[at]), "q": float(result.q[at])}
        rows.append(row)
    return rows


def _print_evaluation(result: Evaluation) -> None:
    """Tables for reading: detection by two measures, PR-AUC and ROC-AUC by class averaged over pairings."""
    tables = [
        ("detection: PR-AUC of finding labelled heads", result.detection),
        ("detection: average precision of finding labelled heads", result.average_precision),
    ]
    for kind, name in (("pr_auc", "PR-AUC"), ("roc_auc", "ROC-AUC")):
        by_metric = {metric: c.by_class[kind] for metric, c in result.classification.items()}
        if by_metric:
            tables.append((f"classification: {name} by class, mean over QQ, KK, VV, OO", by_metric))
    for title, by_metric in tables:
        first_column = "pairing" if title.startswith("detection") else "class"
        names = next(iter(by_metric.values()))  # chance is the same for all of them, but for ties between scores
        cells = {
            name: {m: _with_interval(e[name]) for m, e in by_metric.items()} | {"chance": f"{first.chance:.3f}"}
            for name, first in names.items()
        }
        print_table([{first_column: name, **row} for name, row in cells.items()], title=title)
    if result.spearman:
        rows = [{"pairs": name, **rhos} for name, rhos in result.spearman.items()]
        print_table(rows, title="Spearman's ρ of pk and cs", formats=dict.fromkeys(("OQ", "OK", "OV"), ".3f"))


def _with_interval(estimate: Estimate) -> str:
    interval = "" if math.isnan(estimate.low) else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.3f}{interval}"
