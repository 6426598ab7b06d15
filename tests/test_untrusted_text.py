"""Untrusted text: messages quote at most 200 letters of it, and no cell of a CSV file is a formula."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import headspan as hs
from headspan.cli import _run
from headspan.results.tabular import csv_text
from headspan.vocabulary.errors import HeadspanError, message, quoted

WORDS = "ab cd " * 400  # with blanks, so that it is not one word
LETTERS = "x" * 3000


def longest_run(text: str, of: str) -> int:
    """Length of the longest piece of one text that occurs in the other."""
    best = 0
    for start in range(len(text)):
        while start + best < len(text) and text[start : start + best + 1] in of:
            best += 1
    return best


@pytest.mark.parametrize("given", [WORDS, LETTERS, WORDS[:230], f"org/{LETTERS}", f"{WORDS}.safetensors"])
@pytest.mark.parametrize(
    "words",
    [
        "info {}", "top {}", "top demo --metric {}", "top demo --pairing {}", "top demo --labels {}", "tokens demo {}",
        "nodes demo --nodes {}", "nodes demo --sae {}", "nodes demo --neurons {}", "nodes demo --tokens {}",
        "pair demo {} L1H0.K", "paths demo --to {}", "wiring demo --out {}", "wiring demo --circuit {}",
        "figures demo --only {}", "baseline demo --null {}", "score demo --memory {}", "cache {}", "{}", "top demo {}",
        "diff demo {}", "track demo {}", "report demo --behaviour {}", "top --{}",
    ],
)  # fmt: skip
def test_messages_quote_little_of_a_command_line(words: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run([word.format(given) for word in words.split()])
    for line in capsys.readouterr().err.splitlines():
        assert longest_run(line.removeprefix("headspan: "), given) <= 200 and len(line) < 1000


@pytest.mark.parametrize("given", [WORDS, LETTERS], ids=["words", "letters"])
def test_messages_quote_little_of_a_file(given: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    d, config = 8, {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 5}
    tensors = {"h.0.attn.c_attn.weight": np.ones((d, 3 * d), np.float32), "h.0.attn.c_proj.weight": np.eye(d)}
    messages: list[str] = []

    def attempt(**changes: object) -> None:
        (model / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(HeadspanError) as caught, hs.open(model) as weights:
            weights.read("O", 0)
        messages.append(str(caught.value))

    save_file(tensors, model / "model.safetensors")
    for key in config.keys() - {"vocab_size"}:
        attempt(**{key: given})
    save_file({f"h.0.{given}": np.eye(d)}, model / "model.safetensors")
    attempt()
    index = {"weight_map": dict.fromkeys(tensors, given)}
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    attempt()
    np.savez(tmp_path / "v.npz", **{given: np.ones(3)})
    (tmp_path / "l.csv").write_text(f"head,label\n{given},a\n")
    for call in (lambda: hs.nodes("demo", f"{tmp_path}/v.npz"), lambda: hs.wiring("demo", labels=tmp_path / "l.csv")):
        with pytest.raises(HeadspanError) as caught:
            call()
        messages.append(str(caught.value))
    assert [text for text in messages if longest_run(text, given) > 200 or len(text) > 1000] == []


def test_what_is_cut_is_still_recognised() -> None:
    long = "/data/" + "run " * 100 + "model.safetensors"
    assert (
        quoted(long).startswith("/data/run") and quoted(long).endswith("model.safetensors") and len(quoted(long)) == 200
    )
    assert message("a short one: 'b c'") == "a short one: 'b c'"


# ------------------------------------------------------------------------------------------------------------ CSV


@pytest.mark.parametrize(
    "name", ["=1+1", "+cmd", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "＝1", "-", "=", '=HYPERLINK("x")']
)
def test_no_cell_is_a_formula(name: str) -> None:
    ((cell, number, text),) = list(csv.reader(io.StringIO(csv_text([{"a": name, "b": -0.5, "c": "-0.5"}], "abc"))))[1:]
    assert cell[0] == "'" and (number, text) == ("-0.5", "-0.5")
    assert csv_text([{"a": "L0H1"}], "a") == "a\nL0H1\n"


def test_names_of_nodes_and_labels_in_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "labels.csv").write_text("head,label\nL0H1,=1+1\nL1H2,@x\n")
    save_file({"=cmd|x": np.ones(256, np.float32)}, tmp_path / "v.safetensors")
    hs.wiring(hs.score("demo", "pk", "OK"), labels=tmp_path / "labels.csv").to_csv(tmp_path / "w.csv")
    assert _run(["nodes", "demo", "--nodes", f"{tmp_path}/v.safetensors@1", "--csv"]) == 0
    printed = capsys.readouterr().out
    assert _run(["top", "demo", "--labels", f"{tmp_path}/labels.csv", "-k", "300", "--csv"]) == 0
    for text in (printed, capsys.readouterr().out, (tmp_path / "w.csv").read_text()):
        rows = list(csv.reader(io.StringIO(text)))
        cells = [cell for row in rows for cell in row]
        assert any(cell.startswith(("'=", "'@")) for cell in cells)
        for cell in cells:
            assert not cell.startswith(("=", "+", "@")) and (not cell.startswith("-") or float(cell) < 0)


def test_only_csv_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"=1": np.ones(256, np.float32)}, tmp_path / "v.safetensors")
    assert list(load_file(tmp_path / "v.safetensors")) == ["=1"]
    assert _run(["nodes", "demo", "--nodes", f"{tmp_path}/v.safetensors@1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["node"] == "=1"
