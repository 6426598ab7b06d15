"""--help, one spelling per thing, and one line about every file that a command writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import headspan as hs
from families import FAMILIES, build
from headspan.cli import GROUPS, _run, app

COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def test_every_command_is_in_one_group_of_the_help() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS) and len(set(grouped)) == len(grouped)
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    places = [text.index(f"\n{title}:\n") for title in ("Score", "Read", "Run", "Compare", "Publish")]
    assert places == sorted(places) and "..." not in text[places[0] :] and max(map(len, text.splitlines())) <= 80
    for title, names in GROUPS.items():
        part = text[text.index(f"\n{title}:\n") :].split("\n\n")[0]
        assert all(f"\n  {name} " in part for name in names)


def test_compare_and_diff_name_each_other_in_their_first_line() -> None:
    for name, other in (("compare", "diff"), ("diff", "compare")):
        first = " ".join(COMMANDS[name].help.split("\n\n")[0].split())
        assert other in first and "results" in first and "models" in first


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples(name: str) -> None:
    text = CliRunner().invoke(app, [name, "--help"]).output
    assert "Examples:" in text and text.count(f"headspan {name}") >= 2


def test_one_spelling_and_its_hidden_alias(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=256))
    printed = []
    for option in ("--nodes", "--add"):
        assert _run(["nodes", "demo", option, f"{tmp_path}/v.npy@1", "-k", "2", "--json"]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1] == hs.nodes("demo", nodes=f"{tmp_path}/v.npy@1", k=2).rows()
    for command in COMMANDS.values():
        hidden = {"--add", "--metrics", "--pairings", "--used"}
        assert not hidden & {option for parameter in command.params for option in parameter.opts}


# Every option that writes a file, with the file and the command that writes it.
WRITES = {
    "score --out": "score demo -p OK -m pk --out {new}.safetensors",
    "behaviour --out": "behaviour demo --sequences 2 --length 8 --out {new}.json",
    "behaviour --into": "behaviour demo --sequences 2 --length 8 --into {old}.safetensors",
    "behaviour --labels-out": "behaviour demo --sequences 2 --length 8 --best 2 --labels-out {new}.csv",
    "observe --out": "observe demo --random --sequences 2 --length 8 --out {new}.safetensors",
    "effects --into": "effects demo --to L1H0.K --random --sequences 2 --length 8 --into {old}.safetensors",
    "task --out": "task demo induction --prompts 2 --no-verify --out {new}.safetensors",
    "task --graph-out": "task demo induction --prompts 2 --no-verify --graph-out {new}.json",
    "task --circuit-out": "task demo induction --prompts 2 --no-verify --circuit 3 --circuit-out {new}.json",
    "paths --out": "paths demo --depth 1 --out {new}.json",
    "wiring --out": "wiring demo --out {new}.csv",
    "figures --out": "figures demo --only scatter --out {new}",
    "report --out": "report {old}.safetensors --out {new}.html",
    "site DIR": "site {new} {old}.safetensors",
    "diff --out": "diff demo demo --out {new}.safetensors",
    "track --out": "track {steps}/step1 {steps}/step2 --allow-duplicates --out {new}.safetensors",
}
_NOT_HERE = {"reproduce"}  # needs GPT-2; tests/test_reproduction.py


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("help") / "r.safetensors"
    hs.score("demo", "pk", "flow").save(path)
    return path


@pytest.mark.parametrize("case", WRITES)
def test_what_is_written_is_told_in_one_line(
    case: str, result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if case.split()[0] in ("behaviour", "observe", "effects", "task"):
        pytest.importorskip("torch")
    shutil.copy(result, tmp_path / "old.safetensors")
    for step in ("step1", "step2") if case == "track --out" else ():
        shutil.copytree(Path(hs.__file__).parent / "data" / "demo", tmp_path / step)
    line = WRITES[case].format(new=tmp_path / "new", old=tmp_path / "old", steps=tmp_path)
    assert _run(line.split()) == 0
    path = line.split()[1] if case == "site DIR" else line.split()[-1]
    about = [text for text in capsys.readouterr().err.splitlines() if text.startswith(path)]
    assert len(about) == 1 and (": " in about[0] or case == "figures --out"), about


def test_every_option_that_writes_has_a_case() -> None:
    written = {"--out", "--into", "--labels-out", "--graph-out", "--circuit-out"}
    found = {
        f"{name} {option}"
        for name, command in COMMANDS.items()
        for parameter in command.params
        for option in parameter.opts
        if option in written and name not in _NOT_HERE
    }
    assert found == set(WRITES) - {"site DIR"}


def test_score_mentions_folding_where_info_advises_it(
    tmp_path: Path, llama_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"llama": llama_folder, "gpt2": tmp_path / "gpt2"}
    build(FAMILIES["gpt2"]).save_pretrained(folders["gpt2"])
    for name, advised in (("llama", True), ("gpt2", False)):
        assert (hs.info(folders[name])["fold_advice"] or "").startswith("advised") == advised
        for fold in ([], ["--fold"]):
            out = tmp_path / f"{name}{len(fold)}.safetensors"
            assert _run(["score", str(folders[name]), "-m", "pk", "-p", "OK", "--out", str(out), *fold]) == 0
            assert ("Add --fold" in capsys.readouterr().err) == (advised and not fold), (name, fold)
    folded = hs.score(llama_folder, "pk", "OK", fold=True)
    np.testing.assert_array_equal(
        folded["pk", "OK"].values, hs.load(tmp_path / "llama1.safetensors")["pk", "OK"].values
    )
    np.testing.assert_array_equal(
        folded["pk", "OK"].values, hs.score(hs.fold(llama_folder), "pk", "OK")["pk", "OK"].values
    )
