"""Head scores: how much every head attends to itself, the previous token, duplicates and induction targets."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.results.identity import identity, same_model
from headspan.results.labels import Labels
from headspan.results.metadata import HEAD_SCORES, MODEL
from headspan.results.tabular import Tabular
from headspan.system.arguments import checked
from headspan.system.inputs import read_text, reason
from headspan.system.outputs import writing
from headspan.vocabulary.errors import HeadspanError, refuse_ignored
from headspan.vocabulary.heads import Head

if TYPE_CHECKING:
    from headspan.results.scores import Scores


KINDS = ("identity", "previous_token", "duplicate_token", "induction")


KIND_TITLES = {
    "identity": "Identity",
    "previous_token": "Previous token",
    "duplicate_token": "Duplicate token",
    "induction": "Induction",
}


_LARGEST = 10**8  # bytes of a file of head scores


@dataclass(repr=False, eq=False)
class BehaviourScores(Tabular, Mapping[str, dict[str, float]]):
    """Scores of every query head by kind: ``scores["induction"]["L5H1"]``; NaN where nothing could be measured.

    >>> scores = BehaviourScores((Head(0, 0), Head(0, 1)), {kind: np.array([0.25, 0.5]) for kind in KINDS})
    >>> scores.top("induction", 1)
    [('L0H1', 0.5)]
    """

    heads: tuple[Head, ...]
    arrays: dict[str, np.ndarray]  # kind -> (n_heads,)
    protocol: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])
    model: dict[str, Any] = field(default_factory=dict[str, Any])  # provenance of what ran

    def __getitem__(self, kind: str) -> dict[str, float]:
        return {str(head): float(value) for head, value in zip(self.heads, self._of(kind), strict=True)}

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def rows(self) -> list[dict[str, Any]]:
        """One record per head: head, and its score of every kind."""
        return [
            {"head": str(head), **{kind: float(self.arrays[kind][i]) for kind in self}}
            for i, head in enumerate(self.heads)
        ]

    def _headline(self) -> str:
        return f"head scores of {len(self.heads)} heads: {', '.join(self)}"

    def _of(self, kind: str) -> np.ndarray:
        if kind not in self.arrays:
            raise HeadspanError(f"there is no head score {kind!r}: choose one of {', '.join(self.arrays)}")
        return self.arrays[kind]

    @checked
    def top(self, kind: str, k: int = 10) -> list[tuple[str, float]]:
        """The k best heads of a kind, best first, ties in head order."""
        values = self._of(kind)
        order = np.argsort(-values, kind="stable")  # NaN last
        return [(str(self.heads[int(i)]), float(values[i])) for i in order[:k] if not math.isnan(values[i])]

    @checked
    def grid(self, kind: str) -> np.ndarray:
        """Scores as a (layers, heads) array for a heat map, NaN where there is no head."""
        rows = {layer: row for row, layer in enumerate(sorted({head.layer for head in self.heads}))}
        grid = np.full((len(rows), max(head.index for head in self.heads) + 1), np.nan)
        for head, value in zip(self.heads, self._of(kind), strict=True):
            grid[rows[head.layer], head.index] = value
        return grid

    @checked
    def labels(self, best: int | None = None, threshold: float | None = None) -> Labels:
        """Head classes from behaviour: the best 10 (or ``best``) heads of each kind, or all at or above a threshold."""
        if threshold is not None:
            refuse_ignored("with a threshold", best=best)
        pairs: list[tuple[str, str]] = []
        for kind in self:
            ranked = self.top(kind, len(self.heads))
            chosen = (
                ranked[: 10 if best is None else best]
                if threshold is None
                else [(h, v) for h, v in ranked if v >= threshold]
            )
            pairs += [(head, kind) for head, _ in chosen]
        return Labels.from_pairs(pairs, "behaviour")

    def to_dict(self) -> dict[str, dict[str, float | None]]:
        """Plain JSON: kind -> head -> score, null where nothing could be measured."""
        return {kind: {h: None if math.isnan(v) else v for h, v in self[kind].items()} for kind in self}

    @checked
    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the scores and their model as JSON; the file appears only when complete."""
        with writing(path, "json", force=force) as temporary:
            temporary.write_text(json.dumps(self.to_file_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    @checked
    def load(cls, path: str | os.PathLike[str]) -> BehaviourScores:
        """Head scores from a JSON file, as ``headspan behaviour --out`` writes it."""
        missing = f"there is no file {path}: make one with `hs.behaviour(model)`"
        try:
            content = json.loads(read_text(path, missing, "file of head scores", most=_LARGEST))
        except (ValueError, RecursionError) as error:
            raise HeadspanError(
                f"{path} cannot be read as head scores in JSON ({reason(error)}): make it with `hs.behaviour(model)`"
            ) from None
        return cls.from_dict(content)

    @classmethod
    def from_dict(cls, content: Mapping[str, Mapping[str, float | None]]) -> BehaviourScores:
        """The inverse of `to_dict` (for behaviour.json and the annotations of a result) and of `to_file_dict`."""
        if not isinstance(content, Mapping) or not HEAD_SCORES.fits(dict(content)):
            raise HeadspanError("these are not head scores: expected kind -> head -> a number from 0 to 1 or null")
        tables = {kind: scores for kind, scores in content.items() if kind != MODEL}
        names = list(next(iter(tables.values()), ()))
        if not names or any({*names} != {*scores} for scores in tables.values()):
            raise HeadspanError("these are not head scores: every kind needs the same heads")
        values = {k: np.array([math.nan if s[n] is None else s[n] for n in names]) for k, s in tables.items()}
        return cls(tuple(Head.parse(name) for name in names), values, model=dict(content.get(MODEL) or {}))

    def to_file_dict(self) -> dict[str, Any]:
        """What a file of head scores holds: `to_dict`, and their model."""
        return {**self.to_dict(), MODEL: self.model}

    def to_annotation(self) -> dict[str, Any]:
        """What a result keeps of head scores: `to_dict`, and the identity of their model."""
        return {**self.to_dict(), **({MODEL: identity(self.model)} if self.model else {})}

    def doubt(self, scores: Scores) -> str | None:
        """A note if the model of a result cannot be compared with that of these head scores; raises if they differ."""
        return same_model(scores.provenance, self.model, "the result", "these head scores")
