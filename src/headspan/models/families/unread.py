"""Why models of some families are not read: names of the config's ``model_type`` beside those in the table of families.

The program says the reason, and ``docs/models.md`` lists all of them.

>>> print(why_unread("mamba", ["gpt2"], 0))
models of 'mamba' are not read: they have no softmax attention, so there are no heads to compare
"""

from __future__ import annotations

from collections.abc import Iterable

_TWO_STACKS = "they are an encoder with a decoder, whose stream is fed by cross-attention as well"
_ENCODER = "they are BERT-like encoders that transformers can also run as decoders, and nobody asked for them yet"
_RECURRENT = "they have no softmax attention, so there are no heads to compare"
_MIXED = "a convolution stands between the projections and attention, so a head does not read one token's stream alone"
_GATED_STREAM = (
    "every coordinate of what a head reads is multiplied by a number of its own for each token, so no weight "
    "says what it reads"
)
_DRAFTER = "they draft for another model and use that model's keys and values"
_SCALED_RESIDUAL = "their stream is multiplied by learned numbers between layers, one for every coordinate"
_CROSS = (
    "layers between their own read something else than text by cross-attention and write into the stream, and nobody "
    "asked for them yet"
)
_NORMED_HEADS = "heads are normalised together between attention and the output weight"
_SHARED_BLOCK = "one attention block is shared by many layers and reads the stream beside the embedding"
_SPEECH = (
    "their stream starts from audio codes beside tokens, their tensors have names of their own, and nobody asked for "
    "them yet"
)
_SHARED_LATENT = (
    "a layer may make its keys and values of the latent of an earlier layer, so they read the stream in another place "
    "than the queries of their head"
)

UNREAD: dict[str, str] = {
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "blip", "blip_text_model", "florence2", "marian",
         "mbart", "musicgen", "musicgen_melody", "mvp", "pegasus", "pix2struct", "pix2struct_text_model", "plbart",
         "pp_formulanet", "pp_formulanet_text", "prophetnet", "t5gemma2", "t5gemma2_decoder", "trocr", "udop",
         "vision-encoder-decoder", "whisper"), _TWO_STACKS,
    ),
    **dict.fromkeys(
        ("bert-generation", "big_bird", "data2vec-text", "ernie", "megatron-bert", "rembert", "roberta-prelayernorm",
         "roc_bert", "roformer", "xlm", "xlm-roberta-xl", "xmod"), _ENCODER,
    ),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _GATED_STREAM),
    **dict.fromkeys(("inkling2", "inkling2_text", "inkling_mm_model", "inkling_text", "zaya"), _MIXED),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTER),
    **dict.fromkeys(("doge", "muse_spark", "muse_spark_text"), _SCALED_RESIDUAL),
    **dict.fromkeys(("evolla", "idefics"), _CROSS),
    **dict.fromkeys(("bitnet", "kosmos-2", "kosmos_2_text_model"), _NORMED_HEADS),
    **dict.fromkeys(("kyutai_speech_to_text", "moshi"), _SPEECH),
    **dict.fromkeys(("mistral_large4", "mistral_large4_text"), _SHARED_LATENT),
    **dict.fromkeys(("zamba", "zamba2"), _SHARED_BLOCK),
    **dict.fromkeys(
        ("diffusion_gemma", "diffusion_gemma_text"),
        "one set of weights is an encoder of the prompt and a decoder that also attends to what the encoder kept",
    ),
    **dict.fromkeys(
        ("kosmos-2.5", "kosmos_2_5_text_model"),
        "their sizes and tensors have names of their own, and nobody asked for them yet",
    ),
    **dict.fromkeys(
        ("voxtral_realtime", "voxtral_realtime_text"),
        "what their MLPs read is multiplied, coordinate by coordinate, by numbers that follow from the delay a user "
        "chooses",
    ),
    **dict.fromkeys(
        ("molmo2", "molmo2_text"),
        "their tokens are kept in two tables that are one only in memory, and nobody asked for them yet",
    ),
    "axk2": "queries read the latent twice, normalised and not, so no single weight says what they read",
    "blt": "they have three stacks over bytes and patches, so there is no one residual stream",
    "cpmant": "they put prompt tokens of their own before every text and leave them out of what they return, so their "
    "attention cannot be held against the tokens that were given",
    "deepseek_v4": "most layers attend to keys and values that weights of their own pool over many tokens",
    "diffllama": "each head subtracts one attention pattern from another",
    "hrm_text": "they run two stacks in turns, many times, so a layer has no one place in the stream",
    "jetmoe": "every token picks its own query and output weights from experts",
    "pi0": "they are no language models: a second stack that plans movements uses the keys and values of the first",
    "reformer": "their layers are reversible, with two streams that take turns",
    "xlnet": "attention goes over two streams, with weights stored per relative position",
}  # fmt: skip
"""``model_type`` → why models of it are not read; it ends a sentence. Where the text model of a model with pictures or
sound is not read, both names are here."""

_ARRAYS = (
    'pass its four weights as arrays, headspan.open({"Q": Q, "K": K, "V": V, "O": O}), each (layer, head, d_model, '
    "d_head)"
)


def why_unread(model_type: str | None, known: Iterable[str], more: int) -> str:
    """One sentence for a config whose family has no entry; ``more`` is how many other names are known."""
    if model_type in UNREAD:
        return f"models of {model_type!r} are not read: {UNREAD[model_type]}"
    seen = "the config has no model_type" if model_type is None else f"unknown model_type {model_type[:80]!r}"
    listed = f"{', '.join(sorted(known))} and {more} others (docs/models.md)"
    return f"{seen}: known are {listed}; for any other model {_ARRAYS}"
