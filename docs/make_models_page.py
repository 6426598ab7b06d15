"""Write docs/models.md: which models are read, and why other text models of transformers are not."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from headspan.checkpoints.gguf.families import FAMILIES
from headspan.checkpoints.gguf.unread import UNREAD
from headspan.models.families.entry import Architecture
from headspan.models.families.table import ALIASES, ARCHITECTURES
from headspan.models.families.unread import UNREAD as NOT_READ

PAGE = Path(__file__).parent / "models.md"

# Model types of transformers that add vision or audio to a text model that is read.
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
    """What the installed transformers runs on text, alone or with vision or audio, and the text model of each."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto as auto

    names = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    found = {}
    for name in sorted(names | {*auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}):
        try:
            config = AutoConfig.for_model(name)
            text = getattr(config, "text_config", None) or config.get_text_config()
            found[name] = text.model_type
        except Exception:  # of several types: some configs need their parts, or have two text models
            found[name] = name
    return found


NEED_TIMM = ("fast_vlm", "perception_lm")

# GGUF architectures for which no test writes a file: they use the entry of a related family.
RELATIVES = ("baichuan", "deepseek", "gemma-embedding", "internlm2", "llama-embed", "minicpm", "nemotron_h", "qwen2vl",
             "qwen3vl", "qwen3vlmoe", "xverse")  # fmt: skip
# Those that tests write with the name map of a related family: the gguf package may not know them yet.
BORROWED = ("cohere2moe", "deepseek32", "hy_v3", "laguna", "mellum", "minimax-m3")
NAMES_ONLY = ("gemma3n",)  # only the names of their tensors are tested


def _names(chosen: Callable[[Architecture], bool]) -> list[str]:
    """The model types whose entry in the table satisfies a condition."""
    return [name for name in sorted(READ) if chosen(ARCHITECTURES[ALIASES.get(name, name)])]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _reasons(unread: Mapping[str, str]) -> str:
    """A bullet for each reason and the names it applies to, the longest list first."""
    names = {why: sorted(name for name in unread if unread[name] == why) for why in sorted({*unread.values()})}
    most = sorted(names, key=lambda why: -len(names[why]))
    return "\n".join(_wrapped(f"- {_listed(names[why])}: {why}.", "  ") for why in most)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def page() -> str:
    """The page as Markdown."""
    borrowing = _names(lambda entry: entry.lends_kv)
    streams = _names(lambda entry: entry.streams)
    latent = _names(lambda entry: entry.latent)
    without_effects = _names(lambda entry: entry.latent and bool(entry.streams or entry.rotary_norm))
    paragraphs = [
        "# Models",
        "headspan reads the models below by the `model_type` of their config. For any other model pass the four "
        'weights as arrays: `headspan.open({"Q": Q, "K": K, "V": V, "O": O})`.',
        "For each family the tests build a small random model with transformers' own class. They recompute q, k, v "
        "and the attention output from the weights that headspan reads, and compare them with the model's "
        "activations to 1e-5 (`tests/test_architectures.py`, `tests/test_latent.py`).",
        "## Text models",
        _listed(sorted(READ - {"transformer_lens"})) + ".",
        "State dicts of TransformerLens are read too. Effects are refused for models whose layers differ in the number "
        "or size of their heads.",
        "Some of these families are not in transformers. OpenELM (`openelm`) is tested against its documented layout, "
        "which `tests/test_uneven.py` implements independently. Nemotron-NAS and DeciLM (`nemotron-nas`, `deci`) are "
        "tested against Llama's attention with varying numbers of heads (`tests/test_nemotron_nas.py`). `kimi_k2` has "
        "the same tensors as `deepseek_v3` and is read as such.",
        "## Vision and audio models",
        "For a model with vision or audio input, headspan reads the text model, which it identifies by the "
        "`model_type` of the `text_config`. It ignores the vision and audio towers. These model types of transformers "
        "have a text model that is read:",
        _listed(WRAPPERS) + ".",
        "Every text model is tested as above. Where the tests do not run the whole model, they compare the names and "
        "shapes of its tensors with transformers' class (`tests/test_models_page.py`). The exceptions are "
        f"{' and '.join(f'`{name}`' for name in NEED_TIMM)}, whose classes need a package that the tests do not "
        "install.",
        "## Special kinds of attention",
        "[Keys and values of earlier layers](special-cases.md#keys-and-values-of-earlier-layers): "
        f"{_listed(borrowing)}. Effects are refused.",
        f"[Several residual streams](special-cases.md#several-residual-streams): {_listed(streams)}. Effects are "
        "refused.",
        f"[Latent attention](special-cases.md#latent-attention): {_listed(latent)}. `effects` keeps the inner norms "
        f"fixed. It is refused for {_listed(without_effects)}.",
        "## GGUF files",
        "A GGUF file names its family in `general.architecture`. headspan reads "
        + _listed(name for name in sorted(FAMILIES) if FAMILIES[name].model_type in READ)
        + ".",
        "The tests write a float32 file with the name map of the gguf package and compare it with the directory "
        "(`tests/test_sources_gguf_families.py`, `tests/test_latent.py`). There are three exceptions:",
        "\n".join(
            _wrapped(line, "  ")
            for line in (
                f"- {_listed(RELATIVES)} are read like a related family, and no file is written for them.",
                f"- {_listed(BORROWED)} use the name map of a related family, because the gguf package may not have "
                "one for them.",
                f"- For {_listed(NAMES_ONLY)} only the names of the tensors are compared.",
            )
        ),
        *(f"`{name}`: {family.note}." for name, family in sorted(FAMILIES.items()) if family.note),
        "Any other name is refused. For those that llama.cpp knows, the reasons are:",
        _reasons(UNREAD),
        "## Models that are not read",
        "These are the other text, vision and audio models of transformers, grouped by reason. Error messages give the "
        "same reasons (`src/headspan/models/families/unread.py`).",
        _reasons(NOT_READ),
        "This page is generated by `docs/make_models_page.py`. `tests/test_models_page.py` checks that it covers every "
        "causal, vision and audio model in transformers' lists.",
    ]
    return "\n\n".join(text if "\n" in text else _wrapped(text) for text in paragraphs) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
