"""Directories that SAELens wrote with its own classes.

SAELens needs an older TransformerLens than the other tests, so it is in a separate folder (HEADSPAN_SAELENS_PATH, see
.ci/run), and a separate process writes the directories.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import headspan as hs
from conftest import unavailable
from headspan.node_kinds.opening import node_sets
from headspan.vocabulary.heads import Role

WRITE = """
import sys, torch
from sae_lens import StandardSAE, StandardSAEConfig, JumpReLUSAE, JumpReLUSAEConfig, Transcoder, TranscoderConfig
from sae_lens.saes.sae import SAEMetadata
out = sys.argv[1]
torch.manual_seed(0)
def write(cls, config, name, **metadata):
    more = {"d_out": 16, "apply_b_dec_to_input": False} if cls is Transcoder else {}
    sae = cls(config(d_in=16, d_sae=40, metadata=SAEMetadata(**metadata), **more))
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.copy_(torch.randn_like(parameter))
    sae.save_model(f"{out}/{name}")
write(StandardSAE, StandardSAEConfig, "standard", hook_name="blocks.2.hook_resid_pre", model_name="tiny")
write(JumpReLUSAE, JumpReLUSAEConfig, "jumprelu", hook_name="blocks.1.hook_resid_post", model_name="tiny")
write(StandardSAE, StandardSAEConfig, "inside", hook_name="blocks.1.attn.hook_z", model_name="tiny")
write(Transcoder, TranscoderConfig, "transcoder", hook_name="blocks.1.ln2.hook_normalized",
      hook_name_out="blocks.1.hook_mlp_out", hook_layer_out=1, model_name="tiny")
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = os.environ.get("HEADSPAN_SAELENS_PATH", "")
    if not folder:
        unavailable("SAELens is not installed")
    out = tmp_path_factory.mktemp("saes")
    environment = os.environ | {"PYTHONPATH": folder}
    done = subprocess.run([sys.executable, "-c", WRITE, str(out)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    return hs.open({role: rng.normal(size=(4, 2, 16, 3)) for role in "QKVO"})


@pytest.mark.parametrize(("name", "reads", "writes"), [("standard", 4, 3), ("jumprelu", 4, 3), ("transcoder", 3, 3)])
def test_features_that_sae_lens_wrote(written: Path, weights, name: str, reads: int, writes: int) -> None:
    (found,) = node_sets(weights, sae=written / name)
    tensors = load_file(written / name / "sae_weights.safetensors")
    assert (found.places[Role.R].position, found.places[Role.W].position) == (reads, writes)
    for role, expected in ((Role.R, tensors["W_enc"].T), (Role.W, tensors["W_dec"])):
        np.testing.assert_array_equal(np.concatenate([b for _, b in found.blocks(role, 7)])[:, :, 0], expected)
    row = hs.nodes(weights, sae=f"{written / name}:3", k=1).rows()[0]
    u, _ = np.linalg.qr(weights.read_head(row["partner"]))
    direction = tensors["W_enc"][:, 3]
    assert row["share"] == pytest.approx(np.square(u.T @ direction).sum() / np.square(direction).sum(), abs=1e-5)


def test_one_inside_attention_is_refused(written: Path, weights) -> None:
    with pytest.raises(hs.HeadspanError, match="not in the residual stream"):
        node_sets(weights, sae=written / "inside")
