"""The command line: parse, call, print."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from headspan.errors import HeadspanError

_MODULES = ("info", "results", "science", "reading", "behaviour", "pictures", "report")

app = typer.Typer(
    name="headspan",
    help="Which attention heads talk to which, judged by weights alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _module in _MODULES:
    from importlib.util import find_spec
    if find_spec(f"headspan.cli.{_module}") is not None:
        import_module(f"headspan.cli.{_module}").register(app)


def main() -> None:
    """Run the command line; bad input is one sentence on stderr and exit code 2."""
    try:
        app()
    except HeadspanError as error:
        print(f"headspan: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("headspan: stopped; what was finished is kept, the same command goes on from there", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output (head, less) went away: not an error
        sys.exit(0)
