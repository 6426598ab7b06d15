"""The fields of an entry for a GGUF model family, and the Hugging Face names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headspan.checkpoints.gguf.config import About

# Stems of the tensors of one block, and outside the blocks, as in Llama.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    # all experts of a layer in one tensor, and the shared MLP
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Family:
    """One value of ``general.architecture``; the defaults are those of Llama without its rotary order."""

    model_type: str
    layer: str = "model.layers.{}."
    block: Mapping[str, str] = field(default_factory=dict)  # on top of the Llama names
    top: Mapping[str, str] = field(default_factory=dict)
    fused: str | None = None  # Hugging Face's name of a fused QKV; without it a fused QKV is split
    rope: bool = False
    grouped: bool = False
    transposed: tuple[str, ...] = ()
    config: Callable[[Mapping[str, Any], About], dict[str, Any]] | None = None  # further config values from metadata
    note: str = ""  # a note for the user about the weights
    unread: str = ""  # why files of this family cannot be read

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a GGUF tensor; names that no rule covers are unchanged.

        >>> Family("gpt2", layer="transformer.h.{}.", fused="attn.c_attn").hf_name("blk.3.attn_qkv.bias")
        'transformer.h.3.attn.c_attn.bias'
        """
        match = _BLOCK_NAME.fullmatch(name)
        if match:
            stem = self.fused if match["stem"] == "attn_qkv" else {**_BLOCK, **self.block}.get(match["stem"])
            return f"{self.layer.format(int(match['layer']))}{stem}{_suffix(stem, match['end'])}" if stem else name
        stem, dot, end = name.rpartition(".")
        renamed = {**_TOP, **self.top}.get(stem)
        return f"{renamed}{dot}{end}" if renamed else name


_BLOCK_NAME = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<stem>\w+)(?:\.(?P<end>weight|bias))?")


def _suffix(stem: str, end: str | None) -> str:
    """The suffix of a tensor name. Sinks are a parameter without one; the converter omits it for a few names."""
    return "" if stem.endswith("sinks") else f".{end or 'weight'}"
