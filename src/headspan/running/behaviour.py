"""Head scores: what each head attends to, measured by running the model.

A random sequence repeated twice separates four patterns. Averaged over positions and sequences, a head's attention

==================  =====================================================================
``identity``        on the token itself
``previous_token``  on the token before
``duplicate_token`` on the earlier occurrence of the same token
``induction``       on the token after the earlier occurrence of the same token
==================  =====================================================================

On random tokens these are diagonals of the attention matrix. On the user's own text the first two are
too; the others are measured at positions whose token occurred before, as the total attention on all its
earlier positions (duplicate token) or on the positions right after those (induction; a position right after an earlier
occurrence counts only if it is before the current position).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.models.opening import ModelLike, open
from headspan.models.weights import AttentionWeights
from headspan.results.head_scores import KINDS, BehaviourScores
from headspan.results.identity import same_model
from headspan.results.scores import Scores
from headspan.running.opening import RunningModel, head_names, identity_of, running
from headspan.running.samples import Sample, random_samples, stack, text_samples, token_pool
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.errors import HeadspanError, refuse_ignored, warn
from headspan.vocabulary.heads import Head

if TYPE_CHECKING:
    import torch


SEQUENCES, LENGTH, VOCABULARY = 128, 100, 20_000  # of the random sequences
ATTENTION_BUDGET = 512 * 2**20  # bytes of attention maps in memory at a time


@renamed(ref="model", texts="text")
@checked
def behaviour(
    model: ModelLike,
    *,
    sequences: int | None = None,
    length: int | None = None,
    vocab_limit: int | None = None,
    seed: int | None = None,
    batch: int | None = None,
    text: str | Sequence[str] | None = None,
    special_ids: Collection[int] | None = None,
    bos: str = "auto",
    into: str | os.PathLike[str] | None = None,
    device: str | None = None,
    dtype: str = "float32",
    progress: Update | None = None,
) -> BehaviourScores:
    """Run a model and score every query head by what it attends to.

    Parameters
    ----------
    model : model reference, opened weights, live transformers model, or a `RunningModel`.
    sequences, length, vocab_limit, seed : ``sequences`` (128) times ``length`` (100) ids are drawn uniformly from
        0…``vocab_limit`` (20,000) and each sequence is repeated twice. A smaller vocabulary is used whole, without
        its special tokens, and a note reports this.
    batch : sequences per batch; by default as many as keep the attention maps within 512 MiB.
    text : measure on this text, or these, instead of on random tokens.
    special_ids : ids not to draw from a small vocabulary; by default those named by the tokenizer or config.
    bos : prepend the beginning-of-sequence token: ``"auto"`` if the tokenizer does so, ``"yes"`` or ``"no"``.
    into : a result file of this model (``headspan.score``) to store the head scores in.
    device : device for a model that is loaded here.
    dtype : type to compute in: ``"float32"`` (for any stored type), ``"bfloat16"``, ``"float16"``, or
        ``"stored"``.
    progress : called with (sequences done, all sequences); by default a bar in a terminal or notebook.
    """
    if text is not None:
        drawn = {"sequences": sequences, "length": length, "vocab_limit": vocab_limit, "seed": seed}
        refuse_ignored("with a text", **drawn, special_ids=special_ids)
    store = None if into is None else _result_of(into, model)
    ready = running(_runnable(model), device=device, dtype=dtype)
    with progress_bar("running the model", progress) as update, ready as opened:
        notes = list(opened.notes)
        start = opened.start_token(bos)
        if text is not None:
            texts = [text] if isinstance(text, str) else text
            samples = text_samples(opened, texts, notes, start)
            protocol: dict[str, Any] = {"texts": len(texts), "tokens": sum(len(s.ids) for s in samples)}
        else:
            sequences, length = (b if a is None else a for a, b in ((sequences, SEQUENCES), (length, LENGTH)))
            seed = seed or 0
            pool = token_pool(opened, VOCABULARY if vocab_limit is None else vocab_limit, special_ids, notes)
            samples = random_samples(opened, pool, sequences, length, seed, start)
            protocol = {"sequences": sequences, "length": length, "vocabulary": len(pool), "seed": seed}
        if start is not None:
            protocol["bos"] = start
        heads, values = _measure(opened, samples, batch, update)
    for kind in KINDS:
        if np.isnan(values[kind]).all():
            notes.append(f"no token occurs twice in the text, so {kind} could not be measured")
    found = BehaviourScores(heads, values, protocol, notes, opened.identity)
    if store is not None and into is not None:
        _keep(found, store, into)
    return found


def _result_of(into: str | os.PathLike[str], model: Any) -> Scores:
    """The result that will hold the head scores, checked before the long run: it must belong to this model."""
    store = Scores.load(into)
    if doubt := same_model(store.provenance, identity_of(model), str(into), "this model"):
        warn(doubt)
    try:
        with open(model) as weights:
            _check_heads(weights.ports.query, store)
    except HeadspanError as error:
        if isinstance(error, _OtherHeads):
            raise
    return store  # a model can be runnable although headspan cannot read its weights


class _OtherHeads(HeadspanError):
    """A result of another model."""


def _check_heads(heads: Sequence[Head], store: Scores) -> None:
    if set(heads) != set(store.ports.query):
        raise _OtherHeads(
            f"this is a result of another model: it has {len(store.ports.query)} query heads, the model has "
            f"{len(heads)}, or their names differ. Give the model that it was made from"
        )


def _keep(found: BehaviourScores, store: Scores, into: str | os.PathLike[str]) -> None:
    """Add head scores to a result of the same model and save it."""
    _check_heads(found.heads, store)
    found.doubt(store)  # the model may have changed since the first check
    store.annotations["behaviour"] = found.to_annotation()
    store.annotations["behaviour_protocol"] = found.protocol
    store.save(into)


def _runnable(ref: Any) -> Any:
    """What to run: opened weights are run by the reference that they came from."""
    if not isinstance(ref, AttentionWeights):
        return ref
    if ref.folding != "none" or not ref.reopenable:
        raise HeadspanError(
            f"{ref.reference} cannot be run (arrays or folded weights). Give the model itself: "
            "its directory, file or hub id"
        )
    return ref.reference


def _measure(
    model: RunningModel, samples: list[Sample], batch: int | None, progress: Update | None
) -> tuple[tuple[Head, ...], dict[str, np.ndarray]]:
    """Mean attention on the positions of every kind, with one batch of attention maps in memory at a time."""
    totals: dict[str, np.ndarray] = {}
    heads: tuple[Head, ...] = ()
    done, size = 0, batch or 1  # the first run shows how large the maps are
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
    """Up to ``size`` samples of equal length from ``start`` on: padding would change the attention."""
    n = len(samples[start].ids)
    group: list[Sample] = []
    for sample in samples[start : start + size]:
        if len(sample.ids) != n:
            break
        group.append(sample)
    return group


def _total(pattern: torch.Tensor, group: list[Sample], kind: str) -> np.ndarray:
    """Attention of every head on the positions of a kind, summed over positions and sequences, in float64."""
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
            raise HeadspanError("the text has no tokens. Give a longer text")
        if model.context is not None and len(ids) > model.context:
            raise HeadspanError(
                f"the text has {len(ids)} tokens, and {model.reference} takes {model.context}. Give a shorter text"
            )
        attentions = model.attentions(stack([Sample(np.array(ids), {}, {})]))
        assert model.vocabulary is not None  # encode would have refused
        tokens = [model.vocabulary.readable(i) for i in ids]
    present = head_names(attentions)
    wanted = present if heads is None else [Head.parse(head) for head in heads]
    unknown = [str(head) for head in wanted if head not in present]
    if unknown:
        raise HeadspanError(f"no such heads: {', '.join(unknown)}; this model has {present[0]} to {present[-1]}")
    return AttentionPatterns(tokens, {h: attentions[h.layer][0, h.index].float().cpu().numpy() for h in wanted})
