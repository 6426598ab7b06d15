"""What a model runs on: texts, random sequences repeated twice, or given token ids, as samples."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from headspan.running.opening import RunningModel
from headspan.running.samples import Sample, equal_windows, random_samples, token_pool
from headspan.vocabulary.errors import HeadspanError

LENGTH, VOCABULARY = 42, 20_000  # of the random sequences
TEXT_WINDOW = 128
EFFECTS_TEXT, OBSERVE_TEXT = "effects-text.txt", "observe-text.txt"  # two texts, so that one can predict the other


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
    longest = min(TEXT_WINDOW, model.context or TEXT_WINDOW) - (start is not None)
    texts = [text] if isinstance(text, str) else list(text)
    windows = equal_windows([model.encode(one) for one in texts], longest)
    return [Sample(ids, {}, {}).after(start) for ids in windows]
