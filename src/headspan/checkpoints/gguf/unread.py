"""Why GGUF files of some families are not read: names of llama.cpp that are not in the table of families."""

from __future__ import annotations

from collections.abc import Iterable

_NO_HEADS = "it has no softmax attention"
_TWO_STACKS = "it is an encoder–decoder model or the encoder of one"
_NO_TEXT = "it is not a language model"
_FAMILY = "its family is not supported"
_UNTRIED = "its family is read from directories, but its GGUF layout has not been tested yet"
_DRAFTER = "it drafts for another model"

UNREAD: dict[str, str] = {
    **dict.fromkeys(("arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"), _NO_HEADS),
    **dict.fromkeys(("t5", "t5encoder"), _TWO_STACKS),
    **dict.fromkeys(("clip", "mmproj", "wavtokenizer-dec"), _NO_TEXT),
    **dict.fromkeys(("dflash", "eagle3", "gemma4-assistant"), _DRAFTER),
    **dict.fromkeys(
        ("arctic", "bailingmoe", "bailingmoe2", "bitnet", "codeshell", "cogvlm", "deepseek2-ocr",
         "dream", "exaone", "grok", "grovemoe", "jais", "jina-bert-v2", "jina-bert-v3", "llada",
         "llada-moe", "maincoder", "neo-bert", "nomic-bert", "nomic-bert-moe", "orion", "pangu-embedded",
         "plamo", "plamo2", "plamo3", "plm", "qwen", "refact", "rnd1", "smallthinker"), _FAMILY,
    ),
    **dict.fromkeys(("chameleon", "deci", "hunyuan_vl", "paddleocr", "step35"), _UNTRIED),
    "gptj": "llama.cpp names its tensors, but no converter writes such files, so the order of their rows is unknown",
    "persimmon": "llama.cpp no longer supports it, so the order of its rows is unknown",
}  # fmt: skip
"""``general.architecture`` → why it is not read, as the end of an error message."""


def why_unread(architecture: str, known: Iterable[str]) -> str:
    """The error message for a file whose architecture has no entry."""
    why = UNREAD.get(architecture, "headspan does not know how llama.cpp stores that family")
    return (
        f"a GGUF file of {architecture[:80]!r} is not read: {why}; give the Hugging Face directory if its family is "
        f"read, or a GGUF file of one of {', '.join(sorted(known))}"
    )
