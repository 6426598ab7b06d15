"""The built-in model behind the reference ``demo``."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np

from headspan.checkpoints.base import TensorSource
from headspan.checkpoints.huggingface import LocalFiles, open_checkpoint
from headspan.checkpoints.mapping import MappingSource

LAYERS, HEADS, D_MODEL, VOCABULARY, CONTEXT = 2, 8, 64, 128, 64


def open_demo() -> TensorSource:
    """The trained model shipped with the package, or a random one if it is missing."""
    directory = Path(str(resources.files("headspan"))) / "data" / "demo"
    if (directory / "config.json").is_file():
        return open_checkpoint(LocalFiles(directory), "demo")
    return random_demo()


def random_demo() -> MappingSource:
    """A two-layer GPT-2 with random weights from a fixed seed."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0.0, 0.1, shape).astype(np.float32)

    tensors = {"wte.weight": normal(VOCABULARY, D_MODEL), "wpe.weight": normal(CONTEXT, D_MODEL)}
    for layer in range(LAYERS):
        block = f"h.{layer}."
        tensors[block + "attn.c_attn.weight"] = normal(D_MODEL, 3 * D_MODEL)
        tensors[block + "attn.c_attn.bias"] = np.zeros(3 * D_MODEL, np.float32)
        tensors[block + "attn.c_proj.weight"] = normal(D_MODEL, D_MODEL)
        tensors[block + "attn.c_proj.bias"] = np.zeros(D_MODEL, np.float32)
        tensors[block + "ln_1.weight"] = np.ones(D_MODEL, np.float32)
        tensors[block + "ln_1.bias"] = np.zeros(D_MODEL, np.float32)
    tensors["ln_f.weight"] = np.ones(D_MODEL, np.float32)
    tensors["ln_f.bias"] = np.zeros(D_MODEL, np.float32)
    config = {
        "model_type": "gpt2",
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_embd": D_MODEL,
        "n_positions": CONTEXT,
        "vocab_size": VOCABULARY,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
    source = MappingSource(tensors, config, "demo")
    source.notes.append("this is a small random model for demonstration: its scores have no meaning")
    return source
