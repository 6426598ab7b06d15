"""Statistics of a run: sampling error, files, merging, and runs that are stopped, killed or doubled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import headspan as hs
from families import FAMILIES, build
from headspan.results.observations import Statistics, degrees, given_statistics
from headspan.running.observe import observe
from headspan.system.atomic import write_safetensors
from headspan.system.sealed_file import KEY, content_hash
from headspan.vocabulary.errors import HeadspanError, HeadspanWarning
from observation_oracle import MORE_TOKENS as TOKENS
from observation_oracle import exact_statistics, in_float64, observing

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    return in_float64(FAMILIES["qwen3"])


def same(a: Statistics, b: Statistics) -> None:
    assert a.arrays.keys() == b.arrays.keys()
    for name in a.arrays:
        np.testing.assert_array_equal(a.arrays[name], b.arrays[name], err_msg=name, strict=True)
    np.testing.assert_array_equal(a.counts, b.counts, strict=True)


# -- sampling ------------------------------------------------------------------------------------------------


def test_random_signs_are_unbiased(model: Any) -> None:
    """32 independent estimates of every entry: no mean is more than 4.5 standard errors from the exact value."""
    exact = exact_statistics(model, TOKENS[:3]).arrays
    drawn = [observe(model, tokens=TOKENS[:3], draws=4, seed=seed).arrays for seed in range(32)]
    for name in ("fisher/Q", "fisher/K"):
        values = np.stack([one[name] for one in drawn]).astype(float)
        error = values.std(0, ddof=1) / np.sqrt(len(values))
        assert (np.abs(values.mean(0) - exact[name]) < 4.5 * error).all()
        traces = values.trace(axis1=2, axis2=3)
        share = traces.std(0, ddof=1) / np.sqrt(len(values)) / exact[name].trace(axis1=1, axis2=2)
        assert share.max() < 0.06  # so that a wrong factor would be found


def test_the_error_falls_with_the_root_of_the_draws(model: Any) -> None:
    exact = exact_statistics(model, TOKENS[:3])

    def error(draws: int) -> float:
        found = observe(model, tokens=TOKENS[:3], draws=draws)
        shares = [
            np.square(found.arrays[name] - values).sum((1, 2)) / np.square(values).sum((1, 2))
            for name, values in exact.arrays.items()
            if name.startswith("fisher/")
        ]
        return float(np.sqrt(np.concatenate(shares).mean()))

    few, many = error(4), error(256)
    assert few / many == pytest.approx(8, rel=0.4) and many < 0.1


def test_seeds_change_the_signs_and_nothing_else(llama_stats: Statistics, llama_folder: Path) -> None:
    same(observe(llama_folder, tokens=TOKENS), llama_stats)
    other = observe(llama_folder, tokens=TOKENS, seed=1)
    for name, values in llama_stats.arrays.items():
        assert np.array_equal(values, other.arrays[name]) != name.startswith("fisher/")


def test_a_live_model_and_its_folder_give_the_same(llama_folder: Path, llama_stats: Statistics) -> None:
    live = observe(build(FAMILIES["llama"]), tokens=TOKENS)
    for name, values in llama_stats.arrays.items():
        np.testing.assert_allclose(live.arrays[name], values, rtol=1e-5, atol=1e-6 * np.abs(values).max())
    assert live.model["attention_hash"] == llama_stats.model["attention_hash"]


def test_what_is_recorded(llama_stats: Statistics, llama_folder: Path) -> None:
    assert llama_stats.tokens == sum(map(len, TOKENS)) and llama_stats.inputs[0]["kind"] == "tokens"
    assert llama_stats.counts.tolist() == [6, 6, 5, 3, 2, 1] and degrees(llama_stats.counts) == 5 + 5 + 4 + 2 + 1
    assert llama_stats.protocol == {"seed": 0, "draws": 8, "bos": None, "dtype": "float32"}
    assert llama_stats.model["fingerprint"] == hs.open(llama_folder).provenance["fingerprint"]
    assert llama_stats.to_dict()["headspan"] == hs.__version__
    assert observe(llama_folder, tokens=TOKENS[:5]).inputs[0]["sha256"] != llama_stats.inputs[0]["sha256"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tokens": TOKENS[:1]}, "at least two"),
        ({"tokens": TOKENS[:1] * 3}, "the same"),
        ({"tokens": TOKENS, "random": True}, "random.*exclude"),
        ({"tokens": TOKENS, "length": 5}, "length"),
        ({"tokens": TOKENS, "draws": 0}, "Give 1 or more"),
        ({"text": "some text"}, "no tokenizer"),
    ],
)
def test_odd_input_is_refused(llama_folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(HeadspanError, match=reason):
        observe(llama_folder, **options)


# -- files ---------------------------------------------------------------------------------------------------


def test_saved_and_loaded_statistics_are_equal(llama_stats: Statistics, tmp_path: Path) -> None:
    place = saved(llama_stats, tmp_path / "s.safetensors")
    found = Statistics.load(place)
    assert found == llama_stats == hs.load(place)
    same(found, llama_stats)
    for name in ("inputs", "model", "protocol", "notes"):
        assert getattr(found, name) == getattr(llama_stats, name)
    assert found.ports.same_heads(llama_stats.ports) and found.ports.served_by == llama_stats.ports.served_by
    for role in "QKVO":
        np.testing.assert_array_equal(found.roots(role), llama_stats.roots(role))


def saved(stats: Statistics, place: Path) -> Path:
    stats.save(place)
    return place


Edit = Callable[[dict[str, Any], dict[str, np.ndarray]], object]


def rewritten(stats: Statistics, folder: Path, edit: Edit, *, seal: bool = True) -> Path:
    """A file of statistics that was changed, by someone who computed its hash again (``seal``) or did not."""
    place = saved(stats, folder / "s.safetensors")
    with safe_open(place, framework="numpy") as file:
        head = json.loads(file.metadata()[KEY])
        arrays = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
    edit(head, arrays)
    if seal:
        head["hash"] = content_hash(arrays, head)
    write_safetensors(place, arrays, {KEY: json.dumps(head)})
    return place


@pytest.mark.parametrize(
    "edit",
    [
        lambda head, arrays: arrays["arrays/fisher/Q"].__imul__(1.5),
        lambda head, arrays: head["inputs"][0].update(tokens=10**6),
        lambda head, arrays: head["protocol"].update(seed=9),
    ],
)
def test_an_edited_file_is_reported(llama_stats: Statistics, tmp_path: Path, edit: Edit) -> None:
    place = rewritten(llama_stats, tmp_path, edit, seal=False)
    with pytest.warns(HeadspanWarning, match="hash does not match"):
        found = Statistics.load(place)
    again = saved(found, tmp_path / "again.safetensors")
    with pytest.warns(HeadspanWarning, match="had been edited"):  # saving it again does not clean it
        Statistics.load(again)


def put(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    place = name if name == "counts" else f"arrays/{name}"
    return lambda head, arrays: arrays.__setitem__(place, change(arrays[place]))


def at(index: Any, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(a: np.ndarray) -> np.ndarray:
        a[index] = value
        return a

    return change


HOSTILE: dict[str, Edit] = {
    "another kind": lambda head, arrays: head.update(kind="scores"),
    "a newer schema": lambda head, arrays: head.update(schema=99),
    "a schema that is not a number": lambda head, arrays: head.update(schema="1"),
    "no schema": lambda head, arrays: head.pop("schema"),
    "no inputs": lambda head, arrays: head.pop("inputs"),
    "empty inputs": lambda head, arrays: head.update(inputs=[]),
    "inputs of another kind": lambda head, arrays: head.update(inputs={"tokens": 5}),
    "negative tokens": lambda head, arrays: head["inputs"][0].update(tokens=-5),
    "tokens as text": lambda head, arrays: head["inputs"][0].update(tokens="5"),
    "ports of another kind": lambda head, arrays: head.update(ports=[]),
    "a role missing": lambda head, arrays: head["ports"]["ports"].pop("V"),
    "a head that is none": lambda head, arrays: head["ports"]["ports"]["Q"].__setitem__(0, "nonsense"),
    "a head twice": lambda head, arrays: head["ports"]["ports"]["Q"].__setitem__(0, head["ports"]["ports"]["Q"][1]),
    "a head too few": lambda head, arrays: head["ports"]["ports"]["Q"].pop(),
    "a model of another kind": lambda head, arrays: head.update(model=3),
    "an array missing": lambda head, arrays: arrays.pop("arrays/fisher/K"),
    "counts missing": lambda head, arrays: arrays.pop("counts"),
    "an array too many": lambda head, arrays: (
        head["arrays"].update(more={"array": "arrays/more"}), arrays.update({"arrays/more": np.zeros(3, np.float32)})
    ),
    "an array of another shape": put("spread/O", lambda a: a[:, :-1]),
    "an array that is not square": put("fisher/Q", lambda a: a[:, :, :-1]),
    "a flat array": put("fisher/Q", lambda a: a.ravel()),
    "flat means": put("mean/O", lambda a: a.ravel()),
    "heads missing in an array": put("scale/V", lambda a: a[:-1]),
    "fewer positions": put("counts", lambda a: a[:-1]),
    "counts of two dimensions": put("counts", lambda a: a[:, None]),
    "float64": put("spread/O", lambda a: a.astype(np.float64)),
    "float16": put("variance/V", lambda a: a.astype(np.float16)),
    "whole numbers": put("scale/Q", lambda a: a.astype(np.int32)),
    "float counts": put("counts", lambda a: a.astype(np.float32)),
    "NaN": put("fisher/K", at((0, 1, 0), np.nan)),
    "infinity": put("mean/V", at((0, 0), np.inf)),
    "a negative diagonal": put("fisher/K", at((0, 1, 1), -1e-3)),
    "a negative variance": put("variance/V", at(0, -1e-3)),
    "a negative scale": put("scale/K", at(0, -1.0)),
    "a negative length": put("length/O", at(0, -1.0)),
    "a negative count": put("counts", at(0, -1)),
    "counts of one sequence": put("counts", lambda a: np.ones_like(a)),
    "not symmetric": put("fisher/Q", at((0, 0, 1), 1e3)),
    "not positive": put("spread/O", lambda a: at((0, 1, 0), 9.0)(at((0, 0, 1), 9.0)(a))),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(llama_stats: Statistics, tmp_path: Path, name: str) -> None:
    with pytest.raises(HeadspanError):
        Statistics.load(rewritten(llama_stats, tmp_path, HOSTILE[name]))


def test_other_files_are_refused(llama_stats: Statistics, llama_folder: Path, tmp_path: Path) -> None:
    place = saved(llama_stats, tmp_path / "s.safetensors")
    whole = place.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        place.write_bytes(whole[:length])
        with pytest.raises(HeadspanError):
            Statistics.load(place)
    place.write_bytes(b"not safetensors at all" * 10)
    with pytest.raises(HeadspanError, match="cannot be read"):
        Statistics.load(place)
    with pytest.raises(HeadspanError, match="not a headspan result"):
        Statistics.load(llama_folder / "model.safetensors")
    with pytest.raises(HeadspanError, match=r"missing\.safetensors.*hs\.observe"):
        given_statistics(tmp_path / "missing.safetensors")
    result = hs.score("demo", "pk", "OK", out=tmp_path / "result.safetensors") and tmp_path / "result.safetensors"
    with pytest.raises(HeadspanError, match="'statistics'"):
        Statistics.load(result)
    with pytest.raises(HeadspanError, match="'statistics'"):
        hs.Scores.load(saved(llama_stats, tmp_path / "t.safetensors"))


# -- merging -------------------------------------------------------------------------------------------------


def about_equal(ours: Statistics, theirs: Statistics) -> None:
    np.testing.assert_array_equal(ours.counts, theirs.counts)
    assert ours.tokens == theirs.tokens
    for name, values in theirs.arrays.items():
        np.testing.assert_allclose(ours.arrays[name], values, rtol=0, atol=1e-6 * np.abs(values).max(), err_msg=name)


@pytest.mark.parametrize("cut", [2, 3, 4])
def test_merged_statistics_are_those_of_one_run(llama_folder: Path, llama_stats: Statistics, cut: int) -> None:
    parts = [observe(llama_folder, tokens=part) for part in (TOKENS[:cut], TOKENS[cut:])]
    about_equal(Statistics.merge(*parts), llama_stats)
    about_equal(Statistics.merge(*reversed(parts)), llama_stats)


def test_merging_is_associative(llama_folder: Path, llama_stats: Statistics, tmp_path: Path) -> None:
    a, b, c = (observe(llama_folder, tokens=TOKENS[i : i + 2]) for i in (0, 2, 4))
    left = Statistics.merge(Statistics.merge(a, b), c)
    about_equal(left, Statistics.merge(a, Statistics.merge(b, c)))
    about_equal(left, Statistics.merge(a, b, c))
    about_equal(left, llama_stats)
    same(Statistics.load(saved(left, tmp_path / "s.safetensors")), left)
    same(Statistics.merge(a), a)
    assert [one["tokens"] for one in left.inputs] == [8, 5, 10] and left.model["fingerprint"] == a.model["fingerprint"]
    with pytest.raises(HeadspanError, match="at least one"):
        Statistics.merge()


def test_merging_refuses_the_same_input_and_other_models(llama_folder: Path, llama_stats: Statistics) -> None:
    with pytest.raises(HeadspanError, match="count twice"):
        Statistics.merge(llama_stats, llama_stats)
    rest = [[4, 5, 6], [6, 5, 4]]
    with pytest.raises(HeadspanError, match="count twice"):
        Statistics.merge(llama_stats, observe(llama_folder, tokens=rest), llama_stats)
    with pytest.raises(HeadspanError, match="different models"):  # of the same shape
        Statistics.merge(llama_stats, observe(build(FAMILIES["llama"], seed=1), tokens=rest))
    with pytest.raises(HeadspanError, match="different"):
        Statistics.merge(llama_stats, observe(build(FAMILIES["gpt2"]), tokens=rest))


# -- runs that end early -------------------------------------------------------------------------------------

RUN = """
import os, signal, sys
import headspan.running.observe
module = sys.modules["headspan.running.observe"]
module._SAVE_EVERY = -1.0
at, signum = int(sys.argv[3]), int(sys.argv[4])
tokens = {tokens}
module.observe(sys.argv[1], tokens=tokens, out=sys.argv[2],
               progress=lambda done, total: os.kill(os.getpid(), signum) if done == at else None)
