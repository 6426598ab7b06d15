"""Head scores: what a head does, read off its attention when the model runs.

Random tokens, said twice, separate four habits. Averaged over positions and sequences, a head's attention

==================  =====================================================================
``identity``        on the token itself
``previous_token``  on the token before
``duplicate_token`` on the same token, where it stood before
``induction``       on the token that came after the same token, where it stood before
==================  =====================================================================

On random tokens those are diagonals of the attention matrix. On a text of the user's own the first two are
too; the others are measured at the positions whose token occurred before, as the total attention on all its
earlier places (duplicate token) or on the places right after those (induction; a place right after an earlier
occurrence counts only when it lies before the current position).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.analysis.labels import Labels
from headspan.analysis.samples import KINDS, Sample, random_samples, stack, text_samples, token_pool
from headspan.errors import HeadspanError
from headspan.heads import Head
from headspan.metadata import HEAD_SCORES, MODEL
from headspan.models.identity import identity, same_model
from headspan.models.running import RunningModel, head_names, running
from headspan.models.weights import AttentionWeights
from headspan.system.arguments import checked
from headspan.system.inputs import read_text, reason
from headspan.system.outputs import MADE_BY, writing
from headspan.system.progress import progress_bar
from headspan.system.renamed import renamed
from headspan.system.tabular import Tabular, csv_text

if TYPE_CHECKING:
    import torch

    from headspan.scores import Scores

KIND_TITLES = {
    "identity": "Identity",
    "previous_token": "Previous token",
    "duplicate_token": "Duplicate token",
    "induction": "Induction",
}
_LARGEST = 10**8  # bytes of a file of head scores
ATTENTION_BUDGET = 512 * 2**20  # bytes of attention maps kept at a time

Progress = Callable[[int, int], None]


@dataclass(repr=False, eq=False)
class BehaviourScores(Tabular, Mapping[str, dict[str, float]]):
    """Scores of every query head by kind: ``scores["induction"]["L5H1"]``; NaN where nothing could be measured.

    >>> scores = BehaviourScores((Head(0, 0), Head(0, 1)), {kind: np.array([0.25, 0.5]) for kind in KINDS})
    >>> scores.top("induction", 1)
    [('L0H1', 0.5)]
    """

    heads: tuple[Head, ...]
    arrays: dict[str, np.ndarray]  # kind -> (n_heads,)
    protocol: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)  # provenance of what ran

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
        return [(str(self.heads[i]), float(values[i])) for i in order[:k] if not math.isnan(values[i])]

    @checked
    def grid(self, kind: str) -> np.ndarray:
        """Scores as a (layers, heads) array for a heat map, NaN where there is no head."""
        rows = {layer: row for row, layer in enumerate(sorted({head.layer for head in self.heads}))}
        grid = np.full((len(rows), max(head.index for head in self.heads) + 1), np.nan)
        for head, value in zip(self.heads, self._of(kind), strict=True):
            grid[rows[head.layer], head.index] = value
        return grid

    @checked
    def labels(self, best: int = 10, threshold: float | None = None) -> Labels:
        """Head classes from behaviour: the best heads of each kind, or all at or above a threshold."""
        pairs: list[tuple[str, str]] = []
        for kind in self:
            ranked = self.top(kind, len(self.heads))
            chosen = ranked[:best] if threshold is None else [(h, v) for h, v in ranked if v >= threshold]
            pairs += [(head, kind) for head, _ in chosen]
        return Labels.from_pairs(pairs, "behaviour")

    def to_dict(self) -> dict[str, dict[str, float | None]]:
        """Plain JSON: kind -> head -> score, null where nothing could be measured."""
        return {kind: {h: None if math.isnan(v) else v for h, v in self[kind].items()} for kind in self}

    @classmethod
    @checked
    def load(cls, path: str | os.PathLike[str]) -> BehaviourScores:
        """Head scores from a JSON file, as ``headspan behaviour --out`` writes it."""
        missing = f"there is no file {path}: make one with headspan behaviour --out"
        try:
            content = json.loads(read_text(path, missing, "file of head scores", most=_LARGEST))
        except (ValueError, RecursionError) as error:
            raise HeadspanError(
                f"{path} cannot be read as head scores in JSON ({reason(error)}): make it with headspan behaviour --out"
            ) from None
        return cls.from_dict(content)

    @classmethod
    def from_dict(cls, content: Mapping[str, Mapping[str, float | None]]) -> BehaviourScores:
        """The inverse of `to_dict` (for behaviour.json and the annotations of a result) and of `to_file_dict`."""
        if not isinstance(content, Mapping) or not HEAD_SCORES.fits(dict(content)):
            raise HeadspanError("these are no head scores: expected kind -> head -> a number from 0 to 1 or null")
        tables = {kind: scores for kind, scores in content.items() if kind != MODEL}
        names = list(next(iter(tables.values()), ()))
        if not names or any({*names} != {*scores} for scores in tables.values()):
            raise HeadspanError("these are no head scores: every kind needs the same heads")
        values = {k: np.array([math.nan if s[n] is None else s[n] for n in names]) for k, s in tables.items()}
        return cls(tuple(Head.parse(name) for name in names), values, model=dict(content.get(MODEL) or {}))

    def to_file_dict(self) -> dict[str, Any]:
        """What a file of head scores holds: `to_dict`, and the model they are of."""
        return {**self.to_dict(), MODEL: self.model}

    def to_annotation(self) -> dict[str, Any]:
        """What a result keeps of head scores: `to_dict`, and what tells their model from others."""
        return {**self.to_dict(), **({MODEL: identity(self.model)} if self.model else {})}

    def doubt(self, scores: Scores) -> str | None:
        """An error if a result is of another model than these head scores, a sentence where nobody can tell."""
        return same_model(scores.provenance, self.model, "the result", "these head scores")


def write_labels(labels: Labels, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """A label file (columns head,label) that `Labels.load` and the option --labels read."""
    rows = [{"head": str(head), "label": label} for label in labels.names for head in labels.heads(label)]
    with writing(path, "csv", force=force) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        file.write(f"# {MADE_BY}\n")  # a label file written by hand has no such line, and is not replaced
        file.write(csv_text(rows, ("head", "label")))


@checked
def behaviour(
    ref: Any,
    *,
    sequences: int = 128,
    length: int = 100,
    vocab_limit: int = 20_000,
    seed: int = 0,
    batch: int | None = None,
    texts: Sequence[str] | None = None,
    special_ids: Collection[int] | None = None,
    bos: str = "auto",
    device: str | None = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> BehaviourScores:
    """Run a model and score every query head by what it attends to.

    Parameters
    ----------
    ref : model reference, opened weights, live transformers model, or a `RunningModel`.
    sequences, length, vocab_limit, seed : ``sequences`` times ``length`` ids are drawn uniformly from
        0…``vocab_limit`` and each sequence is said twice. A smaller vocabulary is used whole, without its special
        tokens, and a note says so.
    batch : sequences at a time; by default as many as keep the attention maps within 512 MiB.
    texts : measure on these texts instead of on random tokens.
    special_ids : ids not to draw from a small vocabulary; by default those the tokenizer or config names.
    bos : put the beginning-of-sequence token in front: ``"auto"`` where the tokenizer does so, ``"yes"`` or ``"no"``.
    device : where to run a model that is loaded here.
    dtype : what to compute in: ``"float32"`` (whatever the model is stored in), ``"bfloat16"``, ``"float16"``, or
        ``"stored"``.
    progress : called with (sequences done, sequences in all); by default a bar where somebody is looking.
    """
    ready = running(_runnable(ref), device=device, dtype=dtype)
    with progress_bar("running the model", progress) as update, ready as model:
        notes = list(model.notes)
        start = model.start_token(bos)
        if texts is not None:
            samples = text_samples(model, texts, notes, start)
            protocol: dict[str, Any] = {"texts": len(texts), "tokens": sum(len(s.ids) for s in samples)}
        else:
            pool = token_pool(model, vocab_limit, special_ids, notes)
            samples = random_samples(model, pool, sequences, length, seed, start)
            protocol = {"sequences": sequences, "length": length, "vocabulary": len(pool), "seed": seed}
        if start is not None:
            protocol["bos"] = start
        heads, values = _measure(model, samples, batch, update)
    for kind in KINDS:
        if np.isnan(values[kind]).all():
            notes.append(f"the text has no token that comes again, so {kind} could not be measured")
    return BehaviourScores(heads, values, protocol, notes, model.identity)


def _runnable(ref: Any) -> Any:
    """What can be run of a reference: opened weights are run by the reference they came from."""
    if not isinstance(ref, AttentionWeights):
        return ref
    if ref.folding != "none" or not ref.reopenable:
        raise HeadspanError(
            f"{ref.reference} cannot be run as it is opened here (arrays, or folded weights): give the model itself, "
            "its directory, file or hub id"
        )
    return ref.reference


def _measure(
    model: RunningModel, samples: list[Sample], batch: int | None, progress: Progress | None
) -> tuple[tuple[Head, ...], dict[str, np.ndarray]]:
    """Mean attention on the places of every kind; no more than one batch of attention maps at a time."""
    totals: dict[str, np.ndarray] = {}
    heads: tuple[Head, ...] = ()
    done, size = 0, batch or 1  # the first run tells how large the maps are
    while done < len(samples):
        group = _same_length(samples, done, size)
        attentions = model.attentions(stack(group))
        heads = tuple(head_names(attentions))
        for kind in KINDS:
            part = np.concatenate([_total(pattern, group, kind) for pattern in attentions.values()])
            totals[kind] = totals.get(kind, 0.0) + part
        if batch is None and done == 0:
            per_sequence = sum(p[0].numel() * p.element_size() for p in attentions.values())
            size = max(1, min(32, ATTENTION_BUDGET // per_sequence))
        done += len(group)
        if progress is not None:
            progress(done, len(samples))
    counts = {kind: sum(sample.counts[kind] for sample in samples) for kind in KINDS}
    means = {k: totals[k] / counts[k] if counts[k] else np.full(len(heads), np.nan) for k in KINDS}
    return heads, means


def _same_length(samples: list[Sample], start: int, size: int) -> list[Sample]:
    """Up to ``size`` samples from ``start`` on that can be stacked: padding would change the attention."""
    n = len(samples[start].ids)
    group: list[Sample] = []
    for sample in samples[start : start + size]:
        if len(sample.ids) != n:
            break
        group.append(sample)
    return group


def _total(pattern: torch.Tensor, group: list[Sample], kind: str) -> np.ndarray:
    """Attention of every head on the places of a kind, summed over places and sequences, in float64."""
    import torch

    total = np.zeros(pattern.shape[1])
    for row, sample in zip(pattern, group, strict=True):
        queries, keys = (torch.as_tensor(index, device=row.device) for index in sample.places[kind])
        total += row[:, queries, keys].sum(dim=1, dtype=torch.float64).cpu().numpy()
    return total


@dataclass(frozen=True)
class AttentionPatterns:
    """Attention of some heads on one text: ``patterns[head]`` is (queries, keys)."""

    tokens: list[str]
    patterns: dict[Head, np.ndarray]


def attention_patterns(
    ref: Any, text: str, heads: Sequence[Head | str] | None = None, *, device: str | None = None
) -> AttentionPatterns:
    """The attention matrices of heads (all by default) on one text, with its readable tokens."""
    with running(ref, device=device) as model:
        ids = model.encode(text)
        if not ids:
            raise HeadspanError("the text has no tokens: there is no attention to show")
        if model.context is not None and len(ids) > model.context:
            raise HeadspanError(f"the text has {len(ids)} tokens, {model.reference} takes {model.context} at most")
        attentions = model.attentions(stack([Sample(np.array(ids), {}, {})]))
        assert model.vocabulary is not None  # encode would have refused
        tokens = [model.vocabulary.readable(i) for i in ids]
    present = head_names(attentions)
    wanted = present if heads is None else [Head.parse(head) for head in heads]
    unknown = [str(head) for head in wanted if head not in present]
    if unknown:
        raise HeadspanError(f"no such heads: {', '.join(unknown)}; this model has {present[0]} to {present[-1]}")
    return AttentionPatterns(tokens, {h: attentions[h.layer][0, h.index].float().cpu().numpy() for h in wanted})


__getattr__ = renamed(__name__, {"head_scores": "behaviour"})
