"""Absurd numbers, missing devices, results without scores, names with terminal escape codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from headspan.cli import _run

BIG = str(10**30)
HOSTILE = "\x1b[31mred [bold]x[/bold] \u202e\x9b2J"
NUMBERS = [
    "top r.safetensors -k -1",
    f"top r.safetensors -k {BIG}",
    "hubs r.safetensors -k -1",
    f"wiring r.safetensors -k {BIG}",
    "wiring r.safetensors --rule significance --q nan",
    "tokens demo L0H0 -k -1",
    f"tokens demo L0H0 -k {BIG}",
    "evaluate r.safetensors --labels mine.csv --bootstrap 5 --seed -1",
    "score demo --memory 1e400 --out new.safetensors",
    f"score demo --memory {'9' * 400} --out new.safetensors",
    f"behaviour demo --sequences {BIG} --length 3",
    "score demo --device cuda --out new.safetensors",
    "score demo --device nonsense --out new.safetensors",
    "score demo --nodes mine.csv --out new.safetensors",
    "score demo --nodes r.safetensors@0 --out new.safetensors",
    f"score demo --nodes nowhere.npy@{BIG} --out new.safetensors",
    "score demo --neurons L0:* --neurons L1:* --out new.safetensors --screen 5",
    "score demo --pairing OR --out new.safetensors",
    "top r.safetensors --pairing OR",
    "wiring r.safetensors --pairing nodes",
    "hubs r.safetensors --pairing WK",
    "baseline r.safetensors --pairing WR",
    "behaviour demo --device cuda --sequences 1 --length 3",
    "behaviour demo --device nonsense --sequences 1 --length 3",
    "behaviour demo --sequences 1 --length 3 --seed -1",
    "top empty.safetensors",
    "hubs empty.safetensors",
    "wiring empty.safetensors",
    "baseline empty.safetensors",
    "evaluate empty.safetensors --labels mine.csv",
    "figures empty.safetensors --only wiring,scatter,grid --out figures",
    "report empty.safetensors --out page.html",
    "compare empty.safetensors empty.safetensors",
    f"paths demo --to L1H2 -k {BIG}",
    f"paths demo --to L1H2 --depth {BIG}",
    "paths demo --to L1H2 --depth -1",
    "paths demo --memory 1e400",
    "paths empty.safetensors --weights demo",
    f"nodes demo --unembedding -k {BIG}",
    "nodes demo --unembedding -k -1",
    f"nodes demo --neurons L{BIG}:0",
    f"nodes demo --neurons L0:{BIG}",
    f"nodes demo --nodes mine.csv@{BIG}",
    "nodes demo",
    "nodes demo --nodes mine.csv",
    "nodes demo --nodes r.safetensors@0",
    "nodes demo --sae .:0",
    "nodes demo --adapter .",
    "nodes demo --tokens nonsense",
    "nodes r.safetensors --embedding",
    "site gallery empty.safetensors",
    "site gallery r.safetensors --tokens -1",
    "wiring empty.safetensors --circuit mine.csv",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    scores = hs.score(hs.open("demo"))
    scores.save("r.safetensors")
    scores.arrays.clear()
    scores.save("empty.safetensors")
    Path("mine.csv").write_text(f"head,label\nL0H1,{HOSTILE}\nL1H1,{HOSTILE}\n")
    return tmp_path


@pytest.mark.parametrize("command", NUMBERS)
def test_odd_options_end_in_a_message(command: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if "cuda" in command and pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is such a device here")
    code = _run(command.split())
    out, err = capfd.readouterr()
    assert code in (0, 2) and "Traceback" not in err and "\x1b" not in out + err
    if code == 2:
        assert err.splitlines()[-1].startswith("headspan: ")


@pytest.mark.parametrize(
    "command",
    [
        ["hubs", "r.safetensors", "--labels", "mine.csv"],
        ["wiring", "r.safetensors", "--labels", "mine.csv"],
        ["wiring", "r.safetensors", "--labels", "mine.csv", "--json"],
        ["wiring", "r.safetensors", "--labels", "mine.csv", "--csv"],
        ["evaluate", "r.safetensors", "--labels", "mine.csv", "--bootstrap", "0"],
        ["top", HOSTILE],
        ["paths", "demo", "--to", HOSTILE],
        ["paths", "r.safetensors", "--from", HOSTILE, "--weights", HOSTILE],
        ["nodes", "demo", "--nodes", HOSTILE, "--tokens", HOSTILE],
        ["nodes", "demo", "--tokens", HOSTILE],
        ["nodes", "demo", "--sae", HOSTILE],
        ["nodes", "demo", "--neurons", HOSTILE],
        ["nodes", "demo", "--embedding", "--unembedding", "-k", "1"],
        ["site", HOSTILE, "r.safetensors", "--title", HOSTILE],
        ["wiring", "r.safetensors", "--circuit", HOSTILE],
        ["top", "r.safetensors", "--pairing", HOSTILE],
        ["top", "r.safetensors", f"--{HOSTILE}"],
        ["score", "demo", "--out", f"nowhere/{HOSTILE}/x.txt"],
        ["score", "demo", "--out", "new.safetensors", "--nodes", HOSTILE],
    ],
)
def test_a_terminal_gets_nothing_to_obey(command: list[str], place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _run(command)
    out, err = capfd.readouterr()
    assert all(line.isprintable() for line in [*out.split("\n"), *err.split("\n")])
    if "--json" in command:
        assert any(HOSTILE in str(record) or HOSTILE in record.values() for record in json.loads(out))


def test_figures_of_a_model_of_one_layer_and_of_short_texts(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    Path("one").mkdir()
    shapes = {"c_attn": (16, 48), "c_proj": (16, 16)}
    save_file(
        {f"h.0.attn.{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()},
        "one/model.safetensors",
    )
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 4, "n_embd": 16, "vocab_size": 10}
    Path("one/config.json").write_text(json.dumps(config))
    assert _run(["figures", "one", "--out", "figures"]) == 0
    assert "scatter was not drawn" in capfd.readouterr().err
    # A prompt in which no token comes again leaves two kinds unmeasured.
    unknown = ("induction", "duplicate_token")
    heads = [str(head) for head in hs.load("r.safetensors").heads("Q")]
    kinds = ("identity", "previous_token", *unknown)
    scores = {kind: dict.fromkeys(heads, None if kind in unknown else 0.5) for kind in kinds}
    Path("b.json").write_text(json.dumps(scores))
    only = "identity,head-scores,two-layer"
    assert _run(["figures", "r.safetensors", "--behaviour", "b.json", "--only", only, "--out", "figures"]) == 0
    assert "drawn without duplicate_token, induction" in capfd.readouterr().err
