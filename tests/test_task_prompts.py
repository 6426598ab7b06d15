"""Prompts of tasks, with real tokenizers: what differs between clean and corrupted, and which answers continue them."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2Model

from headspan.checkpoints.opening import open_source
from headspan.checkpoints.tokenizer import Vocabulary
from headspan.running.opening import RunningModel, load
from headspan.running.tasks import prompt_files, templates
from headspan.running.tasks.built_in import TASKS
from headspan.running.tasks.prompts import Prompt, TaskPrompts, task_prompts
from headspan.vocabulary.errors import HeadspanError

WORDS = [name for name in TASKS if name != "induction"]
NAMES = {f" {name}" for name in templates.WOMEN + templates.MEN}


def with_vocabulary(vocabulary: Vocabulary | None, size: int, name: str = "model", context: int = 256) -> RunningModel:
    """A small random model; prompts depend on a model's tokenizer, vocabulary size and context only."""
    config = GPT2Config(
        vocab_size=size, n_embd=2, n_head=1, n_layer=1, n_positions=context, bos_token_id=0, eos_token_id=0
    )
    return RunningModel(GPT2Model(config), name, vocabulary)


def trained(folder: Path, digits: str) -> RunningModel:
    """A byte-level tokenizer that splits numbers by a pattern, with every number that the pattern allows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(rf"{digits}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    text = [templates.GREATER_THAN.format(event=event, year=" ", stem=" ") for event in templates.EVENTS]
    text += [" ".join(f"{i:0{width}}" for i in range(10**width)) for width in (1, 2, 3)]
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text * 2, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = Vocabulary.from_directory(folder)
    assert vocabulary is not None
    return with_vocabulary(vocabulary, vocabulary.size)


def vocabulary_of(reference: str) -> RunningModel:
    with open_source(reference) as source:
        vocabulary = source.vocabulary()
    assert vocabulary is not None
    return with_vocabulary(vocabulary, vocabulary.size, Path(reference).name)


@pytest.fixture(scope="module")
def demo() -> RunningModel:
    return load("demo")


@pytest.fixture(scope="module", params=["demo", "SmolLM2"])
def model(request: pytest.FixtureRequest) -> RunningModel:
    if request.param == "demo":
        return request.getfixturevalue("demo")
    return vocabulary_of(str(request.getfixturevalue("smollm2_gguf")))


def everything(found: TaskPrompts) -> list[Prompt]:
    return found.prompts + found.held_out


def readable(model: RunningModel, tokens: tuple[int, ...]) -> list[str]:
    assert model.vocabulary is not None
    return [model.vocabulary.readable(token).replace("_", " ") for token in tokens]


def changes(prompt: Prompt) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(prompt.clean, prompt.corrupted, strict=True)) if a != b]


@pytest.mark.parametrize("task", TASKS)
def test_lists_are_disjoint_and_depend_on_the_seed_alone(model: RunningModel, task: str) -> None:
    found, again, other = (task_prompts(model, task, count=20, seed=seed) for seed in (3, 3, 4))
    assert (found.name, found.source) == (task, "built-in")
    assert len(found.prompts) == len(found.held_out) == 20
    assert len({prompt.clean for prompt in everything(found)}) == 40
    assert found == again and found.sha256 == again.sha256 and re.fullmatch("[0-9a-f]{64}", found.sha256)
    assert other.sha256 != found.sha256
    assert len(task_prompts(model, task).prompts) == 48


@pytest.mark.parametrize("task", WORDS)
def test_answers_are_tokens_that_continue_the_prompt(model: RunningModel, task: str) -> None:
    for prompt in everything(task_prompts(model, task, count=30, seed=1)):
        assert list(prompt.clean) == model.encode(prompt.text)
        assert len(prompt.clean) == len(prompt.corrupted) and prompt.clean != prompt.corrupted
        assert prompt.answers and prompt.wrong and not {*prompt.answers} & {*prompt.wrong}
        for token, word in zip(
            prompt.answers + prompt.wrong, readable(model, prompt.answers + prompt.wrong), strict=True
        ):
            assert model.encode(prompt.text + word) == [*prompt.clean, token]


def test_ioi_has_both_orders_and_a_third_name(model: RunningModel) -> None:
    orders = []
    for prompt in everything(task_prompts(model, "ioi", count=30, seed=1)):
        names = [word for word in readable(model, prompt.clean) if word in NAMES]
        (answer,), (wrong,) = readable(model, prompt.answers), readable(model, prompt.wrong)
        assert names.count(answer) == 1 and names.count(wrong) == 2 and len(names) == 3 and names[2] == wrong
        (place,) = changes(prompt)
        assert readable(model, prompt.clean)[place] == wrong and place > prompt.clean.index(prompt.wrong[0])
        assert readable(model, prompt.corrupted)[place] in NAMES - {answer, wrong}
        orders.append(names[0] == answer)
    assert orders.count(True) == orders.count(False) == 30


def test_pronoun_follows_the_name(model: RunningModel) -> None:
    women, men = ({f" {name}" for name in names} for names in (templates.WOMEN, templates.MEN))
    found = everything(task_prompts(model, "gendered-pronoun", count=30, seed=1))
    for prompt in found:
        (place,) = changes(prompt)
        female = readable(model, prompt.clean)[place] in women
        assert readable(model, prompt.answers + prompt.wrong) == ([" she", " he"] if female else [" he", " she"])
        assert readable(model, prompt.corrupted)[place] in (men if female else women)
    assert sum(prompt.answers == found[0].answers for prompt in found) == 30  # as many women as men


def test_successor_is_next_in_a_series(model: RunningModel) -> None:
    lists = [[*items, items[0]] for items in templates.CYCLES.values()] + [*templates.SERIES.values()]
    follows = {(a, b) for items in lists for a, b in pairwise(items)}
    kinds, lengths = set(), set()
    for prompt in everything(task_prompts(model, "successor", count=48, seed=1)):
        items = re.findall(r"\w+(?=,)", prompt.text)
        answer, other = (readable(model, tokens)[0].strip() for tokens in (prompt.answers, prompt.wrong))
        assert all(pair in follows for pair in zip(items, [*items[1:], answer], strict=True))
        kinds.add(next(i for i, listed in enumerate(lists) if items[0] in listed))
        assert other not in items and (items[-1], other) not in follows
        spoken = "".join(readable(model, prompt.corrupted))
        mixed = re.findall(r"\w+(?=,)", spoken)
        assert len(mixed) == len(items) and not {answer, other} & {*mixed}
        assert not any(pair in follows for pair in zip(mixed, [*mixed[1:], answer], strict=True))
        lengths.add(len(items))
    assert len(kinds) >= 4 and lengths == {3, 4}


def test_years_are_compared_by_digit_if_the_tokenizer_splits_them(model: RunningModel) -> None:
    found = task_prompts(model, "greater-than", count=30, seed=1)
    assert found.notes == ["the tokenizer splits years, so the task compares their third digit"]
    for prompt in everything(found):
        (year,) = re.findall(r"\d{4}", prompt.text)
        assert prompt.text.endswith(f" {year[:2]}") and len(changes(prompt)) <= 2
        assert readable(model, prompt.answers) == [str(i) for i in range(int(year[2]) + 1, 10)]
        assert readable(model, prompt.wrong) == [str(i) for i in range(int(year[2]))]
        assert "".join(readable(model, prompt.corrupted)).strip() == prompt.text.replace(year, f"{year[:2]}01")


@pytest.mark.parametrize(("digits", "stem"), [(r"\p{N}{1,2}", 2), (r"\p{N}{1,3}", 3)])
def test_years_in_larger_pieces(tmp_path: Path, digits: str, stem: int) -> None:
    model = trained(tmp_path, digits)
    found = task_prompts(model, "greater-than", count=30, seed=1)
    expected = ["the tokenizer splits years, so the task compares their last digit"]
    assert found.notes == (expected if stem == 3 else [])
    for prompt in everything(found):
        (year,) = re.findall(r"\d{4}", prompt.text)
        assert prompt.text.endswith(f" {year[:stem]}") and len(changes(prompt)) == 1
        width = 4 - stem
        assert readable(model, prompt.answers) == [f"{i:0{width}}" for i in range(int(year[stem:]) + 1, 10**width)]
        assert readable(model, prompt.wrong) == [f"{i:0{width}}" for i in range(int(year[stem:]))]
        corrupted = "".join(readable(model, prompt.corrupted))
        assert corrupted == prompt.text.replace(year, f"{year[:2]}01" if stem == 2 else f"{year[:3]}0")


def check_induction(prompt: Prompt, start: int | None = None) -> None:
    assert (prompt.clean[0] == prompt.corrupted[0] == start) if start is not None else True
    clean, corrupted = prompt.clean[start is not None :], prompt.corrupted[start is not None :]
    sequence, again = clean[:16], clean[16:]
    assert len({*sequence}) == 16 and again == sequence[: len(again)] and 2 <= len(again) < 16
    assert prompt.answers == (sequence[len(again)],)
    (wrong,) = prompt.wrong
    assert wrong in sequence and wrong not in (*prompt.answers, clean[-1])
    assert [i for i in range(len(clean)) if clean[i] != corrupted[i]] == [len(again) - 1]
    assert corrupted[len(again) - 1] not in clean and corrupted.count(clean[-1]) == 1


def test_induction_needs_no_tokenizer(model: RunningModel, stories260k_dir: Path) -> None:
    bare = load(stories260k_dir)
    assert bare.vocabulary is None
    for one in (model, bare):
        for prompt in everything(task_prompts(one, "induction", count=30, seed=1)):
            check_induction(prompt)
            assert not {*prompt.clean, *prompt.corrupted} & one.special_ids
    for prompt in task_prompts(bare, "induction", count=5, seed=1, bos="yes").prompts:
        check_induction(prompt, start=1)
    for task in WORDS:
        with pytest.raises(HeadspanError, match=f"{task} .*no tokenizer.* induction"):
            task_prompts(bare, task)


def test_a_short_context_and_a_small_vocabulary() -> None:
    short = with_vocabulary(None, 50, context=12)
    assert {len(p.clean) <= 12 for p in everything(task_prompts(short, "induction", count=9))} == {True}
    assert task_prompts(with_vocabulary(None, 50, context=8), "induction", count=9).prompts
    with pytest.raises(HeadspanError, match=r"induction .* 49 .* 6 "):
        task_prompts(with_vocabulary(None, 50, context=6), "induction")
    with pytest.raises(HeadspanError, match="it has 3 ordinary tokens"):
        task_prompts(with_vocabulary(None, 4), "induction")


def test_a_tokenizer_that_cannot_express_a_task(tmp_path: Path, minilm_dir: Path) -> None:
    model = trained(tmp_path, r"\p{N}{1,2}")  # it has seen no names
    with pytest.raises(HeadspanError, match=r"ioi cannot .* 0 of 98 names .* file"):
        task_prompts(model, "ioi")
    with pytest.raises(HeadspanError, match=r"gendered-pronoun cannot be used.* names of women"):
        task_prompts(model, "gendered-pronoun")
    with pytest.raises(HeadspanError, match="does not split years"):
        task_prompts(vocabulary_of(str(minilm_dir)), "greater-than")
    short = vocabulary_of("demo")
    short.model.config.max_position_embeddings = short.model.config.n_positions = 5
    with pytest.raises(HeadspanError, match="only 0 prompts can be written"):
        task_prompts(short, "ioi")


def test_fewer_prompts_than_requested_are_noted(demo: RunningModel) -> None:
    found = task_prompts(demo, "gendered-pronoun", count=1000)
    assert len(found.prompts) == len(found.held_out) > 200
    assert found.notes == [f"there are {len(found.prompts)} prompts for each half, fewer than the 1000 requested"]


@pytest.mark.parametrize(("options", "message"), [
    ({"count": 0}, "from 1 to 20,000, not 0"), ({"count": True}, "not True"), ({"count": 10**9}, "not 1000000000"),
    ({"seed": -1}, "the seed must be .* not -1"), ({"bos": "maybe"}, "unknown bos"),
])  # fmt: skip
def test_bad_options(demo: RunningModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadspanError, match=message):
        task_prompts(demo, "ioi", **options)


def test_tasks_that_do_not_exist(demo: RunningModel, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    with pytest.raises(HeadspanError, match=r"'iio'.* ioi, induction"):
        task_prompts(demo, "iio")
    with pytest.raises(HeadspanError, match=r"there is no file .*none.csv"):
        task_prompts(demo, tmp_path / "none.csv")
    with pytest.raises(HeadspanError, match=r"notes.txt .*\.csv, \.jsonl or \.json"):
        task_prompts(demo, tmp_path / "notes.txt")
    with pytest.raises(HeadspanError, match="list of prompts, not int"):
        task_prompts(demo, 5)  # type: ignore[arg-type]


ROWS = [
    {"clean": f"Then {a} gave the", "corrupted": f"Then {b} gave the", "answer": " book", "wrong": " ball"}
    for a, b in [("Mary", "John"), ("John", "Mary"), ("Anna", "Tom"), ("Tom", "Anna"), ("Ruth", "Paul")]
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows in the format that the suffix names."""
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    else:
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("suffix", prompt_files.SUFFIXES)
def test_a_file_and_a_list_give_the_same_prompts(demo: RunningModel, tmp_path: Path, suffix: str) -> None:
    found = task_prompts(demo, str(write(tmp_path / f"gifts{suffix}", ROWS)), seed=2)
    assert (found.name, found.source, found.notes) == ("gifts", f"gifts{suffix}", [])
    assert (len(found.prompts), len(found.held_out)) == (3, 2)
    assert sorted(p.text for p in everything(found)) == sorted(row["clean"] for row in ROWS)
    listed = task_prompts(demo, ROWS, seed=2)
    assert (listed.source, listed.sha256) == ("list", found.sha256)
    by_text = {prompt.text: prompt for prompt in everything(found)}
    prompt = by_text["Then Mary gave the"]
    assert list(prompt.clean) == demo.encode("Then Mary gave the")
    assert list(prompt.corrupted) == demo.encode("Then John gave the")
    assert (prompt.answers, prompt.wrong) == (tuple(demo.encode(" book")), tuple(demo.encode(" ball")))
    assert {task_prompts(demo, ROWS, seed=seed).sha256 for seed in range(9)} != {found.sha256}
    few = task_prompts(demo, ROWS, count=1)
    assert len(few.prompts) == len(few.held_out) == 1 and few.notes == []
    many = task_prompts(demo, ROWS, count=9)
    assert many.notes == ["there are 2 prompts for each half, fewer than the 9 requested"]


