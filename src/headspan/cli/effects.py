"""``headspan effects``: which edges between heads a model uses, and how well weights predict it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.behaviour import check_model, read_text
from headspan.cli.common import (
    Bos,
    Dtype,
    Listing,
    Metrics,
    ModelRef,
    Pairings,
    check_store,
    k_option,
    listing,
    note,
    progress,
)

if TYPE_CHECKING:
    from headspan.analysis.effects_result import Effects
    from headspan.scores import Scores

_SHORT = {
    "percentile": "pct", "change_identity": "Δid", "change_previous_token": "Δprev",
    "change_duplicate_token": "Δdup", "change_induction": "Δind",
}  # fmt: skip
_COLUMNS = ["spearman", "within", "within_low", "within_high", "ap", "ap_low", "ap_high", "hits", "habit_ap"]
_STOPPED = 130


def register(app: typer.Typer) -> None:
    app.command("effects")(listing(effects))


def effects(
    model: ModelRef,
    result: Annotated[
        Path | None, typer.Argument(metavar="[RESULT]", help="Measure only the best PK edges of this result.")
    ] = None,
    pairing: Pairings = None,
    k: Annotated[int, k_option("Edges per pairing.")] = 200,
    every: Annotated[bool, typer.Option("--all", help="Measure and list every edge.")] = False,
    text: Annotated[list[Path] | None, typer.Option("--text", help="Run on this text file; repeatable.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Run on random tokens said twice.")] = False,
    sequences: Annotated[int, typer.Option(min=1, help="How many random sequences.")] = 4,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a random sequence before it is said again. [default: 42]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
    ablate: Annotated[str, typer.Option(help="What replaces a head's write: resample, mean or zero.")] = "resample",
    shared: Annotated[
        int | None, typer.Option(metavar="R", help="Exchange only the part along R shared principal directions.")
    ] = None,
    frozen_norm: Annotated[
        bool, typer.Option("--frozen-norm", help="Keep the norm's division of the clean run.")
    ] = False,
    bos: Bos = "auto",
    into: Annotated[Path | None, typer.Option(help="Store the effects in this result of headspan score.")] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Say how well weights predict the effects, instead of listing edges.")
    ] = False,
    metric: Metrics = None,
    memory: Annotated[str | None, typer.Option(help="Most memory beside the model, like 2GB.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to run, for example cuda (default: cpu).")] = None,
    dtype: Dtype = "float32",
) -> Listing:
    """Run MODEL and measure which edges it uses: what changes when one head's write is exchanged for one port.

    By default on random tokens said twice and on a short text; the effect is the larger one. Needs headspan[torch].
    --summary says how well similarities (--metric, pk and cs by default) predict it.

    \b
    Examples:
      headspan effects demo
      headspan effects ./gpt2 gpt2.safetensors --pairing OK -k 50
      headspan effects model.gguf --into model.safetensors
      headspan effects demo --summary
    """
    from headspan.analysis.effects import effects as run
    from headspan.analysis.effects_result import attach, check_same_heads
    from headspan.heads import parse_pairings
    from headspan.models.running import check_dtype, identity_of
    from headspan.models.weights import open
    from headspan.scores import Scores
    from headspan.scoring.metrics import parse_metrics
    from headspan.system.outputs import check_output

    if into is not None:
        check_store(into)
        check_output(into, "result", inputs=[model, *(text or [])])
    check_dtype(dtype)
    metrics = parse_metrics(metric or ["pk", "cs"])
    pairings = parse_pairings(pairing or "flow")
    scores = Scores.load(result) if result is not None else None
    store = Scores.load(into) if into is not None else None
    with open(model) as weights:  # before the long run: a result of another model is told at once
        for one, path in ((scores, result), (store, into)):
            if one is not None:
                check_same_heads(weights.ports, one, model)
                check_model(identity_of(model), one.provenance, str(path))
    texts = [read_text(path) for path in text] if text else None
    limited = scores is not None and not every and not summary
    with progress("measuring edges") as update:
        found = run(
            model,
            scores,
            pairing=pairings,
            k=k if limited else None,
            text=texts,
            random=True if random else None,
            ablate=ablate,
            shared=shared,
            frozen_norm=frozen_norm,
            bos=bos,
            sequences=sequences,
            length=length,
            seed=seed,
            memory=memory,
            device=device,
            dtype=dtype,
            progress=update,
        )
    for remark in found.notes:
        note(remark)
    if store is not None and into is not None:
        attach(store, found)
        store.save(into)
    code = _STOPPED if found.interrupted else 0
    if summary:
        return _summary(model, found, metrics, code)
    known = scores or store or _scored(model, found)
    rows = found.records(known, k=None if every else k, by="score" if limited else "effect")
    return _edges(model, found, rows, code)


def _scored(model: str, found: Effects) -> Scores:
    """PK of the model's own weights, for the columns score and rank."""
    from headspan.analysis.given import given_scores

    return given_scores(model, ["pk"], found.pairings)


def _edges(model: str, found: Effects, rows: list[dict[str, Any]], code: int) -> Listing:
    empty = {key for key in (rows[0] if rows else ()) if all(row[key] is None for row in rows)}
    hidden = empty | {name for m in found.materials for name in (f"effect_{m}", f"{m}_largest")}
    shown = [{_SHORT.get(key, key): v for key, v in row.items() if key not in hidden} for row in rows]
    formats = {"score": ".3f", "effect": ".4f", "pct": ".0f"}
    formats |= {name: "+.2f" for name in _SHORT.values() if name.startswith("Δ")}
    title = f"Edges of {model}, measured on {' and '.join(found.materials)}"
    return Listing(rows, tables=[(title, shown, formats)], code=code)


def _summary(model: str, found: Effects, metrics: tuple[str, ...], code: int) -> Listing:
    from headspan.analysis.effects_summary import predictors_of, summarise_effects
    from headspan.models.weights import open

    with open(model) as weights, progress("scoring"):
        if not weights.foldable:
            note(f"raw weights only: {weights.not_foldable_reason}")
        told = summarise_effects(found, predictors_of(weights, metrics, found.pairings))
    tables: list[Any] = []
    for material in found.materials:
        mine = [row for row in told.rows if row["material"] == material]
        used = ", ".join(f"{n} {p}" for p, n in dict.fromkeys((row["pairing"], row["used"]) for row in mine))
        title = f"{model} on {material}: finding the {used} edges of largest effect (k = {told.k})"
        columns = _COLUMNS if material == "random" else [name for name in _COLUMNS if name != "habit_ap"]
        rows = [{name: row[name] for name in ("pairing", "predictor", *columns)} for row in mine]
        tables.append((title, rows, dict.fromkeys(columns, ".2f") | {"hits": ".0f"}))
    formats = dict.fromkeys(("difference", "low", "high"), "+.3f")
    tables.append(("differences, with 95 % intervals", told.differences, formats))
    return Listing(told.rows, tables=tables, code=code)
