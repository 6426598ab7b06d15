"""A few hundred cases of the fuzzer, and proof that it notices faults."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

FUZZ = Path(__file__).parent / "fuzz"
sys.path.insert(0, str(FUZZ))

import arguments  # noqa: E402
import oracle  # noqa: E402
from commands import Commands, Line, judge  # noqa: E402
from disturbed import Edit, Edits, check_whole  # noqa: E402
from files import Files  # noqa: E402
from inputs import Inputs  # noqa: E402
from mutations import INPUTS, Case, split_safetensors  # noqa: E402
from place import Finding  # noqa: E402
from stores import Stores, Tampering  # noqa: E402

import fuzz  # noqa: E402

CASES, SEED = 500, 11


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("commands"))


def test_no_case_is_a_finding() -> None:
    outcomes = list(fuzz.outcomes(SEED, 0, CASES))
    assert len(outcomes) == CASES
    assert [outcome for outcome in outcomes if outcome["outcome"] == "finding"] == []
    # A fuzzer whose every file is refused at once looks at nothing.
    for kind in ("files", "commands", "calls", "inputs"):
        assert {outcome["outcome"] for outcome in outcomes if outcome["kind"] == kind} == {"answered", "refused"}
    assert {outcome["kind"] for outcome in outcomes} >= {"oracle", "stores", "kills", "races"}


def test_every_command_and_option_has_cases() -> None:
    known = arguments.commands()
    assert set(known) == set(arguments.POSITIONAL)
    values = {option.name for options in known.values() for option in options if not option.flag}
    assert values == {*arguments.GOOD, *arguments.WRITES}


def test_good_words_are_answered(commands: Commands) -> None:
    """Every command answers at least one line without an odd word; reproduce takes GPT-2 alone."""
    lines = {
        "info": "gpt2 --check", "score": "llama --out new.safetensors", "top": "used.safetensors", "hubs": "llama.gguf",
        "compare": "gpt2 tuned", "diff": "gpt2 tuned --out new.html", "baseline": "used.safetensors",
        "track": "gpt2 tuned --out new.safetensors", "evaluate": "used.safetensors --labels labels.csv --bootstrap 5",
        "tokens": "gpt2 L0H1", "pair": "gpt2 L0H1.O L1H3.K", "behaviour": "gpt2 --sequences 1 --length 4",
        "effects": "gpt2 --sequences 2 --length 4 --random", "wiring": "used.safetensors --out new.graphml",
        "figures": "used.safetensors --only wiring --out made", "report": "used.safetensors --out new.html",
        "paths": "gpt2 --to L1H3 --depth 1", "site": "gallery used.safetensors",
        "observe": "gpt2 --text text.txt --out new.safetensors", "cache": "", "skill": "",
        "nodes": "gpt2 --components components.safetensors -k 2", "task": "gpt2 induction --prompts 2 -k 2",
        "links": "gpt2 graph.json --transcoders tc{}.npz",
    }  # fmt: skip
    assert {*lines, "reproduce"} == set(arguments.POSITIONAL)
    refused = {name: commands.run(Line([name, *words.split()], None)) for name, words in lines.items()}
    assert {name: said for name, said in refused.items() if said} == {}


@pytest.mark.parametrize(
    "target", ["gpt2/config.json", "llama/config.json", "llama.gguf", "result.safetensors", "labels.csv"]
)
def test_unchanged_files_are_answered(files: Files, target: str) -> None:
    assert files.run(Case(target, (files.seed / target).read_bytes(), "none", frozenset())) == []


def test_cases_can_be_repeated(tmp_path: Path) -> None:
    first, second = fuzz.Bench(tmp_path / "a", 5), fuzz.Bench(tmp_path / "b", 5)
    for bench in (first, second):
        bench.folder.mkdir()
    assert [repr(first.case(n)) for n in range(40)] == [repr(second.case(n)) for n in range(40)]


def test_a_wrong_number_is_noticed(files: Files) -> None:
    """Swapping two tensors while claiming that nothing was touched must be found out."""
    target = "gpt2/model.safetensors"
    header, body = split_safetensors((files.seed / target).read_bytes())
    first, second = "h.0.attn.c_proj.weight", "h.1.attn.c_proj.weight"
    header[first], header[second] = header[second], header[first]
    raw = json.dumps(header).encode()
    swapped = Case(target, len(raw).to_bytes(8, "little") + raw + body, "swap", frozenset())
    with pytest.raises(Finding, match="layer 0"):
        files.run(swapped)


@pytest.mark.parametrize(
    ("fault", "words"),
    [(lambda case: [][1], "IndexError"), (lambda case: all(iter(lambda: 1, 0)), "Hang"), (lambda case: ["a\nb"], "")],
    ids=["crash", "hang", "many lines"],
)
def test_faults_are_noticed(
    files: Files, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Case], Any], words: str
) -> None:
    def model(name: str, case: Case) -> None:
        files.refusals += fault(case) or []

    monkeypatch.setattr(files, "_model", model)
    monkeypatch.setattr(files, "cpu_seconds", 0.2)
    config = "gpt2/config.json"
    outcome = fuzz.run_case(files, Case(config, b"{}", "x"))
    assert outcome["outcome"] == "finding"
    assert words in outcome["text"]
    assert (files.work / config).read_bytes() == (files.seed / config).read_bytes()


@pytest.mark.parametrize(
    ("code", "out", "err"),
    [
        (70, "", "headspan: internal error (x)"),
        (1, "", ""),
        (0, "", "headspan: it failed"),
        (2, "", "one line\nTraceback (most recent call last)"),
        (2, "half a table", "headspan: no"),
        (2, "", "headspan: one\nheadspan: two"),
        (0, "red \x1b[31m", ""),
        (0, "[NaN]", ""),
        (0, "\u202e", ""),
    ],
)
def test_bad_ends_of_commands_are_noticed(code: int, out: str, err: str) -> None:
    judge(["top", "--json"], 0, "[1]", "a remark")
    judge(["top", "--json"], 2, "", "a remark\nheadspan: no such file")
    with pytest.raises(Finding):
        judge(["top", "--json"], code, out, err)


@pytest.mark.parametrize("name", ["gpt2/config.json", "notes.txt", "new.txt", "made/.headspan-1.tmp"])
def test_changed_files_and_leftovers_are_noticed(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def run(case: Line) -> tuple[int, str, str]:
        (commands.work / name).parent.mkdir(exist_ok=True)
        (commands.work / name).write_text("x")
        return 0, "", ""

    monkeypatch.setattr(commands, "_run", run)
    with pytest.raises(Finding):
        commands.run(Line(["figures", "gpt2", "--out", "made"], None))
    assert commands.place.look() == commands.place.kept


def test_the_oracle_notices_a_wrong_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = oracle.Layout("llama", "F32", 2, 4, 2, 17, 4, 2, True, True, True, ("cs",), ("OK",), "default", None, 1, 3)
    assert oracle.Oracle(tmp_path).run(case) == []
    real = oracle.folded
    monkeypatch.setattr(
        oracle, "folded", lambda *a: {r: w * (1 + 1e-3 * (r == "K") * np.eye(17, 4)) for r, w in real(*a).items()}
    )
    with pytest.raises(Finding, match="cs OK"):
        oracle.Oracle(tmp_path).run(case)


def test_an_invalid_tile_that_is_used_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = Stores(tmp_path)
    case = Tampering(0, 1, 0.9, ("swap", "flip", "truncate", "negative"), 3)
    assert stores.run(case)  # it said which tiles it did not believe
    from headspan.scoring import run, tiles

    monkeypatch.setattr(tiles, "_opened", lambda content, key, name: load(content))
    monkeypatch.setattr(run, "is_whole", lambda *a: True)
    with pytest.raises(Exception):  # noqa: B017, PT011 - a wrong result or none at all
        stores.run(Tampering(0, 1, 0.9, ("negative",), 3))


def test_given_files_that_are_unchanged_are_answered_and_wrong_shares_noticed(tmp_path: Path) -> None:
    inputs = Inputs(tmp_path)
    for target in INPUTS:
        assert inputs.run(Case(target, (inputs.seed / target).read_bytes(), "none")) == [], target
    import headspan as hs

    vectors = inputs.work / "probe.npy"
    report = hs.nodes(inputs.model, f"{vectors}@1")
    np.save(vectors, np.load(vectors)[::-1])
    with pytest.raises(Finding, match="the share of"):
        inputs._check_shares(report, vectors)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.html", b"<html><body>"),
        ("index.html", b'<a href="gone.html">x</a></html>'),
        ("a.json", b'{"edges": ['),
        ("a.png", b"\x89PNG\r\n"),
        ("a.graphml", b"<graphml>"),
        ("a.csv", b"a,b\n1"),
        ("a.safetensors", b"\x08"),
    ],
)
def test_files_that_are_not_whole_are_noticed(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Finding, match="not whole"):
        check_whole(tmp_path / name)


def test_an_answer_from_two_files_is_noticed(tmp_path: Path) -> None:
    edits = Edits(tmp_path)
    case = Edit(["track", "gpt2", "tuned", "--out", "new.safetensors"], "gpt2/config.json", "touched", 0.5)
    edits.run(case)
    for key in (" ".join(case.words), (" ".join(case.words), case.file, case.change)):
        edits.known[key] = {name: array + 1 for name, array in edits.known[key].items() if array.dtype.kind == "f"}
    with pytest.raises(Finding, match="neither"):
        edits.run(Edit(case.words, case.file, case.change, 1.5))
