"""docs/trust.md guarantees only what is tested: every guarantee names a test, and every named test exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "trust.md"
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


ROW = re.compile(r"^\| ([A-Z]\d+) \|(.*)\|$", re.MULTILINE)


def test_every_guarantee_names_a_test_that_exists() -> None:
    """Rows of the tables are numbered; the index in the last section lists the tests of each number."""
    text = PAGE.read_text(encoding="utf-8")
    guarantees, index = text.split("\n## Appendix: tests behind each guarantee\n")
    numbers = [number for number, _ in ROW.findall(guarantees)]
    assert len(numbers) > 80
    assert numbers == [number for number, tests in ROW.findall(index) if NAMED.search(tests)]
    missing = [
        f"{file}::{name}"
        for file, name in NAMED.findall(text)
        if not (TESTS / file).exists() or not re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_every_row_of_a_guarantee_has_a_number() -> None:
    guarantees = PAGE.read_text(encoding="utf-8").partition("\n## Load and size\n")[0]
    rows = [line for line in guarantees.splitlines() if line.startswith("|") and not line.startswith(("| # |", "|---"))]
    assert [row for row in rows if not ROW.match(row)] == []


def test_no_test_is_named_in_another_way() -> None:
    """A file without the name of a test, or ``::name`` alone, would not be looked for."""
    text = NAMED.sub("", PAGE.read_text(encoding="utf-8"))
    assert re.findall(r"`::\w+`|`test_\w+\.py`", text) == []


def test_the_mutation_tool_names_tests_that_exist() -> None:
    text = (TESTS / "mutation" / "mutate.py").read_text(encoding="utf-8")
    named = re.findall(r'"(test_\w+\.py)(?:::(test_\w+))?', text)
    assert len(named) > 30
    assert [
        (file, name) for file, name in named if f"def {name}" not in (TESTS / file).read_text(encoding="utf-8")
    ] == []
