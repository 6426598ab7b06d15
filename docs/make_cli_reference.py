"""Write docs/cli.md from the --help of every command; with --check, only report whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from typer.testing import CliRunner

from headspan.cli import app

PAGE = Path(__file__).parent / "cli.md"


def reference() -> str:
    """The whole page as Markdown."""
    runner = CliRunner()
    parts = [
        "# Command reference\n",
        "Made from `--help` by `make docs`; a test fails when it is out of date.\n",
    ]
    for command in [None, *typer.main.get_command(app).commands]:  # type: ignore[attr-defined]
        words = [command] if command else []
        help_text = runner.invoke(app, [*words, "--help"], env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"}).output
        lines = "\n".join(line.rstrip() for line in help_text.replace("Usage: root", "Usage: headspan").splitlines())
        parts.append(f"## headspan {command or ''}".rstrip() + f"\n\n```text\n{lines.strip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == reference() else "docs/cli.md is out of date: run make docs")
    PAGE.write_text(reference(), encoding="utf-8")
