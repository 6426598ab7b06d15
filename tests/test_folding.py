"""Folded weights on the bare normalised stream compute what the original weights compute after their norms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import headspan as hs
from families import FAMILIES, Run, close, normalise
from headspan.models.folding import FoldedWeights, fold
from headspan.models.weights import AttentionWeights, Norm
from headspan.vocabulary.heads import ROLES, Role

pytest.importorskip("transformers")

# LayerNorm with and without bias, without weights, γ − 1 stored; RMSNorm, 1 + γ; fused layouts; GQA; sinks.
FOLDABLE = (
    "gpt2", "gpt_bigcode", "bloom", "falcon-40b", "mpt", "olmo", "cohere", "starcoder2", "phi", "gptj", "nemotron",
    "llama", "qwen2", "qwen3", "gemma", "gpt_oss", "granite", "phi3", "olmoe", "lfm2",
)  # fmt: skip
# A norm after attention, alone or with one before it; a first layer without a norm.
OTHER_PLACES = tuple(name for name, family in FAMILIES.items() if family.place in ("output", "sandwich", "partial"))


@pytest.fixture(scope="module", params=FOLDABLE + OTHER_PLACES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(FAMILIES[request.param], tmp_path_factory.mktemp("model"))


def bare(norm: Norm | None, stream: np.ndarray) -> np.ndarray:
    """The normalised stream, no gain and no bias, by the definition of the norm; the stream itself without a norm."""
    if norm is None:
        return stream
    return normalise(replace(norm, gain=np.ones_like(norm.gain), bias=None), stream)


def plus(vectors: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return vectors if bias is None else vectors + bias


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def folded_attention(folded: FoldedWeights, z: np.ndarray, attention: np.ndarray, layer: int) -> np.ndarray:
    """What the attention of a layer writes, from folded weights alone and the model's attention pattern."""
    values = plus(np.einsum("td,hdm->thm", z, folded.read("V", layer)), folded.bias("V", layer))
    values = np.repeat(values, folded.n_heads // folded.n_kv_heads, axis=1)
    mixed = np.einsum("hij,jhm->ihm", attention, values)
    return plus(np.einsum("ihm,hdm->id", mixed, folded.read("O", layer)), folded.bias("O", layer))


def test_queries_and_keys(run: Run) -> None:
    folded = fold(run.weights)
    for role in "QK":
        for layer in run.weights.layers_with(role):
            z = bare(run.weights.norm(layer), run.stream[layer])
            vectors = np.einsum("td,hdm->thm", z, folded.read(role, layer)[..., : run.width(role, layer)])
            close(plus(vectors, folded.bias(role, layer)), run.project(role, layer))


def test_attention_output(run: Run) -> None:
    """What is added to the stream, from the model's own module after attention; its division is a scalar."""
    folded = fold(run.weights)
    for layer in run.weights.layers:
        z = bare(run.weights.norm(layer), run.stream[layer])
        theirs = run.seen.get(f"added{layer}", run.seen[f"O{layer}"])[1]
        if run.weights.norm_kind == "layer":
            theirs = theirs - theirs.mean(-1, keepdims=True)
        if not (run.weights._map.entry.own_gate or run.weights._map.entry.value_norm):
            ours = folded_attention(folded, z, run.attention[layer], layer)
        else:  # what heads hand to their outputs, as the model gated or normalised it
            written = folded.read("O", layer)[..., : run.width("O", layer)]
            ours = np.einsum("ihm,hdm->id", run.seen[f"O{layer}"][0].reshape(len(z), len(written), -1), written)
            ours = plus(ours, folded.bias("O", layer))
        if run.weights.norm_place in ("output", "sandwich"):
            number = (ours * theirs).sum(-1, keepdims=True) / np.square(ours).sum(-1, keepdims=True)
            assert (number > 0).all()
            assert np.ptp(number) > 1e-3  # another one for every token
            ours = ours * number
        close(ours, theirs)


@pytest.mark.parametrize("role", "QKV")
def test_the_norm_in_front_is_one_positive_number_a_token(run: Run, role: str) -> None:
    """Folded weights on the raw stream see what the model's own projections see, up to one scalar per token."""
    folded = fold(run.weights)
    for layer in run.weights.layers_with(role):
        bias = folded._input_bias(Role.parse(role), layer)
        ours = np.einsum("td,hdm->thm", run.stream[layer], folded.read(role, layer)[..., : run.width(role, layer)])
        theirs = run.project(role, layer) - (0 if bias is None else bias)
        number = (ours * theirs).sum((1, 2), keepdims=True) / np.square(ours).sum((1, 2), keepdims=True)
        assert (number > 0).all()
        close(ours * number, theirs)


def test_logits_up_to_a_constant(run: Run) -> None:
    folded = fold(run.weights)
    z = bare(run.weights.final_norm(), run.seen["final"][0])
    logits = plus(z @ folded.unembedding().T, folded.unembedding_bias())
    if run.weights.architecture in ("modernbert", "modernbert-decoder"):
        check_head_of_its_own(run, logits)
        return
    config = run.model.config
    scale = (getattr(config, "logit_scale", None) or 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = np.tanh(logits / cap) * cap if cap else logits * scale
    close(log_softmax(logits), log_softmax(run.logits))


def check_head_of_its_own(run: Run, logits: np.ndarray) -> None:
    """A dense layer comes before this unembedding: folding is exact before and after it."""
    import torch

    final, unembedding, bias = run.weights.final_norm(), run.weights.unembedding(), run.weights.unembedding_bias()
    assert final is not None
    normed = normalise(final, run.seen["final"][0])
    close(log_softmax(logits), log_softmax(plus(normed @ unembedding.T, bias)))
    with torch.no_grad():
        head = run.model.head if run.weights.architecture == "modernbert" else run.model.lm_head
        behind = head(torch.tensor(normed, dtype=torch.float32)).numpy()
    close(plus(behind @ unembedding.T, bias), run.logits)
    assert any("an extra layer between" in note for note in run.weights.notes)


def test_whole_gpt2_from_folded_weights(tmp_path) -> None:
    """All logits of a GPT-2: attention and unembedding folded, only the MLP is the model's own."""
    import torch

    run = Run(FAMILIES["gpt2"], tmp_path)
    folded = fold(run.weights)
    stream = run.stream[0]
    stream = stream - stream.mean(-1, keepdims=True)
    for layer, block in enumerate(run.model.transformer.h):
        z = bare(folded.norm(layer), stream)
        q, k = (plus(np.einsum("td,hdm->thm", z, folded.read(r, layer)), folded.bias(r, layer)) for r in "QK")
        scores = np.einsum("ihm,jhm->hij", q, k) / np.sqrt(q.shape[2])
        causal = np.tril(np.ones(scores.shape[1:], dtype=bool))
        attention = np.exp(log_softmax(np.where(causal, scores, -1e9)))
        stream = stream + folded_attention(folded, z, attention, layer)
        with torch.no_grad():
            stream = stream + block.mlp(block.ln_2(torch.tensor(stream, dtype=torch.float32))).numpy()
    final = folded.final_norm()
    logits = plus(bare(final, stream) @ folded.unembedding().T, folded.unembedding_bias())
    assert final is not None
    assert (final.gain == 1).all()
    assert final.bias is None
    close(log_softmax(logits), log_softmax(run.logits), 1e-4)


def test_unembedding_is_centred_over_tokens_in_pieces(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fold(run.weights).unembedding()
    monkeypatch.setattr("headspan.models.folding._ROWS", 7)
    folded = fold(run.weights)
    pieces = np.concatenate([folded.unembedding_rows(start, min(start + 13, 50)) for start in range(0, 50, 13)])
    close(pieces, whole)
    if run.weights.norm_kind == "layer":
        assert np.abs(whole.mean(axis=0)).max() < 1e-6
        assert np.abs(whole.mean(axis=1)).max() < 1e-6


def test_value_bias_moves_to_the_output_only_where_attention_sums_to_one(run: Run) -> None:
    folded = fold(run.weights)
    kept = folded.bias("V", run.weights.layers[0]) is not None
    assert kept == (run.weights.architecture in ("gpt_oss", "lfm3"))  # sinks; a gate


def _centring(weights: AttentionWeights) -> dict[str, list[str]]:
    """The expected provenance of centred weights, from the weights themselves."""
    centred: dict[str, bool] = {}
    for role in ROLES:
        for layer in weights.layers_with(role):
            for head, weight in zip(weights.heads_in(role, layer), weights.read(role, layer), strict=True):
                centred[f"{head}.{role}"] = bool(np.abs(weight.mean(axis=0)).max() < 1e-6 * np.abs(weight).max())
    roles = [str(role) for role in ROLES if any(centred[f"{head}.{role}"] for head in weights.heads(role))]
    others = [name for name, is_so in centred.items() if not is_so and name[-1] in roles]
    return {"centred": roles, "not_centred": others}


def test_sizes_and_provenance(run: Run) -> None:
    folded = fold(run.weights)
    changed = {"folding": "folded", "folded_norms": folded.folded_norms, **_centring(folded)}
    assert folded.provenance == run.weights.provenance | changed
    assert run.weights.provenance["centred"] == run.weights.provenance["not_centred"] == []
    assert (run.weights.provenance["folding"], run.weights.provenance["folded_norms"]) == ("none", [])
    behind = run.weights.norm_place in ("output", "sandwich")
    assert ("on the attention output" in folded.folded_norms) == behind == (run.weights.output_norm(1) is not None)
    assert any("before attention" in norm for norm in folded.folded_norms) == (run.weights.norm(1) is not None)
    assert folded.ports == run.weights.ports
    for role in ROLES:
        assert folded.read(role, 1).shape == run.weights.read(role, 1).shape
        assert folded.read(role, 1).dtype == np.float32


def test_folding_twice_is_refused(run: Run) -> None:
    with pytest.raises(hs.HeadspanError, match="already folded"):
        fold(fold(run.weights))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("bert", "post-norm"), ("opt-post", "post-norm"), ("bloom-residual", "continues from the normalised stream")],
)  # fmt: skip
def test_not_foldable(name: str, reason: str, tmp_path) -> None:
    run = Run(FAMILIES[name], tmp_path)
    assert not run.weights.foldable
    with pytest.raises(hs.HeadspanError, match=reason):
        fold(run.weights)


def test_arrays_with_gains() -> None:
    rng = np.random.default_rng(0)
    arrays = {role: rng.normal(size=(2, 4 if role in "QO" else 2, 10, 3)) for role in "QKVO"}
    gain = rng.uniform(0.5, 2, (2, 10))
    rms = fold(hs.open({**arrays, "norm": "rms", "gain": gain}))
    np.testing.assert_allclose(rms.read("K", 1), arrays["K"][1] * gain[1][:, None])
    np.testing.assert_array_equal(rms.read("O", 1), arrays["O"][1])
    centring = np.eye(10) - 0.1
    layer = fold(hs.open({**arrays, "norm": "layer", "gain": gain}))
    np.testing.assert_allclose(layer.read("K", 1), centring @ (arrays["K"][1] * gain[1][:, None]), atol=1e-12)
    np.testing.assert_allclose(layer.read("O", 1), centring @ arrays["O"][1], atol=1e-12)
    with pytest.raises(hs.HeadspanError, match="no norm"):
        fold(hs.open(arrays))
