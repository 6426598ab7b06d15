"""``headspan tokens`` and ``headspan pair``: the tokens of one head, and what two heads share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.common import (
    Csv,
    Fold,
    Json,
    Listing,
    ModelRef,
    k_option,
    listing,
    note,
    open_model,
    print_json,
    progress,
)
from headspan.vocabulary.errors import HeadspanError, refuse_ignored

if TYPE_CHECKING:
    from headspan.models.weights import AttentionWeights
    from headspan.reading.head_pairs import HeadPairs
    from headspan.reading.pair import PairReport, SignedTokens
    from headspan.reading.tokens import Token

TOKENS_EXAMPLES = """\b
Examples:
  headspan tokens model.gguf L14H0
  headspan tokens model.gguf L14KV0 --role K -k 20 --json
  headspan tokens ./gpt2 --all --role O --csv
  headspan tokens ./gpt2 --norms
"""
PAIR_EXAMPLES = """\b
Examples:
  headspan pair ./gpt2 L4H11 L5H1
  headspan pair ./gpt2 L4H11.O L5H1.K
  headspan pair model.gguf L17H3.O L20KV1.K -k 3 --tokens 8
  headspan pair ./gpt2 L4H11.O L5H1.K --fold --json
"""

DEFAULT = "centre-normalise"
Preprocess = Annotated[
    str | None,
    typer.Option(
        help="Preprocessing of token vectors: centre-normalise, centre, normalise or identity. "
        "[default: centre-normalise]"
    ),
]


def register(app: typer.Typer) -> None:
    app.command("tokens", epilog=TOKENS_EXAMPLES)(listing(tokens))
    app.command("pair", epilog=PAIR_EXAMPLES)(pair)


def tokens(
    model: ModelRef,
    head: Annotated[str | None, typer.Argument(help="A head: L10H6, L10H6.O or L17KV1.")] = None,
    role: Annotated[
        str | None, typer.Option(help="Q, K, V or O (default: O for one head, all four with --all).")
    ] = None,
    all_heads: Annotated[bool, typer.Option("--all", help="List all heads.")] = False,
    norms: Annotated[
        bool,
        typer.Option("--norms", help="Instead, report how far vector lengths determine the scores, per preprocessing."),
    ] = False,
    k: Annotated[int | None, k_option("Tokens per head. [default: 10]")] = None,
    preprocess: Preprocess = None,
    fold: Fold = False,
) -> Listing:
    """List the tokens whose unembedding vectors lie closest to a head's subspace."""
    if (head is not None) + all_heads + norms != 1:
        raise HeadspanError("give exactly one of: a head such as L10H6, --all, or --norms")
    if norms:
        refuse_ignored("with --norms", role=role, k=k, preprocess=preprocess)
    k, preprocess = k or 10, preprocess or DEFAULT
    with open_model(model, fold) as weights:
        if norms:
            found = _norms(weights)
        elif head is None:
            found = _all_heads(weights, role, k, preprocess)
        else:
            found = _one_head(weights, head, role, k, preprocess)
        if weights.vocabulary() is None and not norms:
            note("no tokenizer was found with the weights, so tokens are shown as ids")
    return found


def _one_head(weights: AttentionWeights, head: str, role: str | None, k: int, preprocess: str) -> Listing:
    from headspan.reading.tokens import head_and_role
    from headspan.reading.tokens import tokens as find

    name, chosen = head_and_role(head, role)
    if (sentence := weights.ports.note(name, chosen)) is not None:
        note(sentence)
    title = f"tokens of {name}.{chosen} ({_explain(weights, str(chosen), preprocess)})"
    rows = [
        {"head": str(name), "role": str(chosen), **row} for row in find(weights, name, chosen, k, preprocess).rows()
    ]
    return Listing(rows, title, {"score": ".4f"}, shown=("rank", "id", "token", "score"))


