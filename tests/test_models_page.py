"""docs/models.md accounts for every causal model of the installed transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_models_page", DOCS / "make_models_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_causal_model_is_read_or_has_a_reason(maker: Any) -> None:
    known = maker.causal_models()
    assert [name for name in known if name not in maker.READ and name not in maker.LEFT_OUT] == []
    assert not maker.READ & set(maker.LEFT_OUT)  # nothing is left out that is read
    assert [name for name in maker.LEFT_OUT if name not in known] == []


def test_the_page_is_what_the_table_says(maker: Any) -> None:
    assert (DOCS / "models.md").read_text(encoding="utf-8") == maker.page()
