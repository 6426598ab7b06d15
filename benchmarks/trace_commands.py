"""Which modules of headspan a command loads, and how many of its functions it calls.

    python benchmarks/trace_commands.py [MODEL] [--modules]

MODEL is a reference, ``demo`` by default. Every command runs in a new process. ``--modules`` also lists the modules by
name.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

SCORE = ["--metric", "pk", "--pairing", "OK"]


def commands(model: str, folder: Path) -> dict[str, list[str]]:
    """Each command by its name here; the later ones read the result that ``score`` writes."""
    scores = str(folder / "scores.safetensors")
    return {
        "--help": ["--help"],
        "score": ["score", model, *SCORE, "--out", scores],
        "top": ["top", scores],
        "effects": ["effects", model, "--pairing", "OK", "-k", "20", "--into", scores],
        "report": ["report", scores, "--out", str(folder / "report.html")],
    }


def traced(arguments: list[str]) -> dict[str, Any]:
    """Run one command in this process: its exit code, the modules it loaded and the functions it called."""
    called: set[tuple[str, int]] = set()

    def profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code  # the bodies of modules and classes also count as calls, but are not optimised
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and "/headspan/" in code.co_filename:
            called.add((code.co_filename, code.co_firstlineno))

    sys.argv = ["headspan", *arguments]
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from headspan.cli import main

            main()
    except SystemExit as error:
        code = error.code
    finally:
        sys.setprofile(None)
    return {
        "code": code,
        "modules": sorted(n for n in sys.modules if n.startswith("headspan.")),
        "functions": len(called),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--modules", action="store_true", help="also list the modules that are loaded")
    parser.add_argument("--one", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # what each new process runs
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(traced(options.one)))
        return
    print("| command | modules loaded | functions called |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in commands(options.model, Path(folder)).items():
            run = [sys.executable, __file__, "--one", *arguments]
            found = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE).stdout)
            failed = f" (exit code {found['code']})" if found["code"] else ""
            print(f"| `{name}`{failed} | {len(found['modules'])} | {found['functions']} |")
            if options.modules:
                print("\n".join(f"|   {module} |" for module in found["modules"]))


if __name__ == "__main__":
    main()
