"""What every command shares, and how a new command is written.

A command is a function in a module of this folder that has ``register(app)``; the module's name stands in
``_MODULES`` of ``cli/__init__.py``, the command in ``COMMANDS`` of tests/test_cli.py, and ``make docs`` puts its help
into docs/cli.md. It parses, calls one public function that does the work (so that Python can do the same), and prints.

A command that lists something returns a `Listing` and is registered as ``app.command("hubs")(listing(hubs))``::

    def hubs(reference: ResultRef, pairing: Pairings = None, k: Annotated[int, k_option("Heads.")] = 10) -> Listing:
        '''One line that says what it lists.

        \b
        Examples:
          headspan hubs gpt2
        '''
        ...
        return Listing(rows, title="hubs by pk", formats={"score": ".2f"})

`listing` adds ``--json`` and ``--csv``. Rows are flat: the same keys in every row, each value a number, a text or None.
JSON and CSV show all of them in full; the table shows ``shown`` (or all) of them, or the command's own ``tables``.

Options that several commands take are spelled once, here: `Metric`, `Metrics`, `Pairings`, `k_option`, `LabelsOption`,
`WeightsOption`, `BehaviourOption`, `Fold`, `Bos`, `Dtype`, `NullOption`, `Force`, `out_option`; those that name nodes
in cli/node_options.py. Old and plural spellings go into ``ALIASES``: they work and are not shown. What a reference, a
label list or a file stands for is known by `headspan.scoring.inputs`.

A command that writes calls `headspan.system.outputs.check_output` before any work, with what it reads and ``force``.

Long work goes under ``with progress("scoring") as update``; remarks for the reader through `note`, never `print`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from headspan.cli.tables import Row, print_csv, print_json, print_lines, print_table
from headspan.system.progress import progress_bar as progress
from headspan.vocabulary.errors import HeadspanError, message

if TYPE_CHECKING:
    from headspan.models.weights import AttentionWeights

__all__ = ["Listing", "listing", "note", "print_json", "print_lines", "print_table", "progress"]

# -------------------------------------------------------------------------------------------- arguments, options

ModelRef = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Directory, file (.safetensors, .gguf, .bin), hub id or 'demo'."),
]
ResultRef = Annotated[
    str,
    typer.Argument(metavar="RESULT|MODEL", help="A saved result, or a model reference to score on the spot."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")]
Metric = Annotated[
    str | None, typer.Option("--metric", "-m", help="Similarity: one of {metrics}. [default: {default_metric}]")
]
Metrics = Annotated[
    list[str] | None,
    typer.Option("--metric", "-m", help="Similarities: {metrics}, or all; may be repeated."),
]
Pairings = Annotated[
    list[str] | None,
    typer.Option("--pairing", "-p", help="Like OK; flow for OQ, OK and OV; or all. May be repeated."),
]
LabelsOption = Annotated[
    str | None,
    typer.Option(
        "--labels",
        help="Head classes: gpt2, gpt2-ioi, gpt2-identity, a CSV file head,label, or behaviour for head scores ≥ 0.3.",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", help="With a RESULT: the model it was made from, for tokens, angles and norms."),
]
BehaviourOption = Annotated[
    str | None, typer.Option("--behaviour", help="Head scores written by headspan behaviour --out.")
]
Fold = Annotated[bool, typer.Option("--fold", help="Fold the norms into the weights first.")]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a file that headspan did not make; never one that is read.")
]
Bos = Annotated[
    str, typer.Option(help="Beginning-of-sequence token in front: auto (as the tokenizer does), yes or no.")
]
Dtype = Annotated[
    str, typer.Option(help="Compute in float32, bfloat16, float16, or the type the weights are stored in (stored).")
]
NullOption = Annotated[
    str | None,
    typer.Option(
        "--null",
        help="random subspaces; reversed: pairs in the direction no information can flow; within: other heads of the "
        "same two layers. [default: random]",
    ),
]
# Spellings of version 0.1 that still work, where a command does not use the word for something else.
ALIASES = {"--metrics": "--metric", "--pairings": "--pairing", "--used": "--large-effect"}


def k_option(what: str, minimum: int = 1) -> Any:
    """``-k``: how many to list."""
    return typer.Option("-k", "--top", min=minimum, help=what)


def out_option(what: str) -> Any:
    """``--out``: where to write."""
    return typer.Option("--out", "-o", help=what)


class Command(TyperCommand):
    """A command that understands the spellings in ``ALIASES``, and whose help names the similarities of the table."""

    def get_help(self, ctx: Any) -> str:
        from headspan.subspaces.metrics import METRICS, PK

        for parameter in self.params:
            if text := getattr(parameter, "help", None):
                text = text.replace("{metrics}", ", ".join(METRICS)).replace("{default_metric}", PK)
                parameter.help = text  # type: ignore[attr-defined]
        return super().get_help(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        return super().parse_args(ctx, [_modern(arg, known) for arg in args])


def _modern(argument: str, known: set[str]) -> str:
    """An option in today's spelling.

    >>> _modern("--metrics=pk", {"--metric"}), _modern("--metrics", {"--metrics"})
    ('--metric=pk', '--metrics')
    """
    name, equals, value = argument.partition("=")
    usual = ALIASES.get(name, name)
    return argument if name in known or usual not in known else f"{usual}{equals}{value}"


# ------------------------------------------------------------------------------------------------------ listings


Table = tuple[str | None, Sequence[Row], Mapping[str, str]]  # title, rows, formats


@dataclass
class Listing:
    """What a listing command prints.

    rows: flat records, for JSON, CSV and the table; ``columns`` are their names, needed where there may be no rows.
    shown: the columns of the table where it has fewer; formats: a format spec per column, for the table only.
    tables: other tables (title, rows, formats) to show a reader instead of the one of ``rows``.
    head, remarks: lines above and below the table; with --json and --csv remarks go to stderr.
    tail: lines about the table itself, below it, which --json and --csv do without.
    code: the exit code. written: all of it went to files, so that a table would only be in the way.
    """

    rows: Sequence[Row]
    title: str | None = None
    formats: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ()
    shown: Sequence[str] = ()
    tables: Sequence[Table] = ()
    head: Sequence[str] = ()
    tail: Sequence[str] = ()
    remarks: Sequence[str] = ()
    code: int = 0
    written: bool = False

    def print(self, as_json: bool, as_csv: bool) -> None:
        if as_json:
            print_json(self.rows)
        elif as_csv:
            print_csv(self.rows, self.columns)
        elif not self.written:
            self._print_tables()
        for remark in self.remarks:
            note(remark) if as_json or as_csv else print_lines([remark])

    def _print_tables(self) -> None:
        print_lines(self.head)
        shown = [{name: row[name] for name in self.shown or row} for row in self.rows]
        for i, (title, rows, formats) in enumerate(self.tables or [(self.title, shown, self.formats)]):
            if i:
                print()
            print_table(rows, title, formats)
        print_lines(self.tail)


def with_options(
    run: Callable[..., Any], command: Callable[..., Any], added: Mapping[str, tuple[Any, Any]], instead_of: str = ""
) -> None:
    """Let ``run`` take the parameters of ``command`` and some more (annotation, default), the way Typer asks for them.

    instead_of: the parameter whose place the new ones take; behind all others without one.
    """
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[n]) for n, p in inspect.signature(command).parameters.items()]
    place = next((i for i, p in enumerate(own) if p.name == instead_of), len(own))
    kind = own[place].kind if place < len(own) else inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(n, kind, default=d, annotation=a) for n, (a, d) in added.items()]
    parameters = [*own[:place], *more, *(p for p in own[place:] if p.name != instead_of)]
    run.__annotations__ = {**{p.name: p.annotation for p in parameters}, "return": None}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def listing(command: Callable[..., Listing]) -> Callable[..., None]:
    """Give a command that returns a `Listing` the options --json and --csv, and print what it returns."""

    @functools.wraps(command)
    def run(*args: Any, as_json: bool, as_csv: bool, **options: Any) -> None:
        if as_json and as_csv:
            raise HeadspanError("--json and --csv are two ways to print one list: give one of them")
        found = command(*args, **options)
        found.print(as_json, as_csv)
        if found.code:
            raise typer.Exit(found.code)

    with_options(run, command, {"as_json": (Json, False), "as_csv": (Csv, False)})
    return run


# ---------------------------------------------------------------------------------------------- opening, telling


def open_model(reference: str, fold: bool = False, tell: bool = False, download: bool = False) -> AttentionWeights:
    """The weights of a model, folded if asked for; ``tell`` prints what is remarkable about it."""
    from headspan.scoring.inputs import given_weights

    weights = given_weights(reference, fold, download)
    for sentence in weights.notes if tell else ():
        note(sentence)
    return weights


def check_store(path: Path) -> None:
    """Something can only be stored in a result that is there: told before --out's rules for new files are applied."""
    from headspan.results.scores import Scores, is_result

    if not is_result(path):
        Scores.load(path)  # says what it is instead


def note(text: str) -> None:
    """A remark for the person at the terminal, on stderr so that it never mixes with the output."""
    if sys.stderr is not None:
        print(message(text), file=sys.stderr)
