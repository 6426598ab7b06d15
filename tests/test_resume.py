"""Runs that are stopped, killed, doubled or changed: nothing is lost, nothing is half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from headspan.models.weights import AttentionWeights
from headspan.scoring import run as scoring
from headspan.scoring import tiles
from headspan.scoring.run import score
from notices import noticed

SCORE = [sys.executable, "-m", "headspan", "score"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small GPT-2 checkpoint whose Procrustes scores make many tiles."""
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


def test_a_stopped_run_continues(
    checkpoint: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert not out.exists() and len(list(cache.rglob("*.safetensors"))) == 4

    again = []
    monkeypatch.setattr(scoring, "compute_tile", lambda *a, **k: again.append(a[2].name) or real(*a, **k))
    with noticed() as said:
        score(weights, ["pk", "procrustes"], out=out)
    assert not set(again) & set(done) and any("4 of" in s for s in said)
    assert files(tmp_path) == ["r.safetensors"] and not list(cache.rglob("*.safetensors"))
    score(weights, ["pk", "procrustes"], out=tmp_path / "whole.safetensors")
    assert same(out, tmp_path / "whole.safetensors")


def stopped_before(similarity: str, weights: AttentionWeights, out: Path, cache: Path, **options) -> list[Path]:
    """The kept tiles of a run that was stopped when it came to a similarity."""
    real = scoring.compute_tile

    def stop(*args, **kwargs):
        if args[2].metric == similarity:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "compute_tile", stop)
        with pytest.raises(KeyboardInterrupt):
            score(weights, out=out, **options)
    return sorted(cache.rglob("*.safetensors"))


