"""``headspan cache``: list and remove the cached parts of hub models."""

from __future__ import annotations

from typing import Annotated

import typer

from headspan.cli.common import Listing, listing, note


def register(app: typer.Typer) -> None:
    app.command("cache")(listing(cache))


def cache(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="List only files whose name contains this text.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the listed files.")] = False,
) -> Listing:
    """List the cached parts of hub models; with --clear, delete them.

    The cache is in HEADSPAN_CACHE_DIR, or in the system's cache folder. It holds at most HEADSPAN_CACHE_LIMIT (default
    50GB) and drops the least recently used files first. Files downloaded whole are in the hub's own cache.

    \b
    Examples:
      headspan cache
      headspan cache Llama-3 --clear
    """
    from headspan.checkpoints.hub.chunk_room import cache as find

    found = find(name, clear)
    title = f"removed: {found._headline()}" if clear else found._headline()
    if not found:
        note("nothing is cached" + ("" if name is None else f" whose name contains {name!r}"))
    return Listing(found.rows(), title, {"mb": ",.1f", "of_mb": ",.1f", "days_unused": ".1f"})
