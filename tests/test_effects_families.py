"""For every family that runs: the effect of every edge equals forward passes with hooks that edit the same port."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from families import BASE, FAMILIES, GQA, Family, build, normalise
from headspan.checkpoints.live import by_modules
from headspan.checkpoints.opening import open_source
from headspan.models.checkpoint import CheckpointWeights
from headspan.running.effects import effects
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TOKENS = [[5, 10, 15, 20, 25, 30, 35, 40], [7, 3, 44, 3, 12, 48, 9, 21]]
REFUSED = {name for name, family in FAMILIES.items() if family.place in ("post", "residual")}
UNEVEN = {name for name, family in FAMILIES.items() if len({*family.counts}) > 1 or len({*family.sizes}) > 1}


def two_attention_layers(name: str) -> Family:
    """The family with at least two attention layers, so that there is an edge."""
    family = FAMILIES[name]
    more: dict[str, dict[str, Any]] = {
        "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": ["attention", "mamba", "attention"]},
        "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [0, 2]},
        "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    }
    return replace(family, config=family.config | more[name]) if name in more else family


# Refused in words of their own: what their blocks do to the stream.
CHANGED = {
    "beam": "changes the stream",  # it is scaled down at every addition
}
NOT_COMPARED = REFUSED | UNEVEN | set(CHANGED)
CASES = {name: two_attention_layers(name) for name in FAMILIES if name not in NOT_COMPARED} | {
    "granite-scaled": Family("granite", GQA | {"residual_multiplier": 0.4}),
    "falcon-alibi": Family("falcon", BASE | {"alibi": True, "bias": True, "multi_query": True}, 1),
    "gemma2-capped": Family("gemma2", GQA | {"head_dim": 8, "attn_logit_softcapping": 0.5, "sliding_window": 3}),
    "mistral-window": Family("mistral", GQA | {"head_dim": 8, "sliding_window": 3}),
    "olmo-clipped": Family("olmo", GQA | {"clip_qkv": 0.3}),
    "gpt2-scaled": Family("gpt2", {"n_embd": 24, "n_layer": 3, "n_head": 4, "vocab_size": 50, "n_positions": 64,
                                   "scale_attn_by_inverse_layer_idx": True}, 4),
}  # fmt: skip


class Oracle:
    """One forward pass for each source and port, with explicit hooks."""

    def __init__(self, model: Any, folder: Any, ablate: str = "resample") -> None:
        model.save_pretrained(folder)
        self.model, self.weights = model, CheckpointWeights(open_source(str(folder)))
        self.where = CheckpointWeights(by_modules(model))._map
        self.clean = [self.run(ids) for ids in TOKENS]
        self.ablate = ablate

    def module(self, role: Role | str, layer: int) -> Any:
        return self.model.get_submodule(self.where.module(Role(role), layer))

    def run(self, ids: list[int], edit: tuple[Any, Any] | None = None) -> dict[str, Any]:
        """Stream, attention and the input of every output projection; ``edit`` is (module, function of its output)."""
        seen: dict[str, Any] = {}
        handles = [
            self.module("O", layer).register_forward_pre_hook(
                lambda m, args, layer=layer: seen.__setitem__(f"z{layer}", args[0].detach()[0].numpy())
            )
            for layer in self.weights.layers
        ]
        if edit is not None:
            handles.append(edit[0].register_forward_hook(lambda m, args, out: edit[1](out)))
        with torch.no_grad():
            out = self.model(torch.tensor([ids]), output_attentions=True, output_hidden_states=True)
        for handle in handles:
            handle.remove()
        attentions = [a[0].numpy() for a in out.attentions if a is not None]
        seen["attention"] = dict(zip(self.weights.layers, attentions, strict=True))
        seen["stream"] = [h[0].numpy() for h in out.hidden_states]
        return seen

    def write(self, run: dict[str, Any], layer: int, head: int) -> np.ndarray:
        """What a head adds to the stream: its part through the output projection, without bias, normalised with all."""
        z, m = run[f"z{layer}"], self.weights.d_head("O")
        alone = np.zeros_like(z)
        alone[:, head * m : (head + 1) * m] = z[:, head * m : (head + 1) * m]
        return (self.projected(alone, layer) - self.projected(0 * z, layer)) * self.scale(run, layer)

    def projected(self, z: np.ndarray, layer: int) -> np.ndarray:
        with torch.no_grad():
            return self.module("O", layer)(torch.from_numpy(z)).numpy()

    def scale(self, run: dict[str, Any], layer: int) -> np.ndarray | float:
        """The factor on the output of the projection on its way to the stream: from a norm, from constants."""
        config = self.model.config
        constant = getattr(config, "residual_multiplier", 1.0) * getattr(config, "attention_out_multiplier", 1.0)
        if self.weights.norm_place not in ("output", "sandwich"):
            return constant
        norm = self.model.get_submodule(self.where.in_layer(layer, self.where.entry.output_norm[0]))
        gain = norm.weight.detach().numpy() + (1 if self.where.entry.one_plus else 0)
        whole = self.projected(run[f"z{layer}"], layer)
        return constant * gain / np.sqrt(np.square(whole).mean(-1, keepdims=True) + config.rms_norm_eps)

    def replacement(self, sequence: int, layer: int, head: int) -> np.ndarray | float:
        writes = [self.write(run, layer, head) for run in self.clean]
        if self.ablate == "zero":
            return 0.0
        return writes[1 - sequence] if self.ablate == "resample" else np.concatenate(writes).mean(0)

    def edited(self, sequence: int, source: tuple[int, int], layer: int, role: str, only: int | None = None) -> Any:
        """A forward pass in which the port reads the stream with the source's output replaced."""
        run = self.clean[sequence]
        x = run["stream"][layer] - self.write(run, *source) + self.replacement(sequence, *source)
        norm = self.weights.norm(layer)
        x = x if norm is None else normalise(norm, x)
        weight, bias, module = self.weights.read(role, layer), self.weights.bias(role, layer), self.module(role, layer)
        vectors = np.einsum("td,hdm->thm", x, weight) + (0 if bias is None else bias)
        stored = module.weight.detach().numpy()
        stored = stored.T if self.where.entry.transposed else stored
        chosen = range(len(weight)) if only is None else [only]
        # The rows of the module's weight that belong to a head are found by what is in them.
        rows = {h: [int(np.flatnonzero((stored == w).all(1))[0]) for w in weight[h].T] for h in chosen}

        def change(out: Any) -> Any:
            out = out.clone()
            for h, found in rows.items():
                out[0][:, found] = torch.from_numpy(vectors[:, h].astype(np.float32))
            return out

        return self.run(TOKENS[sequence], (module, change))

    def effects(self, source: tuple[int, int], layer: int, role: str, only: int | None = None) -> np.ndarray:
        """Of one source on every query head of a layer."""
        after = [self.edited(i, source, layer, role, only) for i in range(2)]
        if role == "V":
            change, size = (
                [[self.outputs(run, layer, minus) for run, minus in zip(runs, minuses, strict=True)]
                 for runs, minuses in ((after, self.clean), (self.clean, [None, None]))]
            )  # fmt: skip
            return np.linalg.norm(np.concatenate(change), axis=(0, 2)) / np.linalg.norm(
                np.concatenate(size), axis=(0, 2)
            )
        moved = [np.abs(a["attention"][layer] - b["attention"][layer]) for a, b in zip(after, self.clean, strict=True)]
        return np.concatenate([m.sum(-1) / 2 for m in moved], axis=1).mean(1)

    def outputs(self, run: dict[str, Any], layer: int, minus: dict[str, Any] | None) -> np.ndarray:
        """What every head writes, or its change, (tokens, heads, d), with the gains and scales of the clean run."""
        base = run if minus is None else minus
        mixed = dict(base)
        mixed[f"z{layer}"] = run[f"z{layer}"] - (0 if minus is None else minus[f"z{layer}"])
        found = []
        for head in range(self.weights.n_heads):
            found.append(self._scaled_write(mixed, base, layer, head))
        return np.stack(found, axis=1)

    def _scaled_write(self, mixed: dict[str, Any], base: dict[str, Any], layer: int, head: int) -> np.ndarray:
        m = self.weights.d_head("O")
        z = mixed[f"z{layer}"][:, head * m : (head + 1) * m]
        return (z @ self.weights.read("O", layer)[head].T) * self.scale(base, layer)


