"""``headspan task``: which edges of a model carry a task, and the circuit that they make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.common import (
    STOPPED,
    Bos,
    Dtype,
    Force,
    FromOption,
    LabelsOption,
    Listing,
    ModelRef,
    ToOption,
    ends_in_words,
    k_option,
    listing,
    note,
    out_option,
    progress,
)
from headspan.vocabulary.errors import refuse_ignored
from headspan.vocabulary.words import counted

if TYPE_CHECKING:
    from headspan.results.tasks.task_result import Task


def register(app: typer.Typer) -> None:
    app.command("task")(listing(task))


def task(
    model: ModelRef,
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="ioi, induction, greater-than, successor, gendered-pronoun, or a JSONL, JSON or CSV file of prompts "
            "(clean, corrupted, answer, wrong).",
        ),
    ],
    method: Annotated[
        str, typer.Option(help="ig (EAP-IG, mostly better circuits) or eap (EAP, faster, better single edges).")
    ] = "ig",
    k: Annotated[int, k_option("Edges to list.")] = 40,
    from_: FromOption = None,
    to: ToOption = None,
    labels: LabelsOption = None,
    verify: Annotated[bool, typer.Option(help="Measure the listed edges exactly, with one pass each.")] = True,
    circuit: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|FILE",
            help="Make a circuit of N edges, or the smallest with faithfulness of at least 0.8; or evaluate the "
            "circuit in FILE (of headspan, EAP-IG or MIB).",
        ),
    ] = None,
    circuit_out: Annotated[
        Path | None, typer.Option(help="Write the circuit to this file, for wiring --circuit (.json).")
    ] = None,
    graph_out: Annotated[
        Path | None, typer.Option(help="Write all edges as a graph of EAP-IG and MIB (.json or .pt).")
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(help="A result of MODEL: list the overlap of every edge, with its rank.")
    ] = None,
    stats: Annotated[
        Path | None, typer.Option(help="Statistics from headspan observe: list the influence of every edge.")
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts for attribution, and as many held out. [default: 48, or a file's]"),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What is measured: logit-difference, log-probability or kl.")
    ] = "logit-difference",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts and of the resamples.")] = 0,
    bos: Bos = "auto",
    out: Annotated[Path | None, out_option("Write everything to this file (.safetensors).")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit in addition to the model, for example 2GB.")] = None,
    device: Annotated[str | None, typer.Option(help="Device to run on, for example cuda (default: cpu).")] = None,
    dtype: Dtype = "float32",
    force: Force = False,
) -> Listing:
    """Run MODEL on pairs of prompts and estimate what corrupting each edge does to TASK.

    Edges go from the embedding, heads and MLPs to later heads (Q, K, V), MLPs and the logits. The edges with the
    largest estimates are measured exactly. Negative: the edge helps. freq: how often the edge is among those listed if
    the prompts are drawn again. Needs headspan[torch].

    \b
    Examples:
      headspan task demo induction
      headspan task demo induction --to logits -k 10
      headspan task model.gguf ioi --circuit auto --out ioi.safetensors
      headspan task ./gpt2 prompts.jsonl --scores gpt2.safetensors -k 20
      headspan task ./gpt2 ioi --circuit eap_graph.json
    """
    from headspan.results.tasks.graph_files import graph_kind
    from headspan.running.opening import check_dtype
    from headspan.running.tasks.task import task as run
    from headspan.system.outputs import check_output, check_outputs

    if circuit is None:
        refuse_ignored("without --circuit", circuit_out=circuit_out)
    files = [(out, "task"), (circuit_out, "json"), (graph_out, graph_out and graph_kind(graph_out))]
    inputs = [model, task, scores, stats, circuit]
    check_outputs([(path, str(kind)) for path, kind in files if path is not None], inputs=inputs, force=force)
    if circuit_out is not None:
        check_output(circuit_out, "json", inputs=inputs, force=force, ending=".json")
    check_dtype(dtype)
    with progress("tracing edges") as update:
        found = run(
            model,
            task,
            method=method,
            k=k,
            verify=verify,
            from_=from_,
            to=to,
            labels=labels,
            circuit=int(circuit) if circuit is not None and circuit.isdecimal() else circuit,
            scores=scores,
            stats=stats,
            prompts=prompts,
            objective=objective,
            seed=seed,
            bos=bos,
            out=out,
            force=force,
            memory=memory,
            device=device,
            dtype=dtype,
            progress=update,
        )
    if circuit_out is not None and found.circuit is not None:  # there is none after Ctrl-C
        found.to_circuit().save(circuit_out, force=force)
        note(f"{circuit_out}: circuit of {counted(int(found.edges_kept.sum()), 'edge')}")
    if graph_out is not None:
        found.save_graph(graph_out, force=force)
        note(f"{graph_out}: graph of {found.table.n_edges} edges")
    if out is not None:
        note(f"{out}: {found.name} with {found.table.n_edges:,} edges")
    rows = found.rows()
    formats = {"estimate": "+.3f", "exact": "+.3f", "freq": ".2f"}
    formats |= {name: ".3f" for name in found.similarities if not name.endswith("_rank")}
    ends = "".join(f" {part}" for part in ends_in_words(from_, to))
    title = f"{found.name} in {model}: the {len(rows)} edges{ends} with the largest estimates"
    return Listing(
        rows,
        tables=[(title, [_shown(row) for row in rows], formats)],
        tail=_facts(found),
        code=STOPPED if found.interrupted else 0,
    )


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row narrow enough for a terminal: of more than two similarities the ranks alone, of the first three."""
    short = {"attribution": "estimate", "frequency": "freq", "in_circuit": "kept"}
    ranks = [name for name in row if name.endswith("_rank")]
    left_out = {name.removesuffix("_rank") for name in ranks} if len(ranks) > 2 else set()
    left_out |= set(ranks[3:])
    left_out |= {"in_circuit"} if row["in_circuit"] is None else set()
    return {short.get(n, n.replace("_rank", "_#")): value for n, value in row.items() if n not in left_out}


def _facts(found: Task) -> list[str]:
    """What the task is, how well the model does it, and what the circuit keeps, below the table."""
    values, unit = found.values, str(found.protocol["objective"]).replace("-", " ")
    lines = [
        f"{values['prompts']} prompts, {values['solved']:.0%} solved: {unit} {values['clean']:.2f}, corrupted "
        f"{values['corrupted']:.2f}. An estimate is the change if the edge carries what it carries on the corrupted "
        "prompt; exact is that change measured."
    ]
    for row in found.overlap():
        lines.append(
            f"{row['similarity']}: {row['in_top_1%']} of {row['edges']} verified edges between heads are in its top "
            f"1 % (by chance {row['by_chance']:.1f})."
        )
    if found.circuit is not None and found.faithfulness is not None and found.held_out is not None:
        lines.append(
            f"Circuit: {int(found.circuit.sum()):,} of {found.table.n_edges:,} edges, faithfulness "
            f"{found.faithfulness:.2f} on {found.held_out['prompts']} held-out prompts (of which "
            f"{found.held_out['solved']:.0%} are solved)."
        )
    if found.cpr is not None:
        lines.append(f"CPR {found.cpr:.3f}, CMD {found.cmd:.3f} over 0.1 % to 100 % of the edges.")
    return lines
