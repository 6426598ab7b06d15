"""Fixtures shared by all tests: locations of the real models, and skipping of tests that need one."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import pytest
import threadpoolctl
from filelock import FileLock

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as cores: threads of BLAS and torch would only wait for each other.
    for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_variable, "1")
    threadpoolctl.threadpool_limits(1)  # a plugin may have imported numpy before the variables were set

import headspan as hs
from headspan.results.scores import Scores
from report_browser import FLAGS, Open, View
from report_models import synthetic_scores


def unavailable(reason: str) -> NoReturn:
    """Skip with a reason, or fail if all real models are required."""
    if os.environ.get("HEADSPAN_REQUIRE_REAL") == "1":
        pytest.fail(f"{reason}, and HEADSPAN_REQUIRE_REAL=1 does not allow to skip it")
    pytest.skip(reason)


def _real(variable: str, what: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        unavailable(f"{variable} does not name {what}")
    if not Path(value).exists():
        unavailable(f"{variable} names {value}, which does not exist")
    return Path(value)


# No test loses power: waiting for the disk after every file would only make thousands of small files slow.
os.fsync = lambda handle: None


def pytest_collection_finish() -> None:
    """Everything loaded so far stays; the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep unfinished work of a test and its processes separate from the user's. The folder is made when needed."""
    folder = tmp_path_factory.getbasetemp() / "caches" / str(next(_numbers)) / "headspan"
    monkeypatch.setenv("HEADSPAN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def gpt2_dir() -> Path:
    return _real("HEADSPAN_GPT2_DIR", "a directory with the real GPT-2 small weights")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return _real("HEADSPAN_SMOLLM2_GGUF", "the SmolLM2-135M-Instruct GGUF file")


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    return _real("HEADSPAN_MINILM_DIR", "the all-MiniLM-L6-v2 directory")


@pytest.fixture(scope="session")
def iglm_dir() -> Path:
    return _real("HEADSPAN_IGLM_DIR", "the directory of an IgLM checkpoint")


@pytest.fixture(scope="session")
def stories260k_dir() -> Path:
    return _real("HEADSPAN_STORIES260K_DIR", "the directory of stories260K, a small Llama")


@pytest.fixture(scope="session")
def paper_dir() -> Path:
    return _real("HEADSPAN_PAPER_DIR", "a folder with the source of the paper (paper.tex)")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights."""
    from families import FAMILIES, build

    folder = tmp_path_factory.mktemp("llama") / "model"
    build(FAMILIES["llama"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_stats(llama_folder: Path) -> hs.Statistics:
    """What `observe` finds on a few sequences; no test changes it."""
    from observation_oracle import MORE_TOKENS

    return hs.observe(llama_folder, tokens=MORE_TOKENS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        unavailable("there is no Chromium on this machine")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, which finds accessibility problems in a page."""
    try:
        return (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        unavailable("axe-playwright-python is not installed")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores]:
    """The page of the demo model, and its scores."""
    weights = hs.open("demo")
    scores = hs.score(weights)
    path = tmp_path_factory.mktemp("report") / "demo.html"
    hs.report(scores, weights, path)
    return path, scores


Shared = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """A folder of this name, filled once for all workers by the first that needs it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def shared(name: str, make: Callable[[Path], object]) -> Path:
        folder, part = root / f"shared-{name}", root / f"part-{name}"
        with FileLock(root / f"{name}.lock"):
            if not folder.exists():
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                make(part)
                part.rename(folder)
        return folder

    return shared


@pytest.fixture(scope="session")
def gpt2_page(shared: Shared, gpt2_dir: Path) -> Path:
    """A folder with the page of GPT-2 (page.html), its payload (payload.json) and its scores (scores.safetensors)."""

    def make(folder: Path) -> None:
        weights = hs.open(str(gpt2_dir))
        scores = hs.score(weights)
        page = hs.report(scores, weights, folder / "page.html", labels="gpt2-ioi", tokens=0)
        (folder / "payload.json").write_text(json.dumps(page.payload), encoding="utf-8")
        scores.save(folder / "scores.safetensors")

    return shared("gpt2", make)


@pytest.fixture(scope="session")
def gpt2_flow(shared: Shared, gpt2_dir: Path) -> Scores:
    """pk and cs of the pairings along which information flows in GPT-2."""
    folder = shared("gpt2-flow", lambda f: hs.score(str(gpt2_dir), ["pk", "cs"], "flow").save(f / "s.safetensors"))
    return hs.load(folder / "s.safetensors")


@pytest.fixture(scope="session")
def large_page(shared: Shared) -> Path:
    """A folder with the page of a result of 1,024 heads (page.html) and its payload (payload.json)."""

    def make(folder: Path) -> None:
        page = hs.report(synthetic_scores(32, 32), path=folder / "page.html")
        (folder / "payload.json").write_text(json.dumps(page.payload), encoding="utf-8")

    return shared("large", make)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    views: list[View] = []

    def open_page(path: Path, scores: Scores, fragment: str = "", **options: Any) -> View:
        context = browser.new_context(**({"viewport": {"width": 1440, "height": 900}} | options))
        view = View(context.new_page(), scores)
        view.page.on("request", lambda request: view.requests.append(request.url))
        view.page.on("console", lambda m: view.errors.append(m.text) if m.type in ("error", "warning") else None)
        view.page.on("pageerror", lambda error: view.errors.append(str(error)))
        view.page.on("dialog", lambda dialog: (view.errors.append("a dialog opened"), dialog.dismiss()))
        view.page.goto(path.as_uri() + fragment)
        view.page.wait_for_selector("html[data-ready=true]")
        views.append(view)
        return view

    yield open_page
    for view in views:
        assert view.errors == []
        others = [url for url in view.requests if not url.startswith(("file://", "blob:", "about:"))]
        assert others == []
        assert sum(url.startswith("file://") for url in view.requests) == 1
        view.page.context.close()


@pytest.fixture
def hub() -> Iterator[Any]:
    """A hub on this machine that sends byte ranges, with one model; some test files have a hub of their own."""
    from local_hub import serving
    from range_hub import Hub, repository

    with serving(Hub(repository())) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where processes that a test starts keep their caches."""
    return tmp_path / "home"
