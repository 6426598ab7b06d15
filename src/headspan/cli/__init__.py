"""The command line: parse, call, print."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import Any

import typer

from headspan.errors import HeadspanError

# The class of wrong arguments, which typer keeps in different places from version to version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_STOPPED = 130
_MODULES = ("info", "results", "change", "science", "reading", "behaviour", "pictures", "report")

app = typer.Typer(
    name="headspan",
    help="Which attention heads talk to which, judged by weights alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _module in _MODULES:
    import_module(f"headspan.cli.{_module}").register(app)


def main() -> None:
    """Run the command line; bad input is one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may have no θ and →
    sys.exit(_run(sys.argv[1:] or ["--help"]))


def _run(arguments: list[str]) -> int:
    """The exit code of one command."""
    try:
        code = app(arguments, prog_name="headspan", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk can still be told
    except HeadspanError as error:
        return _fail(str(error))
    except _UsageError as error:
        return _fail(_usage(error))
    except MemoryError:
        return _fail("there is not enough memory for this: give a smaller --memory or fewer pairings")
    except BrokenPipeError:
        _drop_output()  # the reader of our output (head, less) went away: not an error
        return 0
    except OSError as error:
        _drop_output()
        return _fail(f"{error.filename or 'the output'} cannot be used: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        code = _STOPPED
    if code == _STOPPED:
        return _fail("stopped; what was finished is kept, the same command goes on from there", _STOPPED)
    return code if isinstance(code, int) else 0


def _fail(sentence: str, code: int = 2) -> int:
    if sys.stderr is not None:
        print(f"headspan: {sentence}", file=sys.stderr)
    return code


def _usage(error: Any) -> str:
    """What is wrong with the arguments, and which help to read, in one line."""
    command = error.ctx.command_path if error.ctx is not None else "headspan"
    return f"{' '.join(error.format_message().split()).rstrip('.')}: see {command} --help"


def _drop_output() -> None:
    """Let what is still buffered for stdout go nowhere, so that Python does not complain about it at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
