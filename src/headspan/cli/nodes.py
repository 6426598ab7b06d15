"""``headspan nodes``: which heads write a direction, and which read it; and the options that name nodes.

The commands score and paths take the same options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from headspan.cli.common import Fold, Listing, ModelRef, k_option, listing, note, open_model, progress, with_options

EXAMPLES = """\b
Examples:
  headspan nodes model.gguf --tokens " Paris, London"
  headspan nodes ./gpt2 --nodes probe.npy@8 --nodes steering.safetensors:refusal@8
  headspan nodes ./gpt2 --neurons L3:17,L5:* -k 3 --csv
  headspan nodes ./gpt2 --sae ./sae-resid-pre-8:0,5,10-20 --fold --json
  headspan nodes ./base --adapter ./lora
  headspan nodes ./base --components spd.safetensors:h.3.attn.c_attn:0-99
"""
SHOWN = ("node", "side", "rank", "partner", "share", "p", "z", "p_kind")
FORMATS = {"share": ".3f", "p": ".1e", "z": "+.1f", "p_kind": ".3f"}


_OPTIONS: dict[str, Any] = {
    "nodes": Annotated[
        list[str] | None,
        typer.Option(
            "--nodes", help="Vectors: FILE[:name][@layer], .npy, .npz, .safetensors or .pt; may be repeated."
        ),
    ],
    "sae": Annotated[
        list[str] | None,
        typer.Option("--sae", help="Sparse autoencoder or transcoder of SAELens: DIR[:0,5,10-20]; may be repeated."),
    ],
    "adapter": Annotated[
        list[str] | None, typer.Option("--adapter", help="LoRA adapter of PEFT, a directory; may be repeated.")
    ],
    "neurons": Annotated[
        list[str] | None,
        typer.Option(
            "--neurons", help="L3:17,L3:5-20,L3:*; L3E0:17 of an expert, L3S:17 of a shared MLP; may be repeated."
        ),
    ],
    "tokens": Annotated[
        list[str] | None,
        typer.Option("--tokens", help="Single-token words, comma-separated, spaces kept; may be repeated."),
    ],
    "components": Annotated[
        list[str] | None,
        typer.Option(
            "--components",
            help="Components of a parameter decomposition (SPD): FILE[:MODULE[:0,5,10-20]]; may be repeated.",
        ),
    ],
}  # fmt: skip


class NodeWords(NamedTuple):
    """The nodes named on a command line."""

    nodes: list[str] | None = None
    sae: list[str] | None = None
    adapter: list[str] | None = None
    neurons: list[str] | None = None
    tokens: str | None = None
    components: list[str] | None = None

    def inputs(self) -> list[Path]:
        """The files and directories that they are read from."""
        found = list(map(Path, self.adapter or ()))
        if self.nodes:
            from headspan.node_kinds.files import readings

            found += [path for given in self.nodes for path, _, _ in readings(given)]
        if self.sae:
            from headspan.node_kinds.saes import directory_and_features

            found += [directory_and_features(given)[0] for given in self.sae]
        if self.components:
            from headspan.node_kinds.components import file_and_module

            found += [file_and_module(given)[0] for given in self.components]
        return found

    def given(self) -> dict[str, Any] | None:
        """The form that functions take; None if no node is named."""
        return {name: said for name, said in self._asdict().items() if said is not None} or None


NO_NODES = NodeWords()


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that name nodes; it gets them as its argument ``nodes``."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in _OPTIONS}
        tokens = given.pop("tokens")  # commas separate words here; in Python each list item is a word
        return command(*args, nodes=NodeWords(**given, tokens=",".join(tokens) if tokens else None), **options)

    with_options(run, command, {name: (option, None) for name, option in _OPTIONS.items()}, instead_of="nodes")
    return run


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
    sort: Annotated[str, typer.Option(help="Rank by p_kind (by share where there is none), p or share.")] = "p_kind",
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
        named = nodes._asdict()
        report = find(
            weights,
            **named,
            embedding=embedding,
            unembedding=unembedding,
            k=k,
            sort=sort,  # type: ignore[arg-type]
            progress=update,
        )
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
