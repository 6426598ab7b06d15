"""The command line: parse, call, print."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headspan import __version__
from headspan.cli.common import STOPPED, Command
from headspan.cli.notes import in_options
from headspan.vocabulary.errors import HeadspanError, message, remember_text

# The base class of typer's usage errors; typer moves it between versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
# The commands of each module. A command loads its own module only.
_MODULES = {
    "info": ["info"],
    "results": ["score", "top", "compare"],
    "change": ["diff", "track"],
    "science": ["hubs", "baseline", "evaluate", "reproduce"],
    "reading": ["tokens", "pair"],
    "nodes": ["nodes"],
    "paths": ["paths", "links"],
    "behaviour": ["behaviour"],
    "effects": ["effects"],
    "observe": ["observe"],
    "task": ["task"],
    "pictures": ["wiring", "figures"],
    "report": ["report", "site"],
    "cache": ["cache"],
    "agent": ["skill", "mcp"],
}


# The commands in the order of --help, by what they are for.
GROUPS = {
    "Score": ["info", "score", "cache"],
    "Read": ["top", "wiring", "hubs", "baseline", "pair", "tokens", "nodes", "paths", "links"],
    "Run": ["behaviour", "observe", "effects", "task"],
    "Compare": ["compare", "diff", "track", "evaluate", "reproduce"],
    "Publish": ["report", "figures", "site", "skill", "mcp"],
}


class _Groups(TyperGroup):
    """Lists the commands by group in --help, each with its whole first sentence."""

    def list_commands(self, ctx: Any) -> list[str]:
        grouped = [name for names in GROUPS.values() for name in names if name in self.commands]
        return [*grouped, *(name for name in self.commands if name not in grouped)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            rows = [(n.ljust(width), self.commands[n].get_short_help_str(200)) for n in names if n in self.commands]
            with formatter.section(title):
                formatter.write_dl(rows)


class _App(typer.Typer):
    """Registers every command as a `Command`, which accepts old spellings of options."""

    def command(self, *args: Any, **options: Any) -> Any:
        return super().command(*args, **{"cls": Command, **options})


def _version(wanted: bool) -> None:
    if wanted:
        print(f"headspan {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find which attention heads communicate, from their weights alone."""


def _application(first: str = "") -> typer.Typer:
    """The command line for arguments that begin with ``first``: the module of that command, otherwise all modules."""
    made = _App(
        name="headspan",
        cls=_Groups,
        help="Find which attention heads communicate, from their weights alone.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    made.callback()(_options)
    for module in [name for name, commands in _MODULES.items() if first in commands] or _MODULES:
        import_module(f"headspan.cli.{module}").register(made)
    return made


def __getattr__(name: str) -> Any:
    if name == "app":  # complete, for tests and docs
        return _application()
    raise AttributeError(f"module 'headspan.cli' has no attribute {name!r}")


def main() -> None:
    """Run the command line; bad input prints one message to stderr and exits with code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # some terminals cannot print θ or →
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores the signal
            signal.signal(number, _stop)
    sys.exit(_run(sys.argv[1:] or ["--help"]))


_stopped_by: list[int] = []


def _stop(number: int, frame: object) -> None:
    """Clean up as after Ctrl-C; a second signal ends the process at once."""
    _stopped_by.append(number)
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _run(arguments: list[str]) -> int:
    """The exit code of one command."""
    remember_text(*arguments)
    try:
        code = _application(arguments[0])(arguments, prog_name="headspan", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, so that a full disk is still reported
    except HeadspanError as error:
        return _fail(str(error))
    except _UsageError as error:
        return _fail(_usage(error))
    except MemoryError:
        return _fail("not enough memory. Give a smaller --memory or fewer pairings if the command has them")
    except BrokenPipeError:
        return _reader_left()
    except OSError as error:
        _drop_output()
        return _fail(f"{error.filename or 'the output'} cannot be used: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        code = STOPPED
    except SystemExit as error:  # typer leaves like this when the reader of its output has
        return _reader_left() if error.code == 1 else int(error.code or 0)
    except Exception as error:
        return _unforeseen(error)
    if code == STOPPED:
        code = 128 + _stopped_by[0] if _stopped_by else STOPPED
        kept = ". Finished work is kept: run the same command again to continue" if arguments[0] == "score" else ""
        return _fail(f"stopped{kept}", code)
    return code if isinstance(code, int) else 0


def _fail(sentence: str, code: int = 2) -> int:
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"headspan: {message(in_options(sentence))}", file=sys.stderr)
    return code


def _reader_left() -> int:
    """The program that read our output (head, less) closed the pipe early."""
    _drop_output()
    return _fail("the output was closed before all of it was written", 128 + 13)


def _unforeseen(error: Exception) -> int:
    """Report a bug in headspan in one line; with HEADSPAN_DEBUG set, raise it with its traceback."""
    if os.environ.get("HEADSPAN_DEBUG"):
        raise error
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return _fail(f"internal error ({what}). Please report it; HEADSPAN_DEBUG=1 prints the traceback", 70)


def _usage(error: Any) -> str:
    """One line: what is wrong with the arguments, and which --help to read."""
    command = error.ctx.command_path if error.ctx is not None else "headspan"
    return f"{' '.join(error.format_message().split()).rstrip('.')}: see {command} --help"


def _drop_output() -> None:
    """Discard what is still buffered for stdout, so that Python reports no error about it at exit."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
