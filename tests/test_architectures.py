"""For every family: q, k, v, attention output, norms and logits from our weights equal the model's own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import headspan as hs
from families import FAMILIES, Family, build, save
from headspan.architectures import ALIASES, ARCHITECTURES
from headspan.checkpoint import CheckpointWeights
from headspan.heads import ROLES, Role

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
NOT_FROM_TRANSFORMERS = {"transformer_lens"}
TOLERANCE = 1e-5


@contextmanager
def recorded(model: Any, names: dict[str, str]):
    """Input and output of named modules during a forward pass."""
    seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def keep(label: str):
        return lambda module, args, kwargs, out: seen.__setitem__(
            label, tuple(x.detach().numpy()[0] for x in ((args or tuple(kwargs.values()))[0], out))
        )

    handles = [model.get_submodule(name).register_forward_hook(keep(label), with_kwargs=True)
               for label, name in names.items()]  # fmt: skip
    yield seen
    for handle in handles:
        handle.remove()


class Run:
    """One forward pass of a small model beside our view of its saved checkpoint."""

    def __init__(self, family: Family, folder: Any) -> None:
        self.family = family
        self.model = build(family)
        self.weights = hs.open(str(save(self.model, folder)))
        assert isinstance(self.weights, CheckpointWeights)
        where = self.weights._map
        names = {f"{role}{layer}": where.module(role, layer) for role in ROLES for layer in self.weights.layers}
        if where.entry.final_norm:
            names["final"] = where.in_body(where.entry.final_norm)
        ids = torch.arange(1, 8)[None] * 5 % 50
        # Rotary embeddings do nothing at position 0. The mask says that this is one sequence nevertheless.
        kwargs = {"attention_mask": torch.ones_like(ids)}
        if "position_ids" in _parameters(self.model):
            kwargs["position_ids"] = torch.zeros_like(ids)
        with torch.no_grad(), recorded(self.model, names) as self.seen:
            out = self.model(ids, output_attentions=True, output_hidden_states=True, use_cache=False, **kwargs)
        self.stream = [h.numpy()[0] for h in out.hidden_states]
        attentions = [a.numpy()[0] for a in out.attentions if a is not None]
        self.attention = dict(zip(self.weights.layers, attentions, strict=True))
        self.logits = out.logits.numpy()[0]

    def project(self, role: str, layer: int) -> np.ndarray:
        """(token, head, d_head) vectors from our weights and the model's own attention input."""
        x = self.seen[f"{role}{layer}"][0]
        vectors = np.einsum("td,hdm->thm", x, self.weights.read(role, layer))
        bias = self.weights.bias(role, layer)
        return vectors if bias is None else vectors + bias


def _parameters(model: Any) -> Any:
    import inspect

    return inspect.signature(model.forward).parameters


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(FAMILIES[request.param], tmp_path_factory.mktemp("model"))


def close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(ours, theirs, atol=tolerance * max(1.0, np.abs(theirs).max()), rtol=0)


def normalise(norm: Any, x: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True) if norm.kind == "layer" else x
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + norm.eps) * norm.gain
    return x if norm.bias is None else x + norm.bias


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
            close(vectors.reshape(len(vectors), -1), run.seen[f"{role}{layer}"][1])


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
        out = np.einsum("ihm,hdm->id", mixed, run.weights.read("O", layer))
        bias = run.weights.bias("O", layer)
        close(out if bias is None else out + bias, run.seen[f"O{layer}"][1])


def test_norm_in_front_of_attention(run: Run) -> None:
    for layer in run.weights.layers:
        norm, stream = run.weights.norm(layer), run.stream[layer]
        close(stream if norm is None else normalise(norm, stream), run.seen[f"Q{layer}"][0])


def test_final_norm_and_unembedding(run: Run) -> None:
    norm = run.weights.final_norm()
    if run.weights.norm_place == "post":
        assert norm is None
        return
    before, after = run.seen["final"]
    close(normalise(norm, before), after)
    logits = after @ run.weights.unembedding().T
    bias = run.weights.unembedding_bias()
    logits = logits if bias is None else logits + bias
    config = run.model.config
    logits = logits * (getattr(config, "logit_scale", None) or 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    close(np.tanh(logits / cap) * cap if cap else logits, run.logits)


def test_every_family_of_the_table_is_here() -> None:
    tested = {ALIASES.get(family.model_type, family.model_type) for family in FAMILIES.values()}
    assert tested == set(ARCHITECTURES) - NOT_FROM_TRANSFORMERS
