"""Models in memory: transformers, PEFT, TransformerLens, or a state dict with its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headspan.checkpoints.live_tokenizer import live_vocabulary, with_tokenizer
from headspan.checkpoints.mapping import MappingSource
from headspan.checkpoints.plain_models import hint, is_bridge, is_rewritten, is_wrapped, plain_model, unwrapped
from headspan.checkpoints.transformer_lens import is_hooked_state, state_config
from headspan.checkpoints.untrusted import reason
from headspan.vocabulary.errors import HeadspanError


def open_live(ref: Any) -> MappingSource:
    """A source over the tensors of a live model, which is not changed; only what an adapter changes is copied.

    Parameters
    ----------
    ref : a transformers ``PreTrainedModel``, a ``PeftModel`` (its active adapters are merged), a TransformerLens
        ``TransformerBridge`` or ``HookedTransformer``, one of these as ``(model, tokenizer)``, a pair
        ``(state_dict, config)``, or a HookedTransformer's state dict alone.
    """
    model, tokenizer = with_tokenizer(ref)
    source = _open(unwrapped(model))
    source.tokens = live_vocabulary(tokenizer)
    return source


def _open(ref: Any) -> MappingSource:
    name = type(ref).__name__
    if isinstance(ref, type):
        raise HeadspanError(f"{ref.__name__} is a class, not a model: create an instance first")
    if _is_pair(ref):
        return from_state_dict(ref[0], as_config(ref[1]))
    if isinstance(ref, Mapping):
        if not is_hooked_state(key for key in ref if isinstance(key, str)):
            raise HeadspanError("a state dict alone does not give the number of heads: give (state_dict, config)")
        return from_state_dict(ref, {})
    if is_bridge(ref) and (is_rewritten(ref) or not hasattr(ref.original_model, "config")):
        return _from_bridge(ref)
    if hasattr(ref, "state_dict") and (hasattr(ref, "config") or is_bridge(ref)):
        model = plain_model(ref) if is_wrapped(ref) else ref
        return MappingSource(checkpoint_names(model), as_config(model.config), f"live {name}")
    if hasattr(ref, "state_dict") and hasattr(ref, "cfg"):
        return from_state_dict(ref.state_dict(), as_config(ref.cfg), f"live {name}")
    raise HeadspanError(
        f"an object of type {name} is not a model reference: give a path, a hub id, demo, a transformers or "
        f"TransformerLens model, or (state_dict, config).{hint(ref)}"
    )


def _is_pair(ref: object) -> bool:
    return isinstance(ref, tuple) and len(ref) == 2 and isinstance(ref[0], Mapping)


def from_state_dict(
    state: Mapping[Any, Any], config: dict[str, Any], reference: str = "state dict in memory"
) -> MappingSource:
    """A source over a plain state dict, also in TransformerLens' layout."""
    tensors = {str(name): value for name, value in state.items() if hasattr(value, "shape") and hasattr(value, "dtype")}
    source = MappingSource(tensors, config, reference)
    if is_hooked_state(tensors):
        source.config = state_config(source, config)
    return source


def as_config(config: Any) -> dict[str, Any]:
    """A config object or mapping as a dict."""
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    raise HeadspanError(f"a {type(config).__name__} is not a model config: give a dict or a transformers config")


def by_modules(model: Any) -> MappingSource:
    """A transformers model under the names of its modules, which may differ from those in its files."""
    return MappingSource(_state_without_experts(model), as_config(model.config), f"live {type(model).__name__}")


def _state_without_experts(model: Any) -> dict[str, Any]:
    try:
        return {key: value for key, value in model.state_dict().items() if ".experts." not in key}
    except Exception as error:
        raise HeadspanError(f"this {type(model).__name__} does not give its state dict: {reason(error)}") from None


def checkpoint_names(model: Any) -> dict[str, Any]:
    """The state dict of a transformers model under the names that save_pretrained would write.

    transformers 5 renames the tensors of some families while loading and has a reverse map for saving. Experts
    are left out first: they would be copied, and they contain no heads.
    """
    state = _state_without_experts(model)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 keeps the names of the checkpoint
        return state
    try:
        return dict(revert_weight_conversion(model, state))
    except Exception as error:
        raise HeadspanError(f"the tensors of this {type(model).__name__} cannot be named: {reason(error)}") from None


def _from_bridge(bridge: Any) -> MappingSource:
    """A TransformerBridge by its per-head weights: of TransformerLens' own models, and in compatibility mode.

    Compatibility mode folds norms into these weights and leaves the wrapped model's fused tensors stale.
    """
    tensors: dict[str, Any] = {"embed.W_E": bridge.W_E, "unembed.W_U": bridge.W_U}
    for layer, block in enumerate(bridge.blocks):
        heads = block.attn.W_Q.shape[0]
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
            value = getattr(block.attn, name, None)
            if value is not None:
                shared = name[-1] in "KV" and value.shape[0] < heads
                tensors[f"blocks.{layer}.attn.{'_' if shared else ''}{name}"] = value
        tensors |= _norm_tensors(f"blocks.{layer}.ln1", getattr(block, "ln1", None))
    tensors |= _norm_tensors("ln_final", getattr(bridge, "ln_final", None))
    given = {"normalization_type": getattr(bridge.cfg, "normalization_type", None)}
    return from_state_dict(tensors, given, "live TransformerBridge")


def _norm_tensors(name: str, norm: Any) -> dict[str, Any]:
    """Gain and bias of a norm under TransformerLens' names."""
    found = {"w": getattr(norm, "weight", None), "b": getattr(norm, "bias", None)}
    return {f"{name}.{key}": value for key, value in found.items() if value is not None}
