"""What each similarity must not depend on, its bounds and symmetries, on random heads (hypothesis).

Scores come from the whole pipeline (arrays → score), including factors, contraction and assembly.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

import definitions
import headspan as hs
from headspan.subspaces.bases import orthonormal_basis, projection_kernel
from headspan.subspaces.metrics import METRICS, WEIGHT_METRICS
from headspan.vocabulary.heads import PAIRINGS, ROLES

Arrays = dict[str, np.ndarray]
TOLERANCE = 3e-5  # factors are float32; PK is at most 5 here

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=12, deadline=None)


@st.composite
def models(draw: st.DrawFn, d_max: int = 12) -> Arrays:
    """Two layers of one or two heads, with any d and m from 1; entries of very different sizes are likely."""
    rng = np.random.default_rng(draw(seeds))
    d, heads = draw(st.integers(2, d_max)), draw(st.integers(1, 2))
    m = draw(st.integers(1, min(d, 5)))
    spread = draw(st.sampled_from([0.0, 0.5, 1.0]))
    shape = (2, heads, d, m)
    return {str(r): rng.normal(size=shape) * np.exp(spread * rng.normal(size=(2, heads, 1, m))) for r in ROLES}


def scored(arrays: Arrays, metrics: str | list[str] = "all", pairs: str = "all") -> hs.Scores:
    return hs.score(hs.open(arrays), metrics, "all", pairs)  # type: ignore[arg-type]


def assert_same(first: hs.Scores, second: hs.Scores, metric: str, tolerance: float = TOLERANCE) -> None:
    for pairing in PAIRINGS:
        a, b = first[metric, pairing].values, second[metric, pairing].values
        np.testing.assert_allclose(a, b, atol=tolerance, err_msg=f"{metric} {pairing}")


def rotation(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(n, n)))[0]


def well_conditioned(rng: np.random.Generator, n: int) -> np.ndarray:
    """Any invertible matrix with a condition number of at most 100."""
    return rotation(rng, n) @ np.diag(np.exp(rng.uniform(0, np.log(100), n))) @ rotation(rng, n)


def rope(d_head: int, position: float) -> np.ndarray:
    """Rotary embedding of one position: pairs of dimensions are rotated; an odd last one stays."""
    matrix = np.eye(d_head)
    for i in range(d_head // 2):
        angle = position / 10000 ** (2 * i / d_head)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = turn
    return matrix


@few
@given(models(), seeds)
def test_pk_ignores_the_basis_inside_a_head(arrays: Arrays, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = arrays["Q"].shape[-1]
    changed = {r: np.stack([[w @ well_conditioned(rng, m) for w in layer] for layer in a]) for r, a in arrays.items()}
    assert_same(scored(arrays, "pk"), scored(changed, "pk"), "pk")


@few
@given(models(), st.floats(0, 5000), st.floats(0, 5000))
def test_pk_ignores_rope(arrays: Arrays, query: float, key: float) -> None:
    m = arrays["Q"].shape[-1]
    turned = arrays | {"Q": arrays["Q"] @ rope(m, query), "K": arrays["K"] @ rope(m, key)}
    assert_same(scored(arrays, "pk"), scored(turned, "pk"), "pk")


@few
@given(models(), seeds)
def test_pk_ignores_qk_norm_gains(arrays: Arrays, seed: int) -> None:
    gains = np.exp(np.random.default_rng(seed).uniform(-2, 2, (2, arrays["Q"].shape[-1])))
    scaled = arrays | {"Q": arrays["Q"] * gains[0], "K": arrays["K"] * gains[1]}
    assert_same(scored(arrays, "pk"), scored(scaled, "pk"), "pk")


@few
@given(models(), seeds)
def test_a_common_rotation_of_the_stream_changes_nothing(arrays: Arrays, seed: int) -> None:
    turn = rotation(np.random.default_rng(seed), arrays["Q"].shape[2])
    before, after = scored(arrays), scored({r: turn @ a for r, a in arrays.items()})
    for metric in WEIGHT_METRICS:
        assert_same(before, after, metric)


@few
@given(models(), seeds)
def test_cka_and_procrustes_ignore_a_rotation_of_each_side(arrays: Arrays, seed: int) -> None:
    """They compare weights up to an orthogonal map of the stream, so they cannot see where in it a head reads."""
    rng = np.random.default_rng(seed)
    d = arrays["Q"].shape[2]
    turned = {r: np.stack([[rotation(rng, d) @ w for w in layer] for layer in a]) for r, a in arrays.items()}
    before, after = scored(arrays), scored(turned)
    for metric in ("linear_cka", "procrustes"):
        assert_same(before, after, metric)


@few
@given(models(), seeds)
def test_pk_and_simple_cs_ignore_a_rotation_inside_a_head(arrays: Arrays, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = arrays["Q"].shape[-1]
    turned = {r: np.stack([[w @ rotation(rng, m) for w in layer] for layer in a]) for r, a in arrays.items()}
    before, after = scored(arrays), scored(turned)
    for metric in ("pk", "simple_cs"):
        assert_same(before, after, metric)


@few
@given(models(), seeds)
def test_cs_ignores_a_change_of_basis_that_leaves_the_circuit(arrays: Arrays, seed: int) -> None:
    """W_QK = Q Kᵀ and W_OV = O Vᵀ stay the same under A → A R, P → P R⁻ᵀ."""
    rng = np.random.default_rng(seed)
    changed = {r: a.copy() for r, a in arrays.items()}
    for first, second in (("Q", "K"), ("O", "V")):
        for layer, head in np.ndindex(arrays["Q"].shape[:2]):
            change = well_conditioned(rng, arrays["Q"].shape[-1])
            changed[first][layer, head] = arrays[first][layer, head] @ change
            changed[second][layer, head] = arrays[second][layer, head] @ np.linalg.inv(change).T
    assert_same(scored(arrays, "cs"), scored(changed, "cs"), "cs", 1e-4)


@few
@given(models(), seeds)
def test_scale_of_a_head(arrays: Arrays, seed: int) -> None:
    """Four ignore the scale of every single weight; Procrustes only a common one."""
    rng = np.random.default_rng(seed)
    scaled = {r: a * np.exp(rng.uniform(-9, 9, (*a.shape[:2], 1, 1))) for r, a in arrays.items()}
    before, after = scored(arrays), scored(scaled)
    for metric in set(WEIGHT_METRICS) - {"procrustes"}:
        assert_same(before, after, metric)
    assert_same(before, scored({r: 1e-7 * a for r, a in arrays.items()}), "procrustes")


@few
@given(models())
def test_bounds_and_symmetry(arrays: Arrays) -> None:
    scores, m = scored(arrays), arrays["Q"].shape[-1]
    for metric in WEIGHT_METRICS:
        most = METRICS[metric].largest(m, m)
        for pairing in PAIRINGS:
            values = scores[metric, pairing].values
            present = values[~np.isnan(values)]
            assert (present >= 0).all() and (present <= most * (1 + 1e-5)).all(), (metric, str(pairing))
            mirrored = scores[metric, str(pairing)[::-1]].values.T
            np.testing.assert_allclose(values, mirrored, atol=1e-6, err_msg=f"{metric} {pairing}")


@few
@given(models())
def test_every_similarity_follows_its_definition(arrays: Arrays) -> None:
    scores = scored(arrays)
    for metric in WEIGHT_METRICS:
        for pairing in ("OQ", "OK", "OV", "QQ", "KV"):
            value = scores[metric, pairing].values[0, -1]  # first head of layer 0, last of layer 1
            source, target = ({r: a[place] for r, a in arrays.items()} for place in ((0, 0), (1, -1)))
            assert value == pytest.approx(definitions.similarity(metric, source, target, pairing), abs=TOLERANCE)


@few
@given(st.integers(1, 12), st.data())
def test_axis_aligned_subspaces_share_their_common_axes(d: int, data: st.DataObject) -> None:
    axes = st.sets(st.integers(0, d - 1), min_size=1)
    first, second = data.draw(axes), data.draw(axes)
    u, v = (np.eye(d)[:, sorted(chosen)] for chosen in (first, second))
    assert projection_kernel(u, v) == len(first & second)
    if len(first) == len(second):
        stacked = np.stack([u, v])[:, None]
        scores = scored(dict.fromkeys("QKVO", stacked), "pk")
        assert scores["pk", "OK"].values[0, 1] == pytest.approx(len(first & second), abs=1e-6)


@few
@given(st.integers(1, 15), st.integers(1, 6), st.integers(1, 6), seeds)
def test_pk_is_the_sum_of_squared_cosines_of_scipys_angles(d: int, m: int, m2: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(d, min(m, d))), rng.normal(size=(d, min(m2, d)))
    pk = projection_kernel(orthonormal_basis(a).vectors, orthonormal_basis(b).vectors)
    assert pk == pytest.approx(np.sum(np.cos(scipy.linalg.subspace_angles(a, b)) ** 2), abs=1e-9)
    assert 0 <= pk <= min(m, m2, d) + 1e-9


@few
@given(models())
def test_pk_is_the_composition_score_of_projections(arrays: Arrays) -> None:
    """PK = (m · CS(P', P))² when the circuit matrices are the projections on the two spans."""
    m = arrays["Q"].shape[-1]
    bases = {r: np.stack([[np.linalg.qr(w)[0] for w in layer] for layer in a]) for r, a in arrays.items()}
    pk = scored(arrays, "pk")["pk", "OK"].values
    # A head whose two weights of a circuit are one basis U has the circuit matrix UUᵀ.
    cs = scored({"O": bases["O"], "V": bases["O"], "Q": bases["K"], "K": bases["K"]}, "cs")["cs", "OK"].values
    np.testing.assert_allclose((m * cs) ** 2, pk, atol=1e-4)
    direct = np.linalg.norm(bases["K"][1, 0] @ bases["K"][1, 0].T @ bases["O"][0, 0] @ bases["O"][0, 0].T) ** 2
    assert direct == pytest.approx(projection_kernel(bases["K"][1, 0], bases["O"][0, 0]), abs=1e-9)


def test_pk_changes_when_gains_are_folded_in() -> None:
    """The one change of the stream PK must see: gains are not a rotation."""
    rng = np.random.default_rng(0)
    arrays = {r: rng.normal(size=(2, 2, 12, 3)) for r in "QKVO"}
    weights = hs.open(arrays | {"norm": "rms", "gain": np.exp(rng.normal(size=(2, 12)))})
    before, after = (hs.score(w, "pk", "OK")["pk", "OK"].pairs()[2] for w in (weights, hs.fold(weights)))
    assert np.abs(before - after).max() > 1e-2
