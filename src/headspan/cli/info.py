"""``headspan info``: what a model is, what would be read of it, and whether its heads have full rank."""

from __future__ import annotations

from typing import Annotated

import typer

from headspan.cli.common import Json, ModelRef, print_json, print_lines, progress


def register(app: typer.Typer) -> None:
    app.command("info")(info)


def info(
    model: ModelRef,
    check: Annotated[
        bool, typer.Option("--check", help="Read all weights: numbers finite, and the rank of every head.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what a model is and which of its tensors would be read.

    Without --check only headers are read; with it every weight, for its fingerprint too.

    \b
    Examples:
      headspan info demo
      headspan info gpt2 --json
      headspan info model.gguf --check
    """
    from headspan.reading.info import info as describe

    with progress("reading weights") as update:
        facts = describe(model, check, update)
    if as_json:
        print_json(facts)
    else:
        print_lines(facts.lines(), indent=14)
