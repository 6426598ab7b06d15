"""Our OQ, OK and OV against TransformerLens's own, on three layers of the real GPT-2 small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import headspan as hs
from conftest import unavailable
from headspan.scoring.run import score

LAYERS = (3, 4, 5)


@pytest.fixture(scope="module")
def bridge_dir(gpt2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete three-layer GPT-2 with the real attention weights and a tiny random rest."""
    import torch
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = {"vocab_size": 50, "n_inner": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, **small))
    state = model.state_dict()
    tensors = load_file(gpt2_dir / "model.safetensors")
    for new, old in enumerate(LAYERS):
        for part in ("attn.c_attn", "attn.c_proj", "ln_1"):
            for kind in ("weight", "bias"):
                name = f"h.{old}.{part}.{kind}"
                value = tensors[name] if name in tensors else tensors[f"transformer.{name}"]
                state[f"transformer.h.{new}.{part}.{kind}"].copy_(value)
    folder = tmp_path_factory.mktemp("bridge")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bridge(bridge_dir: Path):
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        unavailable("TransformerLens is not installed")
    return TransformerBridge.boot_transformers(str(bridge_dir))


@pytest.fixture(scope="module")
def scores(bridge_dir: Path) -> hs.Scores:
    return score(hs.open(bridge_dir), ["pk", "cs"], "flow")


@pytest.mark.parametrize("role", ["Q", "K", "V"])
def test_projection_kernel(bridge, scores: hs.Scores, role: str) -> None:
    from transformer_lens.tools.analysis.projection_kernel import attention_head_subspace_affinity

    theirs = attention_head_subspace_affinity(bridge, target_role=role)
    ours = scores["pk", f"O{role}"].values
    valid = theirs.valid_mask.numpy().reshape(36, 36)
    assert np.array_equal(~np.isnan(ours), valid)
    np.testing.assert_allclose(ours[valid], theirs.scores.numpy().reshape(36, 36)[valid], rtol=1e-5)


@pytest.mark.parametrize("role", ["Q", "K", "V"])
def test_composition_score(bridge, scores: hs.Scores, role: str) -> None:
    theirs = bridge.all_composition_scores(role).scores.detach().numpy().reshape(36, 36)
    ours = scores["cs", f"O{role}"].values
    valid = ~np.isnan(ours)
    np.testing.assert_allclose(ours[valid], theirs[valid], rtol=1e-4)  # theirs is float32 throughout
    assert (theirs[~valid] == 0).all()  # and writes 0 where we write NaN


def test_live_bridge_opens(bridge, scores: hs.Scores) -> None:
    np.testing.assert_allclose(
        score(hs.open(bridge), "pk", "OK")["pk", "OK"].values, scores["pk", "OK"].values, rtol=1e-6
    )
