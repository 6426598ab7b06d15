"""Compute one layer's attention again, by the model's own code, with the input of one port changed.

A run of the model is recorded once: what every attention module was called with, and what its projections gave.
A replay calls the module again with stand-ins for the projections: the changed port gives what its weights make of
the changed input, the others give what they gave before, for many changed inputs at once. Rotary positions, QK-norm,
soft caps, windows, sinks, ALiBi and masks are therefore the model's own, in every family.

Nothing is taken on trust. Before a model is used, its blocks are run with everything but the stream held still: a
change of the stream must come out unchanged, taking the attention output away must take away exactly what the heads
are said to write, and a replay with nothing changed must give the recorded attention. A model that fails is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headspan.errors import HeadspanError
from headspan.heads import Role
from headspan.models.architectures import WHY_NO_DIRECT_EDGE
from headspan.models.checkpoint import CheckpointWeights
from headspan.models.running import RunningModel
from headspan.models.tensor_map import TensorMap
from headspan.sources.live import open_live
from headspan.sources.untrusted import reason

if TYPE_CHECKING:
    import torch

PORTS = (Role.Q, Role.K, Role.V)
_OUTPUT_NORMS = ("post_self_attn_layernorm", "post_attention_layernorm")  # between attention and the stream
_CHECK_TOKENS = 8
_TOLERANCE = 1e-4  # of float32 sums in another order


@dataclass
class Layer:
    """The modules of one layer that attends."""

    number: int
    attention: Any
    norm: Any | None  # in front of attention
    output_norm: Any | None  # between attention and the stream
    modules: dict[Role, Any]  # of Q, K, V (the same one where they are fused) and O
    rows: dict[Role, torch.Tensor | None]  # of the module's output that belong to a port; None for all
    multiplier: float = 1.0  # of what attention writes


@dataclass
class LayerRecord:
    """What one layer saw and gave in a clean run over one sequence, batch dimension 1."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grows: list[int | None]  # for each tensor the model hands to attention: the dimension that is the batch's
    stream: torch.Tensor  # (1, T, d), in front of the norm
    normed: torch.Tensor  # (1, T, d), what the ports read
    projected: dict[Any, torch.Tensor]  # by projection module
    z: torch.Tensor  # (T, heads, m), what each head hands to W_O
    scale: torch.Tensor | None  # (T, 1): 1 / root mean square of the attention output, where it is normalised


Recording = dict[int, LayerRecord]


