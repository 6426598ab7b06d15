"""A model's architecture, the tensors that headspan would read, and the rank of every head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.models.folding import FOLDED_NORMS, fold_advice
from headspan.models.weights import AttentionWeights
from headspan.results.checks import damaged
from headspan.results.metadata import (
    BOOLEAN,
    Field,
    check_fields,
    fields,
    is_list,
    is_object,
    list_of,
    mapping_of,
    optional,
    text,
    whole,
)
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import given_weights
from headspan.subspaces.bases import orthonormal_bases
from headspan.system.arguments import checked
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.errors import visible
from headspan.vocabulary.heads import ROLES, Port
from headspan.vocabulary.words import listed

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike

_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm", "none": "none"}
_PLACES = {
    "pre": "before attention",
    "post": "after attention is added (post-norm)",
    "output": "on the attention output",
    "sandwich": "before attention and on its output (sandwich)",
    "residual": "before attention, residual stream taken after it",
    "partial": "before attention, but not in the first layer",
    "none": "",
}
_SHOWN = 8  # most lines shown of a list
_SHOWN_IN_REPR = 10
_LINE = 120  # characters of a line in a repr


def _is_key_of(known: Mapping[str, str], value: Any) -> bool:
    return isinstance(value, str) and value in known


_NORM = Field("a kind of norm", partial(_is_key_of, _NORMS))
_PLACE = Field("the place of a norm", partial(_is_key_of, _PLACES))
_COUNT = whole(0, 2**62)
# The facts that every `Info` has.
FACTS: dict[str, Field] = {
    "reference": text(),
    "architecture": optional(text()),
    "n_layers": _COUNT,
    "attention_layers": list_of(_COUNT),
    "n_heads": _COUNT,
    "n_kv_heads": _COUNT,
    "d_model": _COUNT,
    "d_head": _COUNT,
    "d_head_by_role": mapping_of(_COUNT),
    "norm": _NORM,
    "norm_place": _PLACE,
    "foldable": BOOLEAN,
    "not_foldable_reason": optional(text()),
    "folds": list_of(text()),
    "fold_advice": optional(text()),
    "vocab_size": optional(_COUNT),
    "unembedding": BOOLEAN,
    "tied_embedding": optional(BOOLEAN),
    "storage_dtypes": list_of(text()),
    "tensors": list_of(fields({"name": text(), "bytes": _COUNT}, ("name", "bytes"))),
    "bytes_to_read": _COUNT,
    "total_bytes": _COUNT,
    "notes": list_of(text()),
}
_RANKS: dict[str, Field] = dict.fromkeys(("full", "min", "max", "heads"), _COUNT)
_DEFICIENT = {"head": text(), "rank": _COUNT}
# Those of one whose weights were read.
CHECKED: dict[str, Field] = {
    "fingerprint": text(),
    "check": fields(
        {
            "ranks": mapping_of(fields(_RANKS, tuple(_RANKS))),
            "rank_deficient": list_of(fields(_DEFICIENT, tuple(_DEFICIENT))),
        },
        ("ranks", "rank_deficient"),
    ),
}


class Info(Tabular, dict[str, Any]):
    """The facts about a model by name, as JSON values; its text is the output of ``headspan info``."""

    def rows(self) -> list[dict[str, Any]]:
        """One record per fact: name and value; lists are joined by commas, and tensors counted."""
        return [{"fact": name, "value": _flat(value)} for name, value in self.items() if name != "check"]

    def _check(self, path: Path) -> None:
        missing = [name for name in FACTS if name not in self]
        if missing:
            raise damaged(path, f"it lacks {', '.join(missing)}")
        check_fields(self, FACTS | CHECKED, "fact", path)

    def lines(self) -> list[str]:
        """The facts as text."""
        rows = self._rows()
        lines = [f"{name:<14}{value}" for name, value in rows.items()]
        lines += [f"{'':<14}{t['name']}  {_bytes(t['bytes'])}" for t in self["tensors"][:_SHOWN]]
        if len(self["tensors"]) > _SHOWN:
            lines.append(f"{'':<14}… and {len(self['tensors']) - _SHOWN} more")
        lines += [f"{'note':<14}{note}" for note in self["notes"]]
        if "fingerprint" in self:
            lines.append(f"{'fingerprint':<14}{self['fingerprint']}")
        return lines + (list(_check_lines(self["check"])) if "check" in self else [])

    def __repr__(self) -> str:
        rows = self._rows()
        lines = [visible(f"{name:<14}{value}") for name, value in list(rows.items())[:_SHOWN_IN_REPR]]
        return "\n".join(line if len(line) <= _LINE else line[: _LINE - 1] + "…" for line in lines)

    def _headline(self) -> str:
        return f"facts about {self['reference']}"

    def _rows(self) -> dict[str, str]:
        layers, attending = self["n_layers"], len(self["attention_layers"])
        heads, shared = self["n_heads"], self["n_kv_heads"]
        sizes = sorted(set(self["d_head_by_role"].values()))
        return {
            "model": self["reference"],
            "architecture": self["architecture"],
            "layers": f"{layers}" if attending == layers else f"{layers}, {attending} of them with attention",
            "heads": f"{heads} per layer" + (f", {shared} key/value heads" if shared < heads else ""),
            "d_model": f"{self['d_model']}",
            "d_head": ", ".join(map(str, sizes)),
            "norm": " ".join(part for part in (_NORMS[self["norm"]], _PLACES[self["norm_place"]]) if part),
            "folding": _folding(self),
            "vocabulary": _vocabulary(self),
            "stored as": ", ".join(self["storage_dtypes"]),
            "to read": f"{_bytes(self['bytes_to_read'])} in {len(self['tensors'])} tensors, "
            f"of {_bytes(self['total_bytes'])}",
        }


@checked
def info(model: ModelLike, check: bool = False, progress: Update | None = None) -> Info:
    """Describe a model and the tensors that headspan would read.

    Without ``check`` only headers are read; with it all weights are, ``["fingerprint"]`` is theirs and ``["check"]``
    has the rank of every head.

    >>> info("demo")["n_heads"]
    8
    """
    with given_weights(model) as weights:
        facts = Info(describe(weights))
        if check:
            with progress_bar("reading weights", progress) as update:
                facts["check"] = check_ranks(weights, update)
            facts["fingerprint"] = weights.fingerprint()
    return facts


def describe(weights: AttentionWeights) -> dict[str, Any]:
    """The facts about opened weights."""
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
        "folds": FOLDED_NORMS[weights.norm_place] if weights.foldable else [],
        "fold_advice": fold_advice(weights),
        "vocab_size": weights.vocab_size,
        "unembedding": weights.tied_embedding is not None,
        "tied_embedding": weights.tied_embedding,
        "storage_dtypes": weights.storage_dtypes(),
        "tensors": [{"name": name, "bytes": size} for name, size in tensors.items()],
        "bytes_to_read": sum(tensors.values()),
        "total_bytes": weights.total_bytes(),
        "notes": weights.notes,
    }


def check_ranks(weights: AttentionWeights, update: Update) -> dict[str, Any]:
    """Rank of every head's weight by role: the smallest, the largest, and the heads below full rank."""
    ranks: dict[str, Any] = {}
    deficient: list[dict[str, Any]] = []
    steps = len(weights.layers) * len(ROLES)
    for number, layer in enumerate(weights.layers):
        for place, role in enumerate(ROLES):
            if not weights.heads_in(role, layer):
                continue
            found = orthonormal_bases(weights.read(role, layer), weights.storage_dtype(role, layer))[1]
            wide = np.minimum(weights.widths(role)[weights.ports.span(role, layer)], weights.d_model)
            full = int(wide.max())
            seen = ranks.setdefault(str(role), {"full": full, "min": full, "max": 0, "heads": 0})
            seen.update(
                full=max(seen["full"], full),
                min=min(seen["min"], int(found.min())),
                max=max(seen["max"], int(found.max())),
                heads=seen["heads"] + len(found),
            )
            heads = weights.heads_in(role, layer)
            deficient += [
                {"head": str(Port(heads[i], role)), "rank": int(found[i])}
                for i in map(int, (found < wide).nonzero()[0])
            ]
            update(number * len(ROLES) + place + 1, steps)
    return {"finite": True, "ranks": ranks, "rank_deficient": deficient}


