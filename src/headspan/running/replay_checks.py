"""Check that a model's edges between heads are direct.

Before a model is used, its blocks run with everything but the stream held fixed: a change of the stream must come
out unchanged, removing the attention output must remove exactly the computed outputs of the heads, and a replay
with nothing changed must return the recorded attention. A model that fails is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headspan.running.swapped_modules import first, held_still, silenced, stream_of, with_first
from headspan.vocabulary.heads import ROLES

if TYPE_CHECKING:
    import torch

    from headspan.running.replay import Layer, LayerRecord, Replayer

_CHECK_TOKENS = 8
_TOLERANCE = 1e-4  # for float32 sums in another order
_MULTIPLIERS = ("residual_multiplier", "attention_out_multiplier")  # of attention's output, in some configs
_HALF = 4  # roundings of half precision, if a model runs in it


def check_direct_edges(replayer: Replayer, ids: torch.Tensor) -> None:
    """Refuse a model without direct edges; set the multiplier of attention's output."""
    import torch

    for n in replayer.layers:
        for role in ROLES:
            replayer.weights.read(role, n)  # its error names the head of a NaN
    with torch.inference_mode():
        seen = replayer.run(ids[None, :_CHECK_TOKENS])
        blocks = replayer.blocks
        for number in (number for number in range(len(blocks)) if (number, "block") not in seen):
            raise replayer.refusal(f"block {number} does not run on text alone")
        for number, (block, layers) in enumerate(blocks):
            _check_block(replayer, number, block, layers, seen)
            following = seen.get((number + 1, "block"))
            if following is not None and not torch.equal(stream_of(seen[number, "block"][2]), first(following)):
                raise replayer.refusal(f"the stream is changed between blocks {number} and {number + 1}")
        seen = replayer.run(ids[None])
        record = replayer.record(ids)
        for n, layer in replayer.layers.items():
            _check_replay(replayer, layer, record[n], seen[n, "attention"][2])


def _check_block(replayer: Replayer, number: int, block: Any, layers: list[Layer], seen: Mapping[Any, Any]) -> None:
    """Check that the stream passes through a block unchanged and that attention adds its heads' outputs."""
    import torch

    args, kwargs, _ = seen[number, "block"]
    x = first((args, kwargs))
    with held_still(block, tuple(part for layer in layers for part in (layer.output, layer.output_norm))) as still:
        clean = _passed(block, layers, args, kwargs)
        still.hold()
        nudge = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
        moved = _passed(block, layers, *with_first(args, kwargs, x + nudge))
        if not _close(moved[0] - clean[0], nudge, clean[0]):
            raise replayer.refusal(f"block {number} changes the stream, so edges through it are not direct")
        without = []
        for layer in layers:
            with silenced(layer.output):
                without.append(_passed(block, layers, args, kwargs))
    for place, layer in enumerate(layers):
        if number + place > 0 and layer.norm is not None and not _reads_stream(x, nudge, clean, moved, place):
            raise replayer.refusal(f"the attention of layer {layer.number} reads more than the stream")
        added = [now - then for now, then in zip(clean, without[place], strict=True)]
        later = [now for now in range(place + 1, len(layers)) if layers[now].norm is not None]
        if not all(_close(added[1 + now], added[0], clean[0]) for now in later):
            raise replayer.refusal(f"the output of layer {layer.number} is changed before layer {layers[-1].number}")
        _check_write(replayer, block, layer, added[0], seen, clean[0])


def _passed(block: Any, layers: list[Layer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The stream after a block, then before the attention norm of each of its layers (if there is one)."""
    seen: dict[int, torch.Tensor] = {}
    handles = [
        layer.norm.register_forward_hook(
            lambda module, args, kwargs, out, place=place: seen.__setitem__(place, first((args, kwargs)).clone()),
            with_kwargs=True,
        )
        for place, layer in enumerate(layers)
        if layer.norm is not None
    ]
    try:
        out = stream_of(block(*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return [out, *(seen.get(place, out) for place in range(len(layers)))]


def _reads_stream(
    x: torch.Tensor, nudge: torch.Tensor, clean: list[torch.Tensor], moved: list[torch.Tensor], place: int
) -> bool:
    """Whether the input of a layer's norm is the stream: the block's input, or what changes exactly as it does."""
    import torch

    if place == 0:
        return torch.equal(clean[1], x)
    return _close(moved[1 + place] - clean[1 + place], nudge, clean[0])


def _check_write(
    replayer: Replayer, block: Any, layer: Layer, added: torch.Tensor, seen: Mapping[Any, Any], clean: torch.Tensor
) -> None:
    z = first(seen[layer.number, "output"])
    z = z.reshape(z.shape[1], replayer.weights.n_heads, -1)
    scale = replayer.output_scale(layer, seen)
    z = z if scale is None else z * scale[:, :, None]
    said = replayer.written(layer.number, z).sum(0)
    bias = getattr(layer.output, "bias", None)
    if bias is not None:
        said = said + replayer.gained(layer, bias if scale is None else bias * scale)
    named = [getattr(replayer.model.config, key, None) for key in _MULTIPLIERS] + [
        getattr(block, "residual_scale", None)
    ]
    for multiplier in dict.fromkeys([1.0, *(float(value) for value in named if value is not None)]):
        if _close(said * multiplier, added[0], clean):
            layer.multiplier = multiplier
            return
    raise replayer.refusal(f"the heads' output in layer {layer.number} is changed before it reaches the stream")


def _check_replay(replayer: Replayer, layer: Layer, record: LayerRecord, out: Any) -> None:
    clean, own_z = replayer.replay(layer.number, record)
    own = [x for x in out if getattr(x, "shape", None) == clean.shape]
    same = bool(own) and _same_attention(clean, own[-1]) and _close(own_z[0], record.z, record.z)
    read = replayer.read(layer.number, record.stream)
    for receiver in (
        layer.inlets if own else ()
    ):  # nothing changed, in a batch of two, which also checks the batch dimension
        port = replayer.project(layer.number, receiver, record, read).repeat(2, 1, 1, 1)
        pattern, z = replayer.replay(layer.number, record, receiver, port)
        same = same and _same_attention(pattern, clean.expand_as(pattern), own[-1].dtype)
        same = same and all(_close(found, record.z, record.z) for found in z)
    if not same:
        raise replayer.refusal(f"the recomputed attention of layer {layer.number} differs from the model's own")


def _same_attention(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    import torch

    return torch.allclose(ours, theirs.to(ours.dtype), atol=_tolerance(dtype or theirs.dtype))


def _close(ours: torch.Tensor, theirs: torch.Tensor, size: torch.Tensor) -> bool:
    """Whether two tensors are equal up to the rounding of numbers as large as ``size``, in their type."""
    rounding = _tolerance(size.dtype)
    share = 1e-3 if rounding == _TOLERANCE else 1.0
    return bool((ours - theirs).abs().max() <= rounding * (share * size.abs().max() + theirs.abs().max()))


def _tolerance(dtype: torch.dtype) -> float:
    import torch

    return max(_TOLERANCE, _HALF * torch.finfo(dtype).eps) if dtype.itemsize < 4 else _TOLERANCE
