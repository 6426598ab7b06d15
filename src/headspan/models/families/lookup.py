"""The family of a checkpoint, found from its config.

>>> find_architecture({"model_type": "xlm-roberta"})[0]
'roberta'
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from headspan.checkpoints.untrusted import config_part
from headspan.models.families.entry import Architecture, Config
from headspan.models.families.table import ALIASES, ARCHITECTURES
from headspan.models.families.unread import UNREAD, why_unread
from headspan.vocabulary.errors import HeadspanError

_TEXT_PARTS = ("thinker_config", "text_config", "llm_config")  # one may be inside another


def _text_part(config: Config) -> Config:
    """The config of the language model in a vision or audio model, the only part that is read."""
    for key in _TEXT_PARTS:
        nested = config_part(config, key)
        if nested:
            ties = [part["tie_word_embeddings"] for part in (config, nested)
                    if part.get("tie_word_embeddings") is not None]  # fmt: skip
            config = {**nested, "tie_word_embeddings": any(ties) if ties else None}
    return config


def find_architecture(config: Config, names: Collection[str] = ()) -> tuple[str, Architecture, Config]:
    """The family of a checkpoint: its name, its entry for this config, and the config of its text model."""
    if config.get("_unread"):
        raise HeadspanError(str(config["_unread"]))
    outer = config.get("model_type")
    config = _text_part(config)
    model_type = config.get("model_type", outer)
    if model_type is None and any(name.endswith(".attn.W_Q") for name in names):
        model_type = "transformer_lens"
    name = ALIASES.get(str(model_type), str(model_type))
    if name not in ARCHITECTURES or str(outer) in UNREAD:  # a drafter may wrap a text model of a supported family
        unread = outer if str(outer) in UNREAD else model_type
        raise HeadspanError(why_unread(None if unread is None else str(unread), ARCHITECTURES, len(ALIASES)))
    entry = ARCHITECTURES[name]
    if config.get("kv_lora_rank") and not entry.latent:
        raise HeadspanError(
            f"the config says {name} but sets kv_lora_rank, a sign of latent attention, which {name} does not have: "
            "check its model_type"
        )
    if entry.in_files and any(f".{entry.in_files['o']}." in tensor for tensor in names):
        entry = replace(entry, **entry.in_files)
    config = {**entry.defaults, **{key: value for key, value in config.items() if value is not None}}
    config = {**config, **(entry.sizes(config) if entry.sizes else {})}
    return name, entry.adapt(entry, config) if entry.adapt else entry, config
