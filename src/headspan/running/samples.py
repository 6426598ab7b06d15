"""Token sequences to run a model on, and the positions in them that define the four head scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from headspan.running.opening import RunningModel
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    import torch

MOST_TOKENS = 10**8  # random tokens of one measurement; more would not improve accuracy
TEXT_WINDOW = 512  # tokens per window of a text for head scores, if the model takes as many
LENGTH, VOCABULARY = 42, 20_000  # of the random sequences
EDGE_WINDOW = 128  # the same for effects and statistics, which compare all pairs of heads
EFFECTS_TEXT, OBSERVE_TEXT = "effects-text.txt", "observe-text.txt"  # two texts, so that one can predict the other


@dataclass(frozen=True)
class Sample:
    """Token ids, and for each kind the (query, key) positions that count and the number of their queries."""

    ids: np.ndarray
    places: Mapping[str, tuple[np.ndarray, np.ndarray]]
    counts: Mapping[str, int]

    @property
    def tensor(self) -> torch.Tensor:
        """The ids as a model takes them, (T,)."""
        import torch

        return torch.from_numpy(self.ids.astype(np.int64))

    def after(self, start: int | None) -> Sample:
        """The same with a beginning-of-sequence token prepended, which is never a query; unchanged for None."""
        if start is None:
            return self
        places = {kind: (queries + 1, keys + 1) for kind, (queries, keys) in self.places.items()}
        return Sample(np.concatenate([[start], self.ids]), places, self.counts)


def random_samples(
    model: RunningModel,
    pool: np.ndarray,
    sequences: int,
    length: int,
    seed: int,
    start: int | None = None,
    stream: int = 0,
) -> list[Sample]:
    """Random sequences from the pool, repeated twice, after the token ``start`` if there is one."""
    if sequences < 1 or length < 2:
        raise HeadspanError(
            f"{sequences} sequences of {length} tokens cannot be measured. Give at least 1 sequence of 2 tokens"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise HeadspanError(f"the seed must be a whole number of 0 or more, not {seed!r}")
    if sequences * length > MOST_TOKENS:
        raise HeadspanError(
            f"{sequences} sequences of {length} tokens are more than {MOST_TOKENS:,} tokens. Give fewer"
        )
    room = None if model.context is None else model.context - (start is not None)
    if room is not None and 2 * length > room:
        raise HeadspanError(
            f"{model.reference} takes at most {room} tokens, and {length} tokens repeated twice are {2 * length}. "
            f"Choose a length of {room // 2} or less"
        )
    drawn = np.random.default_rng([stream, seed] if stream else seed).choice(pool, size=(sequences, length))
    offsets = {"identity": 0, "previous_token": 1, "duplicate_token": length, "induction": length - 1}
    places, counts = {}, {}
    for kind, offset in offsets.items():
        queries = np.arange(offset, 2 * length)
        places[kind], counts[kind] = (queries, queries - offset), len(queries)
    return [Sample(np.concatenate([ids, ids]), places, counts).after(start) for ids in drawn]


def token_pool(model: RunningModel, limit: int, special_ids: Collection[int] | None, notes: list[str]) -> np.ndarray:
    """The ids to draw from: 0…limit, or all ordinary tokens of a smaller vocabulary."""
    if model.vocab_size > limit:
        return np.arange(limit + 1)
    special = model.special_ids if special_ids is None else special_ids
    pool = np.setdiff1d(np.arange(model.vocab_size), np.array(sorted(special), dtype=int))
    if len(pool) < 2:
        raise HeadspanError(f"{model.reference} has {len(pool)} ordinary tokens, too few for random sequences")
    notes.append(
        f"the vocabulary has fewer than {limit + 1:,} tokens: using its {len(pool):,} tokens that are not special"
    )
    return pool


def text_samples(model: RunningModel, texts: Sequence[str], notes: list[str], start: int | None = None) -> list[Sample]:
    """Texts as windows of tokens that fit the model, each after the token ``start`` if there is one."""
    window = min(TEXT_WINDOW, model.context or TEXT_WINDOW) - (start is not None)
    windows: list[list[int]] = []
    for text in texts:
        ids = model.encode(text)
        windows += [ids[first : first + window] for first in range(0, len(ids), window)]
        if len(ids) > window:
            notes.append(f"a text of {len(ids):,} tokens is measured in windows of {window}")
    samples = [text_sample(np.array(ids)).after(start) for ids in windows if len(ids) > 1]
    if not samples:
        raise HeadspanError("the text has fewer than two tokens. Give a longer text")
    return samples


def equal_windows(texts: Sequence[Sequence[int]], longest: int) -> list[np.ndarray]:
    """Texts as windows of at most ``longest`` tokens, cut so that at least two have the full length.

    Resampling uses a head's output at the same position of another sequence, so two sequences must have full length.

    >>> [len(w) for w in equal_windows([range(11), range(4)], 8)]
    [5, 5, 4]
    """
    lengths = sorted((len(ids) for ids in texts), reverse=True)
    halves = max((n // 2 for n in lengths), default=0)
    window = min(longest, max(halves, lengths[1] if len(lengths) > 1 else 0))
    if window < 2:
        raise HeadspanError("the text is too short for two windows of at least two tokens. Give a longer text")
    cut = [np.array(ids[first : first + window]) for ids in texts for first in range(0, len(ids), window)]
    return [ids for ids in cut if len(ids) > 1]


def text_sample(ids: np.ndarray) -> Sample:
    """The positions that define the four head scores in one text."""
    n = len(ids)
    here = np.arange(n)
    earlier = (ids[:, None] == ids[None, :]) & (here[None, :] < here[:, None])
    after = np.zeros_like(earlier)
    after[:, 1:] = earlier[:, :-1]
    after &= here[None, :] < here[:, None]
    places = {
        "identity": (here, here),
        "previous_token": (here[1:], here[:-1]),
        "duplicate_token": np.nonzero(earlier),
        "induction": np.nonzero(after),
    }
    return Sample(ids, places, {kind: len(np.unique(queries)) for kind, (queries, _) in places.items()})


def stack(group: list[Sample]) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.stack([sample.ids for sample in group]).astype(np.int64))


def built_in_text(name: str) -> str:
    """A short English text that models run on by default."""
    return (files("headspan") / "data" / name).read_text(encoding="utf-8")


def token_material(model: RunningModel, tokens: Sequence[Sequence[int]]) -> list[Sample]:
    """Sequences of token ids, checked."""
    rows = int(model.model.get_input_embeddings().weight.shape[0])
    found = []
    for ids in tokens:
        array = np.asarray(ids)
        if array.ndim != 1 or len(array) < 2 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= rows:
            raise HeadspanError(f"a token sequence must be a list of at least two ids from 0 to {rows - 1}")
        found.append(Sample(array, {}, {}))
    return found


def random_material(
    model: RunningModel,
    start: int | None,
    sequences: int,
    length: int | None,
    seed: int,
    notes: list[str],
    stream: int = 0,
) -> list[Sample]:
    """Random sequences repeated twice; those of another stream are different for the same seed."""
    pool = token_pool(model, VOCABULARY, None, notes)
    room = (model.context or 10**9) - (start is not None)
    return random_samples(model, pool, sequences, length or min(LENGTH, room // 2), seed, start, stream)


def text_material(model: RunningModel, start: int | None, text: str | Sequence[str]) -> list[Sample]:
    """Texts in windows of at most 128 tokens."""
    longest = min(EDGE_WINDOW, model.context or EDGE_WINDOW) - (start is not None)
    texts = [text] if isinstance(text, str) else list(text)
    windows = equal_windows([model.encode(one) for one in texts], longest)
    return [Sample(ids, {}, {}).after(start) for ids in windows]
