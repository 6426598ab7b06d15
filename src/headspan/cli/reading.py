"""``headspan tokens`` and ``headspan pair``: read one head, and what two heads share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.common import Csv, Json, ModelRef, note, print_json, print_table, progress, show
from headspan.errors import HeadspanError

if TYPE_CHECKING:
    from headspan.analysis.pair import PairReport, SignedTokens
    from headspan.analysis.tokens import Token
    from headspan.models.weights import AttentionWeights

TOKENS_EXAMPLES = """\b
Examples:
  headspan tokens model.gguf L14H0
  headspan tokens model.gguf L14KV0 --role K --top 20 --json
  headspan tokens ./gpt2 --all --role O --csv
  headspan tokens ./gpt2 --norms
"""
PAIR_EXAMPLES = """\b
Examples:
  headspan pair ./gpt2 L4H11.O L5H1.K
  headspan pair model.gguf L17H3.O L20KV1.K --top 3 --tokens 8
  headspan pair ./gpt2 L4H11.O L5H1.K --fold --json
"""

Fold = Annotated[bool, typer.Option("--fold", help="Fold the norms into the weights first.")]
Preprocess = Annotated[
    str,
    typer.Option(help="What is done to a token's vector first: centre-normalise, centre, normalise or identity."),
]


def register(app: typer.Typer) -> None:
    app.command("tokens", epilog=TOKENS_EXAMPLES)(tokens)
    app.command("pair", epilog=PAIR_EXAMPLES)(pair)


def tokens(
    model: ModelRef,
    head: Annotated[str | None, typer.Argument(help="A head: L10H6, L10H6.O or L17KV1.")] = None,
    role: Annotated[
        str | None, typer.Option(help="Q, K, V or O (default: O for one head, all four with --all).")
    ] = None,
    all_heads: Annotated[bool, typer.Option("--all", help="Every head at once.")] = False,
    norms: Annotated[
        bool, typer.Option("--norms", help="How far vector lengths decide the scores, for each preprocessing.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Tokens per head.")] = 10,
    preprocess: Preprocess = "centre-normalise",
    fold: Fold = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """List the tokens whose unembedding vectors lie most in a head's subspace."""
    if (head is not None) + all_heads + norms != 1:
        raise HeadspanError("say what to read: one head such as L10H6, --all for every head, or --norms for the table")
    with _open(model, fold) as weights:
        if norms:
            _print_norms(weights, as_json, as_csv)
        elif head is None:
            _print_all(weights, role, top, preprocess, as_json, as_csv)
        else:
            _print_head(weights, head, role, top, preprocess, as_json, as_csv)
        _remark(weights)


