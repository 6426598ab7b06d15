"""Why models of some families are not read: values of ``model_type`` that are not in the table of families.

The error message gives the reason, and ``docs/models.md`` lists all of them.

>>> print(why_unread("mamba", ["gpt2"], 0))
models of 'mamba' are not read: they have no softmax attention, so there are no heads to compare
"""

from __future__ import annotations

from collections.abc import Iterable

_TWO_STACKS = "they are encoder–decoder models, whose cross-attention also writes to the stream"
_ENCODER = "they are BERT-like encoders that transformers can also run as decoders; support has not been requested yet"
_RECURRENT = "they have no softmax attention, so there are no heads to compare"
_MIXED = "a convolution between the projections and attention mixes tokens, so a head does not read one token alone"
_GATED_STREAM = (
    "each coordinate of what a head reads is scaled separately per token, so no single weight describes what it reads"
)
_DRAFTER = "they draft for another model and use that model's keys and values"
_SCALED_RESIDUAL = "between layers, learned factors scale each coordinate of the stream"
_CROSS = "extra cross-attention layers read non-text inputs and write to the stream; support has not been requested yet"
_NORMED_HEADS = "a norm over all heads comes between attention and the output weight"
_SHARED_BLOCK = "many layers share one attention block, which reads the embedding as well as the stream"
_SPEECH = (
    "their stream starts from audio codes as well as tokens, and their tensors are named differently; support has not "
    "been requested yet"
)
_SHARED_LATENT = (
    "a layer may compute keys and values from the latent of an earlier layer, so they read the stream at a different "
    "position than the queries of the same head"
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
        "the same weights encode the prompt and decode, and the decoder also attends to the encoded prompt",
    ),
    **dict.fromkeys(
        ("kosmos-2.5", "kosmos_2_5_text_model"),
        "their config keys and tensors are named differently; support has not been requested yet",
    ),
    **dict.fromkeys(
        ("voxtral_realtime", "voxtral_realtime_text"),
        "factors that depend on the chosen delay scale each coordinate of what their MLPs read",
    ),
    **dict.fromkeys(
        ("molmo2", "molmo2_text"),
        "their token embedding is stored in two tables that are joined in memory; support has not been requested yet",
    ),
    "axk2": "queries read both the normalised and the raw latent, so no single weight describes what they read",
    "blt": "they have three stacks over bytes and patches, so there is no single residual stream",
    "cpmant": "they prepend their own prompt tokens to every text and drop them from the output, so attention patterns "
    "do not line up with the input tokens",
    "deepseek_v4": "in most layers, learned weights pool keys and values over many tokens",
    "diffllama": "each head subtracts one attention pattern from another",
    "hrm_text": "they alternate between two stacks many times, so a layer has no single position in the stream",
    "jetmoe": "each token is routed to its own query and output weights",
    "pi0": "they are not language models: a second stack, which plans movements, uses the keys and values of the first",
    "reformer": "their layers are reversible and alternate between two streams",
    "xlnet": "attention runs over two streams, with weights per relative position",
}  # fmt: skip
"""``model_type`` → why models of it are not read, as the end of an error message. Where the text model of a
vision or audio model is not read, both names are listed."""

_ARRAYS = (
    'pass its four weights as arrays, headspan.open({"Q": Q, "K": K, "V": V, "O": O}), each (layer, head, d_model, '
    "d_head)"
)


def why_unread(model_type: str | None, known: Iterable[str], more: int) -> str:
    """The error message for a config whose family has no entry; ``more`` is the number of other known names."""
    if model_type in UNREAD:
        return f"models of {model_type!r} are not read: {UNREAD[model_type]}"
    seen = "the config has no model_type" if model_type is None else f"unknown model_type {model_type[:80]!r}"
    listed = f"{', '.join(sorted(known))} and {more} others (docs/models.md)"
    return f"{seen}: known are {listed}; for any other model {_ARRAYS}"
