"""Tokens of all heads of a model the size of GPT-2 small, compared with the matrix products that they need.

Run: python benchmarks/bench_tokens.py [--vocabulary N] [--json]

144 heads × 4 roles of 768×64 and 50,257 tokens need 2·50,257·768·36,864 ≈ 2.85 Tflop. The machine's rate is the
median over float32 products of the shape of one block, timed in between; the ratio is the share of it reached.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from headspan.models.arrays import ArrayWeights
from headspan.reading.tokens import all_tokens
from headspan.vocabulary.heads import ROLES

LAYERS, HEADS, D_MODEL, D_HEAD = 12, 12, 768, 64
BLOCK = 2048


def random_model(vocabulary: int) -> ArrayWeights:
    rng = np.random.default_rng(0)
    shape = (LAYERS, HEADS, D_MODEL, D_HEAD)
    arrays = {role: rng.standard_normal(shape, dtype=np.float32) for role in "QKVO"}
    arrays["unembedding"] = rng.standard_normal((vocabulary, D_MODEL), dtype=np.float32)
    arrays["final_gain"] = rng.uniform(0.5, 2, D_MODEL).astype(np.float32)
    arrays["final_bias"] = rng.standard_normal(D_MODEL, dtype=np.float32)
    return ArrayWeights({**arrays, "norm": "layer"})


def sgemm_seconds(repeats: int = 4) -> list[float]:
    """Seconds of float32 products of one block of tokens with the bases of one role."""
    rng = np.random.default_rng(1)
    block = rng.standard_normal((BLOCK, D_MODEL), dtype=np.float32)
    bases = rng.standard_normal((D_MODEL, LAYERS * HEADS * D_HEAD), dtype=np.float32)
    out = block @ bases
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.matmul(block, bases, out=out)
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(vocabulary: int) -> dict[str, float]:
    weights = random_model(vocabulary)
    seconds, answered = 0.0, 0
    # Time products between the roles, so that other load on the machine slows both sides.
    products = sgemm_seconds()
    for role in ROLES:
        start = time.perf_counter()
        answered += len(all_tokens(weights, [role], k=10))
        seconds += time.perf_counter() - start
        products += sgemm_seconds()
    if answered != len(ROLES) * LAYERS * HEADS:
        raise SystemExit("some heads have no tokens")
    columns = LAYERS * HEADS * D_HEAD
    rate = 2.0 * BLOCK * D_MODEL * columns / float(np.median(products))
    flop = 2.0 * vocabulary * D_MODEL * len(ROLES) * columns
    return {
        "tokens": vocabulary,
        "seconds": seconds,
        "gflops": flop / seconds / 1e9,
        "sgemm_gflops": rate / 1e9,
        "ratio": flop / seconds / rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=50_257)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.vocabulary)
    if arguments.json:
        print(json.dumps(result))
        return
    print(
        f"{result['tokens']:.0f} tokens × 576 heads: {result['seconds']:.1f} s, {result['gflops']:.0f} Gflop/s; "
        f"sgemm here: {result['sgemm_gflops']:.0f} Gflop/s; ratio {result['ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
