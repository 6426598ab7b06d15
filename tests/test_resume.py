"""Runs that are stopped, killed, doubled or changed: nothing is lost, nothing is half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import headspan as hs
from headspan.scoring import run as scoring
from headspan.scoring.run import score

SCORE = [sys.executable, "-m", "headspan", "score"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small GPT-2 checkpoint whose Procrustes scores make many tiles."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    d, layers = 64, 8
    tensors = {}
    for i in range(layers):
        for name, shape in {"c_attn": (d, 3 * d), "c_proj": (d, d)}.items():
            tensors[f"h.{i}.attn.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
        tensors[f"h.{i}.ln_1.weight"] = np.ones(d, np.float32)
        tensors[f"h.{i}.ln_1.bias"] = np.zeros(d, np.float32)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        f'{{"model_type": "gpt2", "n_layer": {layers}, "n_head": 8, "n_embd": {d}, "vocab_size": 10}}'
    )
    return folder


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "model")


def same(a: Path, b: Path) -> bool:
    first, second = hs.load(a), hs.load(b)
    return first.arrays.keys() == second.arrays.keys() and all(
        np.array_equal(first[key].values, second[key].values, equal_nan=True) for key in first.arrays
    )


def test_a_stopped_run_goes_on(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, out = hs.open(checkpoint), tmp_path / "r.safetensors"
    real, done = scoring.compute_tile, []

    def stop_after_four(*args, **kwargs):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(args[2].name)
        return real(*args, **kwargs)

    monkeypatch.setattr(scoring, "compute_tile", stop_after_four)
    with pytest.raises(KeyboardInterrupt):
        score(weights, ["pk", "procrustes"], out=out)
    assert not out.exists() and len(list((tmp_path / "r.safetensors.partial").rglob("*.safetensors"))) == 4

    again = []
    monkeypatch.setattr(scoring, "compute_tile", lambda *a, **k: again.append(a[2].name) or real(*a, **k))
    said: list[str] = []
    score(weights, ["pk", "procrustes"], out=out, say=said.append)
    assert not set(again) & set(done) and any("4 of" in s for s in said)
    assert files(tmp_path) == ["r.safetensors"]
    score(weights, ["pk", "procrustes"], out=tmp_path / "whole.safetensors")
    assert same(out, tmp_path / "whole.safetensors")


def test_a_damaged_tile_is_computed_again(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import save_file

    weights, out = hs.open(checkpoint), tmp_path / "r.safetensors"
    real = scoring.compute_tile

    def stop_at_procrustes(*args, **kwargs):
        if args[2].metric == "procrustes":
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(scoring, "compute_tile", stop_at_procrustes)
    with pytest.raises(KeyboardInterrupt):
        score(weights, ["pk", "cs", "procrustes"], "OK", out=out)
    kept = sorted((tmp_path / "r.safetensors.partial").rglob("*.safetensors"))
    save_file({"O0-K0": np.zeros((2, 2))}, kept[0])  # well-formed, but of another shape
    kept[1].write_bytes(b"junk")
    monkeypatch.setattr(scoring, "compute_tile", real)
    score(weights, ["pk", "cs", "procrustes"], "OK", out=out)
    score(weights, ["pk", "cs", "procrustes"], "OK", out=tmp_path / "whole.safetensors")
    assert same(out, tmp_path / "whole.safetensors")


def test_a_changed_plan_starts_anew_and_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, out = hs.open(checkpoint), tmp_path / "r.safetensors"
    real = scoring.compute_tile

    def fail_on_second(*args, **kwargs):
        if args[2].number == 1:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(scoring, "compute_tile", fail_on_second)
    with pytest.raises(KeyboardInterrupt):
        score(weights, "procrustes", out=out)
    monkeypatch.setattr(scoring, "compute_tile", real)
    said: list[str] = []
    result = score(weights, "procrustes", "flow", out=out, say=said.append)
    assert any("another plan or model" in s for s in said)
    assert set(map(str, result.pairings)) == {"OQ", "OK", "OV"} and files(tmp_path) == ["r.safetensors"]


@pytest.mark.slow
def test_kill_at_any_moment_then_run_again(checkpoint: Path, tmp_path: Path) -> None:
    command = [*SCORE, str(checkpoint), "--metric", "all"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole, out = tmp_path / "whole.safetensors", tmp_path / "r.safetensors"
    started = time.monotonic()
    subprocess.run([*command, "--out", str(whole)], check=True, env=environment, capture_output=True)
    usual = time.monotonic() - started
    kills = 0
    for share in (0.35, 0.5, 0.65, 0.8, 0.9):
        process = subprocess.Popen(
            [*command, "--out", str(out)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=usual * share)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        if out.exists():
            assert same(out, whole)  # complete, or not there at all
            out.unlink()
    assert kills > 0
    subprocess.run([*command, "--out", str(out)], check=True, env=environment, capture_output=True)
    assert same(out, whole)


@pytest.mark.slow
def test_two_runs_to_one_output(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.safetensors"
    command = [*SCORE, str(checkpoint), "--metric", "all", "--out", str(out)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    messages = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], messages
    score(hs.open(checkpoint), "all", out=tmp_path / "alone.safetensors")
    assert same(out, tmp_path / "alone.safetensors")


def test_a_model_changed_during_the_run_is_noticed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, out = hs.open(checkpoint), tmp_path / "r.safetensors"
    real = scoring.compute_tile

    def touch(*args, **kwargs):
        result = real(*args, **kwargs)
        path = checkpoint / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return result

    monkeypatch.setattr(scoring, "compute_tile", touch)
    with pytest.raises(hs.HeadspanError, match="changed"):
        score(weights, "pk", "flow", out=out)
    assert not out.exists()


def test_unwritable_places_are_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hs.HeadspanError, match="cannot write"):
        score(hs.open(checkpoint), "pk", "OK", out=tmp_path / "file" / "r.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(hs.HeadspanError, match="cannot write"):
        score(hs.open(checkpoint), "pk", "OK", out=tmp_path / "folder")


@pytest.mark.slow
def test_disk_full_leaves_nothing_half_written(checkpoint: Path, tmp_path: Path) -> None:
    """A file-size limit stands for a full disk: the write fails with the same kind of error."""
    out = tmp_path / "r.safetensors"
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
        "from headspan.cli import main; sys.argv = ['headspan', *sys.argv[1:]]; main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", limited, "score", str(checkpoint), "--out", str(out)], capture_output=True, text=True
    )
    assert run.returncode == 2 and "cannot write" in run.stderr and "Traceback" not in run.stderr
    assert not out.exists()
