"""Commands that make and read result files: score, top, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headspan.cli.common import Csv, Force, Json, ModelRef, ResultRef, note, print_table, progress

Metrics = Annotated[
    list[str] | None,
    typer.Option("--metric", "-m", help="pk, cs, simple_cs, linear_cka, procrustes or all; may be repeated."),
]
Pairings = Annotated[
    list[str] | None,
    typer.Option("--pairing", "-p", help="Like OK; flow for OQ, OK and OV; or all. May be repeated."),
]


def register(app: typer.Typer) -> None:
    app.command("score")(score)
    app.command("top")(top)
    app.command("compare")(compare)


def score(
    model: ModelRef,
    out: Annotated[Path, typer.Option("--out", "-o", help="The result file to write (.safetensors).")],
    metric: Metrics = None,
    pairing: Pairings = None,
    pairs: Annotated[
        str, typer.Option(help="default (forward, and same-type for QQ KK VV OO), forward, same-type or all.")
    ] = "default",
    fold: Annotated[bool, typer.Option("--fold", help="Fold the norms into the weights first.")] = False,
    memory: Annotated[str | None, typer.Option(help="Most memory to use, like 2GB. [default: half of free]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    route: Annotated[str | None, typer.Option(help="gram or direct. [default: the cheaper one]")] = None,
    dask: Annotated[str | None, typer.Option(help="Address of a Dask scheduler, or local.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with an unfinished run of the same plan.")] = True,
    force: Force = False,
) -> None:
    """Score all pairs of heads and write a result file.

    Example: headspan score gpt2 --out gpt2.safetensors
    Example: headspan score model.gguf --out r.safetensors --metric all --pairing flow
    """
    from headspan.errors import HeadspanError
    from headspan.models.folding import fold as folded
    from headspan.models.weights import open
    from headspan.scoring.run import score as run
    from headspan.system.outputs import check_output

    check_output(out, "result", inputs=[model], force=force)
    if route not in (None, "gram", "direct"):
        raise HeadspanError(f"unknown route {route!r}: choose gram or direct")
    weights = open(model)
    for sentence in weights.notes:
        note(sentence)
    with progress("scoring") as update:
        scores = run(
            folded(weights) if fold else weights,
            metric or ("pk", "cs"),
            pairing or "all",
            pairs,  # type: ignore[arg-type]
            out=out,
            force=force,
            resume=resume,
            memory=memory,
            route=route,  # type: ignore[arg-type]
            device=device,
            dask=dask,
            progress=update,
            say=note,
        )
    pairs_scored = sum(len(scores[key].pairs()[2]) for key in scores.arrays)
    note(f"{out}: {', '.join(scores.metrics)} for {len(scores.pairings)} pairings, {pairs_scored:,} scores")


def top(
    result: ResultRef,
    pairing: Pairings = None,
    k: Annotated[int, typer.Option("-k", "--top", help="How many pairs per pairing.")] = 20,
    metric: Annotated[str, typer.Option("--metric", "-m", help="Which similarity.")] = "pk",
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """List the pairs of heads with the largest scores, with z against random subspaces for pk.

    Example: headspan top gpt2.safetensors --pairing OK -k 20
    Example: headspan top demo --pairing flow -k 5 --json
    """
    from headspan.analysis.baseline import z_scores
    from headspan.heads import parse_pairings
    from headspan.scoring.metrics import parse_metrics
    from headspan.scoring.run import scores_of

    (name,) = parse_metrics(metric)[:1] or ("pk",)
    chosen = parse_pairings(pairing or "flow")
    with progress("scoring") as update:
        scores = scores_of(result, [name], chosen, progress=update)
    rows = []
    for p in chosen:
        matrix = scores[name, p]
        z = z_scores(scores, p) if name == "pk" else None
        for edge in matrix.top(k):
            i, j = matrix.sources.index(edge.source), matrix.targets.index(edge.target)
            rows.append(
                {
                    "pairing": str(p),
                    "rank": edge.rank,
                    "source": str(edge.source),
                    "target": str(edge.target),
                    "score": edge.score,
                    "z": None if z is None else float(z[i, j]),
                }
            )
    print_table(
        rows, title=f"largest {name} scores", formats={"score": ".4f", "z": ".2f"}, as_json=as_json, as_csv=as_csv
    )


def compare(
    first: ResultRef,
    second: ResultRef,
    k: Annotated[int, typer.Option("-k", "--top", help="How many top edges to compare.")] = 20,
    metric: Metrics = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Compare two results of one shape: shared top edges, mean squared difference (PK normalised), Spearman.

    Example: headspan compare gpt2.safetensors gpt2-folded.safetensors
    """
    from headspan.analysis.comparison import check_same_shape
    from headspan.analysis.comparison import compare as run
    from headspan.models.weights import open
    from headspan.scores import Scores, is_result
    from headspan.scoring.metrics import parse_metrics
    from headspan.scoring.run import score as score_model

    names = parse_metrics(metric) if metric else None
    opened = [Scores.load(reference) if is_result(reference) else open(reference) for reference in (first, second)]
    check_same_shape(*opened)  # before the work of scoring
    results = [one if isinstance(one, Scores) else score_model(one, names or ("pk", "cs")) for one in opened]
    rows = [row._asdict() | {"pairing": str(row.pairing)} for row in run(*results, k=k, metrics=names)]
    formats = {"mse": ".3g", "spearman": ".3f", "pairs": ","}
    print_table(rows, title="first against second", formats=formats, as_json=as_json, as_csv=as_csv)
