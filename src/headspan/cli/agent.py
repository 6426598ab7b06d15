"""``headspan skill`` and ``headspan mcp``: headspan for programs that act on a user's behalf."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("skill")(skill)
    app.command("mcp")(mcp)


def _guide() -> str:
    return (files("headspan") / "data" / "SKILL.md").read_text(encoding="utf-8")


def skill() -> None:
    """Print SKILL.md: which command answers which question, how to read the numbers, what not to conclude.

    \b
    Examples:
      headspan skill > SKILL.md
    """
    print(_guide(), end="")


def mcp(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The results and models that may be read.")],
    hub: Annotated[bool, typer.Option("--hub", help="Allow models of the hub, which are downloaded.")] = False,
) -> None:
    """Serve read-only tools over one folder to an agent, by the Model Context Protocol on stdin and stdout.

    Nothing outside FOLDER is read, nothing is written, and no model is run. Needs headspan[mcp].

    \b
    Examples:
      headspan mcp results
      headspan mcp results --hub
    """
    from headspan.vocabulary.errors import missing_extra

    try:
        import mcp.server.mcpserver  # noqa: F401
    except ImportError:
        raise missing_extra("mcp", "mcp", "serving an agent") from None
    from headspan.cli.serving.folder import Folder
    from headspan.cli.serving.tools import server

    server(Folder(folder, hub), _guide()).run()
