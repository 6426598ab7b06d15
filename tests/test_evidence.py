"""The tables of docs/evidence.md and the claim of the README, recomputed where that is quick: the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

import headspan as hs
from headspan.running.effects import effects
from headspan.running.effects_summary import predictors_of, summarise_effects

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def found() -> hs.Effects:
    return effects("demo", random=True)


def test_the_table_of_the_demo_model(found: hs.Effects) -> None:
    section = (ROOT / "docs/evidence.md").read_text(encoding="utf-8").partition("### The demo model")[2]
    written = {
        tuple(line.split(" | ")[:2]): line.split(" | ")[2:] for line in section.splitlines() if line[:3] == "| O"
    }
    rows = summarise_effects(found, predictors_of(hs.open("demo"), ["pk", "cs"], found.pairings)).rows
    assert len(rows) == 18
    for row in rows:
        cells = written[f"| {row['pairing']}", row["predictor"]]
        for measure, cell in zip(("spearman", "within", "ap", "hits"), cells, strict=False):
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
