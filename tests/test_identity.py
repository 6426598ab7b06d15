"""What identifies a model changes with every byte that is read, and nothing of two models is ever mixed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import headspan as hs
from headspan import cli
from headspan.checkpoints.untrusted import Stamp
from headspan.results.identity import same_model
from headspan.scoring.run import score
from headspan.vocabulary.errors import HeadspanError

LAYERS, HEADS, D = 6, 4, 32
CONFIG = {"model_type": "gpt2", "n_layer": LAYERS, "n_head": HEADS, "n_embd": D, "vocab_size": 11}
QUERY = "h.3.attn.c_attn.weight"


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    found = {"wte.weight": random.normal(size=(11, D)).astype(np.float32)}
    for i in range(LAYERS):
        for name, shape in {"c_attn": (D, 3 * D), "c_proj": (D, D)}.items():
            found[f"h.{i}.attn.{name}.weight"] = random.normal(size=shape).astype(np.float32)
            found[f"h.{i}.attn.{name}.bias"] = random.normal(size=shape[1]).astype(np.float32)
        found[f"h.{i}.ln_1.weight"] = random.normal(size=D).astype(np.float32)
        found[f"h.{i}.ln_1.bias"] = random.normal(size=D).astype(np.float32)
    return found | {"ln_f.weight": np.ones(D, np.float32), "ln_f.bias": np.zeros(D, np.float32)}


def edited() -> dict[str, np.ndarray]:
    """The same model with one number of one head changed."""
    found = tensors()
    found[QUERY][5, 7] += 1
    return found


def write_safetensors(folder: Path, content: dict[str, np.ndarray]) -> Path:
    save_file(content, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, content: dict[str, np.ndarray]) -> Path:
    names = sorted(content)
    shards = {f"model-{n}-of-2.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    for shard, held in shards.items():
        save_file({name: content[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_torch(folder: Path, content: dict[str, np.ndarray], zipped: bool = True) -> Path:
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(array) for name, array in content.items()}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return folder


def write_old_torch(folder: Path, content: dict[str, np.ndarray]) -> Path:
    return write_torch(folder, content, zipped=False)


def write_gguf(folder: Path, content: dict[str, np.ndarray]) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(folder / "m.gguf", "gpt2")
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_embedding_length(D)
    names = {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_1": "attn_norm"}
    for name, array in content.items():
        parts = name.split(".")
        if parts[0] == "h":
            stem = names[".".join(parts[2:-1])]
            stored = array.T if array.ndim == 2 else array
            writer.add_tensor(f"blk.{parts[1]}.{stem}.{parts[-1]}", np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


WRITERS: dict[str, Callable[[Path, dict[str, np.ndarray]], Path]] = {
    "safetensors": write_safetensors,
    "sharded": write_sharded,
    "torch": write_torch,
    "old torch": write_old_torch,
    "gguf": write_gguf,
}


def make(folder: Path, kind: str = "safetensors", content: dict[str, np.ndarray] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return WRITERS[kind](folder, tensors() if content is None else content)


def overwrite_in_place(folder: Path, other: Path) -> None:
    """Give every file of a folder the bytes of another folder's: same inode, same size, times set back."""
    for path in folder.iterdir():
        before, content = path.stat(), (other / path.name).read_bytes()
        assert len(content) == before.st_size
        with path.open("r+b") as file:
            file.write(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns


def same(a: hs.Scores, b: hs.Scores) -> bool:
    return a.arrays.keys() == b.arrays.keys() and all(
        np.array_equal(a.arrays[key], b.arrays[key], equal_nan=True) for key in a.arrays
    )


@pytest.mark.parametrize("kind", WRITERS)
def test_killed_run_edit_and_the_same_command(tmp_path: Path, kind: str) -> None:
    """One head is edited in place, its time set back: no tile of the old model is taken over."""
    model = make(tmp_path / "model", kind)
    other = make(tmp_path / "other", kind, edited())
    out = tmp_path / "r.safetensors"
    slow = (  # die in the middle: after three tiles are on disk
        "import os, signal, headspan as hs\nfrom headspan.scoring import run\n"
        "real, done = run.compute_tile, []\n"
        "def tile(*a, **k):\n"
        "    if len(done) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    done.append(1); return real(*a, **k)\n"
        "run.compute_tile = tile\n"
        f"run.score(hs.open({str(model)!r}), ['procrustes'], 'flow', out={str(out)!r})"
    )
    killed = subprocess.run([sys.executable, "-c", slow], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    overwrite_in_place(tmp_path / "model", tmp_path / "other")
    again = score(hs.open(model), ["procrustes"], "flow", out=out)
    clean = score(hs.open(other), ["procrustes"], "flow")
    assert same(again, clean)
    assert same(hs.load(out), clean)
    assert not same(again, score(hs.open(make(tmp_path / "first", kind)), ["procrustes"], "flow"))


@pytest.mark.parametrize("kind", WRITERS)
def test_every_tensor_that_is_read_counts(tmp_path: Path, kind: str) -> None:
    first = hs.open(make(tmp_path / "a", kind)).fingerprint()
    assert hs.open(make(tmp_path / "b", kind)).fingerprint() == first
    seen = {first}
    read = [n for n in tensors() if n != "wte.weight" and not (kind == "gguf" and n.startswith("ln_f"))]
    for name in read[:: 1 if kind == "safetensors" else 7]:
        content = tensors()
        flat = content[name].reshape(-1)
        flat[-1] = np.nextafter(flat[-1], np.float32(9))  # one bit
        seen.add(hs.open(make(tmp_path / "c", kind, content)).fingerprint())
    assert len(seen) == 1 + len(read[:: 1 if kind == "safetensors" else 7])


def test_config_counts(tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    first = hs.open(path)
    (path / "config.json").write_text(json.dumps(CONFIG | {"layer_norm_epsilon": 1e-6}))
    assert hs.open(path).fingerprint() != first.fingerprint()
    assert hs.open(path).attention_hash() == first.attention_hash()


def test_one_model_in_files_of_several_kinds_has_one_attention_hash(tmp_path: Path) -> None:
    kinds = ("safetensors", "sharded", "torch", "old torch")
    found = {hs.open(make(tmp_path / kind.replace(" ", ""), kind)).attention_hash() for kind in kinds}
    prefixed = {f"transformer.{name}": array for name, array in tensors().items()}
    assert found == {hs.open(make(tmp_path / "p", content=prefixed)).attention_hash()}
    assert len(found) == 1


def test_scales_of_float8_count(tmp_path: Path) -> None:
    import ml_dtypes

    from headspan.checkpoints.opening import open_source

    def fingerprint(scale: float) -> str:
        x = np.ones((4, 4)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tobytes()
        header = {
            "x": {"dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [0, 16]},
            "x_scale_inv": {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]},
        }
        raw = json.dumps(header).encode()
        data = len(raw).to_bytes(8, "little") + raw + x + np.float32(scale).tobytes()
        (tmp_path / "model.safetensors").write_bytes(data)
        (tmp_path / "config.json").write_text("{}")
        return open_source(tmp_path).fingerprint(["x"])

    assert fingerprint(1.0) != fingerprint(2.0)
    assert fingerprint(1.0) == fingerprint(1.0)


def test_tensors_in_memory_are_hashed_whole_and_every_time() -> None:
    content = tensors()
    weights = hs.open((content, CONFIG))
    first = weights.fingerprint()
    content[QUERY][5, 7] += 1
    assert weights.fingerprint() != first
    assert weights.fingerprint() == hs.open((edited(), CONFIG)).fingerprint()


def test_live_models_are_hashed_whole() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG, n_positions=8))
    first = hs.open(model).fingerprint()
    with torch.no_grad():
        model.transformer.h[3].attn.c_attn.weight[5, 7] += 1
    assert hs.open(model).fingerprint() != first


@pytest.mark.parametrize("kind", ["arrays", "state dict"])
def test_numbers_in_memory_that_change_during_a_run_are_noticed(kind: str) -> None:
    random = np.random.default_rng(0)
    content = tensors() if kind == "state dict" else {r: random.normal(size=(3, 2, 16, 4)) for r in "QKVO"}
    weights = hs.open((content, CONFIG) if kind == "state dict" else content)

    def change(done: int, total: int) -> None:
        content[QUERY if kind == "state dict" else "Q"][1, 1] += 1

    with pytest.raises(HeadspanError, match="changed while it was in use"):
        score(weights, "pk", "flow", progress=change)


@pytest.mark.parametrize("kind", WRITERS)
def test_an_edit_between_opening_and_reading_is_noticed(tmp_path: Path, kind: str) -> None:
    model = make(tmp_path / "model", kind)
    make(tmp_path / "other", kind, edited())
    weights = hs.open(model)
    weights.fingerprint()
    overwrite_in_place(tmp_path / "model", tmp_path / "other")
    for use in (lambda: weights.read("Q", 3), weights.fingerprint, weights.check_unchanged):
        with pytest.raises(HeadspanError, match="changed while it was in use"):
            use()


def test_young_stamps_are_not_relied_on() -> None:
    now = 10**9 * 1000 + 123
    assert Stamp(1, now, now, 1, taken_ns=now + 10**6).young
    assert not Stamp(1, now, now, 1, taken_ns=now + 10**9).young
    whole_second = 10**9 * 1000  # a file system that counts seconds
    assert Stamp(1, whole_second, whole_second, 1, taken_ns=whole_second + 10**9).young
    assert Stamp(1, now, now, 1, taken_ns=now - 10**9).young  # the clocks of two machines


def test_an_edit_that_a_young_stamp_hides_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = hs.open(make(tmp_path / "model"))
    weights.fingerprint()
    make(tmp_path / "other", content=edited())
    overwrite_in_place(tmp_path / "model", tmp_path / "other")
    monkeypatch.setattr(Stamp, "__eq__", lambda self, other: True)  # a clock that did not tick
    monkeypatch.setattr(Stamp, "young", True)
    with pytest.raises(HeadspanError, match="changed while it was in use"):
        weights.check_unchanged()


def test_hub_snapshot_whose_blob_was_edited(tmp_path: Path) -> None:
    """The name of a commit says nothing about what is on this disk."""
    make(tmp_path / "model")
    make(tmp_path / "other", content=edited())
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    shutil.copytree(tmp_path / "model", blobs)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    first = hs.open(snapshot).fingerprint()
    overwrite_in_place(blobs, tmp_path / "other")
    assert hs.open(snapshot).fingerprint() != first


# What is put together


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, the same with one head edited, and a result of the first."""
    folder = tmp_path_factory.mktemp("pair")
    model, other = make(folder / "model"), make(folder / "other", content=edited())
    score(hs.open(model), "pk", "flow", out=folder / "r.safetensors")
    return model, other, folder / "r.safetensors"


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code and messages of a command."""

    def run(*words: object) -> tuple[int, str]:
        code = cli._run(list(map(str, words)))
        return code, " ".join(capsys.readouterr().err.split())

    return run


def test_report_and_figures_refuse_an_edited_model(pair, run: Run, tmp_path: Path) -> None:
    model, other, result = pair
    for command, out in (("report", "p.html"), ("figures", "f")):
        code, messages = run(command, result, "--weights", other, "--out", tmp_path / out)
        assert code == 2 and "different models" in messages
    code, messages = run("report", result, "--weights", model, "--out", tmp_path / "p.html")
    assert code == 0, messages


def test_results_of_version_01_are_noted_not_refused(pair) -> None:
    from headspan.explorer.report import report

    _, other, result = pair
    scores = hs.load(result)
    scores.provenance["fingerprint"] = "ab" * 32
    del scores.provenance["attention_hash"]
    page = report(scores, hs.open(other))
    assert any("headspan 0.1" in note for note in page.payload["notes"])


def test_same_weights_under_another_config_are_noted(pair, tmp_path: Path) -> None:
    model, _, result = pair
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text(json.dumps(CONFIG | {"layer_norm_epsilon": 1e-6}))
    made, given = hs.load(result).provenance, hs.open(tmp_path / "copy").provenance
    assert "same attention weights" in (same_model(made, given, "a", "b") or "")
    with pytest.raises(HeadspanError, match="different models"):  # folded scores depend on the norms too
        same_model(made | {"folding": "folded"}, given | {"folding": "folded"}, "a", "b")


def test_behaviour_is_not_stored_in_a_result_of_another_model(run: Run, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG, n_positions=64))
    model.save_pretrained(tmp_path / "model")
    score(hs.open(tmp_path / "model"), "pk", "flow", out=tmp_path / "r.safetensors")
    options = ("--sequences", 2, "--length", 5)
    into = ("--into", tmp_path / "r.safetensors")
    code, messages = run("behaviour", tmp_path / "model", *options, *into, "--out", tmp_path / "b.json")
    assert code == 0, messages
    assert "behaviour" in hs.load(tmp_path / "r.safetensors").annotations
    with torch.no_grad():
        model.transformer.h[3].attn.c_attn.weight[5, 7] += 1
    model.save_pretrained(tmp_path / "other")
    code, messages = run("behaviour", tmp_path / "other", *options, *into)
    assert code == 2 and "different models" in messages
    score(hs.open(tmp_path / "other"), "pk", "flow", out=tmp_path / "o.safetensors")
    for command, out in (("report", "p.html"), ("figures", "f")):
        code, messages = run(
            command, tmp_path / "o.safetensors", "--behaviour", tmp_path / "b.json", "--out", tmp_path / out
        )
        assert code == 2 and "different models" in messages


def test_head_scores_of_the_demo_are_only_for_the_demo() -> None:
    from headspan.explorer.report import report

    scores = score(hs.open("demo"), "pk", "flow")
    assert report(scores).payload["behaviour"]
    scores.provenance["fingerprint"] = "2:" + "ab" * 32
    assert not report(scores).payload["behaviour"]


def test_labels_of_gpt2_know_their_model(gpt2_dir: Path, tmp_path: Path) -> None:
    from headspan.results.labels import Labels

    labels = Labels.load("gpt2")
    assert labels.doubt(hs.open(gpt2_dir).provenance) is None
    content = load_file(gpt2_dir / "model.safetensors")
    content["h.5.attn.c_attn.weight"] = content["h.5.attn.c_attn.weight"].copy()
    content["h.5.attn.c_attn.weight"][100, 100] += 1e-3
    save_file(content, tmp_path / "model.safetensors")
    shutil.copy(gpt2_dir / "config.json", tmp_path)
    assert "may not apply" in (labels.doubt(hs.open(tmp_path).provenance) or "")
    assert Labels.from_pairs([("L0H0", "a")]).doubt({}) is None


def test_a_hash_is_taken_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headspan.checkpoints import safetensors_file

    path = make(tmp_path / "model")
    time.sleep(0.1)  # no young stamp
    real, seen = safetensors_file.SafetensorsFile.hash, []
    monkeypatch.setattr(
        safetensors_file.SafetensorsFile, "hash", lambda self, name: seen.append(name) or real(self, name)
    )
    score(hs.open(path), "pk", "flow")
    assert len(seen) == len(set(seen)) > 0
    assert "wte.weight" not in seen


def test_effects_are_not_attached_to_a_result_of_another_model(tmp_path: Path) -> None:
    from headspan.running.effects import Effects, attach
    from headspan.vocabulary.heads import Pairing

    one, other = (make(tmp_path / name, content=c) for name, c in (("one", tensors()), ("other", edited())))
    scores = hs.score(one, "pk", "OK")
    shape = scores["pk", "OK"].values.shape
    arrays = {("random", Pairing.parse("OK")): np.zeros(shape)}
    made = Effects(scores.ports, arrays, {}, np.zeros(shape[0]), model=hs.open(other).provenance)
    with pytest.raises(hs.HeadspanError, match="different models"):
        attach(scores, made)
    assert not scores.extra
    made.model = hs.open(one).provenance
    assert attach(scores, made) is None and scores.extra
