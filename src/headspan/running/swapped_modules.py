"""Tensors of a call, and modules replaced for a while: what recording and replaying a model need."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def submodule(block: Any, name: str) -> Any | None:
    try:
        return block.get_submodule(name.partition("|")[0])
    except AttributeError:
        return None


def first(call: tuple[Any, ...]) -> torch.Tensor:
    """The first tensor a module was called with, by position or by name."""
    args, kwargs = call[0], call[1]
    return args[0] if args else next(iter(kwargs.values()))


def with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (x, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): x}


def stream_of(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def without_cache(model: Any) -> dict[str, Any]:
    """The option by which a model keeps no keys and values; some pass it to their body or text model unnamed."""
    takes = inspect.signature(model.forward).parameters
    unnamed = any(option.kind is option.VAR_KEYWORD for option in takes.values())
    bodies = [getattr(model, "base_model", model), *(part for part in model.modules() if hasattr(part, "config"))]
    inside = any("use_cache" in inspect.signature(body.forward).parameters for body in bodies)
    return {"use_cache": False} if "use_cache" in takes or (unnamed and inside) else {}


def growing(once: Any, twice: Any) -> list[int | None]:
    """For each leaf of a call, the dimension that doubles with the batch."""
    from torch.utils import _pytree as pytree

    found: list[int | None] = []
    for a, b in zip(pytree.tree_leaves(once), pytree.tree_leaves(twice), strict=True):
        shapes = list(zip(getattr(a, "shape", ()), getattr(b, "shape", ()), strict=True))
        found.append(next((dim for dim, (one, two) in enumerate(shapes) if two == 2 * one and one), None))
    return found


def batched(leaf: Any, dim: int | None, n: int) -> Any:
    if dim is None or n == 1:
        return leaf
    if leaf.shape[dim] == 1:
        return leaf.expand(*(n if i == dim else -1 for i in range(leaf.ndim)))
    return leaf.repeat(*(n if i == dim else 1 for i in range(leaf.ndim)))


def outputs_of(module: Any, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight (outputs, inputs) and bias of a linear module or of some of its outputs; Conv1D stores (in, out)."""
    import torch

    weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T
    bias = getattr(module, "bias", None)
    return (weight, bias) if rows is None else (weight[rows], None if bias is None else bias[rows])


def some_outputs(module: Any, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Some outputs of a linear module."""
    import torch

    return torch.nn.functional.linear(x, *outputs_of(module, rows))


def mixed(clean: torch.Tensor, changed: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    if rows is None:
        return changed
    clean[..., rows] = changed.reshape(*clean.shape[:-1], -1)  # latents have one more dimension
    return clean


def widened(x: torch.Tensor) -> torch.Tensor:
    """At least float32: half precision loses sums over many tokens."""
    return x.float() if x.element_size() < 4 else x


def copied(out: Any) -> Any:
    """A copy, because some blocks add in place to a module's output."""
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else leaf, out)


def epsilon(norm: Any) -> float:
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(getattr(norm, name, None), float):
            return getattr(norm, name)
    return 0.0


def gain(norm: Any, *, one_plus: bool) -> torch.Tensor:
    return norm.weight + 1 if one_plus else norm.weight


@contextmanager
def standing_in(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace what a module does for a while."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@contextmanager
def silenced(module: Any) -> Iterator[None]:
    """Make a module return zeros for a while."""
    handle = module.register_forward_hook(lambda module, args, out: out * 0)
    try:
        yield
    finally:
        handle.remove()


class Still:
    """Modules that return their recorded outputs, call by call."""

    def __init__(self) -> None:
        self.given: dict[Any, list[Any]] = {}
        self.turn: dict[Any, int] = {}
        self.holding = False

    def hold(self) -> None:
        self.holding = True

    def hook(self, module: Any, args: Any, out: Any) -> Any:
        if not self.holding:
            self.given.setdefault(module, []).append(copied(out))
            return None
        turn = self.turn.get(module, 0)
        self.turn[module] = turn + 1
        given = self.given.get(module)
        return None if not given else copied(given[turn % len(given)])


@contextmanager
def held_still(block: Any, free: tuple[Any, ...]) -> Iterator[Still]:
    """The modules of a block to hold fixed: all that compute something, except those that stay free."""
    import torch

    still, handles = Still(), []
    passing = (torch.nn.Dropout, torch.nn.Identity)
    for module in block.modules():
        computes = next(module.parameters(recurse=False), None) is not None or next(module.children(), None) is None
        on_the_way = isinstance(module, passing) or any(part is f for part in module.modules() for f in free)
        if computes and module is not block and not on_the_way:
            handles.append(module.register_forward_hook(still.hook))
    try:
        yield still
    finally:
        for handle in handles:
            handle.remove()
