"""``headspan nodes``: which heads write a direction, and which read it."""

from __future__ import annotations

from typing import Annotated

import typer

from headspan.cli.common import Fold, Listing, ModelRef, k_option, listing, note, open_model, progress
from headspan.cli.node_options import NO_NODES, NodeWords, node_options

EXAMPLES = """\b
Examples:
  headspan nodes model.gguf --tokens " Paris, London"
  headspan nodes ./gpt2 --add probe.npy@8 --add steering.safetensors:refusal@8
  headspan nodes ./gpt2 --neurons L3:17,L5:* -k 3 --csv
  headspan nodes ./gpt2 --sae ./sae-resid-pre-8:0,5,10-20 --fold --json
  headspan nodes ./base --adapter ./lora
"""
SHOWN = ("node", "side", "rank", "partner", "share", "p", "z", "p_kind")
FORMATS = {"share": ".3f", "p": ".1e", "z": "+.1f", "p_kind": ".3f"}


def register(app: typer.Typer) -> None:
    app.command("nodes", epilog=EXAMPLES)(listing(node_options(nodes)))


def nodes(
    model: ModelRef,
    nodes: NodeWords = NO_NODES,
    embedding: Annotated[
        bool, typer.Option("--embedding", help="Add the span of all embedding vectors, as a writer.")
    ] = False,
    unembedding: Annotated[
        bool, typer.Option("--unembedding", help="Add the span of all unembedding vectors, as a reader.")
    ] = False,
    fold: Fold = False,
    k: Annotated[int, k_option("Writers and readers per node.")] = 10,
) -> Listing:
    """Find the heads that write what a node reads, and the heads that read what it writes.

    A node is a direction or a subspace of the residual stream: a probe, a feature, an adapter, a neuron, a token.
    share: the fraction of it in the head's subspace. p: exact, for a random direction. z: against random
    subspaces.
    p_kind: the fraction of other nodes of its kind with at least this share in the same head.
    """
    from headspan.reading.node_overlaps import COLUMNS
    from headspan.reading.node_overlaps import nodes as find

    with open_model(model, fold) as weights, progress("comparing nodes with heads") as update:
        report = find(weights, *nodes, embedding, unembedding, k=k, progress=update)
        rows = report.rows()
    for sentence in report.notes:
        note(sentence)
    chance = 1 / max(report.ports, 1)
    remarks = [f"each p is for one pair: the smallest p among {report.ports:,} ports is about {chance:.1g} by chance"]
    if not report.listed_by_node:
        remarks.append(
            f"{report.count:,} nodes are too many to list individually, so this is the top {k} of every head"
        )
    return Listing(rows, report._headline(), FORMATS, columns=COLUMNS, shown=SHOWN, remarks=remarks)
