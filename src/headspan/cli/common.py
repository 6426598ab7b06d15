"""What every command shares, and how a new command is written.

A command is a function in a module of this folder that has ``register(app)``. List it under its module in ``_MODULES``
of ``cli/__init__.py`` and in ``COMMANDS`` of tests/test_cli.py; ``make docs`` writes its help into docs/cli.md. It
parses, calls one public function that does the work (so that Python can do the same), and prints.

A command that lists something returns a `Listing` and is registered as ``app.command("hubs")(listing(hubs))``::

    def hubs(scores: ResultRef, pairing: Pairings = None, k: Annotated[int, k_option("Heads.")] = 10) -> Listing:
        '''One line that says what it lists.

        \b
        Examples:
          headspan hubs gpt2
        '''
        ...
        return Listing(rows, title="hubs by pk", formats={"score": ".2f"})

`listing` adds ``--json`` and ``--csv``. Rows are flat: the same keys in every row; values are numbers, strings or None.
JSON and CSV contain every column; the table shows the columns in ``shown`` (or all), or the command's ``tables``.

Options shared by several commands are defined here: `Metric`, `Metrics`, `Pairings`, `k_option`, `FromOption`,
`ToOption`, `LabelsOption`, `WeightsOption`, `BehaviourOption`, `Fold`, `Bos`, `Dtype`, `NullOption`, `Force`,
`out_option`; options that name nodes are in cli/nodes.py. Old and plural spellings go into ``ALIASES``: they work but
are hidden. References, label lists and files are resolved by `headspan.scoring.inputs`.

A command that writes first calls `headspan.system.outputs.check_output` with its inputs and ``force``.

Long work runs inside ``with progress("scoring") as update``; remarks go through `note`, never `print`. Parameters have
the names of the function's arguments (tests/test_api.py); an option that would have no effect is refused
(`headspan.vocabulary.errors.refuse_ignored`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from headspan.cli.notes import in_options, known_options, note, notes_as_lines
from headspan.cli.tables import Row, print_csv, print_json, print_lines, print_table
from headspan.system.progress import progress_bar as progress
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    from headspan.models.weights import AttentionWeights

STOPPED = 130  # the exit code after Ctrl-C

__all__ = ["Listing", "listing", "note", "print_json", "print_lines", "print_table", "progress"]

# -------------------------------------------------------------------------------------------- arguments, options

ModelRef = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Directory, file (.safetensors, .gguf, .bin), hub id or 'demo'."),
]
ResultRef = Annotated[
    str,
    typer.Argument(metavar="RESULT|MODEL", help="A saved result, or a model to score now."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")]
Metric = Annotated[
    str | None, typer.Option("--metric", "-m", help="Similarity: one of {metrics}. [default: {default_metric}]")
]
Metrics = Annotated[
    list[str] | None,
    typer.Option("--metric", "-m", help="Similarity: {metrics}, or all; may be repeated."),
]
Pairings = Annotated[
    list[str] | None,
    typer.Option("--pairing", "-p", help="Pairing, for example OK; flow (OQ, OK and OV); or all. May be repeated."),
]
LabelsOption = Annotated[
    str | None,
    typer.Option(
        "--labels",
        help="Head classes: gpt2, gpt2-ioi, gpt2-identity, a CSV file (head,label), a file of headspan task (the heads "
        "of its circuit), or behaviour (head scores ≥ 0.3).",
    ),
]
_ENDS = "a head (L5H1), port (L5H1.K), layer (L5), class of --labels, or node; may be repeated."
FromOption = Annotated[list[str] | None, typer.Option("--from", help=f"Only edges that start here: {_ENDS}")]
ToOption = Annotated[list[str] | None, typer.Option("--to", help=f"Only edges that end here: {_ENDS}")]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", help="For a RESULT: the model it was made from; needed for tokens, angles and norms."),
]
BehaviourOption = Annotated[
    str | None, typer.Option("--behaviour", help="Head scores written by headspan behaviour --out.")
]
Fold = Annotated[bool, typer.Option("--fold", help="Fold the norms into the weights first.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that headspan did not make (never an input).")]
Bos = Annotated[
    str, typer.Option(help="Prepend a beginning-of-sequence token: auto (as the tokenizer does), yes or no.")
]
Dtype = Annotated[str, typer.Option(help="Compute in float32, bfloat16, float16, or the weights' own type (stored).")]
NullOption = Annotated[
    str | None,
    typer.Option(
        "--null",
        help="random: random subspaces; reversed: pairs in which no information can flow; within: other heads of the "
        "same two layers. [default: random]",
    ),
]
# Spellings of earlier versions that still work, unless the command uses the word for something else.
ALIASES = {"--metrics": "--metric", "--pairings": "--pairing", "--used": "--large-effect", "--add": "--nodes"}


def ends_in_words(from_: list[str] | None, to: list[str] | None) -> list[str]:
    """``["from L4", "to L5H1.K"]``, for titles."""
    return [f"{word} {', '.join(names)}" for word, names in (("from", from_), ("to", to)) if names]


def k_option(what: str, minimum: int = 1) -> Any:
    """``-k``: how many to list."""
    return typer.Option("-k", "--top", min=minimum, help=what)


def out_option(what: str) -> Any:
    """``--out``: where to write."""
    return typer.Option("--out", "-o", help=what)


class Command(TyperCommand):
    """A command that accepts the spellings in ``ALIASES`` and fills the names of the similarities into its help."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        known_options.update(option for parameter in self.params for option in parameter.opts)

    def get_help(self, ctx: Any) -> str:
        from headspan.subspaces.metrics import METRICS, PK

        for parameter in self.params:
            if text := getattr(parameter, "help", None):
                text = text.replace("{metrics}", ", ".join(METRICS)).replace("{default_metric}", PK)
                parameter.help = text  # type: ignore[attr-defined]
        return super().get_help(ctx)

    def invoke(self, ctx: Any) -> Any:
        with notes_as_lines():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        return super().parse_args(ctx, [_modern(arg, known) for arg in args])


