"""What is published: links of the README, files in the distributions, provenance of data, versions."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import headspan as hs

ROOT = Path(__file__).parent.parent
DATA = Path(hs.__file__).parent / "data"
ADDRESS = "https://forge.example/someone/headspan"
LINKS = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both distributions, built with an address."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, env=os.environ | {"HEADSPAN_URL": f"{ADDRESS}/"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def metadata(dist: dict[str, Path]) -> Message:
    with zipfile.ZipFile(dist[".whl"]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def for_index(text: str, address: str | None, reference: str = "v1") -> str:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.for_index(text, address, reference)


@pytest.mark.parametrize(("text", "with_address", "without"), [
    ("[a](docs/a.md#b)", f"[a]({ADDRESS}/blob/v1/docs/a.md#b)", "a"),
    ("x ![p](i/p.png) y", f"x ![p]({ADDRESS}/raw/v1/i/p.png) y", "x  y"),
    ("[a](https://x.org/a) [b](#b) [c](mailto:x@y.org)",) * 3,
    ("[a\nb](a.md)", f"[a\nb]({ADDRESS}/blob/v1/a.md)", "a\nb"),
    ("```\n[a](b.md)\n```",) * 3,
    ("`[0](1)` no", "`[0](1)` no", "`[0](1)` no"),
])  # fmt: skip
def test_links_for_an_index(text: str, with_address: str, without: str) -> None:
    assert for_index(text, ADDRESS) == with_address
    assert for_index(text, None) == without


@pytest.mark.parametrize("address", [ADDRESS, None])
def test_no_link_of_the_readme_is_relative(address: str | None) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = [link for link in LINKS.findall(text) if "://" not in link]
    assert len(relative) > 10  # there is something to do
    shown = for_index(text, address)
    assert not [link for link in LINKS.findall(shown) if "://" not in link]
    assert not re.search(r"\[[^]]*\]\(docs|<img|!\[\]", shown)
    for block in re.findall(r"```.*?```", text, re.DOTALL):
        assert block in shown


def test_the_metadata(metadata: Message) -> None:
    assert metadata["Version"] == hs.__version__ and metadata["License-Expression"] == "MIT" and metadata["Author"]
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL") or [])
    assert urls["Source"] == ADDRESS and set(urls) >= {"Issues", "Documentation", "Changelog"}
    body = str(metadata.get_payload())
    assert f"{ADDRESS}/blob/" in body and metadata["Description-Content-Type"] == "text/markdown"
    assert not [link for link in LINKS.findall(body) if "://" not in link]


def test_what_is_in_the_distributions(dist: dict[str, Path]) -> None:
    with tarfile.open(dist[".gz"]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    wanted = ["LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile", "hatch_build.py"]
    for folder in ("tests", "docs", "examples", "src/headspan"):
        wanted += [str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")]
    assert not set(wanted) - names
    assert not [name for name in names if re.search(r"__pycache__|\.venv|^out/|\.git/", name)]
    with zipfile.ZipFile(dist[".whl"]) as wheel:
        shipped = set(wheel.namelist())
    data = {f"headspan/data/{path.relative_to(DATA)}" for path in DATA.rglob("*") if path.is_file()}
    assert not data - shipped and "headspan/py.typed" in shipped
    assert not [name for name in shipped if not name.startswith(("headspan/", "headspan-"))]


def test_twine_takes_them(dist: dict[str, Path]) -> None:
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.values())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_wrong_address_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "metadata", "readme"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"HEADSPAN_URL": "forge.example"}, capture_output=True, text=True
    )
    assert done.returncode != 0 and "Give the https address" in done.stderr


def test_every_data_file_has_a_source_and_a_licence() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", (DATA / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}
    assert all(len(cells) == 3 and all(cells) and "MIT" in cells[-1] for cells in listed.values())
    files = {str(path.relative_to(DATA)) for path in DATA.rglob("*") if path.is_file()} - {"README.md"}
    unlisted = {name for name in files if name not in listed and f"{name.partition('/')[0]}/" not in listed}
    assert not unlisted
    assert not {name for name in listed if not (DATA / name).exists()}


def test_the_readme_does_not_promise_a_package_index() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for match in re.finditer(r"pip install '?headspan", text):
        sentence = text[text.rfind("\n\n", 0, match.start()) : match.start()]
        assert "Once it is released" in sentence
    assert "not on a package index yet" in text


def test_versions_agree() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{hs.__version__}"' in pyproject
    assert f"\nversion: {hs.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    supported = re.findall(r'Python :: (3\.[0-9]+)"', pyproject)
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    (matrix,) = re.findall(r"python-version: (\[.*\])", workflow)
    assert json.loads(matrix) == supported


@pytest.mark.parametrize("name", [".github/workflows/ci.yml", ".pre-commit-config.yaml", "CITATION.cff"])
def test_configurations_are_yaml(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    assert isinstance(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")), dict)


def test_targets_of_the_workflow_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in re.findall(r"run: make (\w+)", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE)
