"""How much memory there is: the machine's, and the limits of control groups of both versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

import headspan as hs
from headspan.plotting import draw
from headspan.plotting.context import Context
from headspan.system import memory
from headspan.vocabulary.errors import HeadspanError


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_limits_of_nested_groups_of_version_2(tmp_path: Path) -> None:
    mount, groups = tmp_path / "cgroup", tmp_path / "self"
    groups.write_text("0::/outer/inner\n")
    group(mount / "outer", max=4000, current=3000, stat="anon 1\ninactive_file 500")
    group(mount / "outer" / "inner", max="max", current=100)
    assert memory._container_limits(groups, mount) == [(4000, 2500)]
    group(mount / "outer" / "inner", max=900, current=100)
    assert sorted(memory._container_limits(groups, mount)) == [(900, 100), (4000, 2500)]


def test_limits_of_version_1(tmp_path: Path) -> None:
    mount, groups = tmp_path / "cgroup", tmp_path / "self"
    groups.write_text("5:cpu:/\n4:memory:/docker/abc\n0::/\n")
    # In a container the group of this process is mounted at the top under the host's name for it.
    group(mount / "memory", limit_in_bytes=7000, usage_in_bytes=2000, stat="total_inactive_file 1500")
    assert memory._container_limits(groups, mount) == [(7000, 500)]


@pytest.mark.parametrize("content", [None, "", "nonsense\n", "4:memory\n", "4:memory:/../../etc\n"])
def test_an_unreadable_limit_is_ignored(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "self").write_text(content)
    assert memory._container_limits(tmp_path / "self", tmp_path / "cgroup") == []


def test_the_smallest_room_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_container_limits", list)
    assert memory.total_memory() == psutil.virtual_memory().total
    monkeypatch.setattr(memory, "_container_limits", lambda: [(2**30, 2**29), (2**31, 0)])
    assert (memory.total_memory(), memory.available_memory(), memory.default_memory()) == (2**30, 2**29, 2**28)
    monkeypatch.setattr(memory, "_container_limits", lambda: [(10, 20)])
    assert (memory.available_memory(), memory.default_memory()) == (0, 1)


@pytest.mark.parametrize("text", ["1e400", "-1", "9" * 400, "nan", "inf", "", "2 XB", "1.2.3GB", True, None, "0x10"])
def test_what_is_not_an_amount_of_memory(text: object) -> None:
    with pytest.raises(HeadspanError, match="is not an amount of memory"):
        memory.parse_memory(text)  # type: ignore[arg-type]


def many_heads(folder: Path, layers: int, heads: int) -> Path:
    """A small file with many heads of one dimension."""
    rng, d = np.random.default_rng(0), 8
    tensors = {}
    for i in range(layers):
        start = f"model.layers.{i}.self_attn."
        tensors |= {f"{start}{x}_proj.weight": rng.normal(size=(heads, d)).astype(np.float32) for x in "qkv"}
        tensors[f"{start}o_proj.weight"] = rng.normal(size=(d, heads)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": d}
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 1, "vocab_size": 7}))
    return folder


def test_a_small_file_of_many_heads_stays_within_its_memory(tmp_path: Path) -> None:
    """Measured from outside: 5,000 heads in a file of 700 kB, whose OK scores alone are 100 MB."""
    model = many_heads(tmp_path / "model", 50, 100)
    code = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run([sys.executable, '-m', 'headspan', *sys.argv[1:]], capture_output=True, text=True)\n"
        "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, done.stderr)\n"
    )

    def run(*words: str) -> tuple[int, int, str]:
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        status, peak, said = done.stdout.split(" ", 2)
        return int(status), int(peak), said

    score = ("score", str(model), "-m", "pk", "-o", str(tmp_path / "r.safetensors"), "--memory")
    status, peak, said = run("info", str(model))
    assert status == 0 and peak < 150e6, (peak, said)
    status, peak, said = run(*score, "300MB")  # of all pairings: 1.6 GB
    assert status == 2 and "is too little memory" in said and peak < 150e6, (peak, said)
    status, peak, said = run(*score, "350MB", "-p", "OK")
    assert status == 0 and peak < 350e6, (peak, said)


def test_reports_and_figures_say_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_heads(tmp_path / "model", 4, 50)
    scores = hs.score(model, "pk", "OK")
    scores.save(tmp_path / "r.safetensors")
    monkeypatch.setattr(memory, "available_memory", lambda: 10**5)
    with pytest.raises(HeadspanError, match=r"reading .*r\.safetensors needs about"):
        hs.load(tmp_path / "r.safetensors")
    for call in (
        lambda: hs.report(scores, out=tmp_path / "r.html"),
        lambda: draw("wiring", Context(scores), tmp_path / "figures"),
    ):
        with pytest.raises(HeadspanError, match=r"200 heads.*0\.0 GB.*0\.0 GB"):
            call()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "r.safetensors"]
