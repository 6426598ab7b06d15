"""Two declarative tables: how MLPs store their weights, and their position in the block of each family.

The names of a layer's tensors determine its layout, so layers of one model may differ (dense ones before
mixtures of experts). To add a family, add its layout if it is new, its norm, and whether its MLP is parallel to the
attention. Names are those of :mod:`headspan.models.families.table`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headspan.models.families.entry import Config


@dataclass(frozen=True)
class Layout:
    """The modules of one MLP, with ``{}`` for the number of an expert.

    gate, up: the modules that read; a plain MLP has no gate. If both are one tensor, its rows are those of the gate,
    then those of up (``interleaved``: alternating), and ``up`` is None.
    stacked: one tensor holds all experts, (expert, rows, columns). turned: weights are stored (in, out).
    flat: the neurons of all experts are the rows of one tensor, both for reading and for writing (DBRX).
    shared: an MLP that every token passes through, besides the experts.
    """

    gate: str | None
    up: str | None
    down: str
    stacked: bool = False
    flat: bool = False
    turned: bool = False
    interleaved: bool = False
    shared: bool = False

    @property
    def experts(self) -> bool:
        return self.stacked or self.flat or "{}" in self.down

    @property
    def fused(self) -> bool:
        return self.up is None

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(module for module in (self.gate, self.up) if module is not None)


def _gated(start: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), **more: Any) -> Layout:
    gate, up, down = (f"{start}.{name}" for name in names)
    return Layout(gate, up, down, **more)


def _plain(up: str, down: str, **more: Any) -> Layout:
    return Layout(None, up, down, **more)


_W = ("w1", "w3", "w2")
_LINEAR_GATE = ("linear_gate", "up_proj", "down_proj")

# The first layout whose tensors are all present applies. Gated MLPs come before plain ones that share two names.
DENSE: tuple[Layout, ...] = (
    _gated("mlp"),
    _gated("mlp", _LINEAR_GATE),
    _gated("feed_forward"),
    _gated("feed_forward", _W),
    _gated("block_sparse_moe"),
    _gated("mlps.{sub}"),
    _plain("mlp.up_proj", "mlp.down_proj"),
    _plain("mlp.c_fc", "mlp.c_proj"),
    _plain("mlp.fc_in", "mlp.fc_out"),
    _plain("mlp.fc1", "mlp.fc2"),
    _plain("fc1", "fc2"),
    _plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    _plain("ffn.up_proj", "ffn.down_proj"),
    _plain("ffn.lin1", "ffn.lin2"),
    _plain("intermediate.dense", "output.dense"),
    _plain("ffn.0", "ffn.2"),
    _plain("mixer.up_proj", "mixer.down_proj"),
    _gated("mlp_block"),
    Layout("mlp.gate_up_proj", None, "mlp.down_proj"),
    Layout("mlp.Wi", None, "mlp.Wo"),
    Layout("ffn.proj_1", None, "ffn.proj_2"),
    Layout("mlp.W_gate|", "mlp.W_in|", "mlp.W_out|", turned=True),
    _plain("mlp.W_in|", "mlp.W_out|", turned=True),
)
EXPERTS: tuple[Layout, ...] = (
    _plain("mixer.experts.{}.up_proj", "mixer.experts.{}.down_proj"),
    _plain("mixer.experts.up_proj", "mixer.experts.down_proj", stacked=True),
    _gated("mlp.experts.{}"),
    _gated("feed_forward.experts.{}"),
    _gated("feed_forward.experts.{}", _W),
    _gated("block_sparse_moe.experts.{}", _W),
    _gated("mlp.experts.{}", _W),
    _gated("mlp.experts", stacked=True),
    _gated("moe", stacked=True),
    Layout("mlp.experts.gate_up_proj", None, "mlp.experts.down_proj", stacked=True),
    Layout("mlp.experts.gate_up_proj|", None, "mlp.experts.down_proj|", stacked=True),
    Layout("feed_forward.experts.gate_up_proj|", None, "feed_forward.experts.down_proj|", stacked=True),
    Layout("block_sparse_moe.experts.gate_up_proj|", None, "block_sparse_moe.experts.down_proj|", stacked=True),
    Layout("block_sparse_moe.input_linear", None, "block_sparse_moe.output_linear", stacked=True),
    Layout("mlp.experts.fc1", None, "mlp.experts.fc2", stacked=True, turned=True),
    Layout("ffn.experts.mlp.w1|", "ffn.experts.mlp.v1|", "ffn.experts.mlp.w2|", flat=True),
)
SHARED: tuple[Layout, ...] = (
    *(_gated(name, shared=True) for name in (
        "mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp", "feed_forward.shared_expert",
        "block_sparse_moe.shared_experts",
    )),
    _gated("share_expert", shared=True),
    _gated("mlp.shared_experts", _LINEAR_GATE, shared=True),
    _plain("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj", shared=True),
    Layout("mlp.shared_experts.gate_up_proj", None, "mlp.shared_experts.down_proj", shared=True),
    Layout("shared_mlp.input_linear", None, "shared_mlp.output_linear", shared=True),
)  # fmt: skip

# Families that interleave gate and up of stacked experts.
INTERLEAVED = frozenset({"gpt_oss"})

# The norm between the stream and the MLP: the first that the layer has. If it has none, the MLP of a parallel block
# reads what attention reads, and families with norms only on their outputs read the stream directly.
NORMS: tuple[str, ...] = (
    "pre_feedforward_layernorm", "pre_mlp_layernorm", "pre_ff_layernorm", "feedforward_layernorm",
    "feedforward_layer_norm", "channel_pre_norm", "ffn_norm", "mlp_norm", "ln_mlp", "ln_2", "ln2.w|ln2.b", "norm_2",
    "layernorm2", "norm_attn_norm.norm_2", "final_layer_norm", "post_attention_layernorm",
    "post_attention_layernorm.{sub}", "LayerNorm", "LayerNorm.gamma|LayerNorm.beta", "norm",
)  # fmt: skip
# The norm between the MLP and the stream, in families that have one there.
OUTPUT_NORMS = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2", "post_ffn_norm")

# Families whose MLPs may be a mixture of parts with separate norms, which is not supported: the config key that
# shows it.
OWN_NORMS = {"gemma4": "enable_moe_block"}

PARALLEL = frozenset({"gptj", "codegen", "phi", "cohere", "cohere2"})


def is_parallel(architecture: str, config: Config) -> bool:
    """Whether the MLP reads the same stream as the attention of its layer, before attention has written."""
    if architecture == "falcon":
        return bool(config.get("new_decoder_architecture") or config.get("parallel_attn", True))
    if architecture == "gpt_neox":
        return bool(config.get("use_parallel_residual", True))
    if architecture == "stablelm":
        return bool(config.get("use_parallel_residual", False))
    if architecture == "transformer_lens":
        return bool(config.get("parallel_attn_mlp", False))
    return architecture in PARALLEL
