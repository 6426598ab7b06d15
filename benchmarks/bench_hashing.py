"""The cost of the fingerprint: `score` of a model with and without hashing every byte.

Run: python benchmarks/bench_hashing.py MODEL [--times N] [--metrics pk] [--pairings flow]

The two alternate, so that a busy machine slows both. The ratio of CPU seconds is more stable than that of wall
seconds; targets are 1.05 for GPT-2 small and 1.03 for a 7B shape.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import headspan as hs
from headspan.checkpoints.base import TensorSource


def seconds(model: str, metrics: str, pairings: str, hashed: bool) -> tuple[float, float]:
    """Wall and CPU seconds from opening the files to the result."""
    real = TensorSource._hash_all
    if not hashed:
        TensorSource._hash_all = lambda self, names: self._hashed.update(dict.fromkeys(names, b""))
    try:
        wall, work = time.perf_counter(), time.process_time()
        hs.score(hs.open(model), metrics.split(","), pairings)
        return time.perf_counter() - wall, time.process_time() - work
    finally:
        TensorSource._hash_all = real


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--metrics", default="pk,cs")
    parser.add_argument("--pairings", default="all")
    options = parser.parse_args()
    seconds(options.model, options.metrics, options.pairings, True)  # warm-up: files in the page cache, packages loaded
    runs = {True: [], False: []}
    for _ in range(options.times):
        for hashed in (True, False):
            runs[hashed].append(seconds(options.model, options.metrics, options.pairings, hashed))
    found = {}
    for place, kind in enumerate(("wall", "processor")):
        with_hash, without = (median(run[place] for run in runs[hashed]) for hashed in (True, False))
        found |= {f"{kind}_s": round(with_hash, 3), f"{kind}_ratio": round(with_hash / without, 3)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
