"""``headspan score``, ``top`` and ``compare``: commands that make and read result files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.common import (
    Fold,
    Force,
    FromOption,
    LabelsOption,
    Listing,
    Metrics,
    ModelRef,
    Pairings,
    ResultRef,
    ToOption,
    ends_in_words,
    k_option,
    listing,
    note,
    open_model,
    out_option,
    progress,
)
from headspan.cli.nodes import NO_NODES, NodeWords, node_options
from headspan.cli.tables import EFFECT_FORMATS, effect_columns
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headspan.results.observations import Statistics
    from headspan.results.scores import Scores


def register(app: typer.Typer) -> None:
    app.command("score")(node_options(score))
    app.command("top")(listing(top))
    app.command("compare")(listing(compare))


def score(
    model: ModelRef,
    out: Annotated[Path, out_option("The result file to write (.safetensors).")],
    metric: Metrics = None,
    pairing: Pairings = None,
    pairs: Annotated[
        str,
        typer.Option(help="Pairs to score: default (forward; same-type for QQ KK VV OO), forward, same-type or all."),
    ] = "default",
    screen: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help="Keep only the K strongest pairs of each pairing by pk, for very large models.",
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="With --screen: probability allowed for a wrong certificate. [default: 0.01]")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="With --screen: seed of the random sketches. [default: derived from the weights]"),
    ] = None,
    nodes: NodeWords = NO_NODES,
    stats: Annotated[
        Path | None, typer.Option(help="For influence: statistics of a run, from headspan observe.")
    ] = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="For influence: run the model now on a built-in text instead of --stats.")
    ] = False,
    fold: Fold = False,
    memory: Annotated[
        str | None, typer.Option(help="Memory limit, for example 2GB. [default: half of free memory]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps; cuda+bf16 multiplies in bfloat16.")] = "cpu",
    route: Annotated[str | None, typer.Option(help="gram or direct. [default: the cheaper one]")] = None,
    dask: Annotated[str | None, typer.Option(help="Address of a Dask scheduler, or local.")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download whole files of a hub model, not only the attention tensors.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run of the same command.")] = True,
    force: Force = False,
) -> None:
    """Score all pairs of heads and write a result file.

    Nodes (--nodes, --sae, --adapter, --neurons, --tokens; 2,000 at most) are scored with the heads: OR, WQ, WK, WV, WR.

    \b
    Examples:
      headspan score gpt2 --out gpt2.safetensors
      headspan score model.gguf --out r.safetensors --metric all --pairing flow
      headspan score gpt2 --out r.safetensors --nodes probe.npy@8 --neurons L3:17
      headspan score demo --out demo.safetensors --metric pk,influence --pairing flow --observe
      headspan score meta-llama/Llama-3.1-70B --out r.safetensors --screen 100 --pairing flow
    """
    import numpy as np

    from headspan.scoring.run import score as run
    from headspan.subspaces.metrics import DEFAULT_METRICS, OBSERVED_METRICS, PK, check_statistics, parse_metrics
    from headspan.system.outputs import check_output

    if route not in (None, "gram", "direct"):
        raise HeadspanError(f"unknown route {route!r}. Choose gram or direct")
    check_result_name(out)
    check_output(out, "result", inputs=[model, stats, *nodes.inputs()], force=force)
    if stats is not None and observe:
        raise HeadspanError("--stats and --observe exclude each other. Give only one of them")
    usual = (PK,) if screen else DEFAULT_METRICS
    usual = (*usual, *OBSERVED_METRICS) if stats is not None or observe else usual
    names = parse_metrics(metric or usual, observed=stats is not None or observe)
    check_statistics(names, stats is not None or observe, argument="observe" if observe else "stats")
    weights = open_model(model, fold, download=download)
    statistics: Any = _observed(model) if observe else stats
    with progress("scoring") as update:
        scores = run(
            weights,
            names,
            pairing or "all",
            pairs,  # type: ignore[arg-type]
            nodes=nodes.given(),
            stats=statistics,
            screen=screen,
            delta=delta,
            seed=seed,
            out=out,
            force=force,
            resume=resume,
            memory=memory,
            route=route,  # type: ignore[arg-type]
            device=device,
            dask=dask,
            progress=update,
        )
    pairs_scored = sum(row.size - int(np.isnan(row).sum()) for values in scores.arrays.values() for row in values)
    count = len(scores.pairings)
    pairings = "1 pairing" if count == 1 else f"{count} pairings"
    note(f"{out}: {', '.join(scores.metrics)} for {pairings}, {pairs_scored:,} scores")


def _observed(model: str) -> Statistics:
    from headspan.running.observe import observe as run

    with progress("observing") as update:
        return run(model, progress=update)


def check_result_name(path: Path) -> None:
    """Check the file's ending: results are recognised by it when they are read."""
    if path.suffix != ".safetensors":
        raise HeadspanError(f"the name of a result file must end in .safetensors, not {path.name!r}")


