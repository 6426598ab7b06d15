"""Build the documentation site: the docs, the API reference from docstrings, and interactive pages of models.

    python docs/make_site.py [FOLDER]     out/site by default; needs headspan[docs]
    python docs/make_site.py --check      build it in a temporary folder, and check every link and anchor

The site is one static folder that loads nothing from elsewhere. It has pages of the demo model and, if the variables
HEADSPAN_GPT2_DIR and HEADSPAN_SMOLLM2_GGUF name them, of GPT-2 small and SmolLM2.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import headspan as hs

ROOT = Path(__file__).parent.parent
# The order of pages: questions, concepts, reference. Any other page comes between the two lists.
FIRST = ("cookbook", "reading-heads", "nodes", "paths", "influence", "effects", "tasks", "change", "report", "gallery",
         "concepts", "statistics", "evidence")  # fmt: skip
LAST = ("special-cases", "models", "demo-model", "cli", "architecture", "trust")
MODELS = {"GPT-2 small": "HEADSPAN_GPT2_DIR", "SmolLM2-135M": "HEADSPAN_SMOLLM2_GGUF"}
MARK = ".made-by-headspan"  # marks the folder of a site, so that no other folder is ever emptied
GALLERY = '<p><a href="{up}gallery/index.html">Interactive pages of models</a>, each one file.</p>'


def build(folder: Path, models: bool = True) -> None:
    """Build the whole site in a folder that is new, empty or an earlier site."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).exists():
        sys.exit(f"{folder} holds other files: choose a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        sources = Path(place)
        assemble(sources)
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", f"{place}/.trees"]
        done = subprocess.run([*command, "-c", str(ROOT / "docs/site"), place, str(folder)], check=False)
    if done.returncode:
        sys.exit("the site could not be built: see the warnings above")
    (folder / MARK).touch()
    shutil.rmtree(folder / ".doctrees", ignore_errors=True)
    found = {name: os.environ.get(variable) for name, variable in MODELS.items()} if models else {}
    hs.site(folder / "gallery", {"demo": "demo", **{name: path for name, path in found.items() if path}})


def assemble(folder: Path) -> None:
    """Collect README, docs and the files that they link to as sources for Sphinx."""
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("*.py", "site", "__pycache__"))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    between = sorted({page.stem for page in (ROOT / "docs").glob("*.md")} - {*FIRST, *LAST})
    contents = "\n".join(f"docs/{name}" for name in (*FIRST, *between, *LAST))
    listed = f"\n```{{toctree}}\n:hidden:\n\n{contents}\napi\nCONTRIBUTING\nCHANGELOG\n```\n"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (folder / "index.md").write_text(f"{readme}\n{GALLERY.format(up='')}\n{listed}", encoding="utf-8")
    (folder / "api.md").write_text("".join(reference()), encoding="utf-8")
    with (folder / "docs/gallery.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{GALLERY.format(up='../')}\n")
    graph = folder / "docs/architecture.md"  # rendering it would need an external script
    graph.write_text(graph.read_text(encoding="utf-8").replace("```mermaid", "```text"), encoding="utf-8")
    for page in folder.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#\s:]+)", page.read_text(encoding="utf-8")):
            target = Path(os.path.normpath(page.parent / unquote(link)))
            original = ROOT / target.relative_to(folder) if target.is_relative_to(folder) else target
            if not target.exists() and original.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(original, target.with_suffix(".txt") if target.suffix == ".md" else target)
                if target.suffix == ".md":
                    text = page.read_text(encoding="utf-8").replace(f"]({link}", f"]({link.removesuffix('.md')}.txt")
                    page.write_text(text, encoding="utf-8")


def reference() -> Iterator[str]:
    """The API reference: every public name with its docstring, in the order of the package."""
    yield "# Python reference\n\nEvery command is a function of the same name; whatever a command takes as a word, a "
    yield "function takes as a string.\n\n"
    names = sorted(hs.__all__, key=lambda name: list(hs._EXPORTS).index(name))
    for title, wanted in (("Functions", inspect.isfunction), ("Classes", inspect.isclass)):
        yield f"## {title}\n\n"
        for name in names:
            thing = getattr(hs, name)
            if not wanted(thing):
                continue
            kind = "autofunction" if inspect.isfunction(thing) else "autoclass"
            members = "" if kind == "autofunction" else "   :members:\n"
            yield f"### {name}\n\n```{{eval-rst}}\n.. {kind}:: headspan.{name}\n{members}```\n\n"


# ------------------------------------------------------------------------------------------------------- links


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif tag == "a" and name == "href":
                self.links.append(value or "")
            elif name in ("src", "srcset", "data", "poster") or (tag == "link" and name == "href"):
                self.loads.append(value or "")


def problems(folder: Path) -> list[str]:
    """Every link inside the site that leads nowhere, and everything that it would load from elsewhere."""
    folder = folder.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    found = []
    for path, page in pages.items():
        where = path.relative_to(folder)
        found += [f"{where} loads {load[:80]}" for load in page.loads if _is_elsewhere(load)]
        for link in (*page.links, *(load for load in page.loads if not load.startswith("data:"))):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or not target.is_relative_to(folder):
                found.append(f"{where} links to {link}, which is not there")
            elif target in pages and not _is_there(unquote(parts.fragment), pages[target]):
                found.append(f"{where} links to {link}, and there is no such place in it")
    return found


def _is_elsewhere(load: str) -> bool:
    parts = urlsplit(load)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def _is_there(fragment: str, page: Page) -> bool:
    """Whether a page has an anchor; head=L4H7 is not an anchor but a view of a model's page."""
    return not fragment or "=" in fragment or fragment in page.anchors


def check(folder: Path) -> None:
    found = problems(folder)
    pages = len(list(folder.rglob("*.html")))
    print("\n".join(found) or f"{pages} pages, every link and anchor leads somewhere, nothing is loaded from elsewhere")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    if "--check" in sys.argv:
        with tempfile.TemporaryDirectory() as place:
            build(Path(place) / "site", models=False)
            check(Path(place) / "site")
    else:
        made = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "out/site")
        build(made)
        check(made)
        print(f"open {made / 'index.html'}")
