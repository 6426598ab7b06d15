"""Faults found by the fuzzer: each was once a traceback, a warning, a wrong exit or a message of many lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import headspan as hs
from headspan.vocabulary.errors import HeadspanError
from notices import noticed

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

from mutations import split_safetensors
from seeds import gguf_parts, write_extras, write_seeds


def changed_json(name: str, **changes: Any) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return path.parent

    return change


def shard_called(name: str) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        index = folder / "llama" / "model.safetensors.index.json"
        tree = json.loads(index.read_text())
        tree["weight_map"]["lm_head.weight"] = name
        index.write_text(json.dumps(tree))
        return folder / "llama"

    return change


def huge_gain(folder: Path) -> Path:
    path = folder / "gpt2" / "model.safetensors"
    tensors = load_file(path)
    tensors["h.0.ln_1.weight"] = np.full(16, 3e38, np.float32)
    tensors["h.0.attn.c_attn.weight"] = np.full((16, 48), 3e38, np.float32)
    save_file(tensors, path)
    return path.parent


def nan_embedding(folder: Path) -> Path:
    path = folder / "gpt2" / "model.safetensors"
    tensors = load_file(path)
    tensors["wte.weight"][3] = [np.inf, -np.inf] * 8
    save_file(tensors, path)
    return path.parent


def infinite_scale(folder: Path) -> Path:
    path = folder / "llama.gguf"
    parts = gguf_parts()
    start = parts.spans["blk.1.attn_v.weight"][0]
    parts.data = parts.data[:start] + b"\xff\xff" + bytes(32) + parts.data[start + 34 :]
    path.write_bytes(parts.emit())
    return path


FOUND: dict[str, tuple[Callable[[Path], Path], str]] = {
    "layer_types is a number": (changed_json("llama/config.json", layer_types=3), "layer_types"),
    "eps is a list": (changed_json("gpt2/config.json", layer_norm_epsilon=[1]), "layer_norm_epsilon"),
    "eps is text": (changed_json("gpt2/config.json", layer_norm_epsilon="tiny"), "layer_norm_epsilon"),
    "model_type of a page": (changed_json("gpt2/config.json", model_type="x" * 9000), "unknown model_type"),
    "size of a page": (changed_json("gpt2/config.json", n_head="x" * 9000), "n_head"),
    "shard with a lone surrogate": (shard_called("\ud800.safetensors"), "cannot be read"),
    "shard with a line break": (shard_called("a\nb/c\u2028.safetensors"), r"a\\nb/c\\u2028"),
    "shard of a page": (shard_called("x/" * 4500), "is not a weight file"),
    "token of a page": (changed_json("llama/vocab.json", x="y" * 9000), "has the entry 'x'"),
    "gain that overflows": (huge_gain, "after folding"),
    "infinite unembedding": (nan_embedding, "row of token 3"),
    "quantised block with a scale of NaN": (infinite_scale, "weight V of head L1KV0"),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_found_in_checkpoints(tmp_path: Path, name: str) -> None:
    from headspan.reading.tokens import tokens as head_tokens

    change, words = FOUND[name]
    write_seeds(tmp_path / "seed")
    with pytest.raises(HeadspanError, match=words) as caught:  # noqa: PT012 - which step refuses is not the point
        weights = hs.open(change(tmp_path / "seed"))
        head_tokens(weights, "L0H0", "O", 3)
        hs.fold(weights).read("Q", 0)
        weights.read("V", 1)
    assert len(str(caught.value)) < 2000
    assert "\n" not in str(caught.value)


def result_with(folder: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]) -> Path:
    write_seeds(folder / "seed")
    path = folder / "seed" / "result.safetensors"
    header, _ = split_safetensors(path.read_bytes())
    head, tensors = json.loads(header["__metadata__"]["headspan"]), load_file(path)
    text = change(head, tensors)
    save_file(tensors, path, {"headspan": text if isinstance(text, str) else json.dumps(head)})
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda head, tensors: "[" * 100_000,
        lambda head, tensors: head.update(d_model=True),
        lambda head, tensors: head.update(d_model=0),
        lambda head, tensors: head.update(order=[["pk/OK"]]),
        lambda head, tensors: head.update(extra=True),
        lambda head, tensors: head.update(extra=[["effect/random/OK"]]),
        lambda head, tensors: tensors.update({"pk/OK": tensors["pk/OK"].view(np.int32)}),
        lambda head, tensors: tensors.update({"rank/Q": tensors["rank/Q"].view(np.float32)}),
        lambda head, tensors: tensors.update({"pk/OQ": np.full_like(tensors["pk/OQ"], np.inf)}),
        lambda head, tensors: tensors.update({"rank/Q": -tensors["rank/Q"]}),
    ],
    ids=[
        "deep",
        "boolean width",
        "no width",
        "order of lists",
        "extra that is not a list",
        "extra of lists",
        "integer scores",
        "ranks that are not integers",
        "infinite",
        "negative",
    ],
)
def test_found_in_results(tmp_path: Path, change: Any) -> None:
    with pytest.raises(HeadspanError, match=r"damaged|cannot be read"):
        hs.load(result_with(tmp_path, change))


def test_found_in_ranks_of_results(tmp_path: Path) -> None:
    """Impossible ranks are reported in one line, not as an array."""
    from headspan.statistics.baseline import summarise

    def change(head: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors["rank/K"][2] = 2**31 - 1

    with pytest.raises(HeadspanError) as caught:
        summarise(hs.load(result_with(tmp_path, change)))
    assert "\n" not in str(caught.value)


def test_found_in_labels(tmp_path: Path) -> None:
    from headspan.results.labels import Labels

    path = tmp_path / "labels.csv"
    path.write_text("head,label\nL0H0," + "x" * 200_000)
    with pytest.raises(HeadspanError, match="line 2"):
        Labels.load(path)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_found_in_signalling_nan(tmp_path: Path) -> None:
    """A NaN that complains when it is converted is read as a missing pair like any other."""
    from headspan.statistics.hubs import hubs

    def change(head: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors["pk/OK"].view(np.uint32)[0, :] = 0x7F800001

    scores = hs.load(result_with(tmp_path, change))
    assert np.isnan(scores["pk", "OK"].values[0]).all()
    hubs(scores, "OK")


def test_found_in_headers_of_a_page(tmp_path: Path) -> None:
    """The safetensors package quotes invalid content in full."""
    path = tmp_path / "result.safetensors"
    raw = json.dumps({"__metadata__": {"headspan": "{}"}, "pk/OK": "x" * 9000}).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(HeadspanError, match="cannot be read") as caught:
        hs.load(path)
    assert len(str(caught.value)) < 1000


def test_found_in_reports_of_some_pairings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A result without one of the four roles has no ranks for it; its page is written anyway."""
    from headspan.cli import _run

    result, page = str(tmp_path / "r.safetensors"), tmp_path / "r.html"
    hs.score("demo", "pk", "OK", out=result)
    assert _run(["report", result, "--out", str(page)]) == 0, capfd.readouterr().err
    assert page.stat().st_size > 10_000


