"""Whether a model's edges between heads are direct: nothing is taken on trust.

Before a model is used, its blocks are run with everything but the stream held still: a change of the stream must come
out unchanged, taking the attention output away must take away exactly what the heads are said to write, and a replay
with nothing changed must give the recorded attention. A model that fails is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headspan.heads import Role
from headspan.models.standins import first, held_still, silenced, stream_of, with_first

if TYPE_CHECKING:
    import torch

    from headspan.models.replay import Layer, LayerRecord, Replayer

PORTS = (Role.Q, Role.K, Role.V)
_CHECK_TOKENS = 8
_TOLERANCE = 1e-4  # of float32 sums in another order
_HALF = 4  # roundings of half precision, where a model is run in it


def check_direct_edges(replayer: Replayer, ids: torch.Tensor) -> None:
    """Refuse a model whose direct edges are not what is said above; sets what attention is multiplied by."""
    import torch

    for n in replayer.layers:
        for role in (*PORTS, Role.O):
            replayer.weights.read(role, n)  # names the head of a NaN
    with torch.inference_mode():
        seen = replayer.run(ids[None, :_CHECK_TOKENS])
        for n in range(replayer.weights.n_layers):
            _check_block(replayer, n, seen)
        seen = replayer.run(ids[None])
        record = replayer.record(ids)
        for n, layer in replayer.layers.items():
            _check_replay(replayer, layer, record[n], seen[n, "attention"][2])


def _check_block(replayer: Replayer, n: int, seen: Mapping[Any, Any]) -> None:
    """The stream passes through a block unchanged, and attention adds to it what its heads write."""
    import torch

    args, kwargs, out = seen[n, "block"]
    if n + 1 < replayer.weights.n_layers and not torch.equal(stream_of(out), first(seen[n + 1, "block"])):
        raise replayer.refusal(f"the stream is changed between layers {n} and {n + 1}")
    layer = replayer.layers.get(n)
    block = replayer.block(n)
    with held_still(block, () if layer is None else (layer.modules[Role.O], layer.output_norm)) as still:
        clean = stream_of(block(*args, **kwargs))
        still.hold()
        x = first((args, kwargs))
        nudge = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
        nudged, options = with_first(args, kwargs, x + nudge)
        moved = stream_of(block(*nudged, **options))
        if not _close(moved - clean, nudge, clean):
            raise replayer.refusal(f"layer {n} does not pass the stream on unchanged, so no edge through it is direct")
        if layer is None:
            return
        with silenced(layer.modules[Role.O]):
            without = stream_of(block(*args, **kwargs))
    if n > 0 and layer.norm is not None and not torch.equal(first(seen[n, "norm"]), x):
        raise replayer.refusal(f"the attention of layer {n} does not read the stream alone")
    _check_write(replayer, layer, clean - without, seen, clean)


def _check_write(
    replayer: Replayer, layer: Layer, added: torch.Tensor, seen: Mapping[Any, Any], clean: torch.Tensor
) -> None:
    z = first(seen[layer.number, Role.O])
    z = z.reshape(z.shape[1], replayer.weights.n_heads, -1)
    scale = replayer.output_scale(layer, seen)
    z = z if scale is None else z * scale[:, :, None]
    said = replayer.written(layer.number, z).sum(0)
    bias = getattr(layer.modules[Role.O], "bias", None)
    if bias is not None:
        said = said + replayer.gained(layer, bias if scale is None else bias * scale)
    for multiplier in dict.fromkeys((1.0, float(getattr(replayer.model.config, "residual_multiplier", 1.0)))):
        if _close(said * multiplier, added[0], clean):
            layer.multiplier = multiplier
            return
    raise replayer.refusal(f"what the heads of layer {layer.number} write is changed before it reaches the stream")


def _check_replay(replayer: Replayer, layer: Layer, record: LayerRecord, out: Any) -> None:
    clean, own_z = replayer.replay(layer.number, record)
    own = [x for x in out if getattr(x, "shape", None) == clean.shape]
    same = bool(own) and _same_attention(clean, own[-1]) and _close(own_z[0], record.z, record.z)
    for role in PORTS if own else ():  # nothing changed, twice: the batch is what it seems
        port = replayer.project(layer.number, role, replayer.read(layer.number, record.stream)).repeat(2, 1, 1, 1)
        pattern, z = replayer.replay(layer.number, record, role, port)
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
