"""``headspan effects``: effects of edges between heads, which are large, and how well weights predict them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.behaviour import text_of
from headspan.cli.common import (
    STOPPED,
    Bos,
    Dtype,
    FromOption,
    LabelsOption,
    Listing,
    Metrics,
    ModelRef,
    Pairings,
    ToOption,
    check_store,
    k_option,
    listing,
    note,
    progress,
)
from headspan.cli.tables import EFFECT_FORMATS, effect_columns
from headspan.vocabulary.errors import refuse_ignored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headspan.results.effects import Effects
    from headspan.results.observations import Statistics
    from headspan.results.scores import Scores

_HABITS = {"identity": "id", "previous_token": "prev", "duplicate_token": "dup", "induction": "ind"}
_ALWAYS = (
    "pairing", "source", "source_labels", "target", "target_labels", "score", "rank", "effect", "effect_unit",
    "large_effect", "random_write_ratio", "percentile_in_layers",
)  # fmt: skip
_SPARE = ("ratio", "change", "rank", "score")
_MEASURED, _SHOWN = 200, 20  # edges per pairing, without -k and --all


def register(app: typer.Typer) -> None:
    app.command("effects")(listing(effects))


def effects(
    model: ModelRef,
    scores: Annotated[
        Path | None,
        typer.Argument(metavar="[RESULT]", help="Measure only the edges with the largest PK in this result."),
    ] = None,
    pairing: Pairings = None,
    k: Annotated[int | None, k_option("Edges per pairing. [default: measure 200, print 20]")] = None,
    every: Annotated[bool, typer.Option("--all", help="Measure and list every edge.")] = False,
    from_: FromOption = None,
    to: ToOption = None,
    labels: LabelsOption = None,
    text: Annotated[list[Path] | None, typer.Option("--text", help="Run on this text file; may be repeated.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Run on random sequences repeated twice.")] = False,
    sequences: Annotated[int | None, typer.Option(min=1, help="Number of random sequences. [default: 4]")] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a random sequence before it is repeated. [default: 42]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for the random tokens. [default: 0]")] = None,
    ablate: Annotated[str, typer.Option(help="What replaces a head's output: resample, mean or zero.")] = "resample",
    shared: Annotated[
        int | None, typer.Option(metavar="R", help="Patch only the component along R shared principal directions.")
    ] = None,
    frozen_norm: Annotated[
        bool, typer.Option("--frozen-norm", help="Keep the normalisation scale of the clean run.")
    ] = False,
    floor: Annotated[
        float | None,
        typer.Option(help="Smallest effect that counts as large. [default: 0.05 for OQ and OK, 0.1 for OV]"),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=0, help="Random outputs to compare each effect at or above the floor with. [default: 8]"),
    ] = None,
    bos: Bos = "auto",
    into: Annotated[
        Path | None, typer.Option(help="Store the effects in this result file (from headspan score).")
    ] = None,
    summary: Annotated[
        bool,
        typer.Option("--summary", help="Report how well the weights predict the effects, instead of listing edges."),
    ] = False,
    metric: Metrics = None,
    stats: Annotated[
        list[Path] | None,
        typer.Option("--stats", help="With --summary: statistics from headspan observe; may be repeated."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit in addition to the model, for example 2GB.")] = None,
    device: Annotated[str | None, typer.Option(help="Device to run on, for example cuda (default: cpu).")] = None,
    dtype: Dtype = "float32",
) -> Listing:
    """Run MODEL and measure edges: patch one head's output as seen by one Q, K or V input of a later head.

    By default it runs random sequences repeated twice and a short text, and reports the larger effect. An effect is
    large if it is at least the floor and at least 1.5 times the effect of an output of the same length in a random
    direction. --summary reports how well similarities (--metric; default: pk, cs and influence) predict effects.
    Without --stats, influence comes from another run, on other text and other random sequences. Needs headspan[torch].

    \b
    Examples:
      headspan effects demo
      headspan effects demo --to L1H0.K
      headspan effects ./gpt2 gpt2.safetensors --pairing OK -k 50
      headspan effects model.gguf --into model.safetensors
      headspan effects demo --summary
    """
    from headspan.results.scores import Scores
    from headspan.running.effects import effects as run
    from headspan.running.opening import check_dtype
    from headspan.subspaces.metrics import DEFAULT_METRICS, OBSERVED_METRICS, parse_metrics
    from headspan.system.outputs import check_output
    from headspan.vocabulary.heads import parse_pairings

    if into is not None:
        check_store(into)
        check_output(into, "result", inputs=[model, *(text or [])])
    check_dtype(dtype)
    if summary:
        refuse_ignored("with --summary", k=k, all=every, from_=from_, to=to, labels=labels)
        if into is None:
            refuse_ignored("with --summary and without --into", draws=draws, floor=floor)
    else:
        refuse_ignored("without --summary", metric=metric, stats=stats)
    if every:
        refuse_ignored("with --all", k=k)
    metrics = parse_metrics(metric or (*DEFAULT_METRICS, *OBSERVED_METRICS), observed=True)
    pairings = parse_pairings(pairing or "flow")
    result = Scores.load(scores) if scores is not None else None
    texts = [text_of(path) for path in text] if text else None
    limited = result is not None and not every and not summary
    with progress("measuring edges") as update:
        found = run(
            model,
            result,
            pairing=pairings,
            k=(k or _MEASURED) if limited else None,
            from_=from_,
            to=to,
            labels=labels,
            text=texts,
            random=True if random else None,
            ablate=ablate,
            shared=shared,
            frozen_norm=frozen_norm,
            floor=floor,
            draws=0 if summary and into is None and shared is None else draws,
            bos=bos,
            sequences=sequences,
            length=length,
            seed=seed,
            into=into,
            memory=memory,
            device=device,
            dtype=dtype,
            progress=update,
        )
    for remark in found.notes:
        note(remark)
    if into is not None:
        note(f"{into}: {found._headline()}")
    code = STOPPED if found.interrupted else 0
    if summary:
        run_again = {"bos": bos, "device": device, "dtype": dtype}
        return _summary(model, found, metrics, stats or _other_input(model, found, metrics, run_again), code)
    known = result or (Scores.load(into) if into is not None else _scored(model, found))
    rows = found.records(known, k=None if every else k or _MEASURED, by="score" if limited else "effect")
    return _edges(model, found, rows, len(rows) if every or k else _SHOWN, code)


def _scored(model: str, found: Effects) -> Scores:
    """PK of the model's own weights, for the columns score and rank."""
    from headspan.scoring.inputs import given_scores
    from headspan.subspaces.metrics import PK

    return given_scores(model, [PK], found.pairings)


