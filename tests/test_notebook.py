"""In a notebook: bars, messages and tables, in a real kernel with and without ipywidgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headspan as hs

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient

WARNING = """
import numpy as np, headspan as hs
rng = np.random.default_rng(0)
weak = {role: rng.normal(size=(2, 2, 8, 3)) for role in "QKVO"}
weak["Q"][0, 0, :, 2] = 0  # a head of rank 2, which is reported
for _ in range(3):
    hs.score(weak, "pk", "OQ")
hs.score(weak, "pk", "OQ")
"""
BAR = """
import time
from headspan.system.progress import progress_bar
with progress_bar("counting") as update:
    for i in range(4):
        time.sleep(0.4)
        update(i + 1, 4)
"""
WITHOUT = "import sys\nsys.modules['ipywidgets'] = None\n"
SHOWN = """
import headspan as hs
scores = hs.score("demo", "pk")
hs.report(scores, out="page.html")
"""


def run(folder: Path, *cells: str) -> list[list[dict[str, Any]]]:
    """The outputs of each cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return [cell.outputs for cell in notebook.cells]


def errors(outputs: list[dict[str, Any]]) -> str:
    return "".join(output["text"] for output in outputs if output.get("name") == "stderr")


def test_cells(tmp_path: Path) -> None:
    first, later, bar, page = run(tmp_path, WARNING, f"{WARNING}# again", BAR, SHOWN)
    assert errors(first).count("has rank 2 of 3") == 1
    assert errors(later) == "", "the first cell shows it"
    assert errors(bar) == "" and [output["data"]["text/plain"][:4] for output in bar] == ["HBox"]
    data = page[-1]["data"]
    assert len(str(data)) < 60_000 and 'href="page.html"' in data["text/html"]
    assert (tmp_path / "page.html").stat().st_size > 100_000


def test_cells_without_widgets(tmp_path: Path) -> None:
    bar, page = run(tmp_path, WITHOUT + BAR, SHOWN)
    assert "ipywidgets" not in errors(bar) + errors(page)
    assert "counting: 75 %, 0 s left" in errors(bar) and errors(bar).endswith("\r")


def test_a_cell_that_is_run_again_shows_its_warnings_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from headspan.vocabulary import notebook

    class ZMQInteractiveShell:
        execution_count = 1
        parent_header: dict[str, Any] = {"metadata": {"cellId": "a"}}  # noqa: RUF012
        user_ns: dict[str, Any] = {}  # noqa: RUF012

    class OfColab(ZMQInteractiveShell):
        pass

    shell = OfColab()
    monkeypatch.setattr(notebook, "_shown", {})
    monkeypatch.setitem(
        __import__("sys").modules, "IPython", type("I", (), {"get_ipython": staticmethod(lambda: shell)})
    )
    assert notebook.kernel_shell() is shell

    def in_cell(cell: str, count: int) -> list[bool]:
        shell.parent_header, shell.execution_count = {"metadata": {"cellId": cell}}, count
        return [notebook.shown_before("a message") for _ in range(2)]

    assert in_cell("a", 1) == [False, True]
    assert in_cell("b", 2) == [True, True]
    assert in_cell("a", 3) == [False, True], "its output was cleared"


@pytest.mark.parametrize("name", ["weights", "folded", "scores", "labels", "figures"])
def test_what_is_returned_has_a_table(name: str, tmp_path: Path) -> None:
    scores = hs.score("demo", "pk")
    made: dict[str, Any] = {
        "weights": lambda: hs.open("demo"),
        "folded": lambda: hs.fold("demo"),
        "scores": lambda: scores,
        "labels": lambda: hs.Labels.load("gpt2"),
        "figures": lambda: hs.figures(scores, tmp_path, "wiring,scatter", dpi=40),
    }
    shown = made[name]()._repr_html_()
    assert "<table>" in shown and 1 < shown.count("<tr>") <= 21
    assert len(repr(made[name]()).splitlines()) <= 12 and len(max(repr(made[name]()).splitlines(), key=len)) <= 120