class Replayer:
    """A running model whose attention layers can be computed again, one port changed."""

    def __init__(self, model: RunningModel) -> None:
        self.model = model
        source = open_live(model.model)
        self.weights = CheckpointWeights(source)
        self.weights.reference = model.reference
        self._where = TensorMap(source)
        place = self.weights.norm_place
        if place in WHY_NO_DIRECT_EDGE:
            raise self._refusal(WHY_NO_DIRECT_EDGE[place])
        self.layers = {layer: self._find(layer) for layer in self.weights.layers}
        self._shapes: dict[int, dict[int, list[int | None]]] = {}

    def _refusal(self, why: str) -> HeadspanError:
        return HeadspanError(f"no effects for {self.model.reference} ({self.weights.architecture}): {why}")

    # -- modules ---------------------------------------------------------------------------------------------

    def _find(self, number: int) -> Layer:
        where, entry = self._where, self._where.entry
        modules = {role: self._module(where.module(role, number)) for role in Role if role in (*PORTS, Role.O)}
        block = self._block(number)
        norm = next((found for name in entry.norm if (found := _submodule(block, name))), None)
        output_norm = None
        if self.weights.norm_place in ("output", "sandwich"):
            output_norm = next((found for name in _OUTPUT_NORMS if (found := _submodule(block, name))), None)
            if output_norm is None:
                raise self._refusal("the norm behind its attention was not found")
        attention = self._module(where.module(Role.Q, number).rpartition(".")[0])
        return Layer(number, attention, norm, output_norm, modules, {r: self._rows(r) for r in PORTS})

    def _block(self, number: int) -> Any:
        return self._module((self._where.prefix + self._where.entry.layer.format(number)).rstrip("."))

    def _module(self, name: str) -> Any:
        try:
            return self.model.model.get_submodule(name)
        except AttributeError:
            raise self._refusal(f"it has no module {name}, which its family has") from None

    def _rows(self, role: Role) -> torch.Tensor | None:
        import torch

        rows = self.weights.port_rows(role).ravel()
        return None if len(rows) == self._where.rows(role) else torch.from_numpy(rows)

    # -- recording -------------------------------------------------------------------------------------------

    def record(self, ids: torch.Tensor) -> Recording:
        """One clean run over token ids (T,)."""
        import torch

        length = len(ids)
        with torch.inference_mode():
            seen = self._run(ids[None])
            if length not in self._shapes:  # what grows with the batch is seen by running two copies
                twice = self._run(ids[None].repeat(2, 1))
                self._shapes[length] = {
                    n: _growing(seen[n, "attention"][:2], twice[n, "attention"][:2]) for n in self.layers
                }
        return {n: self._layer_record(n, seen, self._shapes[length][n]) for n in self.layers}

    def _layer_record(self, n: int, seen: Mapping[Any, Any], grows: list[int | None]) -> LayerRecord:
        layer = self.layers[n]
        args, kwargs, _ = seen[n, "attention"]
        normed = _first(seen[n, Role.Q])
        stream = _first(seen[n, "norm"]) if layer.norm is not None else normed
        z = _first(seen[n, Role.O])
        z = z.reshape(z.shape[1], self.weights.n_heads, -1)
        projected = {layer.modules[role]: seen[n, role][2] for role in PORTS}
        return LayerRecord(args, kwargs, grows, stream, normed, projected, z, self._output_scale(layer, seen))

    def _output_scale(self, layer: Layer, seen: Mapping[Any, Any]) -> torch.Tensor | None:
        """What the norm behind attention multiplies each token by."""
        if layer.output_norm is None:
            return None
        before = _first(seen[layer.number, "output_norm"])[0].float()
        return (before.square().mean(-1, keepdim=True) + _epsilon(layer.output_norm)).rsqrt()

    def _run(self, ids: torch.Tensor) -> dict[Any, tuple[tuple[Any, ...], dict[str, Any], Any]]:
        """Args, kwargs and output of the modules of interest in one run."""
        seen: dict[Any, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

        def keep(label: Any) -> Callable[..., None]:
            copy = _copied if label[1] in PORTS else lambda out: out  # some models clip it in place
            return lambda module, args, kwargs, out: seen.__setitem__(label, (args, kwargs, copy(out)))

        handles = []
        for n, layer in self.layers.items():
            watched = {"attention": layer.attention, **layer.modules}
            watched |= {k: m for k, m in (("norm", layer.norm), ("output_norm", layer.output_norm)) if m is not None}
            handles += [m.register_forward_hook(keep((n, k)), with_kwargs=True) for k, m in watched.items()]
        for n in range(self.weights.n_layers):
            handles.append(self._block(n).register_forward_hook(keep((n, "block")), with_kwargs=True))
        try:
            self._call(ids)
        finally:
            for handle in handles:
                handle.remove()
        absent = next(((n, k) for n in self.layers for k in ("attention", *PORTS, Role.O) if (n, k) not in seen), None)
        if absent is not None:
            raise self._refusal(f"layer {absent[0]} was not run through its {absent[1]} module")
        return seen

    def _call(self, ids: torch.Tensor) -> None:
        model = self.model.model
        known = inspect.signature(model.forward).parameters
        options: dict[str, Any] = {"use_cache": False} if "use_cache" in known else {}
        try:
            model(input_ids=ids.to(model.device), output_attentions=True, return_dict=True, **options)
        except (MemoryError, HeadspanError):
            raise
        except Exception as error:
            raise HeadspanError(f"{self.model.reference} cannot be run: {reason(error)}") from error

    # -- what heads write ------------------------------------------------------------------------------------

    def written(self, layer: int, z: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """What heads of a layer add to the stream, (heads, T, d), for z (T, all heads, m) times the token's scale."""
        import torch

        found = torch.einsum("thm,hdm->htd", z[:, heads], self._output_weight(layer)[heads])
        return self._gained(self.layers[layer], found)

    def _output_weight(self, layer: int) -> torch.Tensor:
        """W_O of every head, (heads, d, m), a view of the module's own weight."""
        weight = self.layers[layer].modules[Role.O].weight
        weight = weight.T if self._where.entry.transposed else weight
        return weight.reshape(weight.shape[0], self.weights.n_heads, -1).permute(1, 0, 2)

    def _gained(self, layer: Layer, written: torch.Tensor) -> torch.Tensor:
        if layer.output_norm is not None:
            written = written * _gain(layer.output_norm, one_plus=self._where.entry.one_plus)
        return written if layer.multiplier == 1.0 else written * layer.multiplier

    def output_grams(self, layer: int) -> torch.Tensor:
        """W_OᵀW_O of every head with the gains behind it, (heads, m, m): the norm of a write from z alone."""
        weight = self._output_weight(layer).transpose(1, 2)  # (heads, m, d)
        weight = self._gained(self.layers[layer], weight)
        return weight @ weight.transpose(1, 2)

    # -- replaying -------------------------------------------------------------------------------------------

    def read(self, layer: int, stream: torch.Tensor) -> torch.Tensor:
        """What the ports of a layer read from a stream (n, T, d): the norm in front of attention, if there is one."""
        norm = self.layers[layer].norm
        return stream if norm is None else norm(stream)

    def project(self, layer: int, role: Role, read: torch.Tensor) -> torch.Tensor:
        """What a port makes of what it reads, (n, T, heads of the port, m) for (n, T, d)."""
        modules = self.layers[layer]
        module, rows = modules.modules[role], modules.rows[role]
        out = module(read) if rows is None else _some_outputs(module, rows, read)
        return out.reshape(*out.shape[:2], len(self.weights.heads_in(role, layer)), -1)

    def replay(
        self, layer: int, record: LayerRecord, role: Role | None = None, projected: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention (n, heads, T, T) and z (n, T, heads, m) with one port giving ``projected`` (n, T, heads, m)."""
        from torch.utils import _pytree as pytree

        modules = self.layers[layer]
        n = 1 if projected is None else len(projected)
        # Copies: some models clip what a projection gave in place.
        outputs = {module: out.repeat(n, 1, 1) for module, out in record.projected.items()}
        if role is not None and projected is not None:
            module = modules.modules[role]
            outputs[module] = _mixed(outputs[module], projected.flatten(2), modules.rows[role])
        leaves, tree = pytree.tree_flatten((record.args, record.kwargs))
        leaves = [_batched(leaf, dim, n) for leaf, dim in zip(leaves, record.grows, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        caught: list[torch.Tensor] = []

        def catch(z: torch.Tensor) -> torch.Tensor:
            caught.append(z)
            return z.new_zeros(()).expand(*z.shape[:-1], self.weights.d_model)

        with ExitStack() as stack:
            for module, value in outputs.items():
                stack.enter_context(_standing_in(module, lambda *a, value=value, **k: value))
            stack.enter_context(_standing_in(modules.modules[Role.O], catch))
            out = modules.attention(*args, **kwargs)
        out = out if isinstance(out, tuple) else (out,)
        z = caught[0] if caught else out[0]
        length = record.z.shape[0]
        shape = (n, self.weights.n_heads, length, length)
        patterns = [x for x in out if getattr(x, "shape", None) == shape]
        if not patterns:
            raise self._refusal("its attention modules do not return the attention weights")
        return patterns[-1], z.reshape(n, length, self.weights.n_heads, -1)

    # -- checks ----------------------------------------------------------------------------------------------

    def check(self, ids: torch.Tensor) -> None:
        """Refuse a model whose direct edges are not what is said above; sets what attention is multiplied by."""
        import torch

        for n in self.layers:
            for role in (*PORTS, Role.O):
                self.weights.read(role, n)  # names the head of a NaN
        with torch.inference_mode():
            seen = self._run(ids[None, :_CHECK_TOKENS])
            for n in range(self.weights.n_layers):
                self._check_block(n, seen)
            seen = self._run(ids[None])
            record = self.record(ids)
            for n, layer in self.layers.items():
                self._check_replay(layer, record[n], seen[n, "attention"][2])

    def _check_block(self, n: int, seen: Mapping[Any, Any]) -> None:
        """The stream passes through a block unchanged, and attention adds to it what its heads write."""
        import torch

        args, kwargs, out = seen[n, "block"]
        if n + 1 < self.weights.n_layers and not torch.equal(_stream_of(out), _first(seen[n + 1, "block"])):
            raise self._refusal(f"the stream is changed between layers {n} and {n + 1}")
        layer = self.layers.get(n)
        block = self._block(n)
        with _held_still(block, () if layer is None else (layer.modules[Role.O], layer.output_norm)) as still:
            clean = _stream_of(block(*args, **kwargs))
            still.hold()
            x = _first((args, kwargs))
            nudge = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
            nudged, options = _with_first(args, kwargs, x + nudge)
            moved = _stream_of(block(*nudged, **options))
            if not _close(moved - clean, nudge, clean):
                raise self._refusal(f"layer {n} does not pass the stream on unchanged, so no edge through it is direct")
            if layer is None:
                return
            with _silenced(layer.modules[Role.O]):
                without = _stream_of(block(*args, **kwargs))
        if n > 0 and layer.norm is not None and not torch.equal(_first(seen[n, "norm"]), x):
            raise self._refusal(f"the attention of layer {n} does not read the stream alone")
        self._check_write(layer, clean - without, seen, clean)

    def _check_write(self, layer: Layer, added: torch.Tensor, seen: Mapping[Any, Any], clean: torch.Tensor) -> None:
        z = _first(seen[layer.number, Role.O])
        z = z.reshape(z.shape[1], self.weights.n_heads, -1)
        scale = self._output_scale(layer, seen)
        z = z if scale is None else z * scale[:, :, None]
        said = self.written(layer.number, z).sum(0)
        bias = getattr(layer.modules[Role.O], "bias", None)
        if bias is not None:
            said = said + self._gained(layer, bias if scale is None else bias * scale)
        for multiplier in dict.fromkeys((1.0, float(getattr(self.model.config, "residual_multiplier", 1.0)))):
            if _close(said * multiplier, added[0], clean):
                layer.multiplier = multiplier
                return
        raise self._refusal(f"what the heads of layer {layer.number} write is changed before it reaches the stream")

    def _check_replay(self, layer: Layer, record: LayerRecord, out: Any) -> None:
        import torch

        clean, own_z = self.replay(layer.number, record)
        own = [x for x in out if getattr(x, "shape", None) == clean.shape]
        same = own and torch.allclose(clean, own[-1], atol=_TOLERANCE) and _close(own_z[0], record.z, record.z)
        for role in PORTS:  # nothing changed, twice: the batch is what it seems
            port = self.project(layer.number, role, self.read(layer.number, record.stream)).repeat(2, 1, 1, 1)
            pattern, z = self.replay(layer.number, record, role, port)
            same = same and torch.allclose(pattern, clean.expand_as(pattern), atol=_TOLERANCE)
            same = same and all(_close(found, record.z, record.z) for found in z)
        if not same:
            raise self._refusal(f"the attention of layer {layer.number}, computed again, is not the model's own")


# -- tensors and modules -------------------------------------------------------------------------------------


def _submodule(block: Any, name: str) -> Any | None:
    try:
        return block.get_submodule(name.partition("|")[0])
    except AttributeError:
        return None


def _first(call: tuple[Any, ...]) -> torch.Tensor:
    """The first tensor a module was called with, by position or by name."""
    args, kwargs = call[0], call[1]
    return args[0] if args else next(iter(kwargs.values()))


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (x, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): x}


def _stream_of(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def _close(ours: torch.Tensor, theirs: torch.Tensor, size: torch.Tensor) -> bool:
    """Equal up to rounding of numbers as large as ``size``."""
    return bool((ours - theirs).abs().max() <= _TOLERANCE * (1e-3 * size.abs().max() + theirs.abs().max()))


def _growing(once: Any, twice: Any) -> list[int | None]:
    """For each leaf of a call, the dimension that doubles when the batch does."""
    from torch.utils import _pytree as pytree

    found: list[int | None] = []
    for a, b in zip(pytree.tree_leaves(once), pytree.tree_leaves(twice), strict=True):
        shapes = list(zip(getattr(a, "shape", ()), getattr(b, "shape", ()), strict=True))
        found.append(next((dim for dim, (one, two) in enumerate(shapes) if two == 2 * one and one), None))
    return found


def _batched(leaf: Any, dim: int | None, n: int) -> Any:
    if dim is None or n == 1:
        return leaf
    if leaf.shape[dim] == 1:
        return leaf.expand(*(n if i == dim else -1 for i in range(leaf.ndim)))
    return leaf.repeat(*(n if i == dim else 1 for i in range(leaf.ndim)))


def _some_outputs(module: Any, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Some outputs of a linear module, which stores its weight as (out, in), or (in, out) for Conv1D."""
    import torch

    weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T
    bias = getattr(module, "bias", None)
    return torch.nn.functional.linear(x, weight[rows], None if bias is None else bias[rows])


def _mixed(clean: torch.Tensor, changed: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    if rows is None:
        return changed
    clean[..., rows] = changed
    return clean


def _copied(out: Any) -> Any:
    """Some blocks add in place to what a module gave."""
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else leaf, out)


def _epsilon(norm: Any) -> float:
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(getattr(norm, name, None), float):
            return getattr(norm, name)
    return 0.0


def _gain(norm: Any, *, one_plus: bool) -> torch.Tensor:
    return norm.weight + 1 if one_plus else norm.weight


@contextmanager
def _standing_in(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """A module that does something else for a while."""
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
def _silenced(module: Any) -> Iterator[None]:
    """A module that gives zeros for a while."""
    handle = module.register_forward_hook(lambda module, args, out: out * 0)
    try:
        yield
    finally:
        handle.remove()


class _Still:
    """Modules that give again what they gave, call by call."""

    def __init__(self) -> None:
        self.given: dict[Any, list[Any]] = {}
        self.turn: dict[Any, int] = {}
        self.holding = False

    def hold(self) -> None:
        self.holding = True

    def hook(self, module: Any, args: Any, out: Any) -> Any:
        if not self.holding:
            self.given.setdefault(module, []).append(_copied(out))
            return None
        turn = self.turn.get(module, 0)
        self.turn[module] = turn + 1
        given = self.given.get(module)
        return None if not given else _copied(given[turn % len(given)])


@contextmanager
def _held_still(block: Any, free: tuple[Any, ...]) -> Iterator[_Still]:
    """Every module of a block that computes something can be held still, but for those that are to stay free."""
    import torch

    still, handles = _Still(), []
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