def _edges(model: str, found: Effects, rows: list[dict[str, Any]], most: int, code: int) -> Listing:
    """All edges as records; the table shows the first ``most`` of each pairing."""
    chosen = [row for pairing in found.pairings for row in [r for r in rows if r["pairing"] == str(pairing)][:most]]
    left = f"{len(chosen)} of {len(rows)} edges are shown: --all lists every edge, -k sets the number per pairing"
    formats = {"score": ".2f"} | EFFECT_FORMATS
    title = f"Edges of {model}, measured on {found.measured_on}"
    remarks = [*_legend(found), *([left] if len(chosen) < len(rows) else [])]
    shown = [_shown(row) for row in chosen]
    return Listing(rows, tables=[(title, shown, formats)], spare=_SPARE, tail=remarks, code=code)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row narrow enough for a terminal: of the head scores, only the one that changes most."""
    shown = effect_columns({key: row[key] for key in _ALWAYS if key in row})
    changes = {short: row.get(f"change_{name}") for name, short in _HABITS.items()}
    known = {short: change for short, change in changes.items() if change is not None}
    if any(f"change_{name}" in row for name in _HABITS):
        most = max(known, key=lambda short: abs(known[short]), default=None)
        shown["change"] = None if most is None else f"{most} {known[most]:+.2f}"
    return shown


def _legend(found: Effects) -> list[str]:
    """Units, floors and columns, below the table."""
    from headspan.results.large_effects import LEAST_RATIO
    from headspan.vocabulary.words import counted

    units = "Units: TV is the total variation (0 to 1) of attention; norm is the relative change of the output."
    if any(name in _HABITS for name, _ in found.arrays):
        units += " change: the head score that changes most."
    if not found.compared:
        return [units, "Effects were not compared with random outputs, so none is marked as large."]
    listed = {pairing: found.asked(pairing) & (found.of(pairing) >= 0) for pairing in found.pairings}
    listed = {pairing: edges for pairing, edges in listed.items() if edges.any()}
    floors = ", ".join(f"{found.floor(pairing):g} for {pairing}" for pairing in listed)
    count = ", ".join(f"{int((found.large(p) & mine).sum())} of {int(mine.sum())} {p}" for p, mine in listed.items())
    open_edges = sum(int((mine & ~found.judged(p)).sum()) for p, mine in listed.items())
    left = f" ({counted(open_edges, 'edge')} not yet compared)" if open_edges else ""
    return [
        units,
        f"large: at least the floor ({floors}) and {LEAST_RATIO:g} times a random output of the same length (ratio). "
        f"An effect below the floor is small on this input. Large effects: {count}{left}.",
    ]


def _other_input(model: str, found: Effects, metrics: tuple[str, ...], options: dict[str, Any]) -> list[Statistics]:
    """Statistics of other sequences of the same kinds as the effects', if a similarity needs them."""
    from headspan.running.observe import observe
    from headspan.subspaces.metrics import METRICS

    if not any(METRICS[name].observed for name in metrics):
        return []
    with progress("observing") as update:
        kinds = dict.fromkeys(material == "random" for material in found.materials)
        return [observe(model, random=random, progress=update, **options) for random in kinds]


