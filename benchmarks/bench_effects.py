"""Measuring all edges of a model, compared with one forward pass per edge, on the same tokens in one process.

    python benchmarks/bench_effects.py model.gguf [--length 42] [--passes 5]

Prints CPU seconds and wall time of `headspan.effects` (all OQ, OK and OV edges on two random sequences of 2·length
tokens, loading not counted), of one forward pass over the same tokens, their ratio for all edges, and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np
import torch

from headspan.running.effects import effects
from headspan.running.opening import running
from headspan.running.samples import random_samples, stack, token_pool


def clock() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def since(start: tuple[float, float]) -> tuple[float, float]:
    return time.process_time() - start[0], time.perf_counter() - start[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=42)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--memory", default="500MB")
    options = parser.parse_args()
    with running(options.model) as model:
        samples = random_samples(model, token_pool(model, 20_000, None, []), 2, options.length, 0)
        ids = stack(samples)
        loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        passes = []
        with torch.inference_mode():
            for _ in range(1 + options.passes):  # the first is a warm-up
                start = clock()
                model.model(input_ids=ids, use_cache=False)
                passes.append(since(start))
        start = clock()
        found = effects(model, random=True, sequences=2, length=options.length, bos="no", memory=options.memory)
        cpu, wall = since(start)
    edges = sum(int((~np.isnan(found.of(pairing))).sum()) for pairing in found.pairings)
    one_cpu, one_wall = np.median(np.array(passes[1:]), axis=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {
        "model": options.model.rpartition("/")[2],
        "tokens": int(ids.numel()),
        "edges": edges,
        "threads": torch.get_num_threads(),
        "effects_cpu_s": round(cpu, 1),
        "effects_wall_s": round(wall, 1),
        "one_pass_cpu_s": round(float(one_cpu), 3),
        "one_pass_wall_s": round(float(one_wall), 3),
        "times_cheaper_cpu": round(edges * float(one_cpu) / cpu),
        "times_cheaper_wall": round(edges * float(one_wall) / wall),
        "peak_mb": round(peak / 1e3),
        "loaded_model_mb": round(loaded / 1e3),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
