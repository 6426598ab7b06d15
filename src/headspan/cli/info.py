"""``headspan info``: a model's architecture, the tensors headspan would read, and the rank of every head."""

from __future__ import annotations

from typing import Annotated

import typer

from headspan.cli.common import Json, ModelRef, print_json, print_lines, progress


def register(app: typer.Typer) -> None:
    app.command("info")(info)


def info(
    model: ModelRef,
    check: Annotated[
        bool, typer.Option("--check", help="Read all weights; check that they are finite and report every head's rank.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Describe a model and the tensors that headspan would read.

    Without --check only headers are read. --check reads every weight and also prints the model's fingerprint.

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
