"""Models whose layers have different numbers of heads, or heads of different sizes: from the file to the page.

OpenELM is not in transformers, so its layout is written down here once more: one tensor with all query, key and value
heads of a layer one after the other, RMS norms in front of attention and of the MLP, one norm for all queries and one
for all keys.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from families import FAMILIES, Run, close, normalise
from headspan.heads import Role
from headspan.models.architectures import find_architecture
from headspan.models.mlp import Mlps

D, M, F, VOCABULARY = 24, 4, 20, 50
QUERY, KV = [2, 4, 6], [1, 2, 2]
TOKENS = np.arange(1, 8) * 5 % VOCABULARY


def config() -> dict[str, Any]:
    return {
        "model_type": "openelm", "model_dim": D, "head_dim": M, "num_transformer_layers": 3, "num_query_heads": QUERY,
        "num_kv_heads": KV, "vocab_size": VOCABULARY, "share_input_output_layers": True,
        "normalize_qk_projections": True,
    }  # fmt: skip


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * 0.2 + (1 if len(shape) == 1 else 0)).astype(np.float32)

    found = {"transformer.token_embeddings.weight": normal(VOCABULARY, D), "transformer.norm.weight": normal(D)}
    for layer, (n, n_kv) in enumerate(zip(QUERY, KV, strict=True)):
        found |= {
            f"transformer.layers.{layer}.{name}.weight": normal(*shape)
            for name, shape in {
                "attn.qkv_proj": ((n + 2 * n_kv) * M, D), "attn.out_proj": (D, n * M), "attn.q_norm": (M,),
                "attn.k_norm": (M,), "attn_norm": (D,), "ffn_norm": (D,), "ffn.proj_1": (2 * F, D),
                "ffn.proj_2": (D, F),
            }.items()
        }  # fmt: skip
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    path = tmp_path_factory.mktemp("openelm")
    (path / "config.json").write_text(json.dumps(config()))
    save_file(tensors(), path / "model.safetensors")
    return path


def rms(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * gain


def forward() -> list[dict[str, np.ndarray]]:
    """What every layer of the model computes, without rotary positions, which no weight depends on."""
    stored, seen = tensors(), []
    x = stored["transformer.token_embeddings.weight"][TOKENS]
    for layer, (n, n_kv) in enumerate(zip(QUERY, KV, strict=True)):
        here = {k.split(f"layers.{layer}.")[1]: v for k, v in stored.items() if f"layers.{layer}." in k}
        read = rms(x, here["attn_norm.weight"])
        qkv = (read @ here["attn.qkv_proj.weight"].T).reshape(len(x), n + 2 * n_kv, M)
        q, k, v = qkv[:, :n], qkv[:, n : n + n_kv], qkv[:, n + n_kv :]
        keys = np.repeat(rms(k, here["attn.k_norm.weight"]), n // n_kv, axis=1)
        logits = np.einsum("ihm,jhm->hij", rms(q, here["attn.q_norm.weight"]), keys) / np.sqrt(M)
        pattern = np.exp(np.where(np.tri(len(x)) == 1, logits, -np.inf))
        pattern /= pattern.sum(-1, keepdims=True)
        z = np.einsum("hij,jhm->ihm", pattern, np.repeat(v, n // n_kv, axis=1))
        out = z.reshape(len(x), -1) @ here["attn.out_proj.weight"].T
        seen.append({"stream": x, "read": read, "Q": q, "K": k, "V": v, "pattern": pattern, "out": out})
        x = x + out
        gate, up = np.split(rms(x, here["ffn_norm.weight"]) @ here["ffn.proj_1.weight"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ here["ffn.proj_2.weight"].T
    return seen


def test_openelm_is_read_as_its_layout_says(folder: Path) -> None:
    weights = hs.open(str(folder))
    assert [str(h) for h in weights.heads("K")] == ["L0KV0", "L1KV0", "L1KV1", "L2KV0", "L2KV1"]
    assert str(weights.ports.kv_of("L2H3")) == "L2KV1"
    for layer, seen in enumerate(forward()):
        norm = weights.norm(layer)
        assert norm is not None
        close(normalise(norm, seen["stream"]), seen["read"])
        for role in "QKV":
            close(np.einsum("td,hdm->thm", seen["read"], weights.read(role, layer)), seen[role])
        values = np.repeat(seen["V"], QUERY[layer] // KV[layer], axis=1)
        mixed = np.einsum("hij,jhm->ihm", seen["pattern"], values)
        close(np.einsum("ihm,hdm->id", mixed, weights.read("O", layer)), seen["out"])
    np.testing.assert_array_equal(weights.unembedding(), tensors()["transformer.token_embeddings.weight"])


def test_openelm_neurons_are_rows_of_its_two_projections(folder: Path) -> None:
    mlps, stored = Mlps(hs.open(str(folder))), tensors()
    (part,) = mlps.parts(1)
    reads, writes = (mlps.read(1, part, role, 0) for role in (Role.R, Role.W))
    both = stored["transformer.layers.1.ffn.proj_1.weight"]
    np.testing.assert_array_equal(reads, np.stack([both[:F], both[F:]], axis=2))
    np.testing.assert_array_equal(writes[:, :, 0], stored["transformer.layers.1.ffn.proj_2.weight"].T)
    norm = mlps.norm(1)
    assert norm is not None
    np.testing.assert_array_equal(norm.gain, stored["transformer.layers.1.ffn_norm.weight"])


def test_scores_of_uneven_layers_are_those_of_their_subspaces(folder: Path, tmp_path: Path) -> None:
    weights = hs.open(str(folder))
    assert "3 layers of 2 to 6 heads, 1 to 2 key/value heads" in repr(weights)
    assert any("its layers differ: 2 to 6 heads with 1 to 2 key/value heads" in note for note in weights.notes)
    scores = hs.score(str(folder), metrics=["pk"], pairings="all")
    scores.save(tmp_path / "uneven.safetensors")
    for result in (scores, hs.load(tmp_path / "uneven.safetensors")):
        for pairing in ("OK", "OQ", "VV"):
            first, second = pairing
            bases = {r: [np.linalg.qr(weights.read_head(f"{h}.{r}"))[0] for h in weights.heads(r)] for r in pairing}
            expected = [[np.square(a.T @ b).sum() for b in bases[second]] for a in bases[first]]
            ours = result["pk", pairing].values
            assert np.isfinite(ours).sum() > 5
            np.testing.assert_allclose(ours, np.where(np.isfinite(ours), expected, np.nan), atol=1e-5)


def test_the_page_and_a_comparison_of_uneven_layers(folder: Path, tmp_path: Path) -> None:
    import json

    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config()))
    save_file(tensors(1), other / "model.safetensors")
    page = hs.report(hs.score(str(folder), metrics=["pk"], pairings="flow"), str(folder))
    assert page.payload["model"]["n_heads"] == "2 to 6"
    assert "34 weights, 34 moved" in repr(hs.diff(str(folder), str(other)))  # 12 Q and O, 5 K and V


def test_keys_and_values_of_other_layers_are_refused() -> None:
    with pytest.raises(hs.HeadspanError, match="the last 4 layers of this Gemma 4 use the keys and values of earlier"):
        find_architecture({"model_type": "gemma4_text", "num_kv_shared_layers": 4})


def test_gemma4_sizes_by_layer_or_by_kind() -> None:
    """Published configs say the sizes of layers that see everything once; those that transformers saves, by layer."""
    common = {"model_type": "gemma4_text", "head_dim": 8, "num_key_value_heads": 2, "attention_k_eq_v": True,
              "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    by_kind = find_architecture({**common, "global_head_dim": 16, "num_global_key_value_heads": 1})[2]
    by_layer = find_architecture({**common, "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}}})[2]
    for found in (by_kind, by_layer):
        assert (found["head_dim"], found["num_key_value_heads"]) == ([8, 16], [2, 1])


def test_a_mixture_behind_norms_of_its_own_is_told(tmp_path: Path) -> None:
    mixture = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}
    run = Run(replace(FAMILIES["gemma4"], config=FAMILIES["gemma4"].config | mixture), tmp_path)
    with pytest.raises(hs.HeadspanError, match="a mixture whose parts have norms of their own"):
        hs.nodes(str(tmp_path), neurons="L0:*")
    assert hs.nodes(run.weights, hs.Node(np.ones(run.weights.d_model), "ones", layer=1)).count == 1
