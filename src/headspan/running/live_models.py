"""A model in memory made ready to run: the transformers model inside what was given, which shares its tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headspan.checkpoints.plain_models import (
    check_in_memory,
    hint,
    is_bridge,
    is_rewritten,
    is_wrapped,
    plain_model,
    shared_copy,
)
from headspan.vocabulary.errors import HeadspanError

GIVE = "Give a transformers or PEFT model, a TransformerBridge, a model directory, a .gguf file or a hub id"


def live_model(ref: Any, dtype: str) -> tuple[Any, dict[str, Any]]:
    """The transformers model to run, and its identity: a copy that shares its tensors, so nothing of it changes."""
    _check_runnable(ref)
    model = plain_model(ref)
    check_in_memory(model)
    # A function in place of a forward calls the modules of the model, never those of a copy.
    replaced = any(inspect.isfunction(vars(module).get("forward")) for module in model.modules())
    model = ref if replaced and not is_wrapped(ref) else model
    identity = identity_of(model)
    if identity:
        identity["reference"] = f"live {type(ref).__name__}"
    model = _in(model, dtype)
    if replaced and model is not ref:
        raise HeadspanError(
            f"the forward of a module of this {type(ref).__name__} was replaced, so a copy would not run as it does. "
            "Give a plain transformers model in the type to run in"
        )
    return model, identity


@contextmanager
def evaluated(model: Any) -> Iterator[None]:
    """A transformers model in evaluation mode, with eager attention, for a while."""
    attention, modes = model.config._attn_implementation, [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        model.set_attn_implementation("eager")
        yield
    finally:
        model.set_attn_implementation(attention)
        for module, mode in modes:
            module.training = mode


def _check_runnable(ref: Any) -> None:
    """Refuse an object that is not a live transformers model, nor wraps one."""
    name = type(ref).__name__
    if isinstance(ref, type):
        raise HeadspanError(f"{ref.__name__} is a class, not a model: create an instance first")
    if is_bridge(ref) and not hasattr(ref.original_model, "config"):
        raise HeadspanError(f"this {name} wraps a model of TransformerLens itself, which cannot be run. {GIVE}")
    if is_bridge(ref) and is_rewritten(ref):
        raise HeadspanError(
            f"this {name} cannot be run, because its compatibility mode has rewritten the weights. Boot it again "
            "without enable_compatibility_mode, or with no_processing=True"
        )
    if hasattr(ref, "cfg") and hasattr(ref, "blocks") and not is_bridge(ref):
        raise HeadspanError(
            f"a {name} of TransformerLens 2 or 3 cannot be run. Load the model with transformers, or score its weights"
        )
    if not is_bridge(ref) and not (hasattr(ref, "base_model") and hasattr(ref, "set_attn_implementation")):
        raise HeadspanError(f"an object of type {name} cannot be run. {GIVE}.{hint(ref)}".removesuffix("."))


def _in(model: Any, dtype: str) -> Any:
    """The model, or a copy of it in another type."""
    import torch

    if dtype == "stored" or (dtype == "float32" and model.dtype == torch.float64):
        return model
    wanted = getattr(torch, dtype)
    differs = any(parameter.is_floating_point() and parameter.dtype != wanted for parameter in model.parameters())
    return shared_copy(model, wanted) if differs else model


def identity_of(ref: Any) -> dict[str, Any]:
    """Provenance of the attention weights of a model, to compare with a result's; empty for unknown families."""
    from headspan.models.opening import open

    try:
        return open(ref).provenance
    except HeadspanError:
        return {}