def test_repeated_prompts_stay_in_one_half(demo: RunningModel) -> None:
    other = {**ROWS[0], "corrupted": "Then Paul gave the"}
    for seed in range(6):
        found = task_prompts(demo, [*ROWS, ROWS[1], other], seed=seed)
        assert found.notes == ["1 of 7 prompts were left out because they are repeated"]
        assert len(everything(found)) == 6
        assert not {p.clean for p in found.prompts} & {p.clean for p in found.held_out}
    with pytest.raises(HeadspanError, match=r"one clean prompt. Give at least two"):
        task_prompts(demo, [ROWS[0], other])


def first(model: RunningModel, row: dict[str, Any]) -> tuple[Prompt, list[str]]:
    """The prompt of one row, and the notes."""
    clean: Any = row.get("clean", row.get("prompt"))
    found = task_prompts(model, [row, *ROWS[2:]])
    text = clean if isinstance(clean, str) else " ".join(map(str, clean))
    return next(p for p in everything(found) if p.text == text), found.notes


def test_several_answers_and_token_ids(demo: RunningModel, tmp_path: Path) -> None:
    book, ball, cake = (demo.encode(f" {word}")[0] for word in ("book", "ball", "cake"))
    prompt, notes = first(demo, {**ROWS[0], "answer": [" book", cake, " book"], "wrong": ball})
    assert (prompt.answers, prompt.wrong) == ((book, cake), (ball,))
    assert notes == [f"answers are token ids, which hold for one tokenizer only: {cake} is '_cake'"]
    rows = [{**row, "answer": " book| cake"} for row in ROWS]
    assert {p.answers for p in everything(task_prompts(demo, write(tmp_path / "a.csv", rows)))} == {(book, cake)}
    ids = {"clean": demo.encode(ROWS[0]["clean"]), "corrupted": demo.encode(ROWS[0]["corrupted"])}
    assert first(demo, {**ids, "answer": book, "wrong": ball})[0].clean == tuple(ids["clean"])
    with pytest.raises(HeadspanError, match=r"prompt 1: the answer is a text.* token ids"):
        first(demo, {**ROWS[0], **ids})