def _all_heads(weights: AttentionWeights, role: str | None, k: int, preprocess: str) -> Listing:
    from headspan.reading.tokens import TokenList, all_tokens
    from headspan.vocabulary.heads import ROLES

    with progress("projecting the vocabulary") as update:
        found = all_tokens(weights, ROLES if role is None else [role], k, preprocess, update)
    rows = [{"head": str(f.head), "role": str(f.role), **row} for f in found for row in TokenList(f.tokens).rows()]
    shown = [{"head": f"{f.head}.{f.role}", "best": f.tokens[0].score, "tokens": _joined(f.tokens)} for f in found]
    title = f"tokens of every head ({_explain(weights, role or 'O', preprocess)})"
    return Listing(rows, tables=[(title, shown, {"best": ".3f"})])


def _explain(weights: AttentionWeights, role: str, preprocess: str) -> str:
    """The preprocessing and, if token vectors have length 1, the score to compare with."""
    from headspan.reading.token_lengths import parse_preprocess
    from headspan.reading.tokens import parse_role, random_best
    from headspan.statistics.dimension import dimension_between

    if not parse_preprocess(preprocess)[1] or not weights.vocab_size:
        return preprocess
    rows_centred = weights.folding != "none" and weights.norm_kind == "layer"
    d = int(dimension_between(weights.d_model, rows_centred, weights.centred_ports(role).all()))
    best = random_best(d, weights.d_head(parse_role(role)), weights.vocab_size)
    return f"{preprocess}; best token of a random subspace: {best:.2f}"


def _norms(weights: AttentionWeights) -> Listing:
    """Two tables of correlations and cosines; as records, one per number, distinguished by ``quantity``."""
    from headspan.reading.tokens import norm_correlations, unembedding_cosines

    with progress("correlating lengths") as update:
        table = norm_correlations(weights, update)
    cosines = unembedding_cosines(weights)
    rows: list[dict[str, Any]] = [
        {"quantity": "spearman", "preprocess": name, "role": role, "mean": mean, "sd": sd}
        for name, by_role in table.items()
        for role, (mean, sd) in by_role.items()
    ]
    rows += [
        {"quantity": f"cosine_{name}", "preprocess": None, "role": None, "mean": value, "sd": None}
        for name, value in cosines.items()
    ]
    shown = [
        {"preprocess": name, **{role: f"{mean:+.3f}\n± {sd:.3f}" for role, (mean, sd) in by_role.items()}}
        for name, by_role in table.items()
    ]
    title = "Spearman ρ: length of a token's vector against length of its projection, over heads"
    lines = [{"mean cosine": name.replace("_", " "), "value": value} for name, value in cosines.items()]
    return Listing(rows, tables=[(title, shown, {}), (None, lines, {"value": ".3f"})])


