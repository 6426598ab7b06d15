"""docs/questions.md is true: every command and every Python line prints what the page says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import unavailable

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import make_questions  # noqa: E402  # pyright: ignore[reportMissingImports]

sys.path.pop(0)
TEXT = make_questions.PAGE.read_text(encoding="utf-8")
EXAMPLES = make_questions.examples(TEXT)
SLOW = {"headspan reproduce gpt2"}  # the Python line computes the same
CASES = [pytest.param(e, marks=pytest.mark.slow) if e.code in SLOW else e for e in EXAMPLES]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with the files of the page, in which its setup has run."""
    pytest.importorskip("torch")
    return make_questions.prepared(tmp_path_factory.mktemp("questions"), TEXT)


def test_there_are_ten_questions_each_with_a_command_and_a_python_line() -> None:
    by_question: dict[str, list[str]] = {}
    for example in EXAMPLES:
        by_question.setdefault(example.question, []).append(example.code)
    assert len(by_question) == 10 == TEXT.count("\n## ")
    for codes in by_question.values():
        assert codes[0].startswith("headspan ") and codes[-1].count("\n") == 0 and "hs." in codes[-1]


@pytest.mark.parametrize("example", CASES, ids=[one.code[:60] for one in EXAMPLES])
def test_the_page_says_what_is_printed(example: Any, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in example.models:
        if make_questions.MODELS[name] not in os.environ:
            unavailable(f"{make_questions.MODELS[name]} does not name {name}")
    monkeypatch.setenv("COLUMNS", "80")
    printed = session.run(example.code)
    assert make_questions.same(printed, example.output), printed
    assert not example.code.startswith("headspan") or max(map(len, printed.splitlines())) <= 80


def test_the_comparison_notices_other_words_and_numbers() -> None:
    same = make_questions.same
    assert same("a  1.00 b", "a 1.001 b") and same("x\ny\nz 3", "x\n…\nz 3")
    for printed, expected in (("a 1.0", "a 1.2"), ("a 1", "b 1"), ("a 1 2", "a 1"), ("x\nz 4", "x\n…\nz 3")):
        assert not same(printed, expected)
