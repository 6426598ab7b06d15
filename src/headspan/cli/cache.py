"""The command cache: what was read from the hub and is kept."""

from __future__ import annotations

from typing import Annotated

import typer

from headspan.cli.common import Listing, listing, note


def register(app: typer.Typer) -> None:
    app.command("cache")(listing(cache))


def cache(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only files whose name contains this.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove what is listed.")] = False,
) -> Listing:
    """Parts of hub models that are kept on this machine, and how to be rid of them.

    They stay under HEADSPAN_CACHE_LIMIT (50GB if it is not set), in HEADSPAN_CACHE_DIR or the usual place for caches;
    what was not used for longest goes first. Whole files that were downloaded are in the hub's own cache.

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
    title = f"{files} of the hub in part, {total}; the limit is {size_text(cache_limit())}"
    if clear:
        title = f"removed: {title}"
        remove(found)
    if not found:
        note("nothing of the hub is kept" + ("" if name is None else f" whose name contains {name!r}"))
    return Listing(rows, title, {"mb": ",.1f", "of_mb": ",.1f", "days_unused": ".1f"})