def flip(tile: Path, bit: int) -> None:
    content = bytearray(tile.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    tile.write_bytes(content)


def forge(tile: Path, change: Callable[[np.ndarray], np.ndarray], kind: str = "f") -> None:
    """A tile with other scores, or ranks, and a hash that fits them."""
    from safetensors.numpy import load_file

    raw = tile.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    about = json.loads(header["__metadata__"]["tile"])
    arrays = {name: change(a) if a.dtype.kind == kind else a for name, a in load_file(tile).items()}
    tile.write_bytes(tiles._sealed(arrays, about["plan"], about["tile"]))


def swap(first: Path, second: Path) -> None:
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def become(tile: Path, make: Callable[[Path], object]) -> None:
    tile.unlink()
    make(tile)


DAMAGE: dict[str, Callable[[list[Path]], object]] = {
    "a bit of the header": lambda kept: flip(kept[0], 8 * 20),
    "a bit of the hash": lambda kept: flip(kept[0], 8 * (kept[0].read_bytes().index(b"digest") + 20)),
    "a bit of the numbers": lambda kept: flip(kept[0], -3),
    "swapped": lambda kept: swap(kept[0], kept[1]),
    "of the right form, by another": lambda kept: save_file({"O0-K0": np.zeros((64, 64))}, kept[0]),
    "cut short": lambda kept: kept[0].write_bytes(kept[0].read_bytes()[:-8]),
    "longer": lambda kept: kept[0].write_bytes(kept[0].read_bytes() + b"x"),
    "empty": lambda kept: kept[0].write_bytes(b""),
    "junk": lambda kept: kept[0].write_bytes(b"\xff" * 100),
    "a number that is not one": lambda kept: forge(kept[0], lambda a: np.full_like(a, np.nan)),
    "infinite": lambda kept: forge(kept[0], lambda a: np.where(np.isnan(a), a, np.inf)),
    "beyond the largest score": lambda kept: forge(kept[0], lambda a: a + 100),
    "negative": lambda kept: forge(kept[0], lambda a: a - 100),
    "numbers where there are no pairs": lambda kept: forge(kept[0], lambda a: np.nan_to_num(a)),
    "of another shape": lambda kept: forge(kept[0], lambda a: a[1:]),
    "integers": lambda kept: forge(kept[0], lambda a: np.nan_to_num(a).astype(np.int64)),
    "ranks below 0": lambda kept: forge(kept[0], lambda a: a - 100, "i"),
    "ranks of other heads": lambda kept: forge(kept[0], lambda a: a[1:], "i"),
    "ranks of another kind": lambda kept: forge(kept[0], lambda a: a.astype(np.int64), "i"),
    "a pipe": lambda kept: become(kept[0], os.mkfifo),
    "a directory": lambda kept: become(kept[0], Path.mkdir),
    "a link to another tile": lambda kept: become(kept[0], lambda path: path.symlink_to(kept[1])),
    "a link to a device": lambda kept: become(kept[0], lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_tile_is_computed_again(damage: str, checkpoint: Path, tmp_path: Path, cache: Path) -> None:
    weights, out = hs.open(checkpoint), tmp_path / "r.safetensors"
    options = {"metric": ["pk", "cs", "procrustes"], "pairing": "OK"}
    kept = stopped_before("procrustes", weights, out, cache, **options)
    assert len(kept) == 2
    DAMAGE[damage](kept)
    with noticed() as said:
        score(weights, out=out, **options)
    wrong = [sentence for sentence in said if "computed again" in sentence]
    assert len(wrong) == (2 if damage == "swapped" else 1)
    whole = score(weights, **options)
    for key in whole.arrays:
        np.testing.assert_array_equal(hs.load(out)[key].values, whole[key].values)


def test_a_large_tile_with_a_head_of_rank_0_is_taken_over(tmp_path: Path, cache: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {role: rng.normal(size=(4, 100, 8, 1)) for role in "QKVO"}
    arrays["O"][0, 0] = 0
    weights, out = hs.open(arrays), tmp_path / "r.safetensors"
    options = {"metric": ["pk", "cs"], "pairing": "OK"}
    (kept,) = stopped_before("cs", weights, out, cache, **options)
    assert kept.stat().st_size > 1.2e6
    with noticed() as said:
        found = score(weights, out=out, **options)
    assert found.ranks("O").tolist() == [0] + [1] * 399
    assert "1 of 2 tiles are done" in said[0] and not any("computed again" in sentence for sentence in said)


def test_any_bit_of_a_tile_counts() -> None:
    """Every single-bit change of a small tile is noticed."""
    rng = np.random.default_rng(0)
    sealed = tiles._sealed({"O0-K0": rng.random((2, 3)), "rank-O0": np.arange(2, dtype=np.int32)}, "plan", "pk-00000")
    assert set(tiles._opened(sealed, "plan", "pk-00000")) == {"O0-K0", "rank-O0"}
    for bit in range(8 * len(sealed)):
        content = bytearray(sealed)
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"it is|its content"):
            tiles._opened(bytes(content), "plan", "pk-00000")
    for plan, name in (("other", "pk-00000"), ("plan", "pk-00001")):
        with pytest.raises(ValueError, match="another tile"):
            tiles._opened(sealed, plan, name)


def test_nothing_of_the_users_is_removed(checkpoint: Path, tmp_path: Path, cache: Path) -> None:
    """Folders that look like unfinished work, links to the user's folders, old work that another run holds."""
    weights, out = hs.open(checkpoint), tmp_path / "r.safetensors"
    mine = tmp_path / "mine"
    (mine / "deep").mkdir(parents=True)
    (mine / "pk-00000.safetensors").write_text("precious")
    (mine / "deep" / "thesis.tex").write_text("precious")
    partial = Path(f"{out}.partial")  # where version 0.1 kept its tiles
    partial.mkdir()
    (partial / "holiday").mkdir()
    (partial / "link").symlink_to(mine)
    kept = stopped_before("procrustes", weights, out, cache, metric=["pk", "procrustes"], pairing="OK")
    (kept[0].parent / "notes.txt").write_text("precious")
    unfinished = kept[0].parents[1]
    (unfinished / f"{'a' * 16}-{'b' * 16}").symlink_to(mine)
    unmarked = unfinished / f"{'c' * 16}-{'d' * 16}"
    unmarked.mkdir()
    (unmarked / "pk-00000.safetensors").write_text("precious")
    for path in (unmarked, unfinished / f"{'a' * 16}-{'b' * 16}"):
        os.utime(path, (0, 0), follow_symlinks=False)
    before = {p: p.read_text() for p in tmp_path.rglob("*") if p.is_file() and "model" not in p.parts}
    score(weights, ["pk", "procrustes"], "OK", out=out)
    assert {p: p.read_text() for p in before} == before
    assert (unmarked / "pk-00000.safetensors").read_text() == "precious"
    assert (kept[0].parent / "notes.txt").exists() and not kept[0].exists()
    assert (partial / "holiday").is_dir() and (partial / "link").is_symlink()


def test_a_folder_in_the_way_is_not_used(checkpoint: Path, tmp_path: Path, cache: Path) -> None:
    weights, out = hs.open(checkpoint), tmp_path / "r.safetensors"
    store = tiles.TileStore(out, "key")
    mine = tmp_path / "mine"
    mine.mkdir()
    store.folder.parent.mkdir(parents=True)
    store.folder.symlink_to(mine)
    with noticed() as said, tiles.TileStore(out, "key") as used:
        used.save("pk-00000", {"O0-K0": np.zeros((2, 2))})
        assert used.load("pk-00000") is None
    assert len(said) == 1 and "not made by headspan" in said[0]
    assert store.folder.is_symlink() and not list(mine.iterdir())
    assert score(weights, "pk", "OK", out=out).metrics == ("pk",)


def test_old_work_goes_but_not_while_it_is_held(tmp_path: Path, cache: Path) -> None:
    def left(key: str) -> tiles.TileStore:
        store = tiles.TileStore(tmp_path / "r.safetensors", key)
        with suppress(KeyboardInterrupt), store:
            store.save("pk-00000", {"O0-K0": np.zeros((2, 2))})
            raise KeyboardInterrupt
        return store

    young, old, held = left("young"), left("old"), left("held")
    day = 24 * 3600
    for store, days in ((young, 29.5), (old, 30.5)):
        os.utime(store.folder, (time.time() - days * day,) * 2)
    with held:
        os.utime(held.folder, (0, 0))
        with tiles.TileStore(tmp_path / "other.safetensors", "key"):
            pass
        assert young.folder.exists() and held.folder.exists() and not old.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")
def test_looking_for_unfinished_runs_leaves_no_file_open(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "r.safetensors"
    with suppress(KeyboardInterrupt), tiles.TileStore(out, "one") as first:
        first.save("pk-00000", {"O0-K0": np.zeros((2, 2))})
        raise KeyboardInterrupt
    before = os.listdir("/proc/self/fd")
    with tiles.TileStore(out, "another") as store:
        assert store.other_runs() == [first.folder.name]
        (store.folder.parent / "notes").mkdir()
        assert store.other_runs() == [first.folder.name]
    assert os.listdir("/proc/self/fd") == before


def test_a_cache_that_cannot_be_used(checkpoint: Path, tmp_path: Path, cache: Path) -> None:
    """The run continues without saving its tiles and reports it once."""
    weights, out = hs.open(checkpoint), tmp_path / "r.safetensors"
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")
    with noticed() as said:
        score(weights, ["pk", "procrustes"], "OK", out=out)
    assert sum("cannot be saved" in sentence for sentence in said) == 1 and out.exists()
    assert any("(Not a directory)" in sentence or "(File exists)" in sentence for sentence in said)


def test_a_changed_plan_starts_again_with_a_message(
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
    with noticed() as said:
        result = score(weights, "procrustes", "flow", out=out)
    assert any("another plan or model" in s for s in said)
    assert set(map(str, result.pairings)) == {"OQ", "OK", "OV"} and files(tmp_path) == ["r.safetensors"]
    said.clear()
    with noticed() as said:
        score(weights, "pk", "OK", out=tmp_path / "another.safetensors")
    assert said == []  # an unfinished run to another file is not reported


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
    """A file-size limit simulates a full disk: the write fails with the same kind of error."""
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
