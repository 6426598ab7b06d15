"""``headspan paths`` and ``links``: paths through several heads, and heads between two features."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headspan.cli.common import (
    Fold,
    Force,
    FromOption,
    LabelsOption,
    Listing,
    ModelRef,
    Pairings,
    ResultRef,
    ToOption,
    WeightsOption,
    ends_in_words,
    k_option,
    listing,
    note,
    open_model,
    out_option,
    progress,
)
from headspan.cli.nodes import NO_NODES, NodeWords, node_options
from headspan.vocabulary.errors import HeadspanError, refuse_ignored
from headspan.vocabulary.words import counted


def register(app: typer.Typer) -> None:
    app.command("paths")(listing(node_options(paths)))
    app.command("links")(listing(links))


def paths(
    scores: ResultRef,
    from_: FromOption = None,
    to: ToOption = None,
    labels: LabelsOption = None,
    depth: Annotated[int, typer.Option(help="Largest number of hops (up to 4); 1 lists single hops.")] = 3,
    k: Annotated[int, k_option("Paths per number of hops.")] = 10,
    pairing: Pairings = None,
    model: WeightsOption = None,
    nodes: NodeWords = NO_NODES,
    fold: Fold = False,
    memory: Annotated[str, typer.Option(help="Memory limit for partial paths.")] = "1GB",
    out: Annotated[Path | None, out_option("Write the hops of all paths as a circuit to this .json file.")] = None,
    force: Force = False,
) -> Listing:
    """List the strongest paths: one head writes, others pass it on through their values, and a last head reads it.

    The score is that of the composed map, ‖U_bᵀ·M_a·U_s‖²; for one hop it is PK. product is the score expected from the
    per-hop PKs, chance the mean for random subspaces, and z the distance from it in standard deviations.
    --pairing restricts the last hop. Name nodes as for score; a result does not hold their vectors, so name them again
    with a result. Plain neurons and transcoder features can be inside a path; other nodes can only start or end it.

    \b
    Examples:
      headspan paths gpt2 --to L5H1 --depth 3
      headspan paths gpt2.safetensors --weights gpt2 --from L4H11 --pairing OQ --json
      headspan paths gpt2 --to L5H1.K --out circuit.json
      headspan paths ./gpt2 --nodes probe.npy@8 --to probe --neurons L5:17 --depth 2
    """
    from headspan.graphs.paths import PATH_COLUMNS
    from headspan.graphs.paths import paths as find
    from headspan.results.scores import is_result
    from headspan.system.outputs import check_output

    if out is not None:
        check_output(out, "json", inputs=[scores, model, *nodes.inputs()], force=force, ending=".json")
    if fold and is_result(scores):
        raise HeadspanError("--fold cannot change a saved result. Give a model instead, or score it again with --fold")
    given = scores if is_result(scores) else open_model(scores, fold)
    with progress("following paths") as update:
        found = find(
            given, to, from_, depth, k, pairing,
            model=model, labels=labels, nodes=nodes.given(), memory=memory, progress=update,
        )  # fmt: skip
    if out is not None:
        circuit = found.to_circuit()
        circuit.save(out, force=force)
        and_nodes = " and nodes" if nodes.given() else ""
        ends = f"{counted(len(circuit.nodes), 'head')}{and_nodes}"
        note(f"{out}: {counted(len(circuit.edges), 'edge')} between {ends}")
    rows = found.rows()
    formats = {"score": ".3f", "product": ".3f", "chance": ".3g", "z": ".1f"}
    title = " ".join(["strongest paths", *ends_in_words(from_, to)])
    shown = [_shown(row) for row in rows]
    return Listing(
        rows, columns=PATH_COLUMNS, tables=[(title, shown, formats)], remarks=found.notes, written=out is not None
    )


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row for a terminal: the path as one text, with the classes of its ends."""
    classes = [row.get(f"{end}_labels") for end in ("source", "target")]
    between = {"labels": " → ".join(found or "–" for found in classes)} if "source_labels" in row else {}
    shown = ("score", "product", "chance", "z")
    return {"hops": row["hops"], "rank": row["rank"], "path": row["path"], **between} | {n: row[n] for n in shown}


def links(
    model: ModelRef,
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="JSON of circuit-tracer or Neuronpedia.")],
    transcoders: Annotated[
        str, typer.Option(help="Files (W_enc, W_dec) or SAELens directories, {} for the layer: layer_{}.safetensors.")
    ],
    k: Annotated[int, k_option("Heads per link.")] = 3,
    strongest: Annotated[int, typer.Option(min=1, help="Links: those with the largest weights.")] = 10,
    from_: Annotated[str | None, typer.Option("--from", help="Only links from this feature: L3F17 or L3F17@5.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Only links to this feature.")] = None,
    hook: Annotated[
        str | None, typer.Option(help="With --fold: where encoders in files read. [default: hook_mlp_in]")
    ] = None,
    fold: Fold = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample of other features.")] = 0,
) -> Listing:
    """Find the heads that could carry the links between features of an attribution graph.

    strength: the decoder of the first feature, through the head's W_O W_V, onto the encoder of the second, in units of
    its size for random directions. reads, writes: fractions of decoder and encoder inside the head's V and O.
    p_kind: fraction of pairs of other features with at least this strength in the same head.

    \b
    Examples:
      headspan links google/gemma-2-2b graph.json --transcoders 'scope/layer_{}/params.npz' --fold
      headspan links ./llama graph.json --transcoders 'tc/layer_{}.safetensors' --to L8F1234 -k 5
    """
    from headspan.node_kinds.transcoders import INPUT_HOOK
    from headspan.reading.links import COLUMNS
    from headspan.reading.links import links as find

    if not fold:
        refuse_ignored("without --fold", hook=hook)
    with progress("comparing heads with links") as update:
        found = find(
            model, graph, transcoders, k,
            strongest=strongest, from_=from_, to=to, hook=hook or INPUT_HOOK, fold=fold, seed=seed, progress=update,
        )  # fmt: skip
    shown = ("source", "target", "weight", "head", "strength", "reads", "writes", "p_kind")
    formats = {"weight": ".3g", "strength": "+.1f", "reads": ".3f", "writes": ".3f", "p_kind": ".3f"}
    return Listing(found.rows(), found._headline(), formats, COLUMNS, shown, tail=found.remarks())