"""


def run(folder: Path, out: Path, at: int = -1, signum: int = 0) -> subprocess.Popen[bytes]:
    """A process that observes, and is sent a signal when it comes to a sequence."""
    command = [sys.executable, "-c", RUN.format(tokens=TOKENS), str(folder), str(out), str(at), str(signum)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def continued(folder: Path, out: Path) -> tuple[Statistics, list[int]]:
    """Run again to the end; the progress it made."""
    seen: list[int] = []
    return observe(folder, tokens=TOKENS, out=out, progress=lambda done, total: seen.append(done)), seen


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kill -9 is of POSIX")
def test_a_killed_run_continues(llama_folder: Path, llama_stats: Statistics, tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "s.safetensors"
    process = run(llama_folder, out, 4, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not out.exists() and len(list(cache.rglob("*.safetensors"))) == 1
    found, seen = continued(llama_folder, out)
    assert seen == [3, 4, 5, 6]  # the fourth was finished but not yet saved
    same(found, llama_stats)
    same(Statistics.load(out), llama_stats)
    assert not list(cache.rglob("*.safetensors")) and [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def stopped(folder: Path, out: Path, at: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """A run stopped by Ctrl-C."""

    def stop(done: int, total: int) -> None:
        if done == at:
            raise KeyboardInterrupt

    given: dict[str, Any] = {"tokens": TOKENS} | options
    monkeypatch.setattr(observing, "_SAVE_EVERY", -1.0)
    with pytest.raises(KeyboardInterrupt):
        observe(folder, out=out, progress=stop, **given)


def test_a_stopped_run_continues(
    llama_folder: Path, llama_stats: Statistics, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s.safetensors"
    stopped(llama_folder, out, 3, monkeypatch)
    assert not out.exists()
    found, seen = continued(llama_folder, out)
    assert seen == [2, 3, 4, 5, 6]
    same(found, llama_stats)
    assert not list(cache.rglob("*.safetensors"))


def test_only_the_same_run_is_continued(
    llama_folder: Path, llama_stats: Statistics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s.safetensors"
    stopped(llama_folder, out, 3, monkeypatch, seed=1)
    stopped(llama_folder, out, 3, monkeypatch, draws=2)
    stopped(llama_folder, out, 3, monkeypatch, tokens=[*TOKENS[:5], [1, 2, 3]])
    other = tmp_path / "other"
    build(FAMILIES["llama"], seed=1).save_pretrained(other)
    stopped(other, out, 3, monkeypatch)
    found, seen = continued(llama_folder, out)
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    same(found, llama_stats)
    stopped(llama_folder, tmp_path / "t.safetensors", 3, monkeypatch)
    fresh: list[int] = []
    observe(
        llama_folder, tokens=TOKENS, out=tmp_path / "t.safetensors", resume=False,
        progress=lambda done, total: fresh.append(done),
    )  # fmt: skip
    assert fresh[0] == 0


@pytest.mark.parametrize("bit", [1000, 30_001, 80_003])
def test_damaged_work_is_not_continued(
    llama_folder: Path, llama_stats: Statistics, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, bit: int
) -> None:
    out = tmp_path / "s.safetensors"
    stopped(llama_folder, out, 3, monkeypatch)
    (state,) = cache.rglob("*.safetensors")
    content = bytearray(state.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    state.write_bytes(content)
    with pytest.warns(HeadspanWarning, match="content has changed"):
        found, seen = continued(llama_folder, out)
    assert seen[0] == 0
    same(found, llama_stats)


def test_two_runs_to_one_file(llama_folder: Path, llama_stats: Statistics, tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "s.safetensors"
    both = [run(llama_folder, out) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    same(Statistics.load(out), llama_stats)
    assert not list(cache.rglob("*.safetensors")) and os.listdir(tmp_path) == ["s.safetensors"]


def test_outputs_are_protected(llama_folder: Path, llama_stats: Statistics, tmp_path: Path) -> None:
    with pytest.raises(HeadspanError, match="one of the input files"):
        observe(llama_folder, tokens=TOKENS, out=llama_folder / "model.safetensors")
    precious = tmp_path / "precious.safetensors"
    precious.write_bytes(b"mine")
    with pytest.raises(HeadspanError):
        observe(llama_folder, tokens=TOKENS, out=precious)
    assert precious.read_bytes() == b"mine"
