"""A prompt with its corrupted copy, and the rule by which a word continues a prompt as a single token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from headspan.running.opening import RunningModel


@dataclass(frozen=True)
class Prompt:
    """Token ids of a clean prompt and of its corrupted copy, and those of the right and wrong next tokens.

    Clean and corrupted have the same length, and both include the start token if the model runs with one.
    """

    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    answers: tuple[int, ...]
    wrong: tuple[int, ...]
    text: str = ""  # the clean prompt for people


class PromptEncoder:
    """A model's tokenizer as prompts need it: texts with the start token, and words that continue a text."""

    def __init__(self, model: RunningModel, bos: str = "auto") -> None:
        self.model = model
        self.start = model.start_token(bos)
        self.vocab_size = model.vocab_size  # finding it reads the whole vocabulary
        self.unknown = frozenset[int]() if model.vocabulary is None else model.vocabulary.unknown
        self.text_ids = lru_cache(maxsize=64)(self._text_ids)

    def _text_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without the start token."""
        return tuple(self.model.encode(text))

    def started(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Token ids after the start token, if there is one."""
        return (*(() if self.start is None else (self.start,)), *ids)

    def is_known(self, token: int) -> bool:
        """Whether the model has this token, and it is not the one for unknown text."""
        return 0 <= token < self.vocab_size and token not in self.unknown

    def continuation(self, text: str, word: str) -> int | None:
        """The token that ``word`` is after ``text``; None if it is several tokens, or changes those of the text."""
        before, after = self.text_ids(text), self.text_ids(text + word)
        if len(after) != len(before) + 1 or after[:-1] != before or not self.is_known(after[-1]):
            return None
        return after[-1]

    def fits(self, ids: tuple[int, ...]) -> bool:
        """Whether the model takes a sequence of this length."""
        return self.model.context is None or len(ids) <= self.model.context
