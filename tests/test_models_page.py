"""docs/models.md accounts for every model that the installed transformers runs on text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from families_around import AROUND, LATENT_AROUND
from headspan.checkpoints.live import by_modules, open_live
from headspan.models.families.table import ALIASES, ARCHITECTURES
from headspan.models.families.tensor_map import TensorMap

transformers = pytest.importorskip("transformers")
DOCS = Path(__file__).parent.parent / "docs"


def load_maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_models_page", DOCS / "make_models_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = load_maker()
KNOWN = MAKER.listed_models()
RUN = {family.around[0] for family in (AROUND | LATENT_AROUND).values() if family.around}
RUN |= {"qwen3_omni_moe"}  # by its thinker, in tests/test_around.py
# What the usual config of a class lacks to be built.
MISSING: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}}}},
}  # fmt: skip
# transformers would save them with names of their vision tower in the text model, which their published files do not.
MISNAMED = ("kimi_k25", "qianfan_ocr")


def test_every_model_on_text_is_read_or_has_a_reason() -> None:
    assert len(KNOWN) > 250 and KNOWN["glm5_next"] == "glm5_next_text"
    for name, text in KNOWN.items():
        if name in MAKER.WRAPPERS:
            assert text in MAKER.READ and name not in MAKER.READ, name
        else:
            assert name in MAKER.READ | MAKER.NOT_READ.keys() and text in MAKER.READ | MAKER.NOT_READ.keys(), name
    assert not MAKER.READ & MAKER.NOT_READ.keys()  # nothing is left out that is read
    assert MAKER.NOT_READ.keys() <= {*KNOWN, *KNOWN.values()} and {*MAKER.WRAPPERS} <= KNOWN.keys()


def test_every_model_with_latent_attention_is_accounted_for() -> None:
    folder = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name for path in folder.glob("*/modeling_*.py") if "kv_a_proj_with_mqa" in path.read_text("utf-8")
    }
    assert {"deepseek_v3", "glm5_next", "mistral_large4"} <= found
    for name in found:
        assert name in MAKER.NOT_READ or ARCHITECTURES[ALIASES.get(name, name)].latent, name


@pytest.mark.parametrize("name", sorted({*MAKER.WRAPPERS} - {*MAKER.NEED_TIMM} - RUN))
def test_the_text_model_is_found_inside(name: str) -> None:
    """By names and shapes of the tensors that transformers would save, without creating weights."""
    import torch

    config = transformers.AutoConfig.for_model(name, **MISSING.get(name, {}))
    auto = transformers.AutoModelForMultimodalLM
    if type(config) not in auto._model_mapping:
        auto = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    found = TensorMap((by_modules if name in MISNAMED else open_live)(model))
    text = KNOWN[name]
    assert found.architecture == ALIASES.get(text, text)
    assert found.unembedding is not None


def test_the_page_follows_the_table() -> None:
    assert (DOCS / "models.md").read_text(encoding="utf-8") == MAKER.page()
