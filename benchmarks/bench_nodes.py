"""Time and peak memory of comparing all neurons of a model with all its heads, on random weights.

    python benchmarks/bench_nodes.py            # GPT-2 small, and a model of 1B parameters
    python benchmarks/bench_nodes.py gpt2       # one of them
    python benchmarks/bench_nodes.py 1b 7,8     # the neurons of some layers

Each runs in a separate process. The weights are slices of one pool of random numbers, so that neither downloads nor
files are measured. "product" is the time of the bare matrix products of the same sizes, in the same run.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import zlib

import numpy as np

from headspan.checkpoints.base import TensorSource
from headspan.models.checkpoint import CheckpointWeights
from headspan.node_kinds.search import PRODUCT
from headspan.reading.node_overlaps import nodes

# d_model, layers, heads, key/value heads, neurons per layer, gated
SIZES = {"gpt2": (768, 12, 12, 12, 3072, False), "1b": (2048, 16, 32, 8, 8192, True)}

_PLACES = 2**20
_POOL = np.random.default_rng(0).standard_normal(8192 * 2048 + _PLACES, np.float32)


class Drawn(TensorSource):
    """Random tensors under Llama's names: slices of one pool of numbers, so that reading costs nothing."""

    def __init__(self, d: int, layers: int, heads: int, kv: int, neurons: int, gated: bool) -> None:
        super().__init__("random", {
            "model_type": "llama", "hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv, "vocab_size": 10, "rms_norm_eps": 1e-5,
        })  # fmt: skip
        m = d // heads
        block = {
            "self_attn.q_proj": (d, d), "self_attn.k_proj": (kv * m, d), "self_attn.v_proj": (kv * m, d),
            "self_attn.o_proj": (d, d), "mlp.up_proj": (neurons, d), "mlp.down_proj": (d, neurons),
            **({"mlp.gate_proj": (neurons, d)} if gated else {}),
        }  # fmt: skip
        self._shapes = {f"model.layers.{i}.{n}.weight": s for i in range(layers) for n, s in block.items()}

    def names(self):
        return self._shapes.keys()

    def shape(self, name):
        return self._shapes[name]

    def dtype(self, name):
        return "float32"

    def nbytes(self, name):
        return 4 * int(np.prod(self._shapes[name]))

    def read(self, name, rows=None):
        start = zlib.crc32(name.encode()) % _PLACES
        drawn = _POOL[start : start + int(np.prod(self._shapes[name]))].reshape(self._shapes[name])
        return drawn if rows is None else drawn[rows]

    def _hash(self, name):
        return name.encode()


def run(size: str, chosen: str) -> dict[str, float]:
    d, layers, heads, kv, neurons, gated = SIZES[size]
    weights = CheckpointWeights(Drawn(*SIZES[size]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    numbers = [int(n) for n in chosen.split(",")] if chosen else list(range(layers))
    report = nodes(weights, neurons=",".join(f"L{n}:*" for n in numbers), k=10)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Columns of writers before a layer's MLP and of readers after it, summed over the chosen layers.
    m = d // heads
    writers = sum((layer + 1) * heads * m for layer in numbers) * (2 if gated else 1)
    readers = sum((layers - 1 - layer) * (heads + 2 * kv) * m for layer in numbers)
    flop = 2.0 * neurons * d * (writers + readers)
    pairs = report.count * (layers * heads + layers * (heads + 2 * kv))
    if not any("compared with heads only" in note for note in report.notes):  # neurons with neurons of other layers
        among = neurons**2 * len(numbers) * (len(numbers) - 1) // 2
        pairs, flop = pairs + among, flop + 2 * 2.0 * among * d * (2 if gated else 1)  # from either side
    rows = max(32, PRODUCT // d // heads)
    a, b = np.ones((rows, d), np.float32), np.ones((d, 8192), np.float32)
    a @ b
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < 3:
        a @ b
        count += 1
    rate = count * 2.0 * rows * d * 8192 / (time.perf_counter() - begin)
    return {
        "nodes": report.count, "pairs": pairs,
        "seconds": seconds, "product": flop / rate, "peak_gb": peak / 1e6, "start_gb": before / 1e6,
        "dense_gb": 4e-9 * report.count * layers * (2 * heads + 2 * kv),
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(run(*sys.argv[2:])))
        return
    for size in sys.argv[1:2] or SIZES:
        call = [sys.executable, __file__, "one", size, sys.argv[2] if len(sys.argv) > 2 else ""]
        found = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(
            f"{size}: {found['nodes']:,} neurons, {found['pairs']:,} pairs in {found['seconds']:.1f} s "
            f"(bare products {found['product']:.1f} s, ratio {found['seconds'] / found['product']:.2f}), "
            f"peak {found['peak_gb']:.2f} GB (process before it {found['start_gb']:.2f} GB)"
        )


if __name__ == "__main__":
    main()
