"""A real scheduler and real worker processes, which are killed, absent, or of another version."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import headspan as hs
from headspan.models.weights import AttentionWeights
from headspan.scoring import dask as dask_module
from headspan.scoring.run import score
from notices import noticed

distributed = pytest.importorskip("distributed")


class Cluster:
    """A scheduler and workers as a user starts them, each in its own process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, []
        file = folder / "scheduler.json"
        options = ["--port", "0", "--scheduler-file", str(file), "--no-dashboard", "--no-show"]
        self.scheduler = self._start(["scheduler", *options])
        while not file.exists() or not file.read_text():
            assert self.scheduler.poll() is None
            time.sleep(0.05)
        self.address = json.loads(file.read_text())["address"]

    def worker(self, source: Path | None = None) -> subprocess.Popen[bytes]:
        environment = os.environ | ({"PYTHONPATH": str(source)} if source else {})
        options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(self.folder)]
        return self._start(["worker", self.address, *options], environment)

    def _start(self, arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-m", "dask", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet, cwd=self.folder)
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    made = Cluster(folder)
    yield made
    made.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_module, "_PATIENCE", 10.0)  # a third of it for one answer, also on a busy machine


OPTIONS = {"metric": ["procrustes"], "pairing": "flow"}


@pytest.fixture
def many_tiles(tmp_path: Path) -> AttentionWeights:
    """A checkpoint whose Procrustes scores make dozens of tiles."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    d, layers = 64, 12
    shapes = {"c_attn": (d, 3 * d), "c_proj": (d, d)}
    tensors = {
        f"h.{i}.attn.{name}.weight": rng.normal(size=shape).astype(np.float32)
        for i in range(layers)
        for name, shape in shapes.items()
    }
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        f'{{"model_type": "gpt2", "n_layer": {layers}, "n_head": 8, "n_embd": {d}, "vocab_size": 10}}'
    )
    return hs.open(folder)


def kept(cache: Path) -> int:
    return len(list(cache.rglob("*.safetensors")))


def after_one_tile(act) -> tuple[list[int], object]:
    called: list[int] = []

    def progress(done: int, total: int) -> None:
        if not called:
            called.append(done)
            act()

    return called, progress


@pytest.mark.slow
def test_a_worker_is_killed_and_the_other_does_its_tiles(
    cluster: Cluster, many_tiles: AttentionWeights, tmp_path: Path
) -> None:
    victim, _ = cluster.worker(), cluster.worker()
    called, progress = after_one_tile(lambda: victim.send_signal(signal.SIGKILL))
    there = score(many_tiles, **OPTIONS, dask=cluster.address, out=tmp_path / "r.safetensors", progress=progress)
    here = score(many_tiles, **OPTIONS)
    assert called
    for key in here.arrays:
        np.testing.assert_allclose(there[key].values, here[key].values, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["scheduler", "worker"])
def test_when_the_cluster_dies_finished_tiles_are_kept(
    who: str, cluster: Cluster, many_tiles: AttentionWeights, tmp_path: Path, cache: Path, impatient: None
) -> None:
    worker = cluster.worker()
    victim = cluster.scheduler if who == "scheduler" else worker
    called, progress = after_one_tile(lambda: victim.send_signal(signal.SIGKILL))
    sentence = "scheduler .* stopped answering" if who == "scheduler" else "has no workers"
    started = time.monotonic()
    with pytest.raises(hs.HeadspanError, match=sentence):
        score(many_tiles, **OPTIONS, dask=cluster.address, out=tmp_path / "r.safetensors", progress=progress)
    assert called and kept(cache) >= 1 and time.monotonic() - started < 60
    with noticed() as said:
        score(many_tiles, **OPTIONS, out=tmp_path / "r.safetensors")
    assert any("continuing an unfinished run" in s for s in said) and not kept(cache)


@pytest.mark.slow
def test_no_workers_or_workers_that_do_not_answer(
    cluster: Cluster, many_tiles: AttentionWeights, tmp_path: Path, impatient: None
) -> None:
    with pytest.raises(hs.HeadspanError, match="has no workers"):
        score(many_tiles, **OPTIONS, dask=cluster.address)
    worker = cluster.worker()
    _, progress = after_one_tile(lambda: worker.send_signal(signal.SIGSTOP))
    with pytest.raises(hs.HeadspanError, match="workers do not answer"):
        score(many_tiles, **OPTIONS, dask=cluster.address, progress=progress)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["version", "code", "later"])
def test_a_worker_of_another_version_is_refused(
    change: str, cluster: Cluster, many_tiles: AttentionWeights, tmp_path: Path
) -> None:
    """Before the run, or when it joins later and sends its first tile."""
    other = tmp_path / "other"
    shutil.copytree(Path(hs.__file__).parent, other / "headspan", ignore=shutil.ignore_patterns("__pycache__"))
    if change == "code":
        with (other / "headspan" / "scoring" / "metrics.py").open("a") as file:
            file.write("\n# another line\n")
    else:
        init = other / "headspan" / "__init__.py"
        init.write_text(init.read_text().replace(f'"{hs.__version__}"', '"0.0.9"'))
    if change == "later":
        good = cluster.worker()

        def replace_worker() -> None:
            cluster.worker(other)
            good.kill()

        _, progress = after_one_tile(replace_worker)
    else:
        cluster.worker(other)
        progress = None
    expected = "other source code" if change == "code" else r"runs headspan 0\.0\.9"
    with pytest.raises(hs.HeadspanError, match=expected):
        score(many_tiles, **OPTIONS, dask=cluster.address, **({"progress": progress} if progress else {}))


@pytest.mark.slow
def test_local_in_a_plain_script(tmp_path: Path) -> None:
    """No main guard, no noise, and the numbers of a run without it; folded weights too."""
    script = tmp_path / "script.py"
    script.write_text(
        "import headspan as hs\n"
        "weights = hs.fold(hs.open('demo'))\n"
        "here, there = hs.score(weights, 'pk', 'flow'), hs.score(weights, 'pk', 'flow', dask='local')\n"
        "import numpy as np\n"
        "print(all(np.array_equal(here[k].values, there[k].values, equal_nan=True) for k in here.arrays))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_what_a_cluster_cannot_do_is_refused() -> None:
    arrays = {role: np.random.default_rng(0).normal(size=(2, 2, 8, 3)) for role in "QKVO"}
    with pytest.raises(hs.HeadspanError, match="not arrays"):
        score(hs.open(arrays), "pk", dask="local")
    for address in ("nonsense", "tcp://127.0.0.1:1", "tls://127.0.0.1:1", "http://x", ""):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dask_module, "_PATIENCE", 2.0)
            with pytest.raises(hs.HeadspanError, match="no Dask scheduler answers"):
                score(hs.open("demo"), "pk", dask=address)


@pytest.mark.slow
def test_workers_with_a_torch_device_each(cluster: Cluster, many_tiles: AttentionWeights) -> None:
    """As with several GPUs: every worker has a device, here torch's CPU."""
    pytest.importorskip("torch")
    for _ in range(2):
        cluster.worker()
    options = {"metric": ["pk", "procrustes"], "pairing": "flow"}
    here = score(many_tiles, **options)
    there = score(many_tiles, **options, dask=cluster.address, device="torch:cpu")
    for key in here.arrays:
        np.testing.assert_allclose(there[key].values, here[key].values, rtol=1e-5)


