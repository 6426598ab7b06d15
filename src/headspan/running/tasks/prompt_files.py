"""Prompts from a CSV, JSONL or JSON file, or from a list of mappings, checked row by row."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headspan.checkpoints.untrusted import check_parts, reason
from headspan.running.tasks.pairs import Prompt, PromptEncoder
from headspan.system.inputs import read_text
from headspan.vocabulary.errors import HeadspanError

SUFFIXES = (".csv", ".jsonl", ".json")
MOST_ROWS, _LARGEST = 20_000, 2**26
_LONGEST, _MOST_ANSWERS = 100_000, 1_000  # characters of a prompt, answers of a row
_CLEAN = ("clean", "prompt")
_CORRUPTED = ("corrupted", "counterfactual")
_ANSWERS = ("answer", "answers", "correct_idx")
_WRONG = ("wrong", "incorrect_idx")
# A file of the MIB benchmark has several counterfactuals per prompt; the benchmark uses these.
_MIB = ("s2_io_flip_counterfactual", "symbol_counterfactual", "random_counterfactual")

Row = tuple[str, Mapping[str, Any]]  # where it is, for messages, and what it holds


def prompts_of_file(encoder: PromptEncoder, path: Path, notes: list[str]) -> list[Prompt]:
    """The prompts of a file, in its order."""
    if path.suffix.lower() not in SUFFIXES:
        raise HeadspanError(f"{path} is not a file of prompts. Give a .csv, .jsonl or .json file")
    text = read_text(path, f"there is no file {path}", "file of prompts", most=_LARGEST, encoding="utf-8-sig")
    if path.suffix.lower() == ".csv":
        rows = _csv_rows(path, text)
    else:
        check_parts(text.encode("utf-8"), path)
        rows = _json_items(path, text) if text.lstrip()[:1] == "[" else _json_lines(path, text)
    return _prompts(encoder, rows, str(path), notes)


def prompts_of_list(encoder: PromptEncoder, given: Sequence[Mapping[str, Any]], notes: list[str]) -> list[Prompt]:
    """The prompts of a list of mappings, in its order."""
    return _prompts(encoder, ((f"prompt {i}", row) for i, row in enumerate(given, 1)), "the list", notes)


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        twice = [name for name, count in Counter(header).items() if name and count > 1]
        if twice:
            raise HeadspanError(f"{path} has two columns {twice[0][:40]!r}. Give each column its own name")
        for values in reader:
            where = f"{path}, line {reader.line_num}"
            if not values:
                continue
            if len(values) != len(header):
                raise HeadspanError(
                    f"{where}: {len(values)} values for {len(header)} columns. Put quotes around a text with commas"
                )
            row: dict[str, Any] = dict(zip(header, values, strict=True))
            for name in {*_ANSWERS, *_WRONG} & row.keys():
                parts = row[name].split("|")
                row[name] = [_number(where, name, part) for part in parts] if name.endswith("_idx") else parts
            yield where, row
    except csv.Error as error:
        raise HeadspanError(f"{path}, line {reader.line_num}: not valid CSV ({reason(error)})") from None


def _number(where: str, name: str, text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        raise HeadspanError(f"{where}: {name} must be a token id, not {text[:40]!r}")
    return int(digits)


def _json_lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", _parsed(f"{path}, line {number}", line)


def _json_items(path: Path, text: str) -> Iterator[Row]:
    for number, row in enumerate(_parsed(str(path), text), 1):
        yield f"{path}, item {number}", row


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HeadspanError(f"{where}: not valid JSON ({reason(error)})") from None


def _prompts(encoder: PromptEncoder, rows: Iterator[Row], source: str, notes: list[str]) -> list[Prompt]:
    found: list[Prompt] = []
    for where, row in rows:
        if len(found) == MOST_ROWS:
            raise HeadspanError(f"{source} has more than {MOST_ROWS:,} prompts. Give fewer")
        if not isinstance(row, Mapping):
            raise HeadspanError(f"{where}: should be an object with clean, corrupted, answer and wrong")
        found.append(_PromptRow(encoder, where, row, notes).prompt())
    if not found:
        raise HeadspanError(f"{source} has no prompts. Give rows with clean, corrupted, answer and wrong")
    return found


class _PromptRow:
    """One row: its fields under any of their names, checked and encoded."""

    def __init__(self, encoder: PromptEncoder, where: str, row: Mapping[str, Any], notes: list[str]) -> None:
        self.encoder, self.where, self.row, self.notes = encoder, where, row, notes

    def error(self, sentence: str) -> HeadspanError:
        return HeadspanError(f"{self.where}: {sentence}")

    def prompt(self) -> Prompt:
        clean, text = self.ids("the clean prompt", self.field(_CLEAN))
        other = self.counterfactual()
        corrupted, _ = self.ids("the corrupted prompt", other.get("prompt") if isinstance(other, Mapping) else other)
        if len(clean) != len(corrupted):
            raise self.error(
                f"the clean prompt has {len(clean)} tokens and the corrupted prompt {len(corrupted)}. "
                "Both need the same number of tokens"
            )
        if clean == corrupted:
            raise self.error("the clean and the corrupted prompt are the same tokens. Change a word of one")
        answers, wrong = (self.tokens(what, text, values) for what, values in self.answers(other).items())
        if {*answers} & {*wrong}:
            raise self.error("an answer is also a wrong answer. Give different ones")
        shown = text if text is not None else " ".join(str(token) for token in clean)
        return Prompt(clean, corrupted, answers, wrong, shown)

    def field(self, names: tuple[str, ...]) -> Any:
        """The value under the first of these names that the row has."""
        for name in names:
            if self.row.get(name) is not None:
                return self.row[name]
        there = ", ".join(str(name)[:40] for name in list(self.row)[:12])
        raise self.error(f"there is no {' or '.join(names)}, only {there}" if there else f"there is no {names[0]}")

    def counterfactual(self) -> Any:
        """The corrupted prompt: text, token ids, or an object of the MIB benchmark."""
        if not any(self.row.get(name) is not None for name in _CORRUPTED):
            named = [name for name in self.row if isinstance(name, str) and name.endswith("_counterfactual")]
            used = [name for name in _MIB if name in named] or (named if len(named) == 1 else [])
            if used:
                self.note(f"the corrupted prompts are those of {used[0]}")
                return self.row[used[0]]
        return self.field(_CORRUPTED)

    def answers(self, other: Any) -> dict[str, list[Any]]:
        """Right and wrong answers as given: in columns, as choices with an answerKey, or as labels."""
        row = self.row
        if "choices" in row and "answerKey" in row:
            choices = row["choices"].get("label") if isinstance(row["choices"], Mapping) else row["choices"]
            if not isinstance(choices, (list, tuple)) or not all(isinstance(choice, str) for choice in choices):
                raise self.error("choices must be a list of texts")
            key = choices.index(row["answerKey"]) if row["answerKey"] in choices else row["answerKey"]
            key = int(key) if isinstance(key, str) and key in map(str, range(len(choices))) else key
            if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < len(choices):
                raise self.error(f"answerKey must be one of the {len(choices)} choices, or its number from 0")
            return {"answer": [choices[key]], "wrong answer": [*choices[:key], *choices[key + 1 :]]}
        if isinstance(other, Mapping) and "label" in row and "label" in other:  # arithmetic tasks of MIB
            labels = (row["label"], other["label"])
            if not all(isinstance(label, (str, int)) for label in labels):
                raise self.error("label must be a text or a whole number")
            return {what: [str(label)] for what, label in zip(("answer", "wrong answer"), labels, strict=True)}
        given = {"answer": self.field(_ANSWERS), "wrong answer": self.field(_WRONG)}
        return {what: list(value) if isinstance(value, (list, tuple)) else [value] for what, value in given.items()}

    def ids(self, what: str, value: Any) -> tuple[tuple[int, ...], str | None]:
        """Token ids of a prompt with the start token, and its text if it was given as one."""
        if isinstance(value, (list, tuple)) and value and len(value) <= _LONGEST:
            ids, text = tuple(self.token_id(what, token) for token in value), None
        elif isinstance(value, str):
            self.check_text(what, value)
            ids, text = self.encoder.text_ids(value), value
        else:
            raise self.error(f"{what} must be a text or a list of token ids")
        if not ids:
            raise self.error(f"{what} is empty")
        started = self.encoder.started(ids)
        if not self.encoder.fits(started):
            raise self.error(f"{what} has {len(started)} tokens, and the model takes {self.encoder.model.context}")
        return started, text

    def token_id(self, what: str, token: Any) -> int:
        size = self.encoder.vocab_size
        if isinstance(token, bool) or not isinstance(token, int):
            raise self.error(f"{what} must be text or whole numbers, not {type(token).__name__}")
        if not 0 <= token < size:
            raise self.error(f"{what} has the token id {str(token)[:20]}, and the vocabulary ends at {size - 1}")
        return token

    def check_text(self, what: str, text: str) -> None:
        if not text.strip():
            raise self.error(f"{what} is empty")
        if len(text) > _LONGEST:
            raise self.error(f"{what} has {len(text):,} characters, more than {_LONGEST:,}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise self.error(f"{what} has characters that are not valid Unicode")

    def tokens(self, what: str, text: str | None, values: Sequence[Any]) -> tuple[int, ...]:
        """Token ids of answers: those given as numbers, and those of texts that continue the prompt."""
        if not 0 < len(values) <= _MOST_ANSWERS:
            raise self.error(f"{len(values)} of {what}. Give from 1 to {_MOST_ANSWERS:,}")
        found = []
        for value in values:
            if isinstance(value, str):
                found.append(self.word_token(what, text, value))
            else:
                found.append(self.token_id(f"the {what}", value))
                self.note_token(found[-1])
        return tuple(dict.fromkeys(found))

    def word_token(self, what: str, text: str | None, word: str) -> int:
        """The token of a word after the prompt: as given, or else after a space."""
        self.check_text(f"the {what}", word)
        if text is None:
            raise self.error(f"the {what} is a text, but the prompt is a list of token ids. Give token ids")
        spelt = [word] if text[-1].isspace() or word[0].isspace() else [word, f" {word}"]
        joined = text[-1].isalpha() and word[0].isalpha()
        if joined and "choices" in self.row:  # MIB gives names without their space
            spelt.reverse()
        for spelling in spelt:
            token = self.encoder.continuation(text, spelling)
            if token is not None:
                if joined and spelling == word:
                    self.note("some answers continue the last word of the prompt. Begin them with a space if not meant")
                return token
        before, after = self.encoder.text_ids(text), self.encoder.text_ids(text + word)
        if after[: len(before)] != before:
            hint = "Move the space at the end of the prompt to the answer" if text[-1] == " " else None
            raise self.error(
                f"the {what} {word[:40]!r} changes the last token of the prompt. "
                f"{hint or 'End the prompt with a whole word'}"
            )
        if len(after) == len(before) + 1:
            raise self.error(f"the {what} {word[:40]!r} is not in the vocabulary. Choose another word")
        raise self.error(
            f"the {what} {word[:40]!r} is {len(after) - len(before)} tokens after this prompt. "
            "Choose a word of one token"
        )

    def note_token(self, token: int) -> None:
        """Show the first answer given as a token id: the ids of another tokenizer are other words."""
        known, vocabulary = "answers are token ids, which hold for one tokenizer only", self.encoder.model.vocabulary
        if vocabulary is not None and not any(note.startswith(known) for note in self.notes):
            self.notes.append(f"{known}: {token} is {vocabulary.readable(token)!r}")

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)
