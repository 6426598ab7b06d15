"""The provenance of a result as sentences, each with a name in front."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import headspan
from headspan.results.effects import EXAMPLES, effects_in
from headspan.results.identity import short_name
from headspan.results.observations import inputs_text
from headspan.results.scores import Scores
from headspan.subspaces.metrics import metric_of
from headspan.vocabulary.words import counted, listed

_ROUTES = {"gram": "Gram matrices", "direct": "products of the weights"}
_PAIRS = {
    "default": "forward pairs, and of pairings of one type also pairs within a layer",
    "forward": "forward pairs",
    "same-type": "pairs of one type",
    "all": "all pairs, in both directions and within layers",
}
_NAMES = {
    "d_head": "head size", "pairs": "pairs compared", "headspan": "computed by", "storage_dtypes": "stored as",
    "left_out_layers": "layers left out", "routes": "computation", "rank_deficient": "ranks", "screen": "screening",
}  # fmt: skip
_JOINED = ("folded_norms", "centred", "not_centred", "groupings", "blocks")  # part of another row


def provenance_rows(scores: Scores, schema: int) -> list[tuple[str, str]]:
    """A name and a sentence for everything that a result records about its origin."""
    about = scores.provenance
    rows = [("page", f"made by headspan {headspan.__version__}, schema {schema}")]
    for key, value in about.items():
        if key not in _JOINED:
            text = _WORDS[key](value, about) if key in _WORDS and value is not None else in_words(value)
            rows.append((_NAMES.get(key, str(key).replace("_", " ")), text or "none"))
    protocol = scores.annotations.get("effects")
    if effects_in(scores) is not None and isinstance(protocol, Mapping):
        rows.append(("effects", _effects(protocol)))
    return rows


def in_words(value: Any) -> str:
    """Any JSON value without brackets or quotes.

    >>> in_words({"k": 20, "OK": {"found": 20, "certified": 3}, "seed": None})
    'k: 20; OK: found 20, certified 3; seed: none'
    """
    if isinstance(value, Mapping):
        nested = any(isinstance(part, Mapping) for part in value.values())
        mark, gap = (": ", "; ") if nested else (" ", ", ")
        return gap.join(f"{str(name).replace('_', ' ')}{mark}{in_words(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(in_words, value))
    if value is None or value is True or value is False:
        return {None: "none", True: "yes", False: "no"}[value]
    return without_paths(str(value))


_PATH = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\,;:'\"()]+[/\\])+")


def without_paths(text: str) -> str:
    """Text with every path cut to its last part, so that a shared page reveals nothing about its author's machine.

    >>> without_paths("weights of /home/ann/models/gpt2 and openai-community/gpt2")
    'weights of gpt2 and openai-community/gpt2'
    """
    is_path = text.startswith(("/", "~")) or os.path.isabs(text)
    return short_name(text) if is_path and (" " not in text or os.path.exists(text)) else _PATH.sub("", text)


# --------------------------------------------------------------------- one function per field


def _folding(value: Any, about: Mapping[str, Any]) -> str:
    if value == "none":
        return "the norms are not folded into the weights"
    norms, centred, rest = (about.get(key) or [] for key in ("folded_norms", "centred", "not_centred"))
    text = str(value) if value != "folded" else "the norms are folded into the weights"
    text += f": {in_words(norms)}" if norms else ""
    if centred:
        text += f". {listed(list(map(str, centred)))} are centred, which leaves one dimension less"
        text += f" (except {in_words(rest)})" if rest else ""
    return text


def _routes(value: Any, about: Mapping[str, Any]) -> str:
    blocks = about.get("blocks") or {}
    parts = [
        f"{metric_of(metric).title} by {_ROUTES.get(route, route)}"
        + (f", in {counted(blocks[metric], 'block')} of layers" if metric in blocks else "")
        for metric, route in value.items()
    ]
    return "; ".join(parts)


def _sizes(value: Any, about: Mapping[str, Any]) -> str:
    """
    >>> _sizes({"Q": 64, "K": 64, "V": 64, "O": 64}, {}), _sizes({"Q": 96, "V": 64}, {})
    ('64 dimensions in Q, K, V and O', '96 dimensions in Q; 64 dimensions in V')
    """
    by_size: dict[Any, list[str]] = {}
    for role, size in value.items():
        by_size.setdefault(size, []).append(str(role))
    return "; ".join(f"{counted(size, 'dimension')} in {listed(roles)}" for size, roles in by_size.items())


def _screen(value: Any, about: Mapping[str, Any]) -> str:
    """Screening: what was kept, how sure it is, and the certified pairs of every pairing."""
    text = (
        f"the {counted(value.get('k'), 'strongest pair')} of each pairing, found with {value.get('columns', 'some')} "
        f"random columns (seed {value.get('seed', 'unknown')}); a wrong certificate has a probability of at most "
        f"{value.get('delta', 'an unknown value')}"
    )
    pairings = {name: part for name, part in value.items() if isinstance(part, Mapping)}
    certified = [f"{part.get('certified')} of {part.get('found')} {name}" for name, part in pairings.items()]
    return f"{text}. Certified: {', '.join(certified)}" if certified else text


def _statistics(value: Any, about: Mapping[str, Any]) -> str:
    rest = {key: part for key, part in value.items() if key not in ("inputs", "centred", "not_centred")}
    inputs = value.get("inputs")
    said = f"collected on {inputs_text(inputs)}" if inputs else ""
    return "; ".join(filter(None, (said, in_words(rest))))


def _effects(protocol: Mapping[str, Any]) -> str:
    """How effects were measured."""
    known = ("model", "tokens", "floors", "ablate", "least_ratio", "random_writes", "interrupted", "seed", EXAMPLES)
    tokens, floors, parts = protocol.get("tokens"), protocol.get("floors"), list[str]()
    if isinstance(tokens, Mapping):
        inputs = listed(f"{sum(counts):,} tokens of {name} input" for name, counts in tokens.items())
        parts.append(f"measured on {inputs}")
    if "ablate" in protocol:
        parts.append(f"by patching outputs ({protocol['ablate']})")
    if isinstance(floors, Mapping):
        parts.append("large from " + ", ".join(f"{floor:g} in {p}" for p, floor in floors.items()))
    if "random_writes" in protocol:
        times, draws = protocol.get("least_ratio", 1), counted(protocol["random_writes"], "random output")
        parts.append(f"and from {times:g} times the largest effect of {draws} of the same length")
    if "seed" in protocol:
        parts.append(f"seed {protocol['seed']}")
    if protocol.get("interrupted"):
        parts.append("the run was interrupted")
    rest = {key: value for key, value in protocol.items() if key not in known and value not in (None, False)}
    return ", ".join(parts) + (f"; {in_words(rest)}" if rest else "")


def _joined(value: Any, about: Mapping[str, Any]) -> str:
    return "; ".join(map(in_words, value)) if isinstance(value, (list, tuple)) else in_words(value)


def _layers(value: Iterable[Any], about: Mapping[str, Any]) -> str:
    names = list(map(str, value))
    return f"layer{'' if len(names) == 1 else 's'} {listed(names)}" if names else "none"


_WORDS: dict[str, Callable[[Any, Mapping[str, Any]], str]] = {
    "folding": _folding,
    "routes": _routes,
    "d_head": _sizes,
    "screen": _screen,
    "statistics": _statistics,
    "pairs": lambda value, about: _PAIRS.get(value, str(value)),
    "headspan": lambda value, about: f"headspan {value}",
    "rank_deficient": lambda value, about: _joined(value, about) or "every weight has full rank",
    "notes": _joined,
    "left_out_layers": _layers,
}
