"""Make the small files that docs/questions.md asks about: a probe, a LoRA adapter, a model folder and a training run.

    python examples/question_files.py

They are made from the demo model, in the current folder. The adapter turns the keys of one head towards what another
writes, and the run goes in four steps from random weights to the demo model: neither was trained.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import headspan

DEMO = Path(headspan.__file__).parent / "data" / "demo"
HEAD = 32  # dimensions of a head of the demo model
SHARES = {0: 0.0, 400: 0.2, 800: 0.6, 1200: 1.0}  # step -> share of the demo model in its weights


def probe(place: Path) -> None:
    """A direction that L0H3 writes, with noise: a probe for "the previous token was …"."""
    rng = np.random.default_rng(0)
    written = headspan.open("demo").read_head("L0H3.O") @ rng.normal(size=HEAD)
    np.save(place / "probe.npy", written / np.linalg.norm(written) + 0.5 * rng.normal(size=256) / np.sqrt(256))


def adapter(place: Path) -> None:
    """A LoRA adapter of rank 4 that turns the keys of L1H2 towards what L0H6 writes."""
    weights = headspan.open("demo")
    folder = place / "lora"
    folder.mkdir(exist_ok=True)
    directions = np.linalg.svd(weights.read_head("L0H6.O").astype(np.float64), full_matrices=False)[0][:, :4]
    up = np.zeros((768, 4), dtype=np.float32)
    up[256 + 2 * HEAD : 256 + 3 * HEAD] = np.random.default_rng(0).normal(size=(HEAD, 4))
    name = "base_model.model.transformer.h.1.attn.c_attn"
    down = np.ascontiguousarray(directions.T, dtype=np.float32)
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def run(place: Path) -> None:
    """Checkpoints between random weights and the demo model."""
    trained, rng = load_file(DEMO / "model.safetensors"), np.random.default_rng(0)
    start = {name: rng.normal(size=t.shape).astype(np.float32) * t.std() for name, t in trained.items()}
    for step, share in SHARES.items():
        folder = place / "run" / f"step{step}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(DEMO / "config.json", folder)
        tensors = {name: np.float32(share) * t + np.float32(1 - share) * start[name] for name, t in trained.items()}
        save_file(tensors, folder / "model.safetensors")


def main(place: Path) -> None:
    probe(place)
    adapter(place)
    run(place)
    shutil.copytree(DEMO, place / "model", dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path())
