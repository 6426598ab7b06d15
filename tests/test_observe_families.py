"""For every family that runs: statistics and influence equal hooks on the real model, autograd key by key, and numpy.

The random signs are replaced by orthogonal ones, whose mean is the exact expectation.
"""

from __future__ import annotations

import numpy as np
import pytest

import headspan as hs
from families import FAMILIES, LATENT, build
from headspan.models.folding import FoldedWeights
from headspan.results.observations import Statistics
from headspan.running.observe import observe
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role
from observation_oracle import TOKENS, Oracle, exact_statistics, in_float64, padded
from test_effects_families import CASES, CHANGED, REFUSED, UNEVEN
from test_effects_latent import CASES as LATENT_CASES
from test_effects_latent import REFUSED as LATENT_REFUSED
from test_effects_latent import doubled

pytest.importorskip("torch")
pytest.importorskip("transformers")

RTOL = 1e-6  # statistics are stored in float32; norms and softmax of transformers round to float32
SINKS = {"flint", "gpt_oss"}
# A QK-norm over all heads of a layer: a port changes the attention of the other heads, too.
NORMED_TOGETHER = {"flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmo_hybrid", "olmoe"}


def close(ours: np.ndarray, theirs: np.ndarray, rtol: float = RTOL) -> None:
    """Within a share of the largest entry of every head's own array."""
    assert ours.shape == theirs.shape
    size = np.abs(theirs).max(axis=tuple(range(1, theirs.ndim)), keepdims=True) if theirs.ndim > 1 else np.abs(theirs)
    assert np.all(np.abs(ours - theirs) <= rtol * size), float(np.max(np.abs(ours - theirs) / size))


@pytest.mark.parametrize("name", [*CASES, *LATENT_CASES])
@pytest.mark.filterwarnings("ignore::headspan.HeadspanWarning")  # what the families are like
def test_statistics_and_influence_equal_the_slow_definitions(name: str) -> None:
    model = doubled(name) if name in LATENT_CASES else in_float64(CASES[name])
    found, oracle = exact_statistics(model), Oracle(model)
    assert oracle.has_sinks() == (name in SINKS)
    for layer in oracle.weights.layers:
        check_fisher(found, oracle, layer, name in NORMED_TOGETHER)
        check_writes(found, oracle, layer)
        check_scales(found, oracle, layer)
        check_values(found, oracle, layer)
    scores = hs.score(model, "influence", "flow", stats=found)
    for role in (Role.Q, Role.K, Role.V):
        ours, theirs = scores["influence", f"O{role}"].values, oracle.influence(role)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)  # every pair by itself; NaN where there is none
        assert np.nanmin(theirs) > 0


def check_fisher(found: Statistics, oracle: Oracle, layer: int, normed_together: bool) -> None:
    for role in (Role.Q, Role.K):
        width, span = oracle.weights.d_head(role), oracle.weights.ports.span(role, layer)
        theirs = padded(oracle.fisher(role, layer), width)
        close(found.arrays[f"fisher/{role}"][span], theirs)
        own = padded(oracle.fisher(role, layer, own=True), width)
        assert np.allclose(own, theirs, rtol=1e-9, atol=1e-9 * theirs.max()) != normed_together


def check_writes(found: Statistics, oracle: Oracle, layer: int) -> None:
    span = oracle.weights.ports.span(Role.O, layer)
    close(found.arrays["spread/O"][span], oracle.spread(layer))
    close(found.arrays["length/O"][span], oracle.lengths(layer))
    z = [oracle.writes(run, layer) for run in oracle.runs]
    means = np.stack([np.mean([one[t] for one in z if len(one) > t], axis=0) for t in range(max(map(len, z)))])
    close(found.arrays["mean/O"][:, span], means)


def check_scales(found: Statistics, oracle: Oracle, layer: int) -> None:
    """A port's output is its folded weight's, times the scale of the token, plus a constant."""
    folded = FoldedWeights(oracle.weights)
    for role in (Role.Q, Role.K, Role.V):
        first, theirs = oracle.weights.ports.span(role, layer).start, []
        weight = folded.read(role, layer)
        bias = folded._input_bias(role, layer)
        for port in oracle.ports[role, layer]:
            heads, m = port.rows.shape
            scales = [oracle.scale(run, role, layer, port) for run in oracle.runs]
            mean = np.sqrt(np.square(np.concatenate(scales)).mean())
            close(found.arrays[f"scale/{role}"][first : first + heads], np.full(heads, mean))
            mine = weight[len(theirs) : len(theirs) + heads, :, :m]
            if not (oracle.latent and bias is not None):  # the bias of a latent is divided by its scale
                for run, scale in zip(oracle.runs, scales, strict=True):
                    given = np.einsum("td,hdm->thm", oracle.stream(run, layer), mine) * scale[:, None, None]
                    given += 0 if bias is None else bias
                    close(oracle.outputs(run, port), given, 1e-5)
            theirs += [mean] * heads
            first += heads


def check_values(found: Statistics, oracle: Oracle, layer: int) -> None:
    values, span = oracle.values(layer), oracle.weights.ports.span(Role.V, layer)
    close(found.arrays["mean/V"][span], values.mean(0))
    close(found.arrays["variance/V"][span], np.square(values - values.mean(0)).sum(-1).mean(0))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_families_without_direct_edges_are_refused_by_name(name: str) -> None:
    with pytest.raises(HeadspanError, match=r"^no statistics for .* reaches no later head directly"):
        observe(build(FAMILIES[name]), tokens=TOKENS)


@pytest.mark.parametrize("name", sorted(UNEVEN))
def test_uneven_layers_are_refused(name: str) -> None:
    reasons = {"gemma4-lent-keys": "keys and values of earlier", "gemma3n": "several residual streams"}
    with pytest.raises(HeadspanError, match=reasons.get(name, "between layers of one shape only")) as error:
        observe(build(FAMILIES[name]), tokens=TOKENS)
    assert str(error.value).startswith("no statistics for ") and "effects" not in str(error.value)


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_a_stream_that_blocks_change_is_refused(name: str) -> None:
    with pytest.raises(HeadspanError, match=f"^no statistics for .*{CHANGED[name]}"):
        observe(build(FAMILIES[name]), tokens=TOKENS)


@pytest.mark.parametrize("name", LATENT_REFUSED)
def test_latents_that_are_refused(name: str) -> None:
    reason = {"hy_v4": "several residual streams", "dots3_note_text": "rotary keys have their own norm"}[name]
    with pytest.raises(HeadspanError, match=f"^no statistics for .*{reason}"):
        observe(build(LATENT[name]), tokens=TOKENS)


def test_every_family_is_compared_or_refused() -> None:
    assert {*CASES} | REFUSED | UNEVEN | {*CHANGED} >= {*FAMILIES}
    assert {*LATENT_CASES} | {*LATENT_REFUSED} >= {*LATENT}
