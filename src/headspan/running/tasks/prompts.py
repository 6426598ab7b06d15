"""The prompts of a task: some to attribute, and others that are held out to evaluate circuits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headspan.running.opening import RunningModel
from headspan.running.tasks.built_in import TASKS, built_in_prompts
from headspan.running.tasks.pairs import Prompt, PromptEncoder
from headspan.running.tasks.prompt_files import MOST_ROWS, SUFFIXES, prompts_of_file, prompts_of_list
from headspan.system.inputs import mode_of
from headspan.vocabulary.errors import HeadspanError

COUNT = 48  # prompts of a built-in task in each list

TaskLike = str | os.PathLike[str] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TaskPrompts:
    """Two lists of prompts that share none; ``sha256`` identifies their tokens."""

    name: str
    prompts: list[Prompt]
    held_out: list[Prompt]
    source: str  # "built-in", the name of a file, or "list"
    notes: list[str] = field(default_factory=list)

    @property
    def sha256(self) -> str:
        """Hash of all token ids, in order."""
        ids = [[(p.clean, p.corrupted, p.answers, p.wrong) for p in part] for part in (self.prompts, self.held_out)]
        return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def task_prompts(
    model: RunningModel, task: TaskLike, *, count: int | None = None, seed: int = 0, bos: str = "auto"
) -> TaskPrompts:
    """Prompts of a built-in task, of a file or of a list.

    Parameters
    ----------
    model : the model whose tokenizer writes the prompts.
    task : ``"ioi"``, ``"induction"``, ``"greater-than"``, ``"successor"`` or ``"gendered-pronoun"``; the path of a
        ``.csv``, ``.jsonl`` or ``.json`` file; or a list of mappings with ``clean``, ``corrupted``, ``answer`` and
        ``wrong``.
    count : prompts in each of the two lists; by default 48 of a built-in task and all of a file, half in each.
    seed : decides which prompts are drawn, and which are held out.
    bos : whether prompts begin with the start token: ``"auto"``, ``"yes"`` or ``"no"``.
    """
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MOST_ROWS):
        raise HeadspanError(f"the number of prompts must be from 1 to {MOST_ROWS:,}, not {str(count)[:20]}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise HeadspanError(f"the seed must be a whole number of 0 or more, not {str(seed)[:20]}")
    encoder, notes = PromptEncoder(model, bos), list[str]()
    if isinstance(task, str) and task in TASKS:
        wanted = COUNT if count is None else count
        found = built_in_prompts(encoder, task, 2 * wanted, seed, notes)
        half = len(found) // 2
        _note_fewer(notes, wanted, half)
        return TaskPrompts(task, found[:half], found[half : 2 * half], "built-in", notes)
    name, source, given = _given(encoder, task, notes)
    first, second = _halves(given, source, seed, notes)
    if count is not None:
        _note_fewer(notes, count, min(len(first), len(second)))
    return TaskPrompts(name, first[:count], second[:count], source, notes)


def check_task(task: TaskLike) -> None:
    """Refuse a task that does not exist, before a model is loaded."""
    if isinstance(task, (str, os.PathLike)):
        path = Path(task).expanduser()
        if task not in TASKS and mode_of(path) is None:
            if path.suffix.lower() in SUFFIXES:
                raise HeadspanError(f"there is no file {path}")
            raise HeadspanError(f"there is no task {str(task)!r}. Choose {', '.join(TASKS)}, or give a file of prompts")
    elif not isinstance(task, Sequence) or isinstance(task, (bytes, bytearray)):
        raise HeadspanError(f"a task must be a name, a file or a list of prompts, not {type(task).__name__}")


def _given(encoder: PromptEncoder, task: TaskLike, notes: list[str]) -> tuple[str, str, list[Prompt]]:
    """Name, source and prompts of a file or list."""
    check_task(task)
    if isinstance(task, (str, os.PathLike)):
        path = Path(task).expanduser()
        return path.stem, path.name, prompts_of_file(encoder, path, notes)
    return "prompts", "list", prompts_of_list(encoder, task, notes)


def _halves(given: list[Prompt], source: str, seed: int, notes: list[str]) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts in two halves at random; those with the same clean prompt are in the same half."""
    groups: dict[tuple[int, ...], list[Prompt]] = {}
    distinct = list({(p.clean, p.corrupted, p.answers, p.wrong): p for p in given}.values())
    for prompt in distinct:
        groups.setdefault(prompt.clean, []).append(prompt)
    if len(groups) < 2:
        raise HeadspanError(f"{source} has one clean prompt. Give at least two, because half of them are held out")
    if len(distinct) < len(given):
        notes.append(f"{len(given) - len(distinct)} of {len(given)} prompts were left out because they are repeated")
    halves: tuple[list[Prompt], list[Prompt]] = ([], [])
    order = np.random.default_rng(seed).permutation(len(groups))
    listed = list(groups.values())
    for i in order:
        halves[len(halves[0]) > len(halves[1])].extend(listed[i])
    return halves


def _note_fewer(notes: list[str], wanted: int, found: int) -> None:
    if found < wanted:
        notes.append(f"there are {found} prompts for each half, fewer than the {wanted} requested")
