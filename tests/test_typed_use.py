"""A typed program that uses the package: `make lint` checks its types, and here it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import headspan
from consumer import typed_use

ROOT = Path(__file__).parents[1]
# Public modules that pyright checks in its standard mode: mostly arithmetic on arrays or reading of JSON.
STANDARD = {"results.tasks.circuit", "graphs.paths", "models.adapters", "paper.evaluation", "paper.reproduction"}


def test_the_program_runs(tmp_path: Path) -> None:
    typed_use.main(tmp_path)


def test_the_public_modules_are_checked_strictly() -> None:
    text = re.sub(r"^\s*//.*$", "", (ROOT / "pyright-public.json").read_text(), flags=re.MULTILINE)
    strict = set(json.loads(text)["include"])
    assert all((ROOT / name).is_file() for name in strict)
    public = {module.partition(":")[0] for module in headspan._EXPORTS.values()}
    missing = {module for module in public if f"src/headspan/{module.replace('.', '/')}.py" not in strict}
    assert missing == STANDARD


def test_the_package_says_that_it_is_typed() -> None:
    assert Path(headspan.__file__).with_name("py.typed").is_file()
