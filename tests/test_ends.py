"""``from_`` and ``to`` mean the same in every table of edges, in Python and at the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from headspan.cli import _run
from headspan.vocabulary.errors import HeadspanError

LABELS = "head,label\nL2H0,induction\nL2H3,induction\nL0H1,previous_token\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of three layers of four query heads on two key/value heads, and labels."""
    place = tmp_path_factory.mktemp("ends")
    rng = np.random.default_rng(0)
    weights = hs.open({r: rng.standard_normal((3, 2 if r in "KV" else 4, 24, 4)) for r in "QKVO"})
    hs.score(weights, "pk", out=place / "r.safetensors")
    (place / "l.csv").write_text(LABELS)
    return place


def pairs(rows: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(row["pairing"], row["source"], row["target"]) for row in rows}


# What each word means for a source (which writes) and for a target (which reads), written out by hand.
STARTS = {
    "L0H1": ["L0H1"],
    "L0H1.O": ["L0H1"],
    "L1": ["L1H0", "L1H1", "L1H2", "L1H3"],
    "previous_token": ["L0H1"],
    "L0KV1": ["L0H2", "L0H3"],
    "L0H1,L1H2": ["L0H1", "L1H2"],
}
ENDS = {
    "L2H3": ["OQ L2H3", "OK L2KV1", "OV L2KV1"],
    "L2H3.K": ["OK L2KV1"],
    "l2kv0": ["OK L2KV0", "OV L2KV0"],
    "L2H1.Q": ["OQ L2H1"],
    "2": [*(f"OQ L2H{i}" for i in range(4)), *(f"{p} L2KV{i}" for p in ("OK", "OV") for i in range(2))],
    "induction": [*(f"OQ L2H{i}" for i in (0, 3)), *(f"{p} L2KV{i}" for p in ("OK", "OV") for i in range(2))],
}


def expected(rows: list[dict[str, Any]], start: str | None, end: str | None) -> set[tuple[str, str, str]]:
    return {
        (pairing, source, target)
        for pairing, source, target in pairs(rows)
        if (start is None or source in STARTS[start]) and (end is None or f"{pairing} {target}" in ENDS[end])
    }


@pytest.mark.parametrize(("start", "end"), [*((s, None) for s in STARTS), *((None, e) for e in ENDS), ("L1", "L2H3")])
def test_the_same_words_in_top_wiring_and_paths(folder: Path, start: str | None, end: str | None) -> None:
    result, labels = hs.load(folder / "r.safetensors"), folder / "l.csv"
    rng = np.random.default_rng(0)
    weights = hs.open({r: rng.standard_normal((3, 2 if r in "KV" else 4, 24, 4)) for r in "QKVO"})
    wanted = expected(hs.top(result, "flow", 10**4).rows(), start, end)
    assert wanted
    chosen: dict[str, Any] = {"from_": start, "to": end, "labels": labels}
    assert pairs(hs.top(result, "flow", 10**4, **chosen).rows()) == wanted
    assert pairs(hs.wiring(result, "flow", k=10**4, **chosen).rows()) == wanted
    assert pairs(hs.paths(weights, depth=1, k=10**4, **chosen).rows()) == wanted


