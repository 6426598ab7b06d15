"""``headspan site``: a gallery of several results in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headspan.cli.common import Force, note, progress


def register(app: typer.Typer) -> None:
    app.command("site")(site)


def site(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder, or an existing gallery.")],
    scores: Annotated[
        list[str], typer.Argument(metavar="RESULT|MODEL…", help="Saved results, or models to score now.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option("--weights", help="The model of a RESULT, for tokens and angles; may be repeated, in any order."),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the index page.")] = "headspan gallery",
    tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens to list per head and role; 0 for none. [default: 10]")
    ] = None,
    force: Force = False,
) -> None:
    """Build a static gallery: an index with pictures and key facts, and one page per model.

    The gallery needs no server: copy the folder anywhere.

    \b
    Examples:
      headspan site gallery gpt2.safetensors smollm2.safetensors
      headspan site gallery demo gpt2.safetensors --weights openai-community/gpt2
    """
    from headspan.explorer.site import site as make

    with progress("making the gallery") as update:
        made = make(
            folder,
            scores,
            model=model or [],
            title=title,
            tokens=tokens,
            force=force,
            progress=update,
        )
    note(f"{made.folder / 'index.html'}: {len(made.pages)} models. Open it in a browser")
