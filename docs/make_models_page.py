"""Write docs/models.md: which models are read, and for every causal model of transformers that is not, why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from headspan.models.architecture import Architecture
from headspan.models.architectures import ALIASES, ARCHITECTURES
from headspan.sources.gguf.families import FAMILIES
from headspan.sources.gguf.unread import UNREAD

PAGE = Path(__file__).parent / "models.md"

_TWO_STACKS = "a decoder that belongs to an encoder: its stream is fed by cross-attention as well"
_ENCODER = "a BERT-like encoder that transformers can also run as a decoder; nobody asked for it yet"
_RECURRENT = "no softmax attention: there are no heads to compare"
_PICTURES = "a model of pictures or sound around a language model; the language model alone is read where its family is"
_MIXED = "a convolution between the projections and attention: a head does not read one token's stream alone"
_GATED_STREAM = (
    "every coordinate of what a head reads is multiplied by a number of its own for each token, so no weight "
    "says what it reads"
)
_DRAFTER = "it drafts for another model and uses that model's keys and values"
_SCALED_RESIDUAL = "its stream is multiplied by learned numbers between layers, one for every coordinate"

LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
         "prophetnet", "trocr", "whisper", "musicgen", "musicgen_melody"), _TWO_STACKS,
    ),
    **dict.fromkeys(
        ("bert-generation", "big_bird", "data2vec-text", "ernie", "megatron-bert", "rembert", "roberta-prelayernorm",
         "roc_bert", "roformer", "xlm", "xlm-roberta-xl", "xmod", "modernbert-decoder"), _ENCODER,
    ),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(
        ("emu3", "fuyu", "gemma4_unified", "git", "got_ocr2", "mllama", "moshi", "moss_transcribe_diarize",
         "phi4_multimodal"),
        _PICTURES,
    ),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _GATED_STREAM),
    **dict.fromkeys(("inkling_text", "inkling2_text", "zaya"), _MIXED),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTER),
    "cpmant": "it puts prompt tokens of its own before every text and leaves them out of what it returns, so its "
    "attention cannot be held against the tokens that were given",
    "axk2": "its queries read the latent twice, normalised and not: no single weight says what they read",
    "bitnet": "heads are normalised together between attention and the output weight",
    "blt": "three stacks over bytes and patches: no one residual stream",
    "deepseek_v4": "most of its layers attend to keys and values that weights of their own pool over many tokens",
    "diffllama": "each head subtracts one attention pattern from another",
    "doge": _SCALED_RESIDUAL,
    "hrm_text": "two stacks that are run in turns, many times: a layer has no one place in the stream",
    "jetmoe": "every token picks its own query and output weights from experts",
    "minimax": "most layers have linear attention with a fused projection of its own",
    "reformer": "reversible layers: two streams that take turns",
    "xlnet": "attention over two streams, with weights stored per relative position",
    "zamba": "one attention block shared by many layers, reading the stream beside the embedding",
    "zamba2": "one attention block shared by many layers, reading the stream beside the embedding",
}  # fmt: skip


def causal_models() -> list[str]:
    """The model types that the installed transformers runs as causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


WRAPPERS = ("llama4", "qwen3_5", "qwen3_5_moe")  # name the model with pictures; its text model is read
READ = {*ARCHITECTURES, *ALIASES, *WRAPPERS}

# Names of GGUF files that no test writes a file of: their entry is that of a relative.
RELATIVES = ("baichuan", "deepseek", "gemma-embedding", "internlm2", "llama-embed", "minicpm", "nemotron_h", "qwen2vl",
             "qwen3vl", "qwen3vlmoe", "xverse")  # fmt: skip
# Those that tests write with the name map of a relative: the gguf package may not know them yet.
BORROWED = ("cohere2moe", "deepseek32", "hy_v3", "laguna", "mellum", "minimax-m3")
NAMES_ONLY = ("gemma3n",)  # those of which only the names of tensors are tested


def _names(chosen: Callable[[Architecture], bool]) -> list[str]:
    """The model types whose entry of the table is of some kind."""
    return [name for name in sorted(READ - {*WRAPPERS}) if chosen(ARCHITECTURES[ALIASES.get(name, name)])]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page() -> str:
    """The page as Markdown."""
    lines = [
        "# Models",
        "",
        "Made by `docs/make_models_page.py` and checked against transformers' list of causal models by",
        "`tests/test_models_page.py`. Every family that is read is held to transformers' own activations: q, k, v and",
        "the attention output from our weights are the model's to 1e-5 (`tests/test_architectures.py`,",
        "`tests/test_latent.py`). For any other model pass its four weights as arrays.",
        "",
        "## Read",
        "",
        ", ".join(f"`{name}`" for name in sorted(READ - {"transformer_lens"})) + ".",
        "",
        "State dicts of TransformerLens are read too. Models with pictures or sound around one of these are read by",
        "their `text_config`. Apple's OpenELM (`openelm`) is not in transformers: it is held to its documented layout,",
        "written down once more in `tests/test_uneven.py`. Effects are refused where layers differ in their heads.",
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
        "## Causal models of transformers that are not read, and why",
        "",
        "| model type | why |",
        "|---|---|",
        *(f"| `{name}` | {why} |" for name, why in sorted(LEFT_OUT.items())),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
