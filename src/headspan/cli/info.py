"""`headspan info`: what a model is, what would be read of it, and whether its heads have full rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headspan.cli.common import Json, ModelRef, print_json, progress, show

if TYPE_CHECKING:
    from headspan.models.weights import AttentionWeights

_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm", "none": "none"}
_PLACES = {
    "pre": "in front of attention",
    "post": "after attention is added (post-norm)",
    "output": "on the attention output",
    "sandwich": "in front of attention and on its output (sandwich)",
    "residual": "in front of attention, residual stream taken after it",
    "partial": "in front of attention, but not in the first layer",
    "none": "",
}
_SHOWN = 8  # lines of a list before it is cut short


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""

    @app.command()
    def info(
        model: ModelRef,
        check: Annotated[
            bool, typer.Option("--check", help="Read all weights: numbers finite, and the rank of every head.")
        ] = False,
        json: Json = False,
    ) -> None:
        """Say what a model is and which of its tensors would be read.

        Without --check only headers are read; with it every weight, for its fingerprint too.

        Examples:

            headspan info demo

            headspan info gpt2 --json

            headspan info model.gguf --check
        """
        import headspan

        with headspan.open(model) as weights:
            facts = describe(weights)
            if check:
                with progress("reading weights") as update:
                    facts["check"] = check_ranks(weights, update)
                facts["fingerprint"] = weights.fingerprint()
        if json:
            print_json(facts)
        else:
            show("\n".join(_lines(facts)))


def describe(weights: AttentionWeights) -> dict[str, Any]:
    """The facts about an opened model, as JSON-able values."""
    from headspan.heads import ROLES

    tensors = weights.tensors()
    sizes = {role: weights.d_head(role) for role in ROLES}
    return {
        "reference": weights.reference,
        "architecture": weights.architecture,
        "n_layers": weights.n_layers,
        "attention_layers": list(weights.layers),
        "n_heads": weights.n_heads,
        "n_kv_heads": weights.n_kv_heads,
        "d_model": weights.d_model,
        "d_head": sizes[ROLES[0]],
        "d_head_by_role": {str(role): size for role, size in sizes.items()},
        "norm": weights.norm_kind,
        "norm_place": weights.norm_place,
        "foldable": weights.foldable,
        "not_foldable_reason": weights.not_foldable_reason,
        "vocab_size": weights.vocab_size,
        "unembedding": weights.tied_embedding is not None,
        "tied_embedding": weights.tied_embedding,
        "storage_dtypes": weights.storage_dtypes(),
        "tensors": [{"name": name, "bytes": size} for name, size in tensors.items()],
        "bytes_to_read": sum(tensors.values()),
        "total_bytes": weights.total_bytes(),
        "notes": weights.notes,
    }


def check_ranks(weights: AttentionWeights, update: Callable[[int, int], None]) -> dict[str, Any]:
    """Rank of every head's weight by role: the smallest, the largest, and the heads that fall short."""
    from headspan.heads import ROLES, HeadRole
    from headspan.scoring.subspaces import orthonormal_bases

    ranks: dict[str, Any] = {}
    deficient: list[dict[str, Any]] = []
    steps = len(weights.layers) * len(ROLES)
    for number, layer in enumerate(weights.layers):
        for place, role in enumerate(ROLES):
            found = orthonormal_bases(weights.read(role, layer), weights.storage_dtype(role, layer))[1]
            full = min(weights.d_head(role), weights.d_model)
            seen = ranks.setdefault(str(role), {"full": full, "min": full, "max": 0, "heads": 0})
            seen.update(
                min=min(seen["min"], int(found.min())),
                max=max(seen["max"], int(found.max())),
                heads=seen["heads"] + len(found),
            )
            heads = weights.heads_in(role, layer)
            deficient += [
                {"head": str(HeadRole(heads[i], role)), "rank": int(found[i])}
                for i in map(int, (found < full).nonzero()[0])
            ]
            update(number * len(ROLES) + place + 1, steps)
    return {"finite": True, "ranks": ranks, "rank_deficient": deficient}


def _lines(facts: dict[str, Any]) -> list[str]:
    """The facts for a reader."""
    layers, attending = facts["n_layers"], len(facts["attention_layers"])
    heads, shared = facts["n_heads"], facts["n_kv_heads"]
    sizes = sorted(set(facts["d_head_by_role"].values()))
    rows = {
        "model": facts["reference"],
        "architecture": facts["architecture"],
        "layers": f"{layers}" if attending == layers else f"{layers}, {attending} of them with attention",
        "heads": f"{heads} a layer" + (f", {shared} key/value heads" if shared < heads else ""),
        "d_model": f"{facts['d_model']}",
        "d_head": ", ".join(map(str, sizes)),
        "norm": " ".join(part for part in (_NORMS[facts["norm"]], _PLACES[facts["norm_place"]]) if part),
        "folding": "possible" if facts["foldable"] else f"not possible: {facts['not_foldable_reason']}",
        "vocabulary": _vocabulary(facts),
        "stored as": ", ".join(facts["storage_dtypes"]),
        "to read": f"{_bytes(facts['bytes_to_read'])} in {len(facts['tensors'])} tensors, "
        f"of {_bytes(facts['total_bytes'])}",
    }
    lines = [f"{name:<14}{value}" for name, value in rows.items()]
    lines += [f"{'':<14}{t['name']}  {_bytes(t['bytes'])}" for t in facts["tensors"][:_SHOWN]]
    if len(facts["tensors"]) > _SHOWN:
        lines.append(f"{'':<14}… and {len(facts['tensors']) - _SHOWN} more (--json lists all)")
    lines += [f"{'note':<14}{note}" for note in facts["notes"]]
    if "fingerprint" in facts:
        lines.append(f"{'fingerprint':<14}{facts['fingerprint']}")
    return lines + (_check_lines(facts["check"]) if "check" in facts else [])


def _vocabulary(facts: dict[str, Any]) -> str:
    if facts["vocab_size"] is None:
        return "none"
    tied = facts["tied_embedding"]
    kind = {None: "no unembedding in the checkpoint", True: "unembedding tied to the embedding"}
    return f"{facts['vocab_size']} tokens, {kind.get(tied, 'unembedding stored apart')}"


def _check_lines(check: dict[str, Any]) -> list[str]:
    lines = [
        f"{'rank of ' + role:<14}{seen['min']}" + (f"–{seen['max']}" if seen["max"] > seen["min"] else "")
        + f" of {seen['full']}, {seen['heads']} heads"
        for role, seen in check["ranks"].items()
    ]  # fmt: skip
    short = check["rank_deficient"]
    for head in short[:_SHOWN]:
        lines.append(f"{'':<14}{head['head']} has rank {head['rank']} only")
    if len(short) > _SHOWN:
        lines.append(f"{'':<14}… and {len(short) - _SHOWN} more (--json lists all)")
    return lines


def _bytes(size: int) -> str:
    """A size as people write it.

    >>> _bytes(512), _bytes(117_000_000)
    ('512 B', '117.0 MB')
    """
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(len(units) - 1, (len(str(size)) - 1) // 3)
    return f"{size} B" if power == 0 else f"{size / 1000**power:.1f} {units[power]}"
