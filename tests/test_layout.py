"""Data goes one way: a folder imports from folders on its left, from the vocabulary and from ``system``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "headspan"
# Left to right, as in CONTRIBUTING.md. What is not named here may import everything: the package itself and the cli.
ORDER = ["system", "sources", "models", "scoring", "analysis", "figures", "explorer", "cli"]
VOCABULARY = {"errors", "heads", "port_table", "scores", "scores_file", "metadata", "result_checks", "__init__"}
# A notebook asks a wiring to draw itself; what draws is loaded only then.
# And scores are asked for a head's neighbourhood as for their best pairs.
# What range a score has the table of similarities knows, and which models are one their hashes: asked by whoever reads.
EXCEPTIONS = {
    ("wiring_graph.py", "figures"),
    ("scores.py", "analysis"),
    ("result_checks.py", "scoring"),
    ("result_checks.py", "models"),
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """First part below ``headspan`` of everything a module imports, inside functions too, but not for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headspan"):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("headspan.")}
    return {name.split(".")[1] for name in names if "." in name}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    home = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if home in ("__init__", "__main__"):
        return
    if home in VOCABULARY:
        allowed = VOCABULARY | {"system"}
    else:
        allowed = VOCABULARY | set(ORDER[: ORDER.index(home) + 1])
    if home == "system":
        allowed -= {"scores", "heads", "port_table"}
    wrong = {name for name in imported(path) - allowed if (path.name, name) not in EXCEPTIONS}
    assert not wrong, f"{path.name} in {home} imports {wrong}"


def test_every_folder_has_its_place() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(ORDER)
    assert {path.stem for path in PACKAGE.glob("*.py")} == VOCABULARY | {"__main__"}
