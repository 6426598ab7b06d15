"""``headspan behaviour``: run a model and score its heads by what they attend to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.common import (
    Bos,
    Dtype,
    Force,
    Listing,
    ModelRef,
    check_store,
    k_option,
    listing,
    note,
    out_option,
    progress,
)
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    from headspan.results.head_scores import BehaviourScores

EXAMPLES = """\b
Examples:
  headspan behaviour demo
  headspan behaviour model.gguf --labels-out labels.csv --threshold 0.3
  headspan behaviour ./gpt2 --into gpt2.safetensors --out behaviour.json
  headspan behaviour demo --prompt "Anna gave the book to Peter, and Peter gave Anna a pen."
"""


def register(app: typer.Typer) -> None:
    app.command("behaviour", epilog=EXAMPLES)(listing(behaviour))


def behaviour(
    model: ModelRef,
    sequences: Annotated[int | None, typer.Option(min=1, help="Number of random sequences. [default: 128]")] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a random sequence before it is repeated. [default: 100]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for the random tokens. [default: 0]")] = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="Measure on this text file instead; may be repeated.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Measure on this text instead; may be repeated.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per batch (default: chosen by memory).")] = None,
    device: Annotated[str | None, typer.Option(help="Device to run on, for example cuda (default: cpu).")] = None,
    k: Annotated[int, k_option("Heads of each kind in the table.")] = 10,
    out: Annotated[Path | None, out_option("Write all scores to this JSON file.")] = None,
    into: Annotated[
        Path | None, typer.Option(help="Store the scores in this result file (from headspan score).")
    ] = None,
    labels_out: Annotated[Path | None, typer.Option(help="Write the best heads of each kind as a label file.")] = None,
    best: Annotated[int | None, typer.Option(min=1, help="Heads of each kind in the label file (default 10).")] = None,
    threshold: Annotated[float | None, typer.Option(help="Instead, label every head at or above this score.")] = None,
    bos: Bos = "auto",
    dtype: Dtype = "float32",
    force: Force = False,
) -> Listing:
    """Run MODEL and score each head: identity, previous token, duplicate token, induction (needs headspan[torch])."""
    from headspan.results.labels import write_labels
    from headspan.running.behaviour import behaviour as measure
    from headspan.running.opening import check_dtype
    from headspan.system.outputs import check_outputs

    if best is not None and threshold is not None:
        raise HeadspanError("--best and --threshold both choose labels. Give only one of them")
    if (best is not None or threshold is not None) and labels_out is None:
        raise HeadspanError("--best and --threshold need a label file. Add --labels-out FILE")
    if into is not None:
        check_store(into)
    outputs = [(into, "result"), (out, "json"), (labels_out, "csv")]
    check_outputs([(p, kind) for p, kind in outputs if p is not None], inputs=[model, *(text or [])], force=force)
    texts = [*map(text_of, text or []), *(prompt or [])] or None
    check_dtype(dtype)
    with progress("running the model") as update:
        scores = measure(
            model,
            sequences=sequences,
            length=length,
            seed=seed,
            batch=batch,
            text=texts,
            bos=bos,
            into=into,
            device=device,
            dtype=dtype,
            progress=update,
        )
    for remark in scores.notes:
        note(remark)
    if into is not None:
        note(f"{into}: head scores of {len(scores.heads)} heads")
    if out is not None:
        scores.save(out, force=force)
        note(f"{out}: head scores of {len(scores.heads)} heads")
    if labels_out is not None:
        labels = scores.labels(best, threshold)
        write_labels(labels, labels_out, force=force)
        note(f"{labels_out}: labels of {len(labels)} heads")
    title = f"Heads of {model} by what they attend to"
    return Listing(scores.rows(), tables=[(title, _best_heads(scores, k), {})])


def text_of(path: Path) -> str:
    """Read a text file; raise an error that says why if it cannot be read."""
    from headspan.system.inputs import read_text

    return read_text(path, f"there is no file {path}. --text takes a text file", "text in UTF-8")


def _best_heads(scores: BehaviourScores, k: int) -> list[dict[str, Any]]:
    """One row per rank: the best heads of the four kinds side by side."""
    from headspan.results.head_scores import KIND_TITLES

    ranked = {kind: scores.top(kind, k) for kind in scores}
    rows: list[dict[str, Any]] = []
    for rank in range(max(map(len, ranked.values()))):
        row: dict[str, Any] = {"rank": rank + 1}
        for kind, found in ranked.items():
            row[KIND_TITLES[kind]] = f"{found[rank][0]:<8}{found[rank][1]:.3f}" if rank < len(found) else None
        rows.append(row)
    return rows
