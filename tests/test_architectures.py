"""For every family: q, k, v, attention output, norms and logits from our weights equal the model's own."""

from __future__ import annotations

import numpy as np
import pytest

from families import FAMILIES, TOLERANCE, Run, close, normalise
from headspan.heads import ROLES
from headspan.models.architectures import ALIASES, ARCHITECTURES

pytest.importorskip("transformers")
NOT_FROM_TRANSFORMERS = {"transformer_lens"}


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(FAMILIES[request.param], tmp_path_factory.mktemp("model"))


def test_sizes(run: Run) -> None:
    family, weights = run.family, run.weights
    assert weights.architecture == ALIASES.get(family.model_type, family.model_type)
    assert (weights.layers, weights.n_heads, weights.n_kv_heads) == (family.layers, 4, family.n_kv_heads)
    assert {weights.d_head(role) for role in ROLES} == {family.d_head}
    assert (weights.norm_place, weights.foldable) == (family.place, family.place == "pre")
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

    All tokens stand at position 0, where rotary embeddings do nothing; ALiBi is subtracted.
    """
    q, k = run.project("Q", layer), run.project("K", layer)
    k = np.repeat(k, run.weights.n_heads // run.weights.n_kv_heads, axis=1)
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
        values = np.repeat(run.project("V", layer), run.weights.n_heads // run.weights.n_kv_heads, axis=1)
        mixed = np.einsum("hij,jhm->ihm", run.attention[layer], values)
        if run.weights._map.entry.gated:
            gate = run.seen[f"Q{layer}"][1].reshape(*mixed.shape[:2], -1)[..., mixed.shape[2] :]
            mixed = mixed / (1 + np.exp(-gate))
        out = np.einsum("ihm,hdm->id", mixed, run.weights.read("O", layer))
        bias = run.weights.bias("O", layer)
        close(out if bias is None else out + bias, run.seen[f"O{layer}"][1])


def test_norm_in_front_of_attention(run: Run) -> None:
    for layer in run.weights.layers:
        norm, stream = run.weights.norm(layer), run.stream[layer]
        close(stream if norm is None else normalise(norm, stream), run.seen[f"Q{layer}"][0])


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
    assert run.weights.tied_embedding == run.model.config.tie_word_embeddings
    embedding = run.model.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(run.weights.embedding(), embedding)


def test_every_family_of_the_table_is_here() -> None:
    tested = {family.model_type for family in FAMILIES.values()}
    assert tested >= {name for name in ALIASES if "_vl" not in name}  # those are in test_weights
    assert {ALIASES.get(name, name) for name in tested} == set(ARCHITECTURES) - NOT_FROM_TRANSFORMERS