@pytest.mark.parametrize("command", ["top", "wiring"])
def test_the_command_lists_what_the_function_lists(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--from", "L1", "--from", "L0H1", "--to", "induction", "--labels", str(folder / "l.csv")]
    assert _run([command, str(folder / "r.safetensors"), "-k", "3", "--json", *words]) == 0
    rows = json.loads(capsys.readouterr().out)
    function = getattr(hs, command)
    found = function(folder / "r.safetensors", k=3, from_=["L1", "L0H1"], to="induction", labels=folder / "l.csv")
    assert pairs(rows) == pairs(found.rows()) and len(rows) == 9


def test_who_feeds_the_induction_heads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--label`` with ``--side target``, ``--to`` with the class, and Python agree; ranks count all pairs."""
    ref, labels = str(folder / "r.safetensors"), str(folder / "l.csv")
    listed = []
    for words in (["--label", "induction", "--side", "target"], ["--to", "induction"]):
        assert _run(["top", ref, "--labels", labels, "-p", "OQ", "-k", "4", "--json", *words]) == 0
        listed.append(json.loads(capsys.readouterr().out))
    assert listed[0] == listed[1]
    matrix = hs.load(ref)["pk", "OQ"]
    best = [edge for edge in matrix.top(10**4) if str(edge.target) in ("L2H0", "L2H3")][:4]
    assert [(row["source"], row["target"], row["rank"]) for row in listed[0]] == [
        (str(edge.source), str(edge.target), edge.rank) for edge in best
    ]
    assert all(row["target_labels"] == "induction" for row in listed[0])
    found = hs.top(ref, "OQ", 4, label="induction", labels=labels, side="target")
    assert found.rows() == hs.top(ref, "OQ", 4, to="induction", labels=labels).rows()
    either = hs.top(ref, "OQ", 100, label="previous_token", labels=labels)
    source = hs.top(ref, "OQ", 100, label="previous_token", labels=labels, side="source")
    assert {str(edge.source) for edge in either} == {str(edge.source) for edge in source} == {"L0H1"}


def test_labels_are_beside_their_heads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ref, labels = str(folder / "r.safetensors"), str(folder / "l.csv")
    for words in (["top", ref], ["top", ref, "--head", "L0H1"], ["wiring", ref], ["top", ref, "--label", "induction"]):
        assert _run([*words, "--labels", labels, "-k", "100"]) == 0
        text = capsys.readouterr().out
        assert "L2H0 induction" in text and "L0H1 previous_token" in text, words


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"to": "L9H9"}, "no head L9H9"),
        ({"to": "L7"}, "layer 7"),
        ({"from_": "L0H1.K"}, "OQ, OK, OV edges cannot start at L0H1.K, because they start at O"),
        ({"to": "L2H1.O"}, "cannot end at L2H1.O"),
        ({"to": "induction"}, "names no end of edges"),
        ({"to": []}, "no end of edges"),
        ({"to": 1.5}, "not 1.5"),
        ({"to": True}, "not True"),
        ({"side": "source"}, "`side` has no effect"),
        ({"label": "induction"}, "needs labels"),
    ],
)
def test_wrong_ends_are_refused(folder: Path, chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadspanError, match=words.replace(".", r"\.")):
        hs.top(folder / "r.safetensors", **chosen)


def test_a_shared_head_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["top", str(folder / "r.safetensors"), "--to", "L2H3.K", "-k", "1"]) == 0
    assert "L2H3.K is L2KV1.K" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ commands that run the model


@pytest.fixture(scope="module")
def measured() -> hs.Effects:
    pytest.importorskip("torch")
    return hs.effects("demo", random=True, sequences=2, length=12)


def test_effects_of_some_edges(measured: hs.Effects, tmp_path: Path) -> None:
    """The same numbers as without ends, percentiles too, because whole layers are measured."""
    found = hs.effects("demo", from_="L0H3", to=["L1H2.K", "L1H4"], random=True, sequences=2, length=12)
    rows = [row for row in measured.rows() if row["source"] == "L0H3"]
    wanted = [row for row in rows if row["target"] == "L1H4" or (row["pairing"], row["target"]) == ("OK", "L1H2")]
    assert found.rows() == wanted and len(wanted) == 4
    found.save(tmp_path / "e.safetensors")
    assert hs.load(tmp_path / "e.safetensors").rows() == wanted
    with pytest.raises(HeadspanError, match="no edge goes to L0H2"):
        hs.effects("demo", to="L0H2", random=True, sequences=2, length=12)


def test_the_command_effects_shows_ends_labels_and_percentiles(
    measured: hs.Effects, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "l.csv").write_text("head,label\nL1H0,induction\nL0H3,previous_token\n")
    quick = ["--random", "--sequences", "2", "--length", "12"]
    monkeypatch.setenv("COLUMNS", "80")
    words = ["effects", "demo", "--to", "induction", "--labels", str(tmp_path / "l.csv"), *quick]
    assert _run(words) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 and "L1H0 induction" in text
    heading = " ".join(" ".join(text.splitlines()[1:4]).split())
    assert all(name in heading for name in ("effect", "unit", "large", "percentile", "layers"))
    assert _run([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["target"] for row in rows} == {"L1H0"} and len(rows) == 24
    row = next(row for row in rows if row["source"] == "L0H3" and row["pairing"] == "OK")
    same = next(one for one in measured.rows() if pairs([one]) == pairs([row]))
    assert row["source_labels"] == "previous_token" and row["target_labels"] == "induction"
    for name in ("effect", "effect_unit", "large_effect", "percentile_in_layers"):
        assert row[name] == same[name]


def test_a_task_on_some_edges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    (tmp_path / "l.csv").write_text("head,label\nL1H0,induction\n")
    given: dict[str, Any] = {"prompts": 4, "verify": False}
    whole = hs.task("demo", "induction", k=10**4, **given)
    choices: list[tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = [
        ({"to": "logits"}, lambda row: row["target"] == "logits.R"),
        ({"from_": "L0H3", "to": "induction", "labels": tmp_path / "l.csv"}, lambda row: (
            row["source"] == "L0H3.O" and row["target"].startswith("L1H0."))),
        ({"from_": "embedding", "to": "L0"}, lambda row: (
            row["source"] == "embedding.W" and row["target"].startswith("L0"))),
    ]  # fmt: skip
    for chosen, keep in choices:
        found = hs.task("demo", "induction", k=10**4, **given, **chosen)
        rows = [row for row in whole.rows() if keep(row)]
        assert [(r["source"], r["target"], r["attribution"]) for r in found.rows()] == [
            (r["source"], r["target"], r["attribution"]) for r in rows
        ] and rows
    found.save(tmp_path / "t.safetensors")
    assert hs.load(tmp_path / "t.safetensors").rows() == found.rows()
    words = "task demo induction --prompts 4 --no-verify -k 3 --json --from L0H3 --to induction"
    assert _run([*words.split(), "--labels", str(tmp_path / "l.csv")]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["target"].partition(".")[0] for row in listed] == ["L1H0"] * 3
    assert all(row["target_labels"] == "induction" for row in listed)