def pair(
    model: ModelRef,
    source: Annotated[str, typer.Argument(help="A head and its role, for example L4H11.O.")],
    target: Annotated[str, typer.Argument(help="A head and its role, for example L5H1.K.")],
    top: Annotated[int, typer.Option(min=1, help="Leading directions to show.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens for each sign of a direction.")] = 5,
    preprocess: Preprocess = "centre-normalise",
    fold: Fold = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Show what two heads share: PK, principal angles, and the tokens along the shared directions."""
    from headspan.analysis.pair import compare_pair

    with _open(model, fold) as weights:
        report = compare_pair(weights, source, target, top, tokens, preprocess)
    if as_json:
        print_json(report.to_dict())
        return
    if as_csv:
        print_table(_direction_csv(report), as_csv=True)
    else:
        show("\n".join(_pair_lines(report)))
        print_table(_direction_rows(report), formats={"cosine": ".4f", "degrees": ".2f"})
    for sentence in report.notes:
        note(sentence)


def _open(model: str, fold: bool) -> AttentionWeights:
    from headspan.models.folding import fold as folded
    from headspan.models.weights import open as open_weights

    weights = open_weights(model)
    return folded(weights) if fold else weights


def _remark(weights: AttentionWeights) -> None:
    if weights.vocabulary() is None:
        note("no tokenizer was found beside the weights, so tokens are shown by their ids")


def _print_head(
    weights: AttentionWeights, head: str, role: str | None, top: int, preprocess: str, as_json: bool, as_csv: bool
) -> None:
    from headspan.analysis.tokens import head_tokens

    name, dot, written = head.partition(".")
    if dot and role is not None and written.upper() != role.upper():
        raise HeadspanError(f"{head} names the role {written}, but --role says {role}: give one of them")
    chosen = (written if dot else role or "O").upper()
    found = head_tokens(weights, name, chosen, top, preprocess)
    if not as_json and not as_csv:  # above the table, not its title: a narrow table would fold it
        show(f"tokens of {name}.{chosen} ({_explain(weights, chosen, preprocess)})")
    print_table(
        [token._asdict() for token in found],
        formats={"score": ".4f"},
        as_json=as_json,
        as_csv=as_csv,
    )


def _print_all(
    weights: AttentionWeights, role: str | None, top: int, preprocess: str, as_json: bool, as_csv: bool
) -> None:
    from headspan.analysis.tokens import all_tokens
    from headspan.heads import ROLES

    with progress("projecting the vocabulary") as update:
        found = all_tokens(weights, ROLES if role is None else [role], top, preprocess, update)
    if as_json:
        print_json(
            [{"head": str(f.head), "role": str(f.role), "tokens": [t._asdict() for t in f.tokens]} for f in found]
        )
    elif as_csv:
        rows = [
            {"head": str(f.head), "role": str(f.role), "rank": rank, **token._asdict()}
            for f in found
            for rank, token in enumerate(f.tokens, start=1)
        ]
        print_table(rows, as_csv=True)
    else:
        rows = [{"head": f"{f.head}.{f.role}", "best": f.tokens[0].score, "tokens": _joined(f.tokens)} for f in found]
        show(f"tokens of every head ({_explain(weights, role or 'O', preprocess)})")
        print_table(rows, formats={"best": ".3f"})


def _explain(weights: AttentionWeights, role: str, preprocess: str) -> str:
    """The preprocessing and, where tokens have length 1, the score to compare with."""
    from headspan.analysis.token_lengths import parse_preprocess
    from headspan.analysis.tokens import parse_role, random_best

    if not parse_preprocess(preprocess)[1] or not weights.vocab_size:
        return preprocess
    best = random_best(weights.d_model, weights.d_head(parse_role(role)), weights.vocab_size)
    return f"{preprocess}; best token of a random subspace: {best:.2f}"


def _print_norms(weights: AttentionWeights, as_json: bool, as_csv: bool) -> None:
    from headspan.analysis.tokens import norm_correlations, unembedding_cosines

    with progress("correlating lengths") as update:
        table = norm_correlations(weights, update)
    cosines = unembedding_cosines(weights)
    if as_json:
        print_json({"spearman": table, "cosines": cosines})
        return
    if as_csv:
        rows: list[dict[str, Any]] = [
            {"preprocess": name, "role": role, "mean": mean, "sd": sd}
            for name, by_role in table.items()
            for role, (mean, sd) in by_role.items()
        ]
        print_table(rows, as_csv=True)
        return
    rows = [
        {"preprocess": name, **{role: f"{mean:+.3f} ± {sd:.3f}" for role, (mean, sd) in by_role.items()}}
        for name, by_role in table.items()
    ]
    print_table(rows, title="Spearman ρ: length of a token's vector against length of its projection, over heads")
    print_table(
        [{"mean cosine": name.replace("_", " "), "value": value} for name, value in cosines.items()],
        formats={"value": ".3f"},
    )


def _pair_lines(report: PairReport) -> list[str]:
    m, m2 = report.dimensions
    z = "" if report.z is None else f", z = {report.z:.1f}"
    forced = (
        f" ({report.forced_directions} more must be shared in so small a space)" if report.forced_directions else ""
    )
    angles = report.to_dict()["principal_angles_degrees"]
    return [
        f"{report.source} → {report.target}: subspaces of {m} and {m2} dimensions in {report.d_model}",
        f"PK {report.pk:.4f}, normalised {report.pk_normalised:.4f}; "
        f"random subspaces: {report.random_mean:.4f} ± {report.random_sd:.4f}{z}",
        f"shared directions: {report.shared_directions} with cos² above {report.shared_threshold:.3f}, which "
        f"{report.shared_level:.0%} of random pairs never exceed{forced}",
        f"participation ratio: {report.participation_ratio:.1f} directions",
        f"principal angles (degrees): {' '.join(f'{angle:.1f}' for angle in angles)}",
    ]


def _direction_rows(report: PairReport) -> list[dict[str, Any]]:
    rows = []
    for direction in report.directions:
        first, last = direction.block[0], direction.block[-1]
        row: dict[str, Any] = {
            "rank": direction.rank,
            "cosine": direction.cosine,
            "degrees": direction.angle_degrees,
            "block": "" if direction.unique else f"{first}–{last}",
        }
        if direction.writes is not None:
            row["writes (source, unembedding)"] = _signed(direction.writes)
        if direction.reads is not None:
            row["reads (target, embedding)"] = _signed(direction.reads)
        rows.append(row)
    return rows


def _direction_csv(report: PairReport) -> list[dict[str, Any]]:
    rows = []
    for direction in report.directions:
        lists = {
            f"{name}_{sign}": "" if found is None else _joined(getattr(found, sign))
            for name, found in (("writes", direction.writes), ("reads", direction.reads))
            for sign in ("positive", "negative")
        }
        first, last = direction.block[0], direction.block[-1]
        place = {"rank": direction.rank, "cosine": direction.cosine, "angle_degrees": direction.angle_degrees}
        rows.append({**place, "block_first": first, "block_last": last, **lists})
    return rows


def _signed(found: SignedTokens) -> str:
    return f"+ {_joined(found.positive)}\n− {_joined(found.negative)}"


def _joined(found: list[Token]) -> str:
    return " ".join(token.token for token in found)
