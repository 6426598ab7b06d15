"""The built-in tasks: prompts from templates, for the tokenizer of any model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headspan.running.samples import VOCABULARY, token_pool
from headspan.running.tasks import templates
from headspan.running.tasks.pairs import Prompt, PromptEncoder
from headspan.vocabulary.errors import HeadspanError

FEWEST = 8  # prompts that a task must yield
SEQUENCE = 16  # tokens that the induction task repeats
_FRUITLESS = 500  # drafts in a row without a new prompt, after which the task counts as exhausted


@dataclass(frozen=True)
class Draft:
    """A prompt in text; ``changed`` is how many tokens may differ between clean and corrupted."""

    clean: str
    corrupted: str
    answers: Sequence[str]
    wrong: Sequence[str]
    changed: int = 1


# A task looks at the tokenizer and returns a function that drafts prompt number k.
Drafts = Callable[[np.random.Generator, int], "Draft | Prompt | None"]
Task = Callable[[PromptEncoder, list[str]], Drafts]


def built_in_prompts(encoder: PromptEncoder, task: str, most: int, seed: int, notes: list[str]) -> list[Prompt]:
    """Up to ``most`` different prompts of a built-in task, in an order that depends on the seed."""
    rng = np.random.default_rng(seed)
    if task != "induction":
        _check_tokenizer(encoder, task)
    draft = TASKS[task](encoder, notes)
    found: dict[tuple[int, ...], Prompt] = {}
    fruitless = 0
    while len(found) < most and fruitless < _FRUITLESS:
        drafted = draft(rng, len(found))
        prompt = _encoded(encoder, drafted) if isinstance(drafted, Draft) else drafted
        fruitless += 1
        if prompt is not None and prompt.clean not in found and encoder.fits(prompt.clean):
            found[prompt.clean] = prompt
            fruitless = 0
    if len(found) < min(FEWEST, most):
        raise _cannot(encoder, task, f"only {len(found)} prompts can be written with its tokenizer")
    return list(found.values())


def _encoded(encoder: PromptEncoder, draft: Draft) -> Prompt | None:
    """The tokens of a draft, or None if this tokenizer does not split both prompts in the same way."""
    clean, corrupted = encoder.text_ids(draft.clean), encoder.text_ids(draft.corrupted)
    if len(clean) != len(corrupted) or not all(encoder.is_known(token) for token in {*clean, *corrupted}):
        return None
    if not 0 < sum(a != b for a, b in zip(clean, corrupted, strict=True)) <= draft.changed:
        return None
    answers = _tokens(encoder, draft.clean, draft.answers)
    wrong = _tokens(encoder, draft.clean, draft.wrong)
    if not answers or not wrong or {*answers} & {*wrong}:
        return None
    return Prompt(encoder.started(clean), encoder.started(corrupted), answers, wrong, draft.clean)


def _tokens(encoder: PromptEncoder, text: str, words: Sequence[str]) -> tuple[int, ...]:
    found = (encoder.continuation(text, word) for word in words)
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _check_tokenizer(encoder: PromptEncoder, task: str) -> None:
    try:
        encoder.text_ids("a")
    except HeadspanError as error:
        raise HeadspanError(
            f"the task {task} needs a tokenizer: {error}. Choose induction, or give a file of token ids"
        ) from None


def _cannot(encoder: PromptEncoder, task: str, seen: str) -> HeadspanError:
    others = ", ".join(name for name in TASKS if name != task)
    return HeadspanError(
        f"the task {task} cannot be used with {encoder.model.reference}: {seen}. "
        f"Choose another task ({others}) or give a file of prompts"
    )


def _single(encoder: PromptEncoder, task: str, what: str, words: Sequence[str], needed: int) -> list[str]:
    """The words that are one token after a space; at least ``needed``."""
    found = [word for word in words if encoder.continuation("Then", f" {word}") is not None]
    if len(found) < needed:
        raise _cannot(encoder, task, f"{len(found)} of {len(words)} {what} are single tokens, and it needs {needed}")
    return found


def _one(rng: np.random.Generator, items: Sequence[str]) -> str:
    return items[int(rng.integers(len(items)))]


def _ioi(encoder: PromptEncoder, notes: list[str]) -> Drafts:
    """Indirect objects: the answer is the name that was not repeated."""
    names = _single(encoder, "ioi", "names", templates.WOMEN + templates.MEN, 4)

    def draft(rng: np.random.Generator, k: int) -> Draft:
        giver, receiver, third = (names[i] for i in rng.choice(len(names), 3, replace=False))
        first, second = (receiver, giver) if k % 2 == 0 else (giver, receiver)  # ABBA and BABA in turn
        words = {"first": first, "second": second}
        words |= {"place": _one(rng, templates.PLACES), "object": _one(rng, templates.OBJECTS)}
        template = _one(rng, templates.IOI)
        clean, corrupted = (template.format(subject=name, **words) for name in (giver, third))
        return Draft(clean, corrupted, [f" {receiver}"], [f" {giver}"])

    return draft


def _pronoun(encoder: PromptEncoder, notes: list[str]) -> Drafts:
    """Pronouns: the answer is she or he, by the name in the sentence."""
    women = _single(encoder, "gendered-pronoun", "names of women", templates.WOMEN, 2)
    men = _single(encoder, "gendered-pronoun", "names of men", templates.MEN, 2)

    def draft(rng: np.random.Generator, k: int) -> Draft:
        template, names = _one(rng, templates.GENDERED_PRONOUN), {"women": _one(rng, women), "men": _one(rng, men)}
        this, other = ("women", "men") if k % 2 == 0 else ("men", "women")
        clean, corrupted = (template.format(name=names[kind]) for kind in (this, other))
        return Draft(clean, corrupted, [templates.PRONOUNS[this]], [templates.PRONOUNS[other]])

    return draft


def _greater_than(encoder: PromptEncoder, notes: list[str]) -> Drafts:
    """Years: right answers are all later ones. Tokenizers split years in different places, and so do the prompts."""
    probe = templates.GREATER_THAN.format(event="war", year=1732, stem="")
    splits = [(2, 2), (2, 1), (3, 1)]  # digits that the prompt ends with, and digits of the answer
    stem, width = next(
        (split for split in splits if _continued(encoder, f"{probe}{str(1732)[: split[0]]}", split[1])), (0, 0)
    )
    if not stem:
        raise _cannot(encoder, "greater-than", "its tokenizer does not split years after two or three digits")
    if width == 1:
        digit = "third" if stem == 2 else "last"
        notes.append(f"the tokenizer splits years, so the task compares their {digit} digit")
    numbers = [f"{i:0{width}}" for i in range(10**width)]

    def draft(rng: np.random.Generator, k: int) -> Draft:
        year = f"{rng.choice(templates.CENTURIES)}{rng.integers(2, 99):02}"
        other = year[:3] + "0" if stem == 3 else year[:2] + "01"
        event, own = _one(rng, templates.EVENTS), year[stem : stem + width]
        clean, corrupted = (
            templates.GREATER_THAN.format(event=event, year=shown, stem=year[:stem]) for shown in (year, other)
        )
        larger, smaller = [n for n in numbers if n > own], [n for n in numbers if n < own]
        return Draft(clean, corrupted, larger, smaller, changed=4 - stem if width == 1 else 1)

    return draft


def _continued(encoder: PromptEncoder, text: str, width: int) -> bool:
    """Whether most numbers of this many digits continue a year as single tokens."""
    numbers = [f"{i:0{width}}" for i in range(10**width)]
    return len(_tokens(encoder, text, numbers)) > 0.8 * len(numbers)


def _successor(encoder: PromptEncoder, notes: list[str]) -> Drafts:
    """Series: the answer is the next item; the corrupted prompt has items of the same series out of order."""
    series = [(items, True) for items in templates.CYCLES.values()]
    series += [(items, False) for items in templates.SERIES.values()]

    def draft(rng: np.random.Generator, k: int) -> Draft | None:
        items, cyclic = series[int(rng.integers(len(series)))]
        count, size = int(rng.integers(3, 5)), len(items)
        first = int(rng.integers(size if cyclic else size - count))
        run = [(first + i) % size for i in range(count + 1)]
        left = [i for i in range(size) if i not in run]
        wrong = left[int(rng.integers(len(left)))]
        pool = [i for i in range(size) if i not in (run[-1], wrong)]
        mixed = [int(i) for i in rng.choice(pool, count, replace=False)]
        if mixed[-1] == run[-2] or any((a + 1) % size == b for a, b in pairwise(mixed)):
            return None
        template = _one(rng, templates.SUCCESSOR)
        clean, corrupted = (template.format(items=", ".join(items[i] for i in part)) for part in (run[:-1], mixed))
        # Some tokenizers have a space apart from the next digit; the prompt then ends with it.
        comma, space = (",", " ") if encoder.continuation(f"{clean},", f" {items[run[-1]]}") is not None else (", ", "")
        answer, other = (f"{space}{items[i]}" for i in (run[-1], wrong))
        return Draft(clean + comma, corrupted + comma, [answer], [other], changed=count)

    return draft


def _induction(encoder: PromptEncoder, notes: list[str]) -> Drafts:
    """Random tokens, and the first of them again: the answer is the token that came next the first time."""
    pool = np.setdiff1d(token_pool(encoder.model, VOCABULARY, None, notes), sorted(encoder.model.special_ids))
    room = (encoder.model.context or 10**9) - len(encoder.started(()))
    length = min(SEQUENCE, room // 2, len(pool) - 1)
    if length < 4:
        raise _cannot(encoder, "induction", f"it has {len(pool)} ordinary tokens and takes {room} at a time")
    vocabulary = encoder.model.vocabulary

    def draft(rng: np.random.Generator, k: int) -> Prompt:
        *sequence, other = (int(token) for token in rng.choice(pool, length + 1, replace=False))
        seen = int(rng.integers(2, length))  # tokens of the second copy
        clean = (*sequence, *sequence[:seen])
        corrupted = (*sequence[: seen - 1], other, *clean[seen:])
        wrong = int(rng.choice([t for t in sequence if t not in (sequence[seen - 1], sequence[seen])]))
        text = " ".join(str(t) if vocabulary is None else vocabulary.readable(t) for t in clean)
        return Prompt(encoder.started(clean), encoder.started(corrupted), (sequence[seen],), (wrong,), text)

    return draft


TASKS: dict[str, Task] = {
    "ioi": _ioi,
    "induction": _induction,
    "greater-than": _greater_than,
    "successor": _successor,
    "gendered-pronoun": _pronoun,
}