def top(
    scores: ResultRef,
    pairing: Pairings = None,
    k: Annotated[int, k_option("Pairs per pairing.", 0)] = 20,
    metric: Metrics = None,
    from_: FromOption = None,
    to: ToOption = None,
    head: Annotated[str | None, typer.Option(help="Only pairs that contain this head (L5H1) or port (L5H1.K).")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Only pairs with a head of this layer.")] = None,
    label: Annotated[str | None, typer.Option(help="Only pairs with a head of this class of --labels.")] = None,
    side: Annotated[
        str | None,
        typer.Option(help="Whether --head, --layer or --label is the source or the target. [default: either]"),
    ] = None,
    labels: LabelsOption = None,
) -> Listing:
    """List the pairs of heads with the largest scores; for pk, with z against random subspaces.

    \b
    Examples:
      headspan top gpt2.safetensors --pairing OK -k 20
      headspan top gpt2.safetensors --head L5H1 -k 5
      headspan top gpt2.safetensors --to L5H1.K --from L4
      headspan top gpt2.safetensors --labels gpt2-ioi --label induction --side target
    """
    from headspan.graphs.strongest import around
    from headspan.graphs.strongest import top as strongest
    from headspan.results.choices import given_labels, given_metrics
    from headspan.results.effects_fields import with_effects
    from headspan.results.labels import classes_by_name, with_labels
    from headspan.results.matrix import edge_row
    from headspan.scoring.inputs import given_scores
    from headspan.statistics.influence_units import with_units
    from headspan.subspaces.metrics import PK
    from headspan.vocabulary.heads import parse_pairings

    if head is not None and any(given is not None for given in (layer, label, from_, to)):
        raise HeadspanError("--head cannot be combined with --layer, --label, --from or --to. Leave them out")
    if side not in (None, "source", "target"):
        raise HeadspanError(f"--side is source or target, not {side!r}")
    result = given_scores(scores, metric or PK, parse_pairings(pairing or "flow"))
    names = given_metrics(",".join(metric or [PK]).split(","), result)
    classes = given_labels(labels, result)
    where = f" of pairs with {head}" if head is not None else _where(from_, to, layer, label, side)
    if head is not None and side is None:
        found = around(result, head, k, names, pairing)
        if found.note:
            note(found.note)
        rows = found.rows()
    else:
        if head is not None:
            from_, to, side = ([head], None, None) if side == "source" else (None, [head], None)
        edges = strongest(
            result, pairing or "flow", k, names,
            from_=from_, to=to, layer=layer, label=label, labels=classes, side=side,  # type: ignore[arg-type]
        )  # fmt: skip
        rows = list(map(edge_row, edges))
    if not rows and result.ports.one_layer:
        note(f"{result.ports.one_layer}. For pairs within it add --pairing QQ,KK,VV,OO")
    rows = with_labels(with_effects(with_units(_with_z(rows, result), result), result), classes_by_name(classes))
    formats = {"score": ".4f", "z": ".2f", "expected": ".4f", "ratio": ".1f", "amount": ".3g", **EFFECT_FORMATS}
    tables = [(f"largest {name} scores{where}", _shown(rows, name), formats) for name in names]
    spare = ("percentile_in_layers", "effect_unit", "unit", "expected", "amount")
    return Listing(rows, tables=tables, spare=spare, tail=_about_influence(result, names))


def _where(
    from_: list[str] | None, to: list[str] | None, layer: int | None, label: str | None, side: str | None
) -> str:
    """Which pairs are listed, for the title."""
    ends = ends_in_words(from_, to)
    one = {"source": "that start in", "target": "that end in"}.get(side or "", "with a head of")
    either = [f"{one} layer {layer}"] if layer is not None else []
    either += [f"{one} class {label}"] if label is not None else []
    parts = ([" of pairs " + " ".join(ends)] if ends else []) + [f" of pairs {words}" for words in either]
    return parts[0] + "".join(part.replace(" of pairs", " and") for part in parts[1:]) if parts else ""


def _shown(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The rows of one similarity, without the columns that say something about others only."""
    from headspan.statistics.influence_units import FIELDS
    from headspan.subspaces.metrics import metric_of

    metric = metric_of(name)
    others = {"metric", *(() if metric.random_null else ("z",)), *(() if metric.observed else FIELDS)}
    mine = [{key: value for key, value in row.items() if key not in others} for row in rows if row["metric"] == name]
    return list(map(effect_columns, mine))


def _about_influence(scores: Scores, names: Sequence[str]) -> list[str]:
    """What the columns of influence mean, and the input that it is about."""
    from headspan.statistics.influence_units import input_of
    from headspan.subspaces.metrics import METRICS

    if not any(name in METRICS and METRICS[name].observed for name in names):
        return []
    return [
        f"Influence on {input_of(scores)}. amount: its square, the expected KL divergence of attention in nats (OQ, "
        "OK) or the share of the value's variance (OV). expected: without interaction of the two; ratio: to that."
    ]


def _with_z(rows: list[dict[str, Any]], scores: Scores) -> list[dict[str, Any]]:
    """Rows of edges with their z against random subspaces; None if the random baseline is unknown."""
    from headspan.statistics.significance import z_scores
    from headspan.subspaces.metrics import metric_of

    if rows and all(metric_of(row["metric"]).observed for row in rows):
        return rows  # random subspaces say nothing about influence

    tables: dict[str, Any] = {}
    found = []
    for row in rows:
        z = None
        if metric_of(row["metric"]).random_null:
            if row["pairing"] not in tables:
                matrix = scores[row["metric"], row["pairing"]]
                places = ({str(h): i for i, h in enumerate(heads)} for heads in (matrix.sources, matrix.targets))
                tables[row["pairing"]] = (z_scores(scores, row["pairing"]), *places)
            values, sources, targets = tables[row["pairing"]]
            z = float(values[sources[row["source"]], targets[row["target"]]])
        found.append(row | {"z": z})
    return found


def compare(
    first: ResultRef,
    second: ResultRef,
    k: Annotated[int, k_option("Number of top edges to compare.", 0)] = 20,
    metric: Metrics = None,
    pairing: Pairings = None,
) -> Listing:
    """Compare the scores of two results (diff compares two models): shared top edges, squared difference, Spearman.

    Both must have the same shape. Before it is squared, a difference of PK is divided by the smaller rank.

    \b
    Examples:
      headspan compare gpt2.safetensors gpt2-folded.safetensors
      headspan compare gpt2.safetensors gpt2-folded.safetensors --pairing flow --metric pk
    """
    from headspan.change.compare import compare as run

    with progress("scoring") as update:
        found = run(first, second, k=k, metric=metric, pairing=pairing, progress=update)
    formats = {"mse": ".3g", "spearman": ".3f", "pairs": ","}
    return Listing(found.rows(), "first against second", formats)