def test_a_worker_finds_each_rank_once(many_tiles: AttentionWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Procrustes computes no bases, so every tile would have to find the ranks of its weights."""
    from dataclasses import replace

    from headspan.scoring.plan import make_plan
    from headspan.subspaces import weight_factors

    looked = []
    real = weight_factors.subspace_ranks
    monkeypatch.setattr(weight_factors, "subspace_ranks", lambda *given: looked.append(1) or real(*given))
    plan = make_plan(many_tiles, ("procrustes",), (hs.Pairing.parse("OK"),), "default", 10**9)
    about = many_tiles.reference, "none", many_tiles.provenance["fingerprint"]
    dask_module._open_here.cache_clear()
    for tile in plan.tiles:
        done = dask_module._work(*about, replace(plan, tiles=[tile]), "cpu")
        assert all((ranks == 8).all() for name, ranks in done.arrays.items() if name.startswith("rank-"))
    assert len(plan.tiles) > 2 and len(looked) == 2 * 12  # O and K of every layer
    dask_module._open_here.cache_clear()


def test_a_worker_opens_a_touched_file_again(tmp_path: Path, many_tiles: AttentionWeights) -> None:
    """A worker keeps the model open between runs; the same bytes with a new date are the same model."""
    from headspan.scoring.plan import make_plan

    reference, fingerprint = many_tiles.reference, many_tiles.provenance["fingerprint"]
    plan = make_plan(many_tiles, ("pk",), (hs.Pairing.parse("OK"),), "default", 10**9)
    work = (reference, "none", fingerprint, plan, "cpu")
    first = dask_module._work(*work)
    file = next(iter(many_tiles.source.files()))  # type: ignore[attr-defined]
    os.utime(file, (1, 1))
    again = dask_module._work(*work)
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, again.arrays[name])
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(hs.HeadspanError, match="differs from the one here"):
        dask_module._work(*work)
    dask_module._open_here.cache_clear()
