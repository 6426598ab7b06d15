"""Many models in one process: memory and open files do not grow with their number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

MODELS = 100
# In a process of its own: what other tests imported would hide growth, and their garbage would look like it.
SCRIPT = """
import gc, json, os, sys
from pathlib import Path
import headspan as hs

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def one(path):
    weights = hs.open(path)
    scores = hs.score(weights, ["pk", "cs"], "flow")
    weights.vocabulary()
    return weights if sys.argv[2] == "keep" else None

paths = sorted(Path(sys.argv[1]).iterdir())
kept = [one(path) for path in paths[:10]]  # pools, caches and imports settle
gc.collect()
before, files = resident(), len(os.listdir("/proc/self/fd"))
kept += [one(path) for path in paths[10:]]
gc.collect()
print(json.dumps({"growth": resident() - before, "files": len(os.listdir("/proc/self/fd")) - files}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred different checkpoints of 1.2 MB each."""
    folder = tmp_path_factory.mktemp("models")
    rng, d = np.random.default_rng(0), 128
    tensors = {f"h.{n}.attn.c_attn.weight": rng.normal(size=(d, 3 * d)).astype(np.float32) for n in range(4)}
    tensors |= {f"h.{n}.attn.c_proj.weight": rng.normal(size=(d, d)).astype(np.float32) for n in range(4)}
    config = {"model_type": "gpt2", "n_embd": d, "n_head": 8, "n_layer": 4}
    for number in range(MODELS):
        place = folder / f"{number:03}"
        place.mkdir()
        tensors["h.0.attn.c_proj.weight"][0, 0] = number
        save_file(tensors, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config))
        (place / "vocab.json").write_text(json.dumps({f"t{i}": i for i in range(50)}))
    return folder


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory of a process is read from /proc")
@pytest.mark.parametrize("mode", ["close", "keep"])
def test_memory_and_files_do_not_grow_with_the_number_of_models(models: Path, mode: str) -> None:
    """Ninety more models of 1.2 MB; kept open, they hold names and at most one fused tensor of 0.2 MB each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, "-c", SCRIPT, str(models), mode]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert grown["files"] == 0
    allowed = 8e6 if mode == "close" else 90 * 0.3e6
    assert grown["growth"] < allowed, grown
