"""The plain transformers model inside a PEFT model, a TransformerLens bridge or a compiled model.

It is a copy of the modules that shares their tensors, so it costs little memory and the model it came from is not
changed, whatever happens to the copy. Only weights that an adapter changes are copied, and the adapter is merged into
them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headspan.checkpoints.untrusted import reason
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    import torch

_INSIDE = ("_original_component", "_orig_mod")  # what a module of a bridge, and a compiled module, wrap
GIVE = "Give a transformers or PEFT model, a TransformerBridge, a model directory, a .gguf file or a hub id"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_BY_INPUT = ("XLORA",)  # adapters whose weights depend on the input, though PEFT has a merge for their parts


def is_bridge(ref: Any) -> bool:
    """Whether an object is a TransformerBridge of TransformerLens."""
    return hasattr(ref, "original_model") and hasattr(ref, "blocks")


def is_rewritten(bridge: Any) -> bool:
    """Whether compatibility mode has rewritten the weights of a bridge; the model that it wraps is stale then."""
    return bool(getattr(bridge, "_weights_processed", getattr(bridge, "compatibility_mode", False)))


def is_wrapped(ref: Any) -> bool:
    """Whether an object is a PEFT model, or a torch model with modules of PEFT, TransformerLens or torch.compile."""
    if is_bridge(ref) or _is_peft_model(ref):
        return True
    modules = list(ref.modules()) if hasattr(ref, "modules") else []
    return any(_is_adapted(module) or _inside(module) is not None for module in modules)


def unwrapped(ref: Any) -> Any:
    """The model inside ``torch.compile`` and data parallelism, which hold the model itself."""
    torch = sys.modules.get("torch")
    while torch is not None and isinstance(ref, torch.nn.Module):
        if isinstance(ref, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            ref = ref.module
        elif "_orig_mod" in ref._modules:
            ref = ref._modules["_orig_mod"]
        else:
            break
    return ref


def check_in_memory(model: Any) -> None:
    """Refuse to run a model of which some tensors have no numbers; its results would be undefined."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    missing = [name for name, tensor in tensors if tensor.is_meta]
    if missing:
        raise HeadspanError(
            f"this {type(model).__name__} cannot be run: {len(missing)} of its {len(tensors)} tensors are on the meta "
            f"device ({missing[0]} …), offloaded or never loaded. Load the whole model into memory"
        )


def hint(ref: Any) -> str:
    """Where an object of another kind has a model, as a sentence; empty if it has none."""
    if isinstance(ref, (tuple, list)):
        found = any(_is_model(part) for part in ref[:9])
        return " To give a model with its tokenizer, give (model, tokenizer)" if found else ""
    names = ("model", "module", "net", "llm", "transformer", "language_model", "_model")
    name = next((name for name in names if _is_model(getattr(ref, name, None))), None)
    return "" if name is None else f" Give its .{name}"


def _is_model(ref: object) -> bool:
    return hasattr(ref, "state_dict") and hasattr(ref, "config") and not isinstance(ref, type)


def plain_model(ref: Any) -> Any:
    """A transformers model without wrappers and with its active adapters merged, as a copy that shares tensors."""
    model = ref.original_model if is_bridge(ref) else ref
    if model is ref and any(getattr(module, "compatibility_mode", False) for module in model.modules()):
        raise HeadspanError(
            f"TransformerLens may have rewritten the weights of this {type(ref).__name__} (compatibility mode). "
            "Give its TransformerBridge, or load the model again"
        )
    if not _is_peft_model(model):
        return _merged(shared_copy(model))
    inside = model.base_model  # of learned prompts the model itself, otherwise PEFT's module around it
    inside = inside.model if type(inside).__module__.startswith("peft.") else inside
    if getattr(model, "_adapters_disabled", False):
        return _merged(shared_copy(inside))
    kinds = {str(getattr(model.peft_config[name].peft_type, "value", "")) for name in _active(model)}
    named = " and ".join(sorted(kinds))
    if kinds.intersection(_BY_INPUT) or not any(_is_adapted(module) for module in inside.modules()):
        raise _not_mergeable(named, "it is not a change of weights")
    return _merged(shared_copy(inside), named)


def shared_copy(model: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of the modules of a model, without wrappers, that shares its tensors; those of another type are converted.

    Hooks are shared too: they may belong to something that cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): _converted(tensor, dtype) for tensor in _tensors(model)}
    memo |= {id(value): value for value in _kept(model)}
    try:
        _unwrap(model, memo)
        return copy.deepcopy(model, memo)
    except Exception as error:  # modules can hold anything
        raise HeadspanError(f"this {type(model).__name__} cannot be copied to run it: {reason(error)}") from None


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for found in (module._parameters, module._buffers):
            yield from (tensor for tensor in found.values() if tensor is not None)


