"""Fixtures shared by all tests: where the real models are, and how a test that needs one is skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import pytest

import headspan as hs
from headspan.scores import Scores
from report_browser import FLAGS, Open, View


def unavailable(reason: str) -> NoReturn:
    """Skip with a reason, or fail where everything real is required to be there."""
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


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Unfinished work of a test, and of the processes it starts, lies apart from the user's."""
    folder = tmp_path_factory.mktemp("cache") / "headspan"
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
    """The script of axe-core, which finds what keeps people from using a page."""
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