def _flat(value: Any) -> str | float | bool | None:
    """A fact as one number or text."""
    if is_object(value):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if is_list(value):
        return f"{len(value)}" if value and isinstance(value[0], dict) else ", ".join(map(str, value))
    return value


def _folding(facts: Mapping[str, Any]) -> str:
    """Whether norms can be folded into the weights, and whether that is advised."""
    if not facts["foldable"]:
        return f"not possible: {facts['not_foldable_reason']}"
    gains = "" if facts["norm_place"] == "pre" else f"of the norms {listed(facts['folds'])}"
    return "; ".join(part for part in ("possible", gains, facts["fold_advice"]) if part)


def _vocabulary(facts: dict[str, Any]) -> str:
    if facts["vocab_size"] is None:
        return "none"
    tied = facts["tied_embedding"]
    kind = {None: "no unembedding in the checkpoint", True: "unembedding tied to the embedding"}
    return f"{facts['vocab_size']} tokens, {kind.get(tied, 'unembedding stored separately')}"


def _check_lines(check: dict[str, Any]) -> Iterator[str]:
    for role, seen in check["ranks"].items():
        ranks = f"{seen['min']}–{seen['max']}" if seen["max"] > seen["min"] else f"{seen['min']}"
        yield f"{'rank of ' + role:<14}{ranks} of {seen['full']}, {seen['heads']} heads"
    short = check["rank_deficient"]
    for head in short[:_SHOWN]:
        yield f"{'':<14}{head['head']} has only rank {head['rank']}"
    if len(short) > _SHOWN:
        yield f"{'':<14}… and {len(short) - _SHOWN} more"


def _bytes(size: int) -> str:
    """A human-readable size.

    >>> _bytes(512), _bytes(117_000_000)
    ('512 B', '117.0 MB')
    """
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(len(units) - 1, (len(str(size)) - 1) // 3)
    return f"{size} B" if power == 0 else f"{size / 1000**power:.1f} {units[power]}"
