"""The tables of docs/evidence.md and the claim of the README, recomputed where that is quick: the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

import headspan as hs
from headspan.running.effects import effects
from headspan.running.effects_summary import effects_summary

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def found() -> hs.Effects:
    return effects("demo", random=True)


def test_the_table_of_the_demo_model(found: hs.Effects) -> None:
    section = (ROOT / "docs/evidence.md").read_text(encoding="utf-8").partition("### The demo model\n")[2]
    lines = [line for line in section.partition("\n### ")[0].splitlines() if line.startswith("| ")]
    columns = lines[0].strip("| ").split(" | ")
    table = [dict(zip(columns, line.strip("| ").split(" | "), strict=True)) for line in lines[1:]]
    written = {(row["pairing"], row["predictor"]): row for row in table}
    rows = effects_summary("demo", found, stats=[hs.observe("demo"), hs.observe("demo", random=True)]).rows()
    assert len(rows) == len(written) == 30
    for row in rows:
        for measure in ("spearman", "within", "spec", "ap", "hits"):
            cell = written[row["pairing"], row["predictor"]][measure]
            if row[measure] is None:
                assert cell == "–"
            else:
                assert float(cell.split(" ")[0]) == pytest.approx(row[measure], abs=0.0051)


def test_the_induction_circuit_of_the_readme(found: hs.Effects) -> None:
    scores = hs.score(hs.open("demo"), metric=["pk"], pairing="flow")
    column = {str(head): i for i, head in enumerate(found.ports.of("K"))}
    row = {str(head): i for i, head in enumerate(found.ports.of("O"))}
    change = found.arrays["induction", hs.Pairing.parse("OK")]
    for edge in scores["pk", "OK"].top(8):
        i, j = row[str(edge.source)], column[str(edge.target)]
        assert str(edge.source) == "L0H3" and found.large("OK")[i, j]
        assert change[i, j] < -0.5 * found.clean["induction"][j]
