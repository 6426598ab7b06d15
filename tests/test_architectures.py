"""For every family: q, k, v, attention output, norms and logits from our weights equal the model's own."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from families import FAMILIES, LATENT, PICTURE_LAYERS, TOLERANCE, Run, close, normalise
from families_around import AROUND, LATENT_AROUND
from headspan.models.families.table import ALIASES, ARCHITECTURES
from headspan.models.mlp import Mlps
from headspan.vocabulary.heads import Role

pytest.importorskip("transformers")
NOT_FROM_TRANSFORMERS = {"transformer_lens", "openelm", "nemotron-nas", "deci"}
VALUE_SCALES = {"mimo_v2_flash": 0.707}  # numbers from the config that values are multiplied by


EVERY = FAMILIES | {f"{name}-around" if name in FAMILIES else name: family for name, family in AROUND.items()}


@pytest.fixture(scope="module", params=EVERY, ids=str)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(EVERY[request.param], tmp_path_factory.mktemp("model"))


def test_sizes(run: Run) -> None:
    family, weights = run.family, run.weights
    assert weights.architecture == ALIASES.get(family.model_type, family.model_type)
    assert weights.layers == family.layers
    for place, layer in enumerate(weights.layers):
        n_heads, n_kv_heads = family.heads(place)
        qk, vo = family.widths(place)
        assert [len(weights.heads_in(role, layer)) for role in "QKVO"] == [n_heads, n_kv_heads, n_kv_heads, n_heads]
        assert [run.width(role, layer) for role in "QKVO"] == [qk, qk, vo, vo]
    assert (weights.norm_place, weights.foldable) == (family.place, family.place not in ("post", "residual"))
    assert weights.vocab_size == 50


def test_projections_equal_the_models_own(run: Run) -> None:
    for layer in run.weights.layers:
        if run.weights._map.entry.fused:
            check_attention_pattern(run, layer)
            continue
        for role in "QKV":
            vectors = run.project(role, layer)
            seen = run.seen[f"{role}{layer}"][1].reshape(*vectors.shape[:2], -1)
            close(vectors, seen[..., : vectors.shape[2]])  # the rest, if any, is the gate


def check_attention_pattern(run: Run, layer: int) -> None:
    """Q and K of a fused tensor, through the model's own split: log-attention differs by q·(k − k₀)/√m.

    All tokens are at position 0, where rotary embeddings do nothing; ALiBi is subtracted.
    """
    q, k = run.project("Q", layer), run.project("K", layer)
    k = run.per_query(layer, k)
    logits = np.einsum("ihm,jhm->hij", q, k) / np.sqrt(q.shape[2]) + alibi(run, layer)
    attention = run.attention[layer]
    for i in range(1, len(q)):
        seen = np.log(attention[:, i, : i + 1])
        close(logits[:, i, : i + 1] - logits[:, i, :1], seen - seen[:, :1], 3 * TOLERANCE)


def alibi(run: Run, layer: int) -> np.ndarray | float:
    if run.weights.architecture not in ("bloom", "mpt"):
        return 0.0
    slopes = 2.0 ** (-8 * np.arange(1, 5) / 4)
    return slopes[:, None, None] * np.arange(len(run.stream[0]))


def test_attention_output_equals_the_models_own(run: Run) -> None:
    for layer in run.weights.layers:
        values = run.per_query(layer, run.project("V", layer)) * VALUE_SCALES.get(run.family.model_type, 1)
        if run.weights._map.entry.value_norm:  # without gain
            eps = run.model.config.get_text_config().rms_norm_eps
            values = values / np.sqrt(np.square(values).mean(-1, keepdims=True) + eps)
        mixed = np.einsum("hij,jhm->ihm", run.attention[layer], values)
        if run.weights._map.entry.gated:
            gate = run.seen[f"Q{layer}"][1].reshape(*mixed.shape[:2], -1)[..., mixed.shape[2] :]
            mixed = mixed / (1 + np.exp(-gate))
        if (
            run.weights._map.entry.own_gate or run.weights.architecture == "granite_swa"
        ):  # a factor for each number or head: what the output weight was given
            handed = run.seen[f"O{layer}"][0].reshape(mixed.shape)
            check_gate(handed, mixed, run.family.model_type)
            mixed = handed
        out = np.einsum("ihm,hdm->id", mixed, run.weights.read("O", layer)[..., : mixed.shape[2]])
        bias = run.weights.bias("O", layer)
        close(out if bias is None else out + bias, run.seen[f"O{layer}"][1])


def check_gate(handed: np.ndarray, mixed: np.ndarray, family: str) -> None:
    """Between mixed values and the output weight there is only a gate: positive, in some families one per head.

    Granite's sinks are such a factor: they are not part of the attention that it returns.
    """
    if family in ("laguna", "granite_swa", "granitemoe_swa", "lfm3"):
        factors = (handed * mixed).sum(-1, keepdims=True) / np.square(mixed).sum(-1, keepdims=True)
        close(factors * mixed, handed)
    else:
        factors = handed / mixed
    assert factors.min() > 0
    assert family == "laguna" or factors.max() < 1


def test_norm_in_front_of_attention(run: Run) -> None:
    for layer in run.weights.layers:
        norm, stream = run.weights.norm(layer), run.stream[layer]
        close(stream if norm is None else normalise(norm, stream), run.seen[f"Q{layer}"][0])


def test_norm_between_attention_and_the_stream(run: Run) -> None:
    for layer in run.weights.layers:
        norm = run.weights.output_norm(layer)
        assert (norm is not None) == (run.family.place in ("output", "sandwich"))
        if norm is not None:
            close(normalise(norm, run.seen[f"added{layer}"][0]), run.seen[f"added{layer}"][1])


def test_final_norm(run: Run) -> None:
    norm = run.weights.final_norm()
    assert (norm is None) == (run.weights.norm_place == "post")
    if norm is not None:
        close(normalise(norm, run.seen["final"][0]), run.seen["final"][1])


def test_unembedding_and_its_bias(run: Run) -> None:
    before, logits = run.seen["logits"]
    if run.weights.architecture == "esm":  # adds the bias outside of the module
        logits = run.logits
    bias = run.weights.unembedding_bias()
    close(before @ run.weights.unembedding().T + (0 if bias is None else bias), logits)
    embedding = run.model.get_input_embeddings().weight
    assert run.weights.tied_embedding == (embedding is run.model.get_output_embeddings().weight)
    np.testing.assert_array_equal(run.weights.embedding(), embedding.detach().numpy())


def test_every_family_of_the_table_is_here() -> None:
    families = [*EVERY.values(), *LATENT.values(), *LATENT_AROUND.values()]
    tested = {family.model_type for family in families} | {family.around[0] for family in families if family.around}
    elsewhere = {"kimi_k2", "dots3_note"}  # in test_latent
    assert tested >= set(ALIASES) - elsewhere - NOT_FROM_TRANSFORMERS
    assert {ALIASES.get(name, name) for name in tested} >= set(ARCHITECTURES) - NOT_FROM_TRANSFORMERS


# Where the layers of a live model keep a mixture of experts.
CONTAINERS = ("mlp", "feed_forward", "block_sparse_moe", "mixer", "ffn")


def test_neurons_equal_the_models_own(run: Run) -> None:
    check_neurons(run)


def check_neurons(run) -> None:
    """Pre-activations from what neurons read, and outputs from what they write, on the model's own MLP input."""
    import torch

    mlps = Mlps(run.weights)
    for layer in range(run.weights.n_layers):
        parts = mlps.parts(layer)
        assert parts or without_mlp(run, layer), f"no MLP was found in layer {layer}"
        if run.family.model_type in PICTURE_LAYERS and layer not in run.weights.layers:
            continue
        block = block_of(run, mlps, layer)
        routed = any(part.layout.experts for part in parts)
        mixture = [part for part in parts if routed and (part.layout.experts or part.layout.shared)]
        for part in (part for part in parts if part not in mixture):
            check_dense(run, mlps, layer, part, block)
        if mixture:
            container = next(getattr(block, name) for name in CONTAINERS if hasattr(block, name))
            with torch.no_grad():
                check_experts(run, mlps, layer, mixture, container)


