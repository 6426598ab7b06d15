"""Write docs/models.md: which models are read, and why others that transformers runs on text are not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from headspan.checkpoints.gguf.families import FAMILIES
from headspan.checkpoints.gguf.unread import UNREAD
from headspan.models.families.entry import Architecture
from headspan.models.families.table import ALIASES, ARCHITECTURES
from headspan.models.families.unread import UNREAD as NOT_READ

PAGE = Path(__file__).parent / "models.md"

# Model types of transformers that are pictures or sound around a text model that is read.
WRAPPERS = (
    "aria", "aya_vision", "blip-2", "cohere2_vision", "cohere_compass", "cosmos3_edge", "cosmos3_omni",
    "deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid", "emu3", "ernie4_5_vl_moe", "exaone4_5", "fast_vlm",
    "fun_asr_nano", "fuyu", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmasr", "glmga", "got_ocr2",
    "granite4_vision", "granite_docling", "granite_speech", "granite_speech_plus", "hunyuan_vl",
    "hyperclovax_vision_v2", "idefics2", "idefics3", "instructblip", "instructblipvideo", "internvl", "janus",
    "kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llama4", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "mistral3", "mllama",
    "moss_transcribe_diarize", "muse_glimmer", "nemo_speechlm", "nemotron_h_omni", "ovis2", "paddleocr_vl",
    "paligemma", "perception_lm", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni", "qwen2_5_omni_thinker",
    "qwen2_audio", "qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_vl",
    "qwen3_vl_moe", "shieldgemma2", "smolvlm", "step3p7", "unlimited_ocr", "vibevoice_asr", "video_llama_3",
    "video_llava", "vipllava", "voxtral",
)  # fmt: skip
READ = {*ARCHITECTURES, *ALIASES}


def listed_models() -> dict[str, str]:
    """What the installed transformers runs on text, alone or beside pictures and sound, with the text model of each."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto as auto

    names = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    found = {}
    for name in sorted(names | {*auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}):
        try:
            config = AutoConfig.for_model(name)
            text = getattr(config, "text_config", None) or config.get_text_config()
            found[name] = text.model_type
        except Exception:  # of several kinds: some cannot be without their parts, or have two of them
            found[name] = name
    return found


NEED_TIMM = ("fast_vlm", "perception_lm")

# Names of GGUF files that no test writes a file of: their entry is that of a relative.
RELATIVES = ("baichuan", "deepseek", "gemma-embedding", "internlm2", "llama-embed", "minicpm", "nemotron_h", "qwen2vl",
             "qwen3vl", "qwen3vlmoe", "xverse")  # fmt: skip
# Those that tests write with the name map of a relative: the gguf package may not know them yet.
BORROWED = ("cohere2moe", "deepseek32", "hy_v3", "laguna", "mellum", "minimax-m3")
NAMES_ONLY = ("gemma3n",)  # those of which only the names of tensors are tested


def _names(chosen: Callable[[Architecture], bool]) -> list[str]:
    """The model types whose entry of the table is of some kind."""
    return [name for name in sorted(READ) if chosen(ARCHITECTURES[ALIASES.get(name, name)])]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page() -> str:
    """The page as Markdown."""
    lines = [
        "# Models",
        "",
        "Made by `docs/make_models_page.py`; `tests/test_models_page.py` checks it against transformers' lists of",
        "causal models and of models with pictures or sound. What is read is held to transformers' own activations: q,",
        "k, v and the attention output from our weights are the model's to 1e-5 (`tests/test_architectures.py`,",
        "`tests/test_latent.py`). For any other model pass its four weights as arrays.",
        "",
        "## Read",
        "",
        ", ".join(f"`{name}`" for name in sorted(READ - {"transformer_lens"})) + ".",
        "",
        "Some are not in transformers. Apple's OpenELM (`openelm`) is held to its documented layout, written down once",
        "more in `tests/test_uneven.py`; Nemotron-NAS and DeciLM (`nemotron-nas`, `deci`) to Llama's attention with",
        "other numbers of heads (`tests/test_nemotron_nas.py`); `kimi_k2` has the tensors of `deepseek_v3` and is read",
        "as that. State dicts of TransformerLens are read too. Effects are refused where layers differ in their heads.",
        "",
        "## Around a text model",
        "",
        "Of a model with pictures or sound the text model is read, by the `model_type` of its `text_config`; what",
        "reads pictures or sound is left alone. Those of transformers whose usual text model is read:",
        ", ".join(f"`{name}`" for name in WRAPPERS) + ".",
        "",
        "Every text model is run and compared as above. Where the whole model is not run with it, names and shapes of",
        "its tensors are compared with transformers' class (`tests/test_models_page.py`); not so for",
        f"{_listed(NEED_TIMM)}, whose classes need a package that the tests do not have.",
        "",
        "## Kinds of attention",
        "",
        "Keys and values of earlier layers (Gemma 3n, Gemma 4 E2B and E4B; see",
        "[concepts](concepts.md#keys-and-values-of-earlier-layers)): "
        + ", ".join(f"`{name}`" for name in _names(lambda entry: entry.lends_kv))
        + ". Their effects are refused.",
        "",
        "Several residual streams (see [concepts](concepts.md#several-residual-streams)): "
        + ", ".join(f"`{name}`" for name in _names(lambda entry: entry.streams))
        + ". Their effects are refused.",
        "",
        "Latent attention (see [concepts](concepts.md#latent-attention)): "
        + _listed(_names(lambda entry: entry.latent))
        + ". `effects` freezes the norms inside; it is refused for "
        + _listed(_names(lambda entry: entry.latent and bool(entry.streams or entry.rotary_norm)))
        + ".",
        "",
        "## From GGUF",
        "",
        "By `general.architecture`, llama.cpp's name of a family: "
        + _listed(name for name in sorted(FAMILIES) if FAMILIES[name].model_type in READ)
        + ".",
        "",
        "Tests write a file in float32 with the name map of the gguf package and compare it with the directory",
        "(`tests/test_sources_gguf_families.py`, `tests/test_latent.py`), with three exceptions. No file is written of",
        f"{_listed(RELATIVES)}, which are read as a relative is.",
        f"The name map is a relative's, where the gguf package has none of their own, for {_listed(BORROWED)}.",
        f"Only the names of tensors are compared for {_listed(NAMES_ONLY)}.",
        "",
        *(f"`{name}`: {family.note}.\n" for name, family in sorted(FAMILIES.items()) if family.note),
        "Any other name is refused. Of those that llama.cpp knows: "
        + "; ".join(
            f"{', '.join(f'`{name}`' for name in sorted(UNREAD) if UNREAD[name] == why)} ({why})"
            for why in dict.fromkeys(UNREAD.values())
        )
        + ".",
        "",
        "## Not read, and why",
        "",
        "Causal models of transformers, models with pictures or sound, and their text models. The program gives the",
        "same reasons (`headspan/models/families/unread.py`).",
        "",
        "| model type | why |",
        "|---|---|",
        *(f"| `{name}` | {why} |" for name, why in sorted(NOT_READ.items())),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