@pytest.mark.parametrize(
    "changes",
    [{"max_position_embeddings": True}, {"hidden_act": []}, {"rope_theta": "x"}, {"rms_norm_eps": 1e400}],
    ids=["boolean positions", "activation that is a list", "rope that is text", "infinite eps"],
)
@pytest.mark.parametrize("command", ["behaviour", "effects"])
def test_found_in_configs_that_transformers_reads(
    tmp_path: Path, changes: dict[str, Any], command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers raises its own kinds of errors, which are reported like any other."""
    from headspan.cli import _run

    pytest.importorskip("transformers")
    write_seeds(tmp_path / "seed")
    model = changed_json("llama/config.json", **changes)(tmp_path / "seed")
    code = _run([command, str(model), "--sequences", "2", "--length", "4"])
    assert code in (0, 2), capfd.readouterr().err


@pytest.mark.parametrize("reference", [3, -1, True, [], {}, 1e300, "\0", "\ud800"])
def test_found_in_results_that_name_no_model(tmp_path: Path, reference: Any) -> None:
    """The model named by a damaged result is never taken for a file or for a file descriptor."""
    path = result_with(tmp_path, lambda head, tensors: head["provenance"].update(reference=reference))
    if not isinstance(reference, str):
        with pytest.raises(hs.HeadspanError, match="provenance reference is"):
            hs.load(path)
        return
    with pytest.warns(hs.HeadspanWarning):
        scores = hs.load(path)
    scores.save(tmp_path / "again.safetensors")
    scores.save(tmp_path / "again.safetensors")
    with pytest.warns(hs.HeadspanWarning):
        assert hs.load(tmp_path / "again.safetensors") == scores


def test_found_in_names_that_are_not_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bytes that are not UTF-8, and escape codes, in the name of a model, in everything that is written about it."""
    from headspan.cli import _run

    write_seeds(tmp_path / "seed")
    model, result = str(tmp_path / "m\udcff\x1b[31m"), str(tmp_path / "r\udcff.safetensors")
    (tmp_path / "seed" / "gpt2").rename(model)
    out = [str(tmp_path / f"o\udcff.{ending}") for ending in ("html", "json", "graphml", "csv", "svg", "pdf")]
    writes = [part for path in out[1:] for part in ("--out", path)]
    for words in (
        ["info", model, "--json"],
        ["score", model, "--out", result],
        ["top", result],
        ["report", result, "--weights", model, "--out", out[0]],
        ["wiring", result, *writes],
        ["diff", model, str(tmp_path / "seed" / ".." / os.path.basename(model)), "--out", out[0], "--json"],
        ["figures", result, "--only", "wiring", "--format", "svg,pdf", "--out", str(tmp_path / "f\udcff")],
        *(["diff", model, model, "--out", str(tmp_path / f"d.{ending}")] for ending in ("png", "svg", "pdf")),
        ["info", model + "/none"],
    ):
        code = _run(words)
        said = capfd.readouterr()
        assert code == (2 if words[1].endswith("none") else 0), said.err
        assert all(line.isprintable() for line in (said.out + said.err).split("\n"))
    assert all(os.path.getsize(path) for path in out)


def test_found_in_a_gallery_that_was_killed(tmp_path: Path) -> None:
    """Pages without their index and an unfinished file are what SIGKILL leaves: the next run makes the gallery."""
    scores = hs.score("demo", "pk", "OK")
    made = tmp_path / "site"
    hs.site(made, [scores])
    (made / "index.html").unlink()
    (made / ".headspan-0123456789abcdef-1-aa.tmp").write_bytes(b"")
    hs.site(made, [scores])
    assert (made / "index.html").is_file()
    (made / "index.html").unlink()
    (made / "notes.txt").write_text("mine")
    with pytest.raises(hs.HeadspanError, match="other files"):
        hs.site(made, [scores])


@pytest.mark.filterwarnings("error")
def test_found_in_vectors_and_adapters_whose_numbers_overflow(tmp_path: Path) -> None:
    """No numpy warnings: finite numbers give shares, others a message."""
    write_seeds(tmp_path)
    with noticed():
        write_extras(tmp_path)
    vector = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    np.save(tmp_path / "v.npy", vector * (np.float32(3e38) / np.abs(vector).max()))
    np.save(tmp_path / "w.npy", vector)
    (large, small) = (
        [row["share"] for row in hs.nodes(tmp_path / "gpt2", f"{tmp_path}/{n}.npy", fold=True).rows()] for n in "vw"
    )
    assert large == pytest.approx(small, abs=1e-6)
    np.save(tmp_path / "v.npy", np.where(np.arange(16) == 3, np.inf, vector))
    with pytest.raises(hs.HeadspanError, match="NaN or infinite"):
        hs.nodes(tmp_path / "gpt2", tmp_path / "v.npy", fold=True)
    path = tmp_path / "lora" / "adapter_model.safetensors"
    save_file({name: np.full_like(array, 3e38) for name, array in load_file(path).items()}, path)
    with pytest.raises(hs.HeadspanError, match="NaN or infinite"):
        hs.adapt(tmp_path / "gpt2", tmp_path / "lora").read("O", 0)


def test_found_in_names_of_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "v.npz", **{"a b " * 100: np.array(["abc"] * 16)})
    with pytest.raises(hs.HeadspanError) as caught:
        hs.nodes("demo", tmp_path / "v.npz")
    assert "a b " * 51 not in str(caught.value)