def expected(oracle: Oracle, role: str) -> np.ndarray:
    """(source heads, heads of the port), as the package orders them; mean over the query heads of a KV head."""
    weights = oracle.weights
    n, layers = weights.n_heads, weights.layers
    group = n // weights.n_kv_heads if role in "KV" else 1
    table = np.full((n * len(layers), n // group * len(layers)), np.nan)
    for a, b in ((a, b) for a in range(len(layers)) for b in range(len(layers)) if a < b):
        for head in range(n):
            found = oracle.effects((layers[a], head), layers[b], role).reshape(-1, group).mean(1)
            table[a * n + head, b * n // group : (b + 1) * n // group] = found
    return table


@pytest.mark.parametrize("name", CASES)
def test_effects_equal_hooked_forward_passes(name: str, tmp_path: Any) -> None:
    model = build(CASES[name])
    found = effects(model, tokens=TOKENS, memory="100MB")
    oracle = Oracle(model, tmp_path)
    for role in "QKV":
        ours = found.of(f"O{role}")
        theirs = expected(oracle, role)
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
        assert np.nanmax(ours) > 1e-3  # something was measured


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize("ablate", ["mean", "zero"])
def test_other_ablations(name: str, ablate: str, tmp_path: Any) -> None:
    model = build(CASES[name])
    found = effects(model, tokens=TOKENS, ablate=ablate)
    oracle = Oracle(model, tmp_path, ablate)
    for role in "QKV":
        np.testing.assert_allclose(found.of(f"O{role}"), expected(oracle, role), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gpt_neox"])
def test_a_port_of_one_head_alone_gives_the_same(name: str, tmp_path: Any) -> None:
    model = build(CASES[name])
    oracle = Oracle(model, tmp_path)
    group = oracle.weights.n_heads // oracle.weights.n_kv_heads
    for role in "QKV":
        every = oracle.effects((0, 1), 1, role)
        for head in range(len(oracle.weights.heads_in(role, 1))):
            mine = slice(head * group, (head + 1) * group) if role in "KV" else slice(head, head + 1)
            np.testing.assert_allclose(oracle.effects((0, 1), 1, role, head)[mine], every[mine], atol=1e-6)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_families_without_direct_edges_are_refused_by_name(name: str) -> None:
    model = build(FAMILIES[name])
    with pytest.raises(HeadspanError, match=r"no effects for .* reaches no later head directly"):
        effects(model, tokens=TOKENS)


@pytest.mark.parametrize("name", sorted(UNEVEN))
def test_uneven_layers_are_refused(name: str) -> None:
    reasons = {"gemma4-lent-keys": "keys and values of earlier", "gemma3n": "several residual streams"}
    with pytest.raises(HeadspanError, match=reasons.get(name, "between layers of one shape only")):
        effects(build(FAMILIES[name]), tokens=TOKENS)


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_a_stream_that_blocks_change_is_refused(name: str) -> None:
    with pytest.raises(HeadspanError, match=CHANGED[name]):
        effects(build(FAMILIES[name]), tokens=TOKENS)