def test_a_space_is_added_only_if_needed(demo: RunningModel, smollm2_gguf: Path) -> None:
    assert first(demo, {**ROWS[0], "answer": "book"})[0].answers == tuple(demo.encode(" book"))
    model = vocabulary_of(str(smollm2_gguf))
    prompt, notes = first(model, {**ROWS[0], "answer": "book", "wrong": " ball"})
    assert prompt.answers == tuple(model.encode("book")) != tuple(model.encode(" book"))
    assert notes == ["some answers continue the last word of the prompt. Begin them with a space if not meant"]


def test_an_answer_that_changes_the_prompt(smollm2_gguf: Path) -> None:
    model = vocabulary_of(str(smollm2_gguf))
    row = {"clean": "She gave it to ", "corrupted": "He gave it to ", "answer": "John", "wrong": "Mary"}
    with pytest.raises(HeadspanError, match=r"'John' changes the last token.* space .* answer"):
        task_prompts(model, [row])
    row = {"clean": "She did", "corrupted": "They did", "answer": "n't", "wrong": " it"}
    with pytest.raises(HeadspanError, match=r"n't. changes the last token.* whole word"):
        task_prompts(model, [row])


def test_files_of_other_tools(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Rows in the shape of EAP-IG's and MIB's files, with words of this test."""
    model = vocabulary_of(str(smollm2_gguf))
    mary, john = (model.encode(f" {name}")[0] for name in ("Mary", "John"))
    clean = "Then, Mary and John were at the house. John gave a book to"
    flipped, third = (clean.replace(". John", f". {name}") for name in ("Mary", "Tom"))
    path = tmp_path / "eap.csv"
    index = {"clean": clean, "corrupted": third, "corrupted_hard": flipped, "correct_idx": mary, "incorrect_idx": john}
    second = {**index, "clean": flipped, "correct_idx": john, "incorrect_idx": mary}
    prompts = everything(task_prompts(model, write(path, [{"": 7, **index}, {"": 9, **second}])))
    assert {(p.text, p.answers, p.wrong) for p in prompts} == {(clean, (mary,), (john,)), (flipped, (john,), (mary,))}

    row: dict[str, Any] = {"prompt": clean, "choices": ["John", "Mary"], "answerKey": 1, "metadata": {"a": 1}}
    row |= {"abc_counterfactual": {"prompt": third}, "s2_io_flip_counterfactual": {"prompt": flipped}}
    prompt, notes = first(model, row)
    assert (prompt.answers, prompt.wrong) == ((mary,), (john,)) and list(prompt.corrupted) == model.encode(flipped)
    assert notes == ["the corrupted prompts are those of s2_io_flip_counterfactual"]

    answer = "The colour is\nA. red\nB. blue\nAnswer:"
    row = {"prompt": answer, "choices": {"label": ["A", "B"], "text": ["red", "blue"]}, "answerKey": "B"}
    prompt, _ = first(model, {**row, "symbol_counterfactual": {"prompt": answer.replace("A.", "C.")}})
    assert (prompt.answers, prompt.wrong) == (tuple(model.encode("B")), tuple(model.encode("A")))

    row = {"prompt": "1+3=", "label": 4, "random_counterfactual": {"prompt": "1+6=", "label": "7"}}
    prompt, _ = first(model, row)
    assert (prompt.answers, prompt.wrong) == (tuple(model.encode("4")), tuple(model.encode("7")))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"clean": None}, "there is no clean or prompt, only clean, corrupted"),
    ({"wrong": None}, "there is no wrong or incorrect_idx"),
    ({"corrupted": None, "a_counterfactual": "x", "b_counterfactual": "y"}, "there is no corrupted or counterfactual"),
    ({"clean": ""}, "the clean prompt is empty"),
    ({"clean": []}, "the clean prompt must be a text or a list of token ids"),
    ({"corrupted": " \n"}, "the corrupted prompt is empty"),
    ({"corrupted": {"text": "x"}}, "the corrupted prompt must be a text or a list"),
    ({"corrupted": "Then John gave"}, "clean prompt has 4 tokens and the corrupted prompt 3"),
    ({"corrupted": "Then Mary gave the"}, "are the same tokens"),
    ({"clean": " ".join(["Then"] * 300)}, "has 300 tokens, and the model takes 256"),
    ({"clean": "a" * 100_001}, "has 100,001 characters"),
    ({"clean": "Then \ud800"}, "not valid Unicode"),
    ({"clean": [5, 1360]}, "token id 1360, and the vocabulary ends at 1359"),
    ({"clean": [5, 1.5]}, "must be text or whole numbers, not float"),
    ({"answer": " ball"}, "also a wrong answer"),
    ({"answer": " telephone"}, "the answer ' telephone' is 10 tokens after this prompt"),
    ({"wrong": "é"}, "the wrong answer 'é' is not in the vocabulary"),
    ({"answer": ""}, "the answer is empty"),
    ({"answer": []}, "0 of answer. Give from 1"),
    ({"answer": [" book"] * 1001}, "1001 of answer"),
    ({"answer": -1}, "token id -1"),
    ({"answer": 10**30}, "token id 10000000000000000000, and"),
    ({"answer": True}, "not bool"),
    ({"answer": 2.0}, "not float"),
    ({"answer": {"a": 1}}, "not dict"),
    ({"choices": "AB", "answerKey": 0}, "choices must be a list of texts"),
    ({"choices": [" book", 1], "answerKey": 0}, "choices must be a list of texts"),
    ({"choices": [" book", " ball"], "answerKey": 2}, "answerKey must be one of the 2 choices"),
    ({"choices": [" book", " ball"], "answerKey": [[]]}, "answerKey must be one of"),
    ({"corrupted": {"prompt": "Then John gave the", "label": []}, "label": 1}, "label must be a text or"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_rows_name_the_line(demo: RunningModel, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in (ROWS[1], {**ROWS[0], **change})), encoding="utf-8")
    with pytest.raises(HeadspanError, match=re.escape("bad.jsonl, line 3: ") + ".*" + re.escape(message)):
        task_prompts(demo, path)
    with pytest.raises(HeadspanError, match=r"^prompt 2: .*" + re.escape(message)):
        task_prompts(demo, [ROWS[1], {**ROWS[0], **change}])


HEAD = "clean,corrupted,answer,wrong\n"
FILES = [
    ("a.csv", "", "has no prompts"),
    ("a.csv", HEAD, "has no prompts"),
    ("a.csv", "clean,corrupted,answer,answer,wrong\nA,B,x,y,z\n", "has two columns 'answer'"),
    ("a.csv", "clean,answer\nThen,Now\n", "line 2: there is no corrupted or counterfactual, only clean, answer"),
    ("a.csv", HEAD + "\nThen, he,Then she, book, ball\n", "line 3: 5 values for 4 columns"),
    ("a.csv", HEAD + '"Then\nhe",Then,a\n', "line 3: 3 values for 4 columns"),
    ("a.csv", HEAD + '"Then', "line 2: not valid CSV"),
    ("a.csv", HEAD + f"{'a' * 140_000},b,c,d\n", "line 2: not valid CSV"),
    ("a.csv", "clean,corrupted,correct_idx,incorrect_idx\nThen he,Then she,5,x\n", "incorrect_idx must be a token id"),
    ("a.csv", "clean,corrupted,correct_idx,incorrect_idx\nThen he,Then she,5|9999,6\n", "token id 9999"),
    ("a.jsonl", "", "has no prompts"),
    ("a.jsonl", "\n\n", "has no prompts"),
    ("a.jsonl", "{}\n", "line 1: there is no clean"),
    ("a.jsonl", '\n{"clean": ', "line 2: not valid JSON"),
    ("a.jsonl", "5\n", "line 1: should be an object with clean, corrupted, answer and wrong"),
    ("a.jsonl", '{"a":' * 200_000, "line 1: not valid JSON"),
    ("a.json", "[]", "has no prompts"),
    ("a.json", "[5]", "item 1: should be an object"),
    ("a.json", "[{}", "a.json: not valid JSON"),
    ("a.json", "[" + "[]," * 3_100_000 + "[]]", "more than any real file"),
    ("a.json", "[" + "9" * 5000 + "]", "a.json"),
    ("a.json", "\ufeff\ufeff", "a.json, line 1: not valid JSON"),
]


@pytest.mark.parametrize(("name", "text", "message"), FILES, ids=[f"{i}-{m[:30]}" for i, (_, _, m) in enumerate(FILES)])
def test_bad_files(demo: RunningModel, tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(HeadspanError, match=re.escape(message)):
        task_prompts(demo, tmp_path / name)


def test_files_that_are_too_large(demo: RunningModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "a.csv").open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(HeadspanError, match="67,108,865 bytes"):
        task_prompts(demo, tmp_path / "a.csv")
    monkeypatch.setattr(prompt_files, "MOST_ROWS", 4)
    with pytest.raises(HeadspanError, match="the list has more than 4 prompts"):
        task_prompts(demo, ROWS)
    (tmp_path / "b.json").mkdir()
    with pytest.raises(HeadspanError, match="is a directory"):
        task_prompts(demo, tmp_path / "b.json")


_FIELDS = st.sampled_from(
    ["clean", "prompt", "corrupted", "counterfactual", "answer", "wrong", "choices", "answerKey", "label",
     "correct_idx", "incorrect_idx", "x_counterfactual"]
)  # fmt: skip
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_VALUES = st.recursive(_SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(_FIELDS, v, max_size=3))
_OBJECTS = st.lists(st.dictionaries(_FIELDS, _VALUES, max_size=6), max_size=4)
_CONTENTS = (
    st.binary(max_size=300)
    | _OBJECTS.map(lambda rows: json.dumps(rows).encode())
    | _OBJECTS.map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
    | st.text(alphabet='clean,corupted"|\n\r0 aswrg', max_size=200).map(lambda text: (HEAD + text).encode())
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bytes], Path]:
    folder = tmp_path_factory.mktemp("scratch")

    def scratch(suffix: str, content: bytes) -> Path:
        path = folder / f"any{suffix}"
        path.write_bytes(content)
        return path

    return scratch


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(suffix=st.sampled_from(prompt_files.SUFFIXES), content=_CONTENTS)
def test_any_bytes_are_prompts_or_an_error(
    demo: RunningModel, scratch: Callable[[str, bytes], Path], suffix: str, content: bytes
) -> None:
    path = scratch(suffix, content)
    try:
        found = task_prompts(demo, path)
    except HeadspanError as error:
        message = str(error)
    else:
        message = found.source
        assert found.prompts and found.held_out
    assert path.name in message
