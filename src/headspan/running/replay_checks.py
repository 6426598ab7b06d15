"""Whether a model's edges between heads are direct: nothing is taken on trust.

Before a model is used, its blocks are run with everything but the stream held still: a change of the stream must come
out unchanged, taking the attention output away must take away exactly what the heads are said to write, and a replay
with nothing changed must give the recorded attention. A model that fails is refused.
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
_TOLERANCE = 1e-4  # of float32 sums in another order
_MULTIPLIERS = ("residual_multiplier", "attention_out_multiplier")  # of what attention writes, in some configs
_HALF = 4  # roundings of half precision, where a model is run in it


def check_direct_edges(replayer: Replayer, ids: torch.Tensor) -> None:
    """Refuse a model whose direct edges are not what is said above; sets what attention is multiplied by."""
    import torch

    for n in replayer.layers:
        for role in ROLES:
            replayer.weights.read(role, n)  # names the head of a NaN
    with torch.inference_mode():
        seen = replayer.run(ids[None, :_CHECK_TOKENS])
        blocks = replayer.blocks
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
    """The stream passes through a block unchanged, and attention adds to it what its heads write."""
    import torch

    args, kwargs, _ = seen[number, "block"]
    x = first((args, kwargs))
    with held_still(block, tuple(part for layer in layers for part in (layer.output, layer.output_norm))) as still:
        clean = _passed(block, layers, args, kwargs)
        still.hold()
        nudge = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
        moved = _passed(block, layers, *with_first(args, kwargs, x + nudge))
        if not _close(moved[0] - clean[0], nudge, clean[0]):
            raise replayer.refusal(
                f"block {number} does not pass the stream on unchanged, so no edge through it is direct"
            )
        without = []
        for layer in layers:
            with silenced(layer.output):
                without.append(_passed(block, layers, args, kwargs))
    for place, layer in enumerate(layers):
        if number + place > 0 and layer.norm is not None and not _reads_stream(x, nudge, clean, moved, place):
            raise replayer.refusal(f"the attention of layer {layer.number} does not read the stream alone")
        added = [now - then for now, then in zip(clean, without[place], strict=True)]
        later = [now for now in range(place + 1, len(layers)) if layers[now].norm is not None]
        if not all(_close(added[1 + now], added[0], clean[0]) for now in later):
            raise replayer.refusal(f"what layer {layer.number} writes is changed before layer {layers[-1].number}")
        _check_write(replayer, block, layer, added[0], seen, clean[0])


def _passed(block: Any, layers: list[Layer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The stream behind a block, then in front of the attention norm of each of its layers (where there is one)."""
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
    """Whether the norm of a layer is given the stream: the block's input, or further in what moves as that does."""
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
    raise replayer.refusal(f"what the heads of layer {layer.number} write is changed before it reaches the stream")


def _check_replay(replayer: Replayer, layer: Layer, record: LayerRecord, out: Any) -> None:
    clean, own_z = replayer.replay(layer.number, record)
    own = [x for x in out if getattr(x, "shape", None) == clean.shape]
    same = bool(own) and _same_attention(clean, own[-1]) and _close(own_z[0], record.z, record.z)
    read = replayer.read(layer.number, record.stream)
    for receiver in layer.inlets if own else ():  # nothing changed, twice: the batch is what it seems
        port = replayer.project(layer.number, receiver, record, read).repeat(2, 1, 1, 1)
        pattern, z = replayer.replay(layer.number, record, receiver, port)
        same = same and _same_attention(pattern, clean.expand_as(pattern), own[-1].dtype)
        same = same and all(_close(found, record.z, record.z) for found in z)
    if not same:
        raise replayer.refusal(f"the attention of layer {layer.number}, computed again, is not the model's own")


def _same_attention(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    import torch

    return torch.allclose(ours, theirs.to(ours.dtype), atol=_tolerance(dtype or theirs.dtype))


def _close(ours: torch.Tensor, theirs: torch.Tensor, size: torch.Tensor) -> bool:
    """Equal up to rounding of numbers as large as ``size``, in the type of those."""
    rounding = _tolerance(size.dtype)
    share = 1e-3 if rounding == _TOLERANCE else 1.0
    return bool((ours - theirs).abs().max() <= rounding * (share * size.abs().max() + theirs.abs().max()))


def _tolerance(dtype: torch.dtype) -> float:
    import torch

    return max(_TOLERANCE, _HALF * torch.finfo(dtype).eps) if dtype.itemsize < 4 else _TOLERANCE
