"""Edited results are noticed; malformed results and odd paths are refused with one message."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from headspan.cli import _run
from headspan.results.head_scores import BehaviourScores
from headspan.system.sealed_file import HASH, content_hash

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

import edited
from place import Finding

Head = dict[str, Any]
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> edited.Edited:
    return edited.Edited(tmp_path_factory.mktemp("edited"))


def rewritten(
    bench: edited.Edited, path: Path, change: Callable[[Head, Tensors], Any], seed: str = "whole", reseal: bool = False
) -> Path:
    """An edited copy of a small result, with the old hash or a new one."""
    head, tensors = edited.read(bench.work / f"{seed}.safetensors")
    change(head, tensors)
    if reseal:
        head[HASH] = content_hash(tensors, head)
    save_file(tensors, path, {"headspan": json.dumps(head)})
    return path


def swap(head: Head, tensors: Tensors) -> None:
    tensors["pk/OQ"], tensors["pk/OK"] = tensors["pk/OK"], tensors["pk/OQ"]


def set_at(name: str, place: tuple[int, ...], value: float) -> Callable[[Head, Tensors], None]:
    def change(head: Head, tensors: Tensors) -> None:
        tensors[name][place] = value

    return change


# ------------------------------------------------------------------------------------------------ the hash


def test_what_was_written_is_read_without_a_warning(bench: edited.Edited) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("whole", "screened", "nodes", "foreign"):
            hs.load(bench.work / f"{name}.safetensors")
        hs.Series.load(bench.work / "series.safetensors")
        hs.load(Path(__file__).parent / "data" / "result-0.1.safetensors")  # without a hash
        hs.load(Path(hs.__file__).parent / "data" / "demo-effects.safetensors")


@pytest.mark.parametrize("schema", [2, 3])
def test_results_of_earlier_versions_load_without_a_warning(bench: edited.Edited, tmp_path: Path, schema: int) -> None:
    def as_before(head: Head, tensors: Tensors) -> None:
        head["schema"] = schema
        del head[HASH], head["annotations"]["effects"]["model"], head["annotations"]["behaviour"]["_model"]

    path = rewritten(bench, tmp_path / "r.safetensors", as_before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = hs.load(path)
        scores.save(path)  # in the way of this version
        hs.load(path)


NOTICED: dict[str, Callable[[Head, Tensors], Any]] = {
    "OQ and OK swapped": swap,
    "one score": set_at("pk/OK", (0, 5), 0.5),
    "one score to NaN": set_at("pk/OK", (0, 5), np.nan),
    "one rank": set_at("rank/O", (0,), 3),
    "an effect": set_at("effect/random/OK", (0, 5), 0.01),
    "d_model": lambda head, tensors: head.update(d_model=17),
    "the model's name": lambda head, tensors: head["provenance"].update(reference="other"),
    "a head score": lambda head, tensors: head["annotations"]["behaviour"]["induction"].update(L0H0=0.9),
    "another field": lambda head, tensors: head.update(comment="looks good"),
    "another array": lambda head, tensors: tensors.update({"kp/OK": tensors["pk/OK"]}),
    "no hash": lambda head, tensors: head.pop(HASH),
    "schema": lambda head, tensors: head.update(schema=2),
}


@pytest.mark.parametrize("what", NOTICED)
def test_an_edited_result_is_warned_of(bench: edited.Edited, tmp_path: Path, what: str) -> None:
    path = rewritten(bench, tmp_path / "r.safetensors", NOTICED[what])
    with pytest.warns(hs.HeadspanWarning, match=r"r\.safetensors is not as") as caught:
        scores = hs.load(path)
    assert caught[0].filename == __file__
    scores.save(path)  # writing it again does not wash it clean
    with pytest.warns(hs.HeadspanWarning, match="edited"):
        hs.load(path)


def test_an_edited_series_is_warned_of(bench: edited.Edited, tmp_path: Path) -> None:
    path = rewritten(bench, tmp_path / "s.safetensors", set_at("scores", (0, 0), 0.5), "series")
    with pytest.warns(hs.HeadspanWarning, match="hash does not match"):
        series = hs.Series.load(path)
    series.save(path)
    with pytest.warns(hs.HeadspanWarning, match="had been edited"):
        hs.Series.load(path)


def test_the_order_of_arrays_and_keys_does_not_matter(bench: edited.Edited, tmp_path: Path) -> None:
    head, tensors = edited.read(bench.work / "whole.safetensors")
    head = {key: head[key] for key in sorted(head, reverse=True)}
    turned = dict(reversed(list(tensors.items())))
    save_file(turned, tmp_path / "r.safetensors", {"headspan": json.dumps(head, indent=1)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hs.load(tmp_path / "r.safetensors")


def test_commands_print_the_warning_once_as_one_line(
    bench: edited.Edited, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rewritten(bench, tmp_path / "r.safetensors", swap)
    for _ in range(2):  # every command that reads it, not only the first of a process
        assert _run(["compare", str(path), str(path), "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)
        assert len(err.splitlines()) == 1
        assert err.startswith(f"warning: {path} is not as headspan wrote it") and "hash does not match" in err


@pytest.mark.parametrize("command", ["behaviour", "effects"])
def test_adding_to_a_result_renews_its_hash(
    bench: edited.Edited, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.safetensors"
    hs.score(bench.work / "gpt2", "pk", "flow").save(path)
    before = edited.read(path)[0][HASH]
    words = [command, str(bench.work / "gpt2"), "--into", str(path), "--sequences", "2", "--length", "4"]
    assert _run(words + ["--random"] * (command == "effects")) == 0
    head, tensors = edited.read(path)
    assert head[HASH] == content_hash(tensors, head) != before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = hs.load(path).annotations
    model = kept["effects"]["model"] if command == "effects" else kept["behaviour"]["_model"]
    assert model["fingerprint"] == hs.load(path).provenance["fingerprint"]


# ------------------------------------------------------------------------------------------- what cannot be


def reverse(head: Head, tensors: Tensors) -> None:
    head["ports"] = {role: names[::-1] for role, names in head["ports"].items()}


REFUSED: dict[str, tuple[Callable[[Head, Tensors], Any], str]] = {
    "pk of 1e30": (set_at("pk/OK", (0, 5), 1e30), "outside the range of pk"),
    "negative pk": (set_at("pk/OK", (0, 5), -0.1), "outside the range of pk"),
    "pk above the ranks": (set_at("pk/OK", (0, 5), 4.01), "pk/OK of L0H0 and L1H1 is 4.01"),
    "cs times 50": (lambda head, t: t.update({"cs/OK": 50 * t["cs/OK"]}), "outside the range of cs"),
    "simple_cs": (set_at("simple_cs/OK", (0, 5), 1.01), "outside the range of simple_cs"),
    "linear_cka": (set_at("linear_cka/OK", (0, 5), 1.01), "outside the range"),
    "procrustes": (set_at("procrustes/OK", (0, 5), -0.01), "outside the range"),
    "ranks of 0": (lambda head, t: t.update({"rank/O": 0 * t["rank/O"]}), "outside the range of pk"),
    "ranks above d_head": (set_at("rank/O", (0,), 5), "5 dimensions for O, more than 4"),
    "no ranks": (lambda head, t: t.pop("rank/K"), "without the ranks"),
    "backward pairs": (set_at("pk/OK", (5, 0), 0.5), "not among its pairs"),
    "backward effects": (set_at("effect/random/OK", (5, 0), 0.5), "come earlier"),
    "infinite effects": (set_at("effect/random/OK", (0, 5), np.inf), "infinite"),
    "heads reversed": (reverse, "not in order"),
    "a head renamed": (lambda head, t: head["ports"]["O"].__setitem__(0, "L0H9"), "not in order at L0H9"),
    "Q and O differ": (lambda head, t: head["ports"].update(Q=head["ports"]["Q"][:-1]), "in Q and O"),
    "d_model": (lambda head, t: head.update(d_model=2**62), "d_model"),
    "provenance": (lambda head, t: head.update(provenance=[1]), "provenance"),
    "screen": (lambda head, t: head["provenance"].update(screen=3), "provenance screen is 3"),
    "screen without k": (lambda head, t: head["provenance"].update(screen={"OK": {}}), "provenance screen"),
    "pairs": (lambda head, t: head["provenance"].update(pairs="some"), "provenance pairs"),
    "head scores": (
        lambda head, t: head["annotations"]["behaviour"]["induction"].update(L0H0=7),
        "annotation behaviour",
    ),
    "heads of head scores": (
        lambda head, t: head["annotations"]["behaviour"]["induction"].update(L9H9=0.5),
        "head scores of L9H9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("reseal", [False, True], ids=["old hash", "new hash"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_no_result_can_hold_is_refused(bench: edited.Edited, tmp_path: Path, what: str, reseal: bool) -> None:
    change, words = REFUSED[what]
    path = rewritten(bench, tmp_path / "r.safetensors", change, reseal=reseal)
    with pytest.raises(hs.HeadspanError, match=words):
        hs.load(path)


def test_rounding_is_not_damage(bench: edited.Edited, tmp_path: Path) -> None:
    path = rewritten(bench, tmp_path / "r.safetensors", set_at("pk/OK", (0, 5), 4 * (1 + 9e-5)), reseal=True)
    assert hs.load(path)["pk", "OK"].values[0, 5] > 4


def test_scores_of_an_unknown_similarity_have_no_range(bench: edited.Edited, tmp_path: Path) -> None:
    path = rewritten(
        bench, tmp_path / "r.safetensors", lambda head, t: t.update({"new/OK": -7 * t["pk/OK"]}), reseal=True
    )
    assert np.nanmin(hs.load(path)["new", "OK"].values) < -1


@pytest.mark.parametrize("what", ["effects of another model", "head scores of another model"])
@pytest.mark.parametrize("words", ["top FILE", "wiring FILE", "report FILE --out new.html", "hubs FILE"])
def test_what_was_measured_on_another_model_is_refused(
    bench: edited.Edited, tmp_path: Path, what: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rewritten(
        bench, tmp_path / "r.safetensors", lambda head, t: edited.PERSON[what](head, t, bench.foreign), reseal=True
    )
    assert _run(words.replace("FILE", str(path)).replace("new", str(tmp_path / "new")).split()) == 2
    assert "are of different models" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- readers


@pytest.mark.parametrize("reader", edited.READERS)
def test_every_reader_notices(bench: edited.Edited, reader: str) -> None:
    """One edit that must be warned of and one invalid field: no reader is silent and none crashes."""
    seed, name = ("series", "scores") if reader in edited.OF_SERIES else ("whole", "pk/OK")
    head, tensors = edited.deepcopy(bench.seeds[seed])
    tensors[name] = np.where(np.isnan(tensors[name]), np.nan, tensors[name] * np.float32(0.99)).astype(np.float32)
    bench.run(edited.Edit(seed, "scores a little smaller", False, head, tensors, reader))
    head, tensors = edited.deepcopy(bench.seeds[seed])
    head["provenance"] = 3
    assert bench.run(edited.Edit(seed, "a number for a provenance", True, head, tensors, reader))


def test_a_sample_of_edits(bench: edited.Edited) -> None:
    quick = [r for r in edited.READERS if not r.startswith(("figures", "report", "site"))]
    refused = 0
    for number in range(60):
        chance = random.Random(f"edited/{number}")
        case = bench.case(chance)
        case = case if case.reader in quick else case._replace(reader="hs.load")
        refused += bool(bench.run(case))
    assert 0 < refused < 60


def test_the_fuzzer_notices_a_reader_that_is_silent(bench: edited.Edited, monkeypatch: pytest.MonkeyPatch) -> None:
    head, tensors = edited.deepcopy(bench.seeds["whole"])
    tensors["pk/OK"][0, 5] = 0.5
    case = edited.Edit("whole", "one score", False, head, tensors, "top")
    assert bench.run(case) == []
    monkeypatch.setattr("headspan.results.saving.check_seal", lambda *a, **k: None)
    with pytest.raises(Finding, match="neither refused nor warned of"):
        bench.run(case)


def test_a_missing_score_leaves_figures_whole(bench: edited.Edited, tmp_path: Path) -> None:
    path = rewritten(bench, tmp_path / "r.safetensors", set_at("pk/OK", (0, 5), np.nan), reseal=True)
    assert (
        _run(["figures", str(path), "--only", "wiring,two-layer,kl,grid", "-o", str(tmp_path / "f"), "--dpi", "20"])
        == 0
    )


# --------------------------------------------------------------------------------------------------- paths


@pytest.fixture
def odd_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("loop", "loop.safetensors"):
        os.symlink(name, name)
    Path("file").write_text("x")
    Path("folder.safetensors").mkdir()
    os.mkfifo("pipe.safetensors")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
    return tmp_path


PATHS = [
    "x" * 300, "x" * 300 + ".safetensors", "a/" * 3000 + "x.safetensors", "a\0b.safetensors", "loop",
    "loop.safetensors", "loop/x", "file/x", "file/x.safetensors", "folder.safetensors", "", " ", "\ud800",
    "\ud800.safetensors",
    "\udcff.safetensors", "/dev/zero", "pipe.safetensors", "socket", "~nobody/x", "x" * 300 + "*", "none.safetensors",
]  # fmt: skip
PATH_READERS: dict[str, Callable[[Any], Any]] = {
    "load": hs.load,
    "Series.load": hs.Series.load,
    "Labels.load": hs.Labels.load,
    "BehaviourScores.load": BehaviourScores.load,
    "Circuit.load": hs.Circuit.load,
    "open": hs.open,
    "adapt": lambda path: hs.adapt("demo", path),
    "track": lambda path: hs.track([path, path]),
    "nodes": lambda path: hs.nodes("demo", nodes=path),
    "sae": lambda path: hs.nodes("demo", sae=path),
    "top": hs.top,
    "site": lambda path: hs.site("gallery", [path]),
    "behaviour": hs.behaviour,
    "wiring": lambda path: hs.wiring("demo", circuit=path),
}


@pytest.mark.parametrize("reader", PATH_READERS)
@pytest.mark.parametrize("as_path", [False, True], ids=["text", "Path"])
def test_odd_paths_are_one_message(odd_paths: Path, reader: str, as_path: bool) -> None:
    for path in PATHS:
        with pytest.raises(hs.HeadspanError) as caught:
            PATH_READERS[reader](Path(path) if as_path else path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000, path[:20]


# ------------------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize("key", ["text_config", "thinker_config", "quantization_config", "attn_config"])
def test_odd_parts_of_a_config(bench: edited.Edited, tmp_path: Path, key: str) -> None:
    """Whatever is in place of a part of a config, a command ends with an answer or one message."""
    folder = tmp_path / "model"
    shutil.copytree(bench.work / "gpt2", folder)
    config = json.loads((folder / "config.json").read_text())
    for value in ({}, [], 3, {"text_config": {}}):
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        assert _run(["behaviour", str(folder), "--sequences", "1", "--length", "4"]) in (0, 2)
        assert _run(["info", str(folder)]) in (0, 2)


def test_the_hash_covers_names_types_shapes_bytes_and_metadata() -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2, np.int32)}
    first = content_hash(arrays, {"k": [1, {"x": None}]})
    assert first == content_hash({"b": arrays["b"], "a": arrays["a"].copy(order="F")}, {"k": [1, {"x": None}]})
    others: list[tuple[Tensors, Head]] = [
        ({**arrays, "a": arrays["a"].reshape(3, 2)}, {"k": [1, {"x": None}]}),
        ({**arrays, "b": np.zeros(2, np.float32)}, {"k": [1, {"x": None}]}),
        ({"a": arrays["a"], "c": arrays["b"]}, {"k": [1, {"x": None}]}),
        ({**arrays, "a": arrays["a"] + 1}, {"k": [1, {"x": None}]}),
        (arrays, {"k": [1, {"x": 0}]}),
    ]
    assert len({first, *(content_hash(*other) for other in others)}) == 6