def pair(
    model: ModelRef,
    source: Annotated[str, typer.Argument(help="A head (L4H11) or one of its weights (L4H11.O).")],
    target: Annotated[str, typer.Argument(help="A head (L5H1) or one of its weights (L5H1.K).")],
    k: Annotated[int | None, k_option("Number of leading directions to show. [default: 10]")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens for each sign of a direction. [default: 5]")] = None,
    preprocess: Preprocess = None,
    fold: Fold = False,
    effects: Annotated[
        bool,
        typer.Option("--effects", help="Run the model and measure the edge's effect through the shared directions."),
    ] = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Show what two heads share: all pairings of two heads, or the shared directions of two weights and their tokens.

    Of two weights, --json prints one object with everything; --csv prints the directions.
    """
    from headspan.reading.head_pairs import HeadPairs
    from headspan.reading.pair import pair as compare

    if effects:
        refuse_ignored("with --effects", k=k, tokens=tokens, preprocess=preprocess, fold=fold)
        _effect_curve(model, source, target).print(as_json, as_csv)
        return
    with open_model(model, fold) as weights, progress("reading the vocabulary"):
        report = compare(weights, source, target, k=k, tokens=tokens, preprocess=preprocess)
    if isinstance(report, HeadPairs):
        _all_pairings(report).print(as_json, as_csv)
        return
    if as_json:
        print_json(report.to_dict())
        return
    rows = _direction_records(report)
    shown = [] if as_csv else _direction_rows(report)
    formats = {"cosine": ".4f", "degrees": ".2f"}
    Listing(rows, tables=[(None, shown, formats)], head=_pair_lines(report)).print(False, as_csv)
    for sentence in report.notes:
        note(sentence)


def _all_pairings(found: HeadPairs) -> Listing:
    for sentence in found.notes:
        note(sentence)
    short = {"source_does": "source", "target_does": "target", "random_mean": "random", "shared_directions": "shared"}
    wide = ("pk_normalised", "smallest_angle")
    shown = [{short.get(k, k): v for k, v in row.items() if k not in wide} for row in found.rows()]
    formats = {"pk": ".2f", "random": ".2f", "z": ".1f"}
    tail = [
        "edge: the direction in which information can pass. random, z: PK of random subspaces. shared: directions that "
        "random subspaces would not share. Give roles to see angles and tokens: "
        f"headspan pair MODEL {found.source.partition('.')[0]}.O {found.target.partition('.')[0]}.K"
    ]
    return Listing(found.rows(), tables=[(found._headline(), shown, formats)], tail=tail)


def _effect_curve(model: str, source: str, target: str) -> Listing:
    from headspan.running.effects_curve import effects_curve

    with progress("running the model"):
        curve = effects_curve(model, source, target)
    for sentence in curve.notes:
        note(sentence)
    title = (
        f"effect of {curve.source} on {curve.target} through the leading directions ({curve.unit}); "
        f"the full effect is {curve.whole:.4f}"
    )
    shown = ("directions", "shared", "random", "random_largest")
    return Listing(curve.rows(), title, dict.fromkeys(shown[1:], ".4f"), shown=shown)


def _pair_lines(report: PairReport) -> list[str]:
    m, m2 = report.dimensions
    z = "" if report.z is None else f", z = {report.z:.1f}"
    forced = (
        f" ({report.forced_directions} more are shared by any two subspaces of this size)"
        if report.forced_directions
        else ""
    )
    angles = report.to_dict()["principal_angles_degrees"]
    return [
        f"{report.pair}: subspaces of {m} and {m2} dimensions in {report.d_model}",
        f"PK {report.pk:.4f}, normalised {report.pk_normalised:.4f}; "
        f"random subspaces: {report.random_mean:.4f} ± {report.random_sd:.4f}{z}",
        f"shared directions: {report.shared_directions} with cos² above {report.shared_threshold:.3f}, a value that "
        f"{report.shared_level:.0%} of random pairs do not exceed{forced}",
        f"participation ratio: {report.participation_ratio:.1f} directions",
        f"principal angles (degrees): {' '.join(f'{angle:.1f}' for angle in angles)}",
    ]


def _direction_rows(report: PairReport) -> list[dict[str, Any]]:
    """The directions as a table, with the tokens of the two signs on separate lines."""
    from headspan.vocabulary.heads import does_as

    rows = []
    for direction in report.directions:
        first, last = direction.block[0], direction.block[-1]
        row: dict[str, Any] = {
            "rank": direction.rank,
            "cosine": direction.cosine,
            "degrees": direction.angle_degrees,
            "block": "" if direction.unique else f"{first}–{last}",
        }
        sides = (("source", report.source, direction.source_tokens), ("target", report.target, direction.target_tokens))
        row |= {f"{side} {does_as(port)}": _signed(found) for side, port, found in sides if found is not None}
        rows.append(row)
    return rows


def _direction_records(report: PairReport) -> list[dict[str, Any]]:
    from headspan.vocabulary.heads import does_as

    rows = []
    for direction in report.directions:
        lists = {
            f"{name}_{sign}": "" if found is None else _joined(getattr(found, sign))
            for name, found in (("source", direction.source_tokens), ("target", direction.target_tokens))
            for sign in ("positive", "negative")
        }
        does = {"source_does": does_as(report.source), "target_does": does_as(report.target)}
        first, last = direction.block[0], direction.block[-1]
        place = {"rank": direction.rank, "cosine": direction.cosine, "angle_degrees": direction.angle_degrees}
        rows.append({**place, "block_first": first, "block_last": last, **does, **lists})
    return rows


def _signed(found: SignedTokens) -> str:
    return f"+ {_joined(found.positive)}\n− {_joined(found.negative)}"


def _joined(found: list[Token]) -> str:
    return " ".join(token.token for token in found)