def _summary(model: str, found: Effects, metrics: tuple[str, ...], stats: Sequence[Any], code: int) -> Listing:
    from headspan.running.effects_summary import effects_summary

    with progress("scoring"):
        told = effects_summary(model, found, metrics, stats=list(stats) or None)
    for sentence in told.notes:
        note(sentence)
    tables: list[Any] = []
    for material in found.materials:
        mine = [row for row in told.rows() if row["material"] == material]
        counts = dict.fromkeys((row["pairing"], row["largest_edges"]) for row in mine)
        largest = ", ".join(f"{n} {p}" for p, n in counts)
        tokens = sum(found.protocol.get("tokens", {}).get(material, []))
        on = f"{tokens:,} tokens of {material}" if tokens else material
        title = f"{model} on {on}: finding the largest 1 % of effects ({largest} edges; k = {told.k})"
        tables.append(
            (
                title,
                [_told(row) for row in mine],
                {"rank_corr": ".2f", "within": ".2f", "hits": ".0f", "habit_ap": ".2f"},
            )
        )
    formats = dict.fromkeys(("difference", "low", "high"), "+.2f")
    tables.append(("differences, with 95 % intervals", told.differences, formats))
    if told.agreement:
        tables.append(("influence on two inputs: rank correlation over all edges", told.agreement, {"spearman": ".2f"}))
    tail = [f"influence ({name}): statistics of {ran_on}" for name, ran_on in told.inputs.items()]
    return Listing(told.rows(), tables=tables, tail=tail, code=code)


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the summary narrow enough for a terminal: spec and ap with their 95 % intervals."""
    told = {"pairing": row["pairing"], "predictor": row["predictor"], "rank_corr": row["spearman"]}
    told["within"] = row["within"]
    told |= {f"{name}_95%": _interval(*(row[name + end] for end in ("", "_low", "_high"))) for name in ("spec", "ap")}
    told["hits"] = row["hits"]
    return told | ({"habit_ap": row["habit_ap"]} if row["material"] == "random" else {})


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    """0.59 -0.06…0.91, as far as there are numbers."""
    one, *ends = ("–" if number is None else f"{number:.2f}" for number in (value, low, high))
    return one if ends == ["–", "–"] else f"{one} {'…'.join(ends)}"