def _kept(model: Any) -> Iterator[Any]:
    """Hooks, and tensors that are neither parameters nor buffers: activations of a graph cannot be copied."""
    import torch

    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))
        for hook in (hook for name in _HOOKS for hook in vars(module)[name].values()):
            if not isinstance(getattr(hook, "__self__", None), torch.nn.Module):
                yield hook


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    import torch

    if dtype in (None, tensor.dtype) or not tensor.is_floating_point():
        return tensor
    found = tensor.detach().to(dtype)
    return torch.nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else found


def _inside(module: Any) -> Any | None:
    return next((found for name in _INSIDE if (found := module._modules.get(name)) is not None), None)


def _unwrap(module: Any, memo: dict[int, Any]) -> None:
    """Note for `copy.deepcopy` that the copy of a wrapper is a copy of what it wraps, from the inside out."""
    inside = _inside(module)
    if inside is None:
        for child in module.children():
            _unwrap(child, memo)
    elif id(module) not in memo:
        _unwrap(inside, memo)
        memo[id(module)] = copy.deepcopy(inside, memo)


# -- to run it -----------------------------------------------------------------------------------------------


def check_runnable(ref: Any) -> None:
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


def in_dtype(model: Any, dtype: str) -> Any:
    """The model, or a copy of it in another type."""
    import torch

    if dtype == "stored" or (dtype == "float32" and model.dtype == torch.float64):
        return model
    wanted = getattr(torch, dtype)
    differs = any(parameter.is_floating_point() and parameter.dtype != wanted for parameter in model.parameters())
    return shared_copy(model, wanted) if differs else model


# -- adapters ------------------------------------------------------------------------------------------------


def _is_peft_model(ref: Any) -> bool:
    peft = sys.modules.get("peft")  # whoever has such a model has imported it
    return peft is not None and isinstance(ref, (peft.PeftModel, peft.PeftMixedModel))


def _is_adapted(module: Any) -> bool:
    peft = sys.modules.get("peft")
    if peft is None:
        return False
    return isinstance(module, (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper))


def _active(adapted: Any) -> list[str]:
    found = adapted.active_adapter
    return [found] if isinstance(found, str) else list(found)


def _merged(model: Any, kinds: str = "") -> Any:
    """Merge the adapters of a copy in place, as far as they are active."""
    import torch

    try:
        with torch.no_grad():
            _merge_children(model)
    except Exception as error:  # PEFT refuses in many ways
        raise _not_mergeable(kinds, reason(error)) from None
    left = next((type(module) for module in model.modules() if type(module).__module__.startswith("peft.")), None)
    if left is not None:
        raise _not_mergeable(kinds, f"{left.__name__} is not a change of weights")
    return model


def _merge_children(parent: Any) -> None:
    for name, child in parent._modules.items():
        if child is not None:
            parent._modules[name] = child = _without_adapters(child)
            _merge_children(child)


def _without_adapters(module: Any) -> Any:
    """The module that computes what an adapted one does: with its adapters if they are on, without if they are off."""
    while _is_adapted(module):
        parts = module._modules
        if "token_adapter" in parts:  # single rows of an embedding
            module = parts["token_adapter"]
        elif "modules_to_save" in parts:  # whole modules, trained beside the adapter
            active = [] if module._disable_adapters else _active(module)
            saved = [parts["modules_to_save"][name] for name in active if name in parts["modules_to_save"]]
            module = saved[0] if saved else parts["original_module"]
        else:
            parts["base_layer"] = _without_adapters(parts["base_layer"])  # adapters can be nested
            module = _merged_layer(module)
    return module


def _merged_layer(layer: Any) -> Any:
    on, merged = not layer.disable_adapters, layer.merged
    if on != merged:
        _own_weights(layer.get_base_layer())
    if merged and not on:
        layer.unmerge()
    merge = on and not merged  # PEFT runs merged weights as they are, even if further adapters are active
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
    if merge:
        layer.merge()
    return layer.get_base_layer()


def _own_weights(layer: Any) -> None:
    """Copy the weights of the layer under an adapter, since merging changes them in place."""
    for module in layer.modules():
        for name, value in module._parameters.items():
            module._parameters[name] = copy.deepcopy(value)


def _not_mergeable(kinds: str, why: str) -> HeadspanError:
    return HeadspanError(
        f"this adapter {f'({kinds}) ' if kinds else ''}cannot be merged into its model ({why}). Disable or remove it, "
        "or give the model without it"
    )
