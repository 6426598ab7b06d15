"""Two versions of headspan on the same work, alternating: what a change costs or saves.

    python benchmarks/bench_versions.py OLD_SRC MODEL [--times 5]

OLD_SRC is the ``src`` folder of the other version (``git archive v0.1 src | tar -x -C old``). Every command runs in a
separate process with compiled modules, as after installation. The best of several runs counts, in wall and CPU
seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NEW = Path(__file__).parents[1] / "src"
WORK = {
    "pk, OQ OK OV": ["--metric", "pk", "--pairing", "flow"],
    "cs, OQ OK OV": ["--metric", "cs", "--pairing", "flow"],
    "pk and cs, 16 pairings": [],
    "procrustes, 16 pairings": ["--metric", "procrustes"],
    "five similarities, 16 pairings": ["--metric", "all"],
}


def run(source: Path, model: str, options: list[str], compiled: str) -> tuple[float, float]:
    """Wall and CPU seconds of one score; ``compiled`` is the folder for compiled modules."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "headspan", "score", model, *options, "--out", f"{folder}/r.safetensors"]
        env = {**os.environ, "PYTHONPATH": str(source), "HEADSPAN_CACHE_DIR": f"{folder}/cache"}
        env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": compiled}
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, env=env, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    clock = time.perf_counter() - start
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("model")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", default="", help="only work whose name starts with this")
    given = parser.parse_args()
    print(f"{'work':32} {'old':>8} {'new':>8} {'ratio':>7}   {'old cpu':>8} {'new cpu':>8} {'ratio':>7}")
    for name, options in WORK.items():
        if name.startswith(given.only):
            compare(name, options, given)


def compare(name: str, options: list[str], given: argparse.Namespace) -> None:
    """Print one line of the table."""
    with tempfile.TemporaryDirectory() as compiled:
        runs = [
            [run(source, given.model, options, compiled) for source in (given.old, NEW)] for _ in range(given.times)
        ]
        sides = [[min(column) for column in zip(*side, strict=True)] for side in zip(*runs, strict=True)]
    (old, old_cpu), (new, new_cpu) = sides
    clock = f"{old:8.2f} {new:8.2f} {new / old:7.2f}"
    print(f"{name:32} {clock}   {old_cpu:8.2f} {new_cpu:8.2f} {new_cpu / old_cpu:7.2f}", flush=True)


if __name__ == "__main__":
    main()
