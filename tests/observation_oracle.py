"""The statistics of a run, slowly and plainly: hooks on the real model's modules, autograd for every key, numpy."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from families import Family, build
from headspan.checkpoints.live import by_modules
from headspan.models.checkpoint import CheckpointWeights
from headspan.models.folding import FoldedWeights
from headspan.results.observations import Statistics
from headspan.running.attention_fisher import orthogonal_signs
from headspan.running.observe import observe
from headspan.vocabulary.heads import Role

observing = sys.modules["headspan.running.observe"]  # the module, whose name is also that of the function

TOKENS = [[5, 10, 15, 20, 25], [7, 3, 44], [9, 21, 33]]
MORE_TOKENS = [*TOKENS, [1, 2], [8, 9, 10, 11, 12, 13], [30, 29, 28, 27]]  # those of the fixture llama_stats
SINK = 1e-3  # more than this missing from a row of attention went to a sink


def in_float64(family: Family) -> Any:
    """The model of a family in float64, if transformers can run it so."""
    model = build(family)
    if family.model_type in ("xglm",):  # its mask is of the largest float64, in float32
        return model
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the faster one has no float64
    return model.double()


@dataclass
class Port:
    """The heads of one role in one layer: the module whose outputs they are, and which outputs, (heads, m)."""

    module: Any
    rows: np.ndarray
    rotary: bool = False


class Oracle:
    """Runs of the real model. By (role, layer, number of the head in its layer)."""

    def __init__(self, model: Any, tokens: list[list[int]] = TOKENS) -> None:
        self.model, self.tokens = model, tokens
        self.weights = CheckpointWeights(by_modules(model))
        self.where, self.n = self.weights._map, self.weights.n_heads
        self.latent = self.where.latent is not None
        self.ports = {
            (role, layer): self._ports(role, layer)
            for layer in self.weights.layers
            for role in (Role.Q, Role.K, Role.V)
        }
        self.runs = [self._run(ids) for ids in tokens]

    # -- where things are ------------------------------------------------------------------------------------

    def module(self, role: Role, layer: int) -> Any:
        return self.model.get_submodule(self.where.module(role, layer))

    def inside(self, layer: int, name: str) -> Any:
        return self.model.get_submodule(self.where.in_layer(layer, name))

    def _ports(self, role: Role, layer: int) -> list[Port]:
        if self.latent:
            return self._latent_ports(role, layer)
        module = self.module(role, layer)
        stored = module.weight.detach().numpy()
        stored = stored.T if self.where.entry.transposed else stored
        # The rows of the module's weight that belong to a head are found by what is in them.
        rows = [
            [int(np.flatnonzero((stored == column).all(1))[0]) for column in head.T]
            for head in self.weights.read(role, layer)
        ]
        return [Port(module, np.array(rows))]

    def _latent_ports(self, role: Role, layer: int) -> list[Port]:
        """The position-free part of every query and key, the values, and the rotary key of the layer."""
        config = self.model.config.get_text_config()
        free, rotary, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        attention = self.attention(layer)
        if role is Role.Q:
            module = attention.q_proj if getattr(attention, "q_b_proj", None) is None else attention.q_b_proj
            return [Port(module, np.arange(self.n * (free + rotary)).reshape(self.n, -1)[:, :free])]
        both = np.arange(self.n * (free + value)).reshape(self.n, -1)
        if role is Role.V:
            return [Port(attention.kv_b_proj, both[:, free:])]
        shared = Port(attention.kv_a_proj_with_mqa, config.kv_lora_rank + np.arange(rotary)[None], rotary=True)
        return [Port(attention.kv_b_proj, both[:, :free]), *([shared] if rotary else [])]

    def attention(self, layer: int) -> Any:
        name = self.where.module(Role.Q, layer).rpartition(".")[0]
        return self.model.get_submodule(name)

    # -- running ---------------------------------------------------------------------------------------------

    def _run(self, ids: list[int]) -> dict[Any, Any]:
        """Outputs of Q and K as leaves of a graph, attention, values, streams, and inputs of output projections."""
        import torch

        seen: dict[Any, Any] = {}
        handles = []

        def leaf(module: Any, args: Any, out: Any) -> Any:
            seen[module] = out.detach().clone().requires_grad_()
            return seen[module].clone()  # some models clip it in place

        def keep(label: Any) -> Any:
            return lambda m, args, kwargs: seen.__setitem__(
                label, (args or tuple(kwargs.values()))[0].detach()[0].clone()
            )

        def pattern(layer: int) -> Any:
            shape = (1, self.n, len(ids), len(ids))
            return lambda m, args, out: seen.__setitem__(
                ("attention", layer), [x for x in out if getattr(x, "shape", None) == shape][-1][0]
            )

        modules = {port.module for ports in self.ports.values() for port in ports}
        handles += [module.register_forward_hook(leaf) for module in modules]
        for layer in self.weights.layers:
            handles.append(self.module(Role.O, layer).register_forward_pre_hook(keep(("z", layer)), with_kwargs=True))
            handles.append(self.attention(layer).register_forward_hook(pattern(layer)))
            for label, names in (("norm", self.where.entry.norm), ("added", self.where.entry.output_norm)):
                for name in names:
                    try:
                        module = self.inside(layer, name)
                    except AttributeError:
                        continue
                    handles.append(module.register_forward_pre_hook(keep((label, layer)), with_kwargs=True))
                    break
        with torch.enable_grad():
            out = self.model(torch.tensor([ids]), output_attentions=True, output_hidden_states=True, use_cache=False)
        for handle in handles:
            handle.remove()
        seen["stream"] = [h.detach()[0].numpy() for h in out.hidden_states]
        return seen

    # -- statistics ------------------------------------------------------------------------------------------

    def outputs(self, run: dict[Any, Any], port: Port) -> np.ndarray:
        """(T, heads, m)."""
        found = run[port.module].detach().numpy()
        return found.reshape(-1, found.shape[-1])[:, port.rows]

    def stream(self, run: dict[Any, Any], layer: int) -> np.ndarray:
        """What the norm before attention reads; without a norm, what the layer before it left."""
        found = run.get(("norm", layer))
        return run["stream"][layer] if found is None else found.numpy()

    def scale(self, run: dict[Any, Any], role: Role, layer: int, port: Port) -> np.ndarray:
        """What the norms divide by, per token: that of the stream, and that of a latent."""
        norm, x = self.weights.norm(layer), self.stream(run, layer)
        scale = np.ones(len(x))
        if norm is not None:
            x = x - x.mean(-1, keepdims=True) if norm.kind == "layer" else x
            scale = 1 / np.sqrt(np.square(x).mean(-1) + norm.eps)
        if self.latent and not port.rotary:
            scale = scale * self._latent_scale(run, role, layer)
        return scale

    def _latent_scale(self, run: dict[Any, Any], role: Role, layer: int) -> np.ndarray | float:
        import torch

        attention = self.attention(layer)
        make, norm = ("q_a_proj", "q_a_layernorm") if role is Role.Q else ("kv_a_proj_with_mqa", "kv_a_layernorm")
        if getattr(attention, make, None) is None:
            return 1.0
        with torch.no_grad():
            read = self.inside(layer, self.where.entry.norm[0])(run["norm", layer][None])
            latent = getattr(attention, make)(read)[0].numpy()
        if role is not Role.Q:
            latent = latent[:, : self.model.config.get_text_config().kv_lora_rank]
        norm = getattr(attention, norm)
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        later = getattr(attention, "mla_scale_q_lora", 1.0) if role is Role.Q else 1.0
        return 1 / np.sqrt(np.square(latent).mean(-1) + eps) / later

    def writes(self, run: dict[Any, Any], layer: int) -> np.ndarray:
        """z of every head, (T, heads, m), times all numbers between it and the stream but gains."""
        config = self.model.config.get_text_config()
        z = run["z", layer].numpy()
        constant = getattr(config, "residual_multiplier", 1.0) * getattr(config, "attention_out_multiplier", 1.0)
        constant *= getattr(self.block(layer), "residual_scale", 1.0)
        if ("added", layer) in run:
            added = run["added", layer].numpy()
            norm = self.weights.output_norm(layer)
            assert norm is not None
            constant = constant / np.sqrt(np.square(added).mean(-1) + norm.eps)[:, None]
        return (z * constant).reshape(len(z), self.n, -1)

    def block(self, layer: int) -> Any:
        each = self.where.entry.sublayers
        return self.model.get_submodule((self.where.prefix + self.where.entry.layer.format(layer // each)).rstrip("."))

    def fisher(self, role: Role, layer: int, *, own: bool = False) -> list[np.ndarray]:
        """Σ_j p_ij g gᵀ, g = ∂log p_ij/∂a, key by key, of every port head: for each port, (heads, m, m).

        With ``own``, only of the attention of the port's own query heads.
        """
        tokens = sum(map(len, self.tokens))
        found = []
        for port in self.ports[role, layer]:
            heads, group = len(port.rows), self.n // len(port.rows)
            total = np.zeros((heads, port.rows.shape[1], port.rows.shape[1]))
            for run in self.runs:
                p, g, of = self._gradients(run, layer, port.module)
                g = g[:, :, port.rows] * self.scale(run, role, layer, port)[:, None, None]
                for head in range(heads):
                    mine = of // group == head if own else np.ones(len(p), bool)
                    total[head] += np.einsum("k,ktm,ktn->mn", p[mine], g[mine, :, head], g[mine, :, head])
            found.append(total / (tokens * group))
        return found

    def _gradients(self, run: dict[Any, Any], layer: int, module: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For every query head, query and key with attention, or sink: p, ∂log p/∂output of a module, query head."""
        import torch

        pattern = run["attention", layer]
        rest = 1 - pattern.sum(-1, keepdim=True)
        p = torch.cat([pattern, torch.where(rest > SINK, rest, 0.0)], -1)
        of, _, _ = places = torch.nonzero(p.detach() > 0, as_tuple=True)
        logarithms = p[places].log()
        (g,) = torch.autograd.grad(
            logarithms, run[module], torch.eye(len(logarithms), dtype=p.dtype), retain_graph=True, is_grads_batched=True
        )
        return p[places].detach().numpy(), g.reshape(len(g), pattern.shape[1], -1).numpy(), of.numpy()

    def has_sinks(self) -> bool:
        sums = [
            float(run["attention", layer].detach().sum(-1).min()) for run in self.runs for layer in self.weights.layers
        ]
        return min(sums) < 1 - SINK

    def spread(self, layer: int) -> np.ndarray:
        """½ E[δδᵀ] over all pairs of sequences at all positions they both have, (heads, m, m)."""
        z = [self.writes(run, layer) for run in self.runs]
        total, degrees = np.zeros(()), 0
        for position in range(max(map(len, z))):
            there = np.stack([one[position] for one in z if len(one) > position])
            degrees += len(there) - 1
            total = total + sum(np.einsum("hm,hn->hmn", a - b, a - b) for a in there for b in there) / 2 / len(there)
        return total / degrees

    def lengths(self, layer: int) -> np.ndarray:
        """Mean length of what every head adds to the stream."""
        weight = self.weights.read("O", layer)
        norm = self.weights.output_norm(layer)
        weight = weight if norm is None else weight * norm.gain[:, None]
        written = [np.einsum("thm,hdm->thd", self.writes(run, layer), weight) for run in self.runs]
        return np.linalg.norm(np.concatenate(written), axis=2).mean(0)

    def values(self, layer: int) -> np.ndarray:
        """(all tokens, heads, m)."""
        (port,) = self.ports[Role.V, layer]
        return np.concatenate([self.outputs(run, port) for run in self.runs])

    def matrices(self, role: Role, layer: int) -> np.ndarray:
        """D, G, or the inverse variance times the squared scale, (heads, m, m), filled up with zeros."""
        if role is Role.O:
            return self.spread(layer)
        if role is not Role.V:
            return padded(self.fisher(role, layer), self.weights.d_head(role))
        (port,) = self.ports[role, layer]
        values = self.values(layer)
        variance = np.square(values - values.mean(0)).sum(-1).mean(0)
        squares = np.concatenate([self.scale(run, role, layer, port) ** 2 for run in self.runs]).mean()
        return np.eye(values.shape[2]) * squares / variance[:, None, None]

    def influence(self, role: Role) -> np.ndarray:
        """√tr(D AᵀGA), A = W̃ᵀW_O in float64, of every pair of a source and a later port, in the package's order."""
        folded = FoldedWeights(self.weights)
        layers = self.weights.layers
        table = np.full((len(self.weights.heads(Role.O)), len(self.weights.heads(role))), np.nan)
        for source in layers:
            rows, spread = self.weights.ports.span(Role.O, source), self.matrices(Role.O, source)
            for target in (layer for layer in layers if layer > source):
                columns, matrix = self.weights.ports.span(role, target), self.matrices(role, target)
                a = np.einsum(
                    "tdm,sdk->stmk", *(folded.read(r, n).astype(float) for r, n in ((role, target), (Role.O, source)))
                )
                square = np.einsum("skl,stmk,tmn,stnl->st", spread, a, matrix, a, optimize=True)
                table[rows, columns] = np.sqrt(square)
        return table


def padded(parts: list[np.ndarray], width: int) -> np.ndarray:
    return np.concatenate([np.pad(a, ((0, 0), *[(0, width - a.shape[1])] * 2)) for a in parts])


def exact_statistics(model: Any, tokens: list[list[int]] = TOKENS) -> Statistics:
    """What `observe` gives with orthogonal signs, whose mean is exact, instead of random ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observing, "random_signs", lambda draws, seed, shape, key: orthogonal_signs(shape, key))
        return observe(model, tokens=tokens)
