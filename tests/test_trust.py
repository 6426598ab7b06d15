"""docs/trust.md claims only what is tested: every claim names a test, and every named test exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "trust.md"
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def claims(text: str) -> list[str]:
    """The rows of the tables about input, faults and numbers; what was counted or timed is no promise."""
    part = re.search(r"^## Hostile input$.*?(?=^## Do the tests notice)", text, re.DOTALL | re.MULTILINE)
    assert part is not None
    rows = [line for line in part[0].splitlines() if line.startswith("| ")]
    return [row for row in rows if not re.search(r"\| test( in \S+)? \|$", row)]


def test_every_claim_names_a_test_that_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = NAMED.findall(text)
    assert len(found) > 60
    missing = [
        f"{file}::{name}"
        for file, name in found
        if not (TESTS / file).exists() or not re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE)
    ]
    assert missing == []
    rows = claims(text)
    assert len(rows) > 40
    assert [row for row in rows if not NAMED.search(row)] == []


def test_no_test_is_named_in_another_way() -> None:
    """A file without the name of a test, or ``::name`` alone, would not be looked for."""
    text = NAMED.sub("", PAGE.read_text(encoding="utf-8"))
    assert re.findall(r"`::\w+`|`test_\w+\.py`", text) == []
