"""The options that name nodes, shared by the commands nodes, score and paths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from headspan.cli.common import with_options

_OPTIONS: dict[str, Any] = {
    "add": Annotated[
        list[str] | None,
        typer.Option(
            "--nodes", "--add", help="Vectors: FILE[:name][@layer], .npy, .npz, .safetensors or .pt; may be repeated."
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
}  # fmt: skip


class NodeWords(NamedTuple):
    """The nodes named on a command line."""

    add: list[str] | None = None
    sae: list[str] | None = None
    adapter: list[str] | None = None
    neurons: list[str] | None = None
    tokens: str | None = None

    def inputs(self) -> list[Path]:
        """The files and directories that they are read from."""
        found = list(map(Path, self.adapter or ()))
        if self.add:
            from headspan.node_kinds.files import readings

            found += [path for given in self.add for path, _, _ in readings(given)]
        if self.sae:
            from headspan.node_kinds.saes import directory_and_features

            found += [directory_and_features(given)[0] for given in self.sae]
        return found

    def given(self) -> dict[str, Any] | None:
        """The form that functions take; None if no node is named."""
        return {name: said for name, said in self._asdict().items() if said is not None} or None


NO_NODES = NodeWords()


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --nodes, --sae, --adapter, --neurons and --tokens; it gets them as its argument ``nodes``."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in _OPTIONS}
        tokens = given.pop("tokens")  # commas separate words here; in Python each list item is a word
        return command(*args, nodes=NodeWords(**given, tokens=",".join(tokens) if tokens else None), **options)

    with_options(run, command, {name: (option, None) for name, option in _OPTIONS.items()}, instead_of="nodes")
    return run
