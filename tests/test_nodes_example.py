"""The worked examples of docs/nodes.md: their numbers are those of the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import headspan as hs

DOCS = Path(__file__).parents[1] / "docs"


def test_a_difference_of_means_is_written_by_the_heads_whose_weights_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    from make_nodes_examples import means  # type: ignore[import-not-found]

    found = means()
    names = list(found)
    assert {*names[:3]} == {"L0H3.O", "L0H4.O", "L0H5.O"}
    share, _, parts, used = zip(*found.values(), strict=True)
    assert list(share) == sorted(share, reverse=True)
    assert sum(parts) == pytest.approx(1.0, abs=0.02)  # the model has no MLP: the heads write all of it
    assert sum(parts[:3]) > 0.9 and {*sorted(used)[-3:]} == {*used[:3]}
    rows = re.findall(
        r"\| (L0H[3-7]) \| ([\d.]+) \| \S+ \| ([\d.]+) \| ([\d.]+) \|", (DOCS / "nodes.md").read_text("utf-8")
    )
    printed = {head: tuple(map(float, values)) for head, *values in rows}
    here = {name[:4]: (s, p, u) for name, (s, _, p, u) in found.items() if name[:4] in printed}
    assert printed.keys() == {"L0H3", "L0H4", "L0H5", "L0H6", "L0H7"}
    assert all(here[head] == pytest.approx(printed[head], abs=0.0051) for head in printed)


def test_heads_that_write_the_names_of_countries(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares of both halves of the words; the thousand random words, which take minutes, are not drawn again."""
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    from make_nodes_examples import WORDS, head_shares, token_id  # type: ignore[import-not-found]

    weights = hs.fold(hs.open(smollm2_gguf))
    ports, shares = head_shares(weights, [token_id(weights, f" {word}") for word in WORDS])
    halves = {port: (own[:8].mean(), own[8:].mean()) for port, own in zip(ports, shares.T, strict=True)}
    page = (DOCS / "nodes.md").read_text("utf-8")
    section = page[page.index("## Example: heads of SmolLM2") : page.index("## Example: heads of the demo model")]
    rows = re.findall(r"\| (L\d+H\d+) \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", section)
    assert len(rows) == 5 and f"{len(ports)} heads" in section
    for head, *printed in rows:
        assert printed == [f"{share:.3f}" for share in halves[f"{head}.O"]]
