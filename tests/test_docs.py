"""What the documentation says is true: commands, links, reference and tour work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("maker", ["make_cli_reference.py", "make_module_graph.py"])
def test_generated_pages_are_current(maker: str) -> None:
    run = subprocess.run([sys.executable, str(ROOT / "docs" / maker), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|href)=\"([^\"#]+)\"", text):
        link = target[0] or target[1]
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def commands(page: Path) -> list[list[str]]:
    """Every `headspan …` line in the code blocks of a page."""
    blocks = re.findall(r"```[a-z]*\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("headspan ")]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "cli.md"], ids=lambda page: page.name)
def test_documented_commands_and_options_exist(page: Path) -> None:
    import typer

    from headspan.cli import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for words in commands(page):
        assert words[0] in known, f"{page.name}: headspan {words[0]}"
        options = {o for p in known[words[0]].params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        for word in words[1:]:
            if re.match(r"--?[a-z]", word):
                assert word.split("=")[0] in options, f"{page.name}: headspan {words[0]} {word}"


@pytest.mark.slow
def test_the_tour_runs(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples/tour.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert (tmp_path / "demo-report.html").stat().st_size > 10_000
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("text/html" in output.get("data", {}) for output in shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt_to_weights", "gqa_rope_composition"])
def test_a_teaching_notebook_runs(name: str, stories260k_dir: Path, tmp_path: Path, monkeypatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("HEADSPAN_NOTEBOOK_MODEL", str(stories260k_dir))  # instead of a model of the hub
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "stored without outputs"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "except ImportError" in code[0].source and "%pip install" in code[0].source
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert all(cell.get("outputs") for cell in code[2:] if not cell.source.startswith("task ="))
    assert len(nbformat.writes(notebook)) < 100_000
    text = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    if name == "prompt_to_weights":
        assert "L0H3 → L1H0: PK 12.8, rank 1 of 64 OK pairs" in text and "24 of 310 edges" in text
        assert "L0H3 {'previous_token': 0.9" in text and "L1H0 {'previous_token': 0.0" in text
    else:
        by_position = [line.split()[1] for line in text.splitlines() if line.split()[0] in ("0", "1", "10", "100")]
        assert len(by_position) == 4 and len(set(by_position)) == 1, "RoPE does not change PK"


def test_the_check_of_the_site_finds_what_is_wrong(tmp_path: Path) -> None:
    """A missing page, a missing anchor, a link out of the folder, an external script and an external image."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from make_site import problems
    finally:
        sys.path.pop(0)
    links = '<a href="b.html#there">1</a><a href="b.html#head=L4H7">2</a><a href="https://x.org">3</a><h1 id="top">'
    (tmp_path / "a.html").write_text(f'{links}<a href="#top">4</a><img src="data:image/png;base64,">')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="a.html">a</a>')
    assert problems(tmp_path) == []
    wrong = {
        '<a href="c.html">': "c.html, which is not there", '<a href="b.html#nowhere">': "no such place",
        '<a href="../x.html">': "which is not there", '<script src="https://x.org/x.js">': "loads https://x.org/x.js",
        '<img src="//x.org/x.png">': "loads //x.org/x.png", '<link rel="stylesheet" href="no.css">': "no.css, which",
    }  # fmt: skip
    for text, words in wrong.items():
        (tmp_path / "a.html").write_text(text)
        found = problems(tmp_path)
        assert len(found) == 1 and words in found[0], (text, found)