def test_found_in_models_whose_file_changes_while_they_run(tmp_path: Path) -> None:
    """The weights of a running model are its own: an edit of its file does not change it, a cut does not kill it."""
    pytest.importorskip("torch")
    script = """
import sys
import torch
from headspan.running.opening import load
for change in ("edited", "cut"):
    model = load(f"{sys.argv[1]}/{change}/gpt2")
    before = [parameter.clone() for parameter in model.model.parameters()]
    with open(f"{sys.argv[1]}/{change}/gpt2/model.safetensors", "r+b") as file:
        file.truncate(4096) if change == "cut" else (file.seek(-4096, 2), file.write(bytes(4096)))
    assert all(torch.equal(a, b) for a, b in zip(before, model.model.parameters(), strict=True)), change
    print(change)
"""
    for change in ("edited", "cut"):
        write_seeds(tmp_path / change)
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["edited", "cut"]), done.stderr


def test_found_a_gallery_left_its_first_page_behind(tmp_path: Path) -> None:
    """A later result that cannot be drawn is noticed before anything is written."""
    scores = hs.score("demo", "pk", "OK")
    with pytest.raises(hs.HeadspanError, match="no scores"):
        hs.site(tmp_path / "gallery", [scores, replace(scores, arrays={})])
    assert not (tmp_path / "gallery").exists()
