"""Every listing: JSON and CSV are the same flat records, and tables read well at 80 columns."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer

from attribution_graphs import for_demo
from headspan.cli import app, main

# How every listing is called; {result} and {model} are of the demo, {labels} a label file.
LISTINGS = {
    "top": "top {result} -k 3 --labels {labels}",
    "top of a head": "top {result} --head L1H2 -k 2",
    "top of a layer": "top {result} --layer 1 -k 2 --pairing OK",
    "top of a class": "top {result} --labels {labels} --label a -k 2",
    "compare": "compare {result} {result} --pairing flow",
    "hubs": "hubs {result} -k 2 --labels {labels}",
    "baseline": "baseline {result} --kl",
    "pairs of the baseline": "baseline {result} --pairing OK --null reversed -k 3",
    "evaluate": "evaluate {result} --labels {labels} --bootstrap 5",
    "evaluate a circuit": "evaluate {result} --circuit {circuit} --bootstrap 5",
    "tokens": "tokens {model} L0H0 -k 3",
    "tokens of all heads": "tokens {model} --all --role O -k 2",
    "norms": "tokens {model} --norms",
    "wiring": "wiring {result} -k 3 --labels {labels}",
    "paths": "paths {model} --to L1H2 --depth 1 -k 3",
    "paths of a result": "paths {result} --weights {model} --from L0H3 --depth 1 -k 3",
    "links": "links {model} {graph} --transcoders {transcoders} -k 2",
    "nodes": "nodes {model} --nodes {vectors}@1 --unembedding -k 2",
    "diff": "diff {model} {model} -k 2",
    "effects": "effects {model} {result} -k 2 --random --sequences 2 --length 8",
    "behaviour": "behaviour {model} --sequences 2 --length 8 -k 2",
    "task": "task {model} induction --prompts 2 -k 3 --scores {result}",
}
# Commands that describe one thing, write files, or take long: their JSON, if any, is one object.
OTHERS = {
    "info",
    "score",
    "observe",
    "pair",
    "report",
    "figures",
    "reproduce",
    "track",
    "site",
    "cache",
    "skill",
    "mcp",
}
Run = Callable[..., str]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import headspan as hs

    folder = tmp_path_factory.mktemp("listings")
    hs.score("demo", "all").save(folder / "demo.safetensors")
    heads = [f"L{layer}H{i},{'a' if i < 3 else 'previous_token_and_more'}" for layer in (0, 1) for i in range(6)]
    (folder / "labels.csv").write_text("head,label\n" + "\n".join(heads) + "\n")
    np.save(folder / "vectors.npy", np.random.default_rng(0).normal(size=(3, 256)))
    hs.paths("demo", depth=1, k=9).to_circuit("paths").save(folder / "circuit.json")
    transcoders, graph = for_demo(folder)
    return {
        "transcoders": transcoders,
        "graph": str(graph),
        "circuit": str(folder / "circuit.json"),
        "vectors": str(folder / "vectors.npy"),
        "result": str(folder / "demo.safetensors"),
        "model": "demo",
        "labels": str(folder / "labels.csv"),
    }


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, names: dict[str, str]) -> Run:
    def call(line: str, *options: str, columns: int | None = None) -> str:
        monkeypatch.setattr(sys, "argv", ["headspan", *(part.format(**names) for part in line.split()), *options])
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        assert not caught.value.code, err
        return out

    return call


@pytest.mark.parametrize("what", LISTINGS)
def test_json_and_csv_are_the_same_records(run: Run, what: str) -> None:
    records = json.loads(run(LISTINGS[what], "--json"))
    rows = list(csv.DictReader(io.StringIO(run(LISTINGS[what], "--csv"))))
    assert isinstance(records, list)
    assert all(
        isinstance(value, (str, int, float, bool, type(None))) for record in records for value in record.values()
    )
    assert [list(record) for record in records] == [list(row) for row in rows]
    written = [{k: "" if v is None else str(v) for k, v in record.items()} for record in records]
    formula = re.compile(r"'(?=[=+\-@])")  # before a token that a spreadsheet would evaluate
    assert written == [{k: formula.sub("", v, count=1) for k, v in row.items()} for row in rows]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("what", LISTINGS)
def test_tables_fit_and_nothing_is_cut(run: Run, what: str, columns: int) -> None:
    text = run(LISTINGS[what], columns=columns)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns
    if not what.startswith(("tokens", "norms", "diff", "behaviour", "evaluate")):
        records = json.loads(run(LISTINGS[what], "--json"))
        for name in ("head", "source", "target"):
            for record in records:
                assert re.search(rf"(^|\s){record.get(name, '')}(\s|\.|$)", text)


def test_every_command_is_a_listing_or_known_not_to_be() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    listed = {line.split()[0] for line in LISTINGS.values()}
    assert set(known) <= listed | OTHERS
    for name, command in known.items():
        options = {option for parameter in command.params for option in parameter.opts}
        if name in listed:
            assert {"--json", "--csv"} <= options


def test_the_same_option_has_the_same_spelling_everywhere() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    spellings: dict[str, set[tuple[str, ...]]] = {}
    for command in known.values():
        for parameter in command.params:
            spellings.setdefault(parameter.name, set()).add(tuple(sorted(parameter.opts)))
    for name in ("metric", "pairing", "k", "labels", "out", "fold", "null", "force"):
        assert len(spellings[name]) == 1, (name, spellings[name])
    assert spellings["model"] == {("model",), ("--weights",)}  # an option of commands that take a result
    assert "pairings" not in spellings and "metrics" not in spellings and "top" not in spellings


@pytest.mark.parametrize(
    "line", ["hubs {result} --pairings OK --metrics pk", "evaluate {result} --labels {labels} --metrics=pk"]
)
def test_old_spellings_still_work(run: Run, line: str) -> None:
    assert run(line) == run(line.replace("--pairings", "--pairing").replace("--metrics", "--metric"))


def test_the_version_is_printed(run: Run) -> None:
    from headspan import __version__

    assert run("--version") == f"headspan {__version__}\n"


def test_behaviour_gives_labels_to_every_command(run: Run, names: dict[str, str], tmp_path: Path) -> None:
    import headspan as hs

    scores = hs.load(names["result"])
    scores.annotations["behaviour"] = {"induction": {str(h): 0.5 if h.layer else 0.1 for h in scores.heads("O")}}
    scores.save(tmp_path / "r.safetensors")
    for command in ("top", "hubs", "evaluate --bootstrap 0", "wiring"):
        out = run(f"{command} {tmp_path}/r.safetensors --labels behaviour", "--csv")
        assert "induction" in out