def _modern(argument: str, known: set[str]) -> str:
    """The current spelling of an option.

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

    rows: flat records, for JSON, CSV and the table; ``columns`` are their names, needed if there may be no rows.
    shown: the columns of the table, if not all; formats: a format spec per column, for the table only.
    tables: tables (title, rows, formats) to print instead of the one made from ``rows``.
    spare: columns that are left out of a table for which the terminal is too narrow, the first of them first.
    head, remarks: lines above and below the table; with --json and --csv remarks go to stderr.
    tail: lines about the table, below it; left out with --json and --csv.
    code: the exit code. written: everything went to files, so no table is printed.
    """

    rows: Sequence[Row]
    title: str | None = None
    formats: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ()
    shown: Sequence[str] = ()
    tables: Sequence[Table] = ()
    spare: Sequence[str] = ()
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
            note(remark) if as_json or as_csv else print_lines([in_options(remark)])

    def _print_tables(self) -> None:
        print_lines(self.head)
        shown = [{name: row[name] for name in self.shown or row} for row in self.rows]
        tables = self.tables or [(self.title, shown, self.formats)]
        left_out: dict[str, None] = {}
        for i, (title, rows, formats) in enumerate(tables):
            if i:
                print()
            left_out |= dict.fromkeys(print_table(list(map(_labels_beside_heads, rows)), title, formats, self.spare))
        print_lines(self.tail)
        if left_out:
            print_lines([f"Too narrow for {', '.join(left_out)}: a wider terminal or --csv shows them."])


def _labels_beside_heads(row: Row) -> Row:
    """A row in which the classes of a head are in the column of the head."""
    ends = [end for end in ("source", "target") if end in row and f"{end}_labels" in row]
    found = {name: value for name, value in row.items() if name not in [f"{end}_labels" for end in ends]}
    return found | {end: f"{row[end]} {row[f'{end}_labels']}".rstrip() for end in ends}


def with_options(
    run: Callable[..., Any], command: Callable[..., Any], added: Mapping[str, tuple[Any, Any]], instead_of: str = ""
) -> None:
    """Give ``run`` the parameters of ``command`` and some more (annotation, default), in the form Typer expects.

    instead_of: the parameter that the new ones replace; without it they come last.
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
    """Add --json and --csv to a command that returns a `Listing`, and print what it returns."""

    @functools.wraps(command)
    def run(*args: Any, as_json: bool, as_csv: bool, **options: Any) -> None:
        if as_json and as_csv:
            raise HeadspanError("--json and --csv exclude each other. Give only one of them")
        found = command(*args, **options)
        found.print(as_json, as_csv)
        if found.code:
            raise typer.Exit(found.code)

    with_options(run, command, {"as_json": (Json, False), "as_csv": (Csv, False)})
    return run


# ------------------------------------------------------------------------------------------------ opening, notes


def open_model(reference: str, fold: bool = False, download: bool = False) -> AttentionWeights:
    """Open the weights of a model, folded if asked for."""
    from headspan.scoring.inputs import given_weights

    return given_weights(reference, fold, download)


def check_store(path: Path) -> None:
    """Check that --into names an existing result, before the rules for new output files are applied."""
    from headspan.results.scores import Scores, is_result
    from headspan.system.outputs import is_ours

    if not is_result(path) or not is_ours(path, "result"):
        Scores.load(path)  # its error says what the file is
