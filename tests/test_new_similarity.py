"""A new similarity is one entry in the metric table and one definition in the tests; everything else follows.

Shown on a copy of the package: the entry is added there, and the ordinary tests and commands take it up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENTRY = '        Metric("overlap", "Overlap", "Overlap", subspace_factor, grows_with_rank=True),\n'
DEFINITION = """

def overlap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.square(scipy.linalg.orth(a).T @ scipy.linalg.orth(b)).sum())
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its tests with one more similarity: one line in the table, one definition in the tests."""
    home = tmp_path_factory.mktemp("copy")
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, home / part, ignore=shutil.ignore_patterns("__pycache__", "fuzz", "data"))
    shutil.copytree(ROOT / "src" / "headspan" / "data", home / "src" / "headspan" / "data")
    table = home / "src" / "headspan" / "subspaces" / "metrics.py"
    text = table.read_text(encoding="utf-8")
    assert text.count("        Metric(\n            PK,\n") == 1
    table.write_text(text.replace("        Metric(\n            PK,\n", f"{ENTRY}        Metric(\n            PK,\n"))
    with open(home / "tests" / "definitions.py", "a", encoding="utf-8") as file:
        file.write(DEFINITION)
    return home


def run(copy: Path, *words: str) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HEADSPAN_")}
    environment = {**plain, "PYTHONPATH": str(copy / "src")}
    done = subprocess.run([sys.executable, "-m", *words], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_ordinary_tests_take_up_a_new_similarity(copy: Path) -> None:
    tests = ["tests/test_scoring.py", "tests/test_scoring_core.py"]
    ran = run(copy, "pytest", "-q", "-p", "no:cacheprovider", "-k", "overlap or largest_value", *tests)
    assert "failed" not in ran and int(ran.strip().splitlines()[-1].split()[0]) >= 3, ran


def test_commands_take_up_a_new_similarity(copy: Path, tmp_path: Path) -> None:
    result, page = str(tmp_path / "demo.safetensors"), str(tmp_path / "demo.html")
    run(copy, "headspan", "score", "demo", "--metric", "overlap,pk", "--out", result)
    for command in (["top"], ["hubs"], ["wiring"], ["top", "--head", "L1H2"]):
        name, *options = command
        assert "L1H" in run(copy, "headspan", name, result, "--metric", "overlap", *options)
    run(copy, "headspan", "report", result, "--out", page)
    assert "Overlap" in Path(page).read_text(encoding="utf-8")
    assert "overlap" in run(copy, "headspan", "top", "--help")
