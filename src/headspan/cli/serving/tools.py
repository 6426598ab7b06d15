"""The tools that a program can call: public functions of headspan on names in one folder, with bounded answers.

A tool returns a headline, rows, notes, and how many rows were left out. It never writes, runs no model and no code
from a file. Wrong arguments get the message that a command would print.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

import headspan as hs
from headspan.cli.serving.folder import BUILT_IN, Folder
from headspan.cli.tables import plain
from headspan.results.scores import Scores
from headspan.subspaces.metrics import PK
from headspan.vocabulary.errors import HeadspanError, HeadspanWarning, message, visible

MOST_ROWS = 100
_MOST_LETTERS = 20_000  # of the rows of one answer, as JSON
_CELL = 200  # characters of a text in a row
_MOST_NOTES = 8
_LABELS = ("gpt2", "gpt2-ioi", "gpt2-identity", "behaviour")
_ONE_AT_A_TIME = threading.Lock()  # warnings and standard output belong to the whole process

Answer = dict[str, Any]


def server(folder: Folder, guide: str) -> MCPServer:
    """A server with all tools over one folder; ``guide`` says how to read the numbers."""
    made = MCPServer(
        "headspan",
        title="headspan",
        version=hs.__version__,
        instructions="Which attention heads communicate, from weights alone. Call guide_to_headspan first, then files.",
        log_level="WARNING",
    )
    only_reads = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=folder.hub)
    for tool in (*_of_results(folder), *_of_models(folder)):
        made.tool(annotations=only_reads)(_answered(folder, tool))

    @made.tool(annotations=only_reads, structured_output=False)
    def guide_to_headspan() -> str:
        """What to ask headspan, how to read its numbers, and what not to conclude from them. Read this first."""
        return guide

    return made


def _answered(folder: Folder, tool: Callable[..., Any]) -> Callable[..., Answer]:
    """A tool with a bounded answer; what is wrong with a call becomes one message."""

    def clean(text: str) -> str:
        """Untrusted text, without the place of the folder."""
        local = text.replace(f"{folder.path}/", "").replace(str(folder.path), "the folder")
        return visible(local if len(local) <= _CELL else f"{local[:_CELL]}…")

    @functools.wraps(tool)
    def run(*args: Any, **options: Any) -> Answer:
        with _ONE_AT_A_TIME, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", HeadspanWarning)
            try:
                with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(io.StringIO()):
                    headline, rows = tool(*args, **options)
            except HeadspanError as error:
                raise ToolError(message(str(error).replace(f"{folder.path}/", ""))) from None
            except (MemoryError, OSError, RecursionError) as error:
                raise ToolError(f"this could not be done: {type(error).__name__}") from None
        shown = _bounded(plain(rows), clean)
        notes = dict.fromkeys(str(one.message) for one in said if issubclass(one.category, HeadspanWarning))
        return {"about": clean(headline), "rows": shown, "left_out": len(rows) - len(shown),
                "notes": list(map(clean, notes))[:_MOST_NOTES]}  # fmt: skip

    signature = inspect.signature(tool, eval_str=True).replace(return_annotation=Answer)
    run.__signature__ = signature  # type: ignore[attr-defined]  # the tool's schema is made of it
    return run


def _bounded(rows: Sequence[dict[str, Any]], clean: Callable[[str], str]) -> list[dict[str, Any]]:
    """As many rows as fit an answer."""
    found: list[dict[str, Any]] = []
    letters = 0
    for row in rows[:MOST_ROWS]:
        short = {name: clean(value) if isinstance(value, str) else value for name, value in row.items()}
        letters += len(json.dumps(short))
        if letters > _MOST_LETTERS:
            break
        found.append(short)
    return found


def _count(k: int) -> int:
    if not 1 <= k <= MOST_ROWS:
        raise HeadspanError(f"k must be from 1 to {MOST_ROWS}, not {k}")
    return k


def _table(found: Any) -> tuple[str, list[dict[str, Any]]]:
    return found._headline(), found.rows()


def _of_results(folder: Folder) -> list[Callable[..., Any]]:
    """Tools that read saved results."""

    def scores(name: str) -> Scores:
        return Scores.load(folder.result(name))

    def known_labels(labels: str) -> str | Path:
        return labels if labels in _LABELS else folder.result(labels)

    def files() -> Any:
        """List the results and models in the folder. "demo" is a small built-in model that is always there."""
        rows = [{"name": name, "kind": kind} for name, kind in folder.files()]
        return "results and models", [{"name": BUILT_IN, "kind": "built-in model"}, *rows]

    def describe(result: str) -> Any:
        """What a saved result is: its kind, its model, its similarities and pairings, and its first rows."""
        found = hs.load(folder.result(result))
        if isinstance(found, Scores):
            known = {name: str(found.provenance.get(name, "")) for name in ("reference", "folding")}
            pairings = ",".join(map(str, found.pairings))
            shape = {"heads": len(found.ports.query), "d_model": found.d_model}
            return "the scores of one model", [
                known | {"metrics": ",".join(found.metrics), "pairings": pairings} | shape
            ]
        return _table(found)

    def top(result: str, pairing: str = "flow", k: int = 10, metric: str = PK, head: str = "") -> Any:
        """The pairs of heads with the largest scores. pairing: OQ, OK, OV (what is written → Q, K or V of a later
        head), or flow for the three. head: only pairs with this head, like L5H1."""
        if head:
            return _table(hs.around(scores(result), head, _count(k), metric, pairing))
        return _table(hs.top(scores(result), pairing, _count(k), metric))

    def significance(result: str, pairing: str = "OK", null: str = "random", k: int = 10) -> Any:
        """z, p and q of the strongest pairs against chance. null: random (subspaces), reversed (pairs in which nothing
        can flow) or within (other heads of the same two layers, the strictest)."""
        found = hs.significance(scores(result), pairing, null=null)  # type: ignore[arg-type]
        return found._headline(), found.rows(_count(k))

    def hubs(result: str, pairing: str = "OK", k: int = 10, metric: str = PK) -> Any:
        """Heads that many others write to (inlets) or read from (outlets)."""
        found = hs.hubs(scores(result), [pairing], metric)
        return found._headline(), found.rows(_count(k))

    def baseline(result: str) -> Any:
        """How far the scores are from chance, one row per pairing."""
        return _table(hs.baseline(scores(result)))

    def evaluate(result: str, labels: str = "gpt2-ioi", metric: str = PK) -> Any:
        """How well a similarity finds labelled heads. labels: gpt2-ioi, gpt2, gpt2-identity, behaviour or a CSV."""
        return _table(hs.evaluate(scores(result), known_labels(labels), metric))

    def circuit_overlap(result: str, circuit: str, metric: str = PK) -> Any:
        """Whether the edges of a circuit (a JSON file) overlap more than other pairs of the same layers: exceeds is 0.5
        by chance."""
        return _table(hs.circuit_overlap(scores(result), folder.result(circuit), metric))

    return [files, describe, top, significance, hubs, baseline, evaluate, circuit_overlap]


def _of_models(folder: Folder) -> list[Callable[..., Any]]:
    """Tools that read the weights of a model."""

    def info(model: str) -> Any:
        """The architecture of a model and what headspan reads of it."""
        found = hs.info(folder.model(model))
        return found._headline(), [{"line": line} for line in found.lines()]

    def pair(model: str, source: str, target: str, k: int = 10) -> Any:
        """What two ports share, like L4H11.O and L5H1.K: principal directions, with tokens if there is a tokenizer."""
        return _table(hs.pair(folder.model(model), source, target, _count(k)))

    def tokens(model: str, head: str, k: int = 10) -> Any:
        """The tokens closest to what a head writes (L10H6) or reads (L10H6.K)."""
        return _table(hs.tokens(folder.model(model), head, k=_count(k)))

    def nodes(model: str, words: str, k: int = 5) -> Any:
        """Which heads write or read single-token words; words are separated by commas, and spaces count."""
        return _table(hs.nodes(folder.model(model), tokens=words, k=_count(k)))

    def paths(model: str, to: str = "", start: str = "", depth: int = 2, k: int = 5) -> Any:
        """The strongest chains of heads that lead to a head (or port), or from one. depth: most hops, up to 3."""
        if not 1 <= depth <= 3 or not (to or start):
            raise HeadspanError("paths need to or start, a head like L5H1, and a depth from 1 to 3")
        return _table(hs.paths(folder.model(model), to or None, start or None, depth, _count(k)))

    return [info, pair, tokens, nodes, paths]