def block_of(run, mlps: Mlps, layer: int):
    entry, where = mlps._map.entry, getattr(run, "where", mlps._map)  # files of some families keep other names
    return run.model.get_submodule(where.prefix + entry.layer.format(layer // entry.sublayers).removesuffix("."))


def live(mlps: Mlps, layer: int, block, module: str):
    """A module of a block by its name in files, which three families rename."""
    name = module.replace("{sub}", str(layer % mlps._map.entry.sublayers)).replace("linear_gate", "gate_proj")
    if mlps._map.architecture == "cosmos3_edge_text":
        name = name.replace("up_proj", "fc1").replace("down_proj", "fc2")
    return block.get_submodule(name if hasattr(block, name.partition(".")[0]) else f"mlp.{name.partition('.')[2]}")


def without_mlp(run: Run, layer: int) -> bool:
    """A layer of Nemotron-H is attention, a state space or an MLP."""
    return run.family.model_type == "nemotron_h" and run.family.config["layer_types"][layer] not in ("mlp", "moe")


def check_dense(run, mlps: Mlps, layer: int, part, block) -> None:
    layout = part.layout
    modules = {module: live(mlps, layer, block, module) for module in (*layout.reads, layout.down)}
    with recorded_rows(modules) as seen:
        run.model(run.ids)
    reads, writes = (mlps.read(layer, part, role, 0) for role in (Role.R, Role.W))
    x = seen[layout.reads[0]][0]
    found = np.einsum("td,ndr->tnr", x, reads)
    ours = [found[:, :, i] for i in range(found.shape[2])]
    if layout.fused:
        biases = np.split(bias(modules[layout.reads[0]], 2 * part.neurons), 2)
        ours = [pre + b for pre, b in zip(ours, biases, strict=True)]
        close(gated(run, *ours), seen[layout.down][0])
    else:
        for pre, module in zip(ours, layout.reads, strict=True):
            close(pre + bias(modules[module], part.neurons), seen[module][1])
    out = seen[layout.down][0] @ writes[:, :, 0] + bias(modules[layout.down], run.weights.d_model)
    close(out, seen[layout.down][1])


def bias(module, size: int) -> np.ndarray:
    found = getattr(module, "bias", None)
    return np.zeros(size, np.float32) if found is None else found.detach().numpy()


def activation(config, x: np.ndarray) -> np.ndarray:
    import torch
    from transformers.activations import ACT2FN

    keys = ("mlp_hidden_act", "hidden_act", "hidden_activation")
    name = next((getattr(config, key) for key in keys if getattr(config, key, None)), "silu")
    return ACT2FN[name](torch.from_numpy(np.ascontiguousarray(x))).numpy()


def gated(run, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if run.weights.architecture in ("gpt_oss", "minimax_m3_vl_text"):  # an activation of their own
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return activation(run.model.config.get_text_config(), gate) * up


def check_experts(run, mlps: Mlps, layer: int, parts, container) -> None:
    """The output of a mixture for a token is a weighted sum of the outputs of its experts."""
    for name, parameter in container.named_parameters():
        if "bias" in name and "experts" in name:
            parameter.zero_()
    scaled = run.family.model_type == "llama4_text"  # it weights what experts read, not what they write
    norm = getattr(container, "post_mlp_layernorm", None)  # A.X K1 has the norm of what it adds inside
    watched = {"mlp": container, "experts": container.experts if scaled else None, "norm": norm}
    with recorded_rows({name: module for name, module in watched.items() if module is not None}) as seen:
        run.model(run.ids)
    x, y = seen["mlp"]
    if norm is not None:
        y = seen["norm"][0]
        close(mlps.output_norm(layer).gain, norm.weight.numpy())
    gives = []
    for part in parts:
        for expert in range(part.experts):
            if scaled and part.layout.experts:
                x = np.split(seen["experts"][0], part.experts)[expert]
            elif scaled:
                x = seen["mlp"][0]
            reads, writes = (mlps.read(layer, part, role, expert) for role in (Role.R, Role.W))
            given = np.moveaxis(np.einsum("td,ndr->tnr", x, reads), 2, 0)
            hidden = gated(run, *given) if len(given) == 2 else activation(run.model.config.get_text_config(), given[0])
            gives.append(hidden @ writes[:, :, 0])
    if getattr(run.model.config, "zero_expert_num", None):
        gives.append(x)  # an expert that hands on what it reads
    together = np.stack(gives, axis=2)  # (token, d, expert)
    left = []
    for token in range(len(x)):
        weights, *_ = np.linalg.lstsq(together[token], y[token], rcond=None)
        left.append(np.abs(together[token] @ weights - y[token]).max() / np.abs(y[token]).max())
    assert max(left) < 1e-4, f"layer {layer}: experts do not add up to the model's own output, {max(left):.2g}"


@contextmanager
def recorded_rows(modules):
    """Input and output of modules, one row per token; copies, since some models add to an output in place."""
    seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def keep(label: str):
        def hook(module, args, kwargs, out):
            both = ((args or tuple(kwargs.values()))[0], out[0] if isinstance(out, tuple) else out)
            seen[label] = tuple(t.detach().numpy().copy().reshape(-1, t.shape[-1]) for t in both)

        return hook

    handles = [module.register_forward_hook(keep(label), with_kwargs=True) for label, module in modules.items()]
    yield seen
    for handle in handles:
        handle.remove()


def test_norm_in_front_of_the_mlp(run: Run) -> None:
    check_mlp_norm(run)


def check_mlp_norm(run) -> None:
    """The MLP reads the normalised stream, with the gains that folding moves."""
    mlps = Mlps(run.weights)
    for layer in range(run.weights.n_layers):
        if not mlps.parts(layer):
            continue  # said above to be right
        if run.family.model_type in PICTURE_LAYERS and layer not in run.weights.layers:
            continue
        part = mlps.parts(layer)[0]
        block = block_of(run, mlps, layer)
        norm = mlps.norm(layer)
        if part.layout.experts or norm is None or run.weights.norm_place in ("post", "residual"):
            continue
        with recorded_rows({"in": live(mlps, layer, block, part.layout.reads[0])}) as seen:
            run.model(run.ids)
        x = seen["in"][0]
        # Undo gain and bias: what is left must be normalised.
        z = (x - (0 if norm.bias is None else norm.bias)) / norm.gain
        np.testing.assert_allclose(np.square(z).mean(-1), 1, rtol=2e-2)
        if norm.kind == "layer":
            np.testing.assert_allclose(z.mean(-1), 0, atol=1e-5)


def test_mlps_without_a_norm_in_front_are_those_of_output_and_post_norm(run: Run) -> None:
    bare = [Mlps(run.weights).norm(layer) is None for layer in range(run.weights.n_layers)]
    expected = run.weights.norm_place in ("post", "residual", "output")
    attends = [layer in run.weights.layers for layer in range(run.weights.n_layers)]  # the others are as they are
    assert [b for b, here in zip(bare, attends, strict=True) if here] == [expected] * len(run.weights.layers)
