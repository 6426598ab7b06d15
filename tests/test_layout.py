"""Imports go one way: a folder imports only from folders on its left, and there are no import cycles."""

from __future__ import annotations

import importlib.util
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
_spec = importlib.util.spec_from_file_location("make_module_graph", DOCS / "make_module_graph.py")
assert _spec is not None and _spec.loader is not None
MAKER = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(MAKER)
GRAPH: dict[str, set[str]] = MAKER.graph()
MOST_MODULES = 18  # of one folder, without its subfolders


@pytest.mark.parametrize("name", GRAPH)
def test_imports_go_one_way(name: str) -> None:
    home = MAKER.ORDER.index(name.split(".")[0])
    wrong = {other for other in GRAPH[name] if MAKER.ORDER.index(other.split(".")[0]) > home}
    assert not wrong, f"{name} imports {wrong}, which come after it"


def test_no_module_imports_one_that_imports_it() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as cycle:
        pytest.fail(f"these modules import each other: {' → '.join(cycle.args[1])}")


def test_a_cycle_is_noticed() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({**GRAPH, "vocabulary.errors": {"cli.common"}}).prepare()


def test_every_folder_is_in_the_order_and_has_a_summary() -> None:
    folders = {path.parent.name for path in MAKER.PACKAGE.glob("*/__init__.py")}
    assert folders == set(MAKER.ORDER)
    assert {path.stem for path in MAKER.PACKAGE.glob("*.py")} == {"__init__", "__main__"}
    for name, path in MAKER.modules().items():
        assert MAKER.summary(path).endswith((".", "?")), f"the first sentence of {name} does not end"


def test_no_folder_is_a_drawer() -> None:
    for folder in {path.parent for path in MAKER.modules().values()}:
        assert len(list(folder.glob("*.py"))) - 1 <= MOST_MODULES, f"{folder.name} has too many modules"
