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
    from headspan.checkpoints.hub.chunk_room import age, cache_limit, contents, remove, size_text

    found = [content for content in contents() if name is None or name.lower() in content.file.lower()]
    rows = [{"file": c.file, "mb": c.bytes / 1e6, "of_mb": c.of / 1e6, "days_unused": age(c)} for c in found]
    total = size_text(sum(content.bytes for content in found))
    files = "1 file" if len(found) == 1 else f"{len(found)} files"
    title = f"partial hub files: {files}, {total}; the limit is {size_text(cache_limit())}"
    if clear:
        title = f"removed: {title}"
        remove(found)
    if not found:
        note("nothing is cached" + ("" if name is None else f" whose name contains {name!r}"))
    return Listing(rows, title, {"mb": ",.1f", "of_mb": ",.1f", "days_unused": ".1f"})
