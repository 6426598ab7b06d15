"""Fixtures shared by all tests: where the real models are, and how a test that needs one is skipped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest


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
