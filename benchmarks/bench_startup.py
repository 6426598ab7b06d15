"""Start-up time and installed size.

    python benchmarks/bench_startup.py [--times 9]

Start-up is the wall time of a new process, best of several runs, next to that of an empty Python process in the same
run (on a busy machine the ratio is more informative than the seconds). The target on a quiet machine is ``headspan
--help`` below 0.3 s and ``import headspan`` below 0.5 s. Size is the disk space of a package and its requirements
(without extras), according to the records of the installed distributions.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import numpy": ["-c", "import numpy"],
    "import headspan": ["-c", "import headspan"],
    "headspan --help": ["-m", "headspan", "--help"],
    "headspan top --help": ["-m", "headspan", "top", "--help"],
}


def seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def start_up(times: int) -> dict[str, float]:
    """Best of several runs, alternating so that a busy moment affects all."""
    rounds = [{name: seconds(arguments) for name, arguments in COMMANDS.items()} for _ in range(times)]
    return {name: min(found[name] for found in rounds) for name in COMMANDS}


def requirements(package: Distribution) -> set[str]:
    """Names of the requirements of a distribution on this machine, without extras."""
    from packaging.requirements import Requirement

    found = (Requirement(text) for text in package.requires or [])
    return {r.name for r in found if r.marker is None or r.marker.evaluate({"extra": ""})}


def closure(name: str) -> dict[str, Distribution]:
    """A distribution and all its installed requirements."""
    found: dict[str, Distribution] = {}
    waiting = [name]
    while waiting:
        key = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if key in found:
            continue
        try:
            found[key] = distribution(key)
        except PackageNotFoundError:
            continue
        waiting += requirements(found[key])
    return found


def size(package: Distribution) -> int:
    """Bytes of the existing files of a distribution (including compiled caches that its record lists)."""
    paths = {Path(str(package.locate_file(file))) for file in package.files or []}
    if package.metadata["Name"] == "headspan":  # installed in place: its record lists only a pointer
        sources = (Path(__file__).parent.parent / "src" / "headspan").rglob("*")
        paths |= {path for path in sources if "__pycache__" not in path.parts}
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=9)
    found = start_up(parser.parse_args().times)
    empty = found["python -c pass"]
    print("| start | seconds | times an empty process |\n|---|---:|---:|")
    for name, best in found.items():
        print(f"| `{name}` | {best:.3f} | {best / empty:.1f} |")
    print("\n| installed | distributions | MB |\n|---|---:|---:|")
    for name in ("headspan", "transformer-lens"):
        packages = closure(name)
        if packages:
            print(f"| {name} with what it requires | {len(packages)} | {sum(map(size, packages.values())) / 1e6:.0f} |")
            print(f"| {name} alone | 1 | {size(packages[name]) / 1e6:.1f} |")


if __name__ == "__main__":
    main()
