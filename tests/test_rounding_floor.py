"""The rounding floor of `diff` on real and artificial weights: rounding is not a change, but slightly more is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.stats import gamma

import headspan as hs
from headspan.change.diff import Diff
from headspan.change.rounding import Expected, LatentNoise, PortNoise, StoredPort, rounding_floor
from headspan.models.families.latent_attention import LatentFactors
from headspan.models.folding import fold as folded
from headspan.models.rounded import narrowest, round_to
from headspan.vocabulary.heads import ROLES, Role
from test_drift import random_model, with_norm

Arrays = dict[str, Any]
TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


def each(arrays: Arrays, change: Callable[[np.ndarray], Any]) -> Arrays:
    return {name: value if isinstance(value, str) else change(value) for name, value in arrays.items()}


def stored(arrays: Arrays, kind: str) -> Arrays:
    return each(arrays, lambda value: value.astype(TYPES[kind]))


def upcast(arrays: Arrays, kind: str) -> Arrays:
    return each(arrays, lambda value: value.astype(TYPES[kind]).astype(np.float32))


def disturbed(arrays: Arrays, kind: str, times: float) -> Arrays:
    """Noise of several times the rounding error of a type in every weight, then rounded to that type."""
    rng = np.random.default_rng(3)

    def change(value: np.ndarray) -> np.ndarray:
        error = value.astype(TYPES[kind]).astype(np.float32) - value
        noise = rng.normal(size=value.shape) * times * np.sqrt(np.square(error).mean())
        return (value + noise if value.ndim == 4 else value).astype(TYPES[kind])

    return each(arrays, change)


@pytest.fixture(scope="module", params=["gpt2", "minilm", "smollm2", "gaussian", "small"])
def weights(request: pytest.FixtureRequest) -> Arrays:
    """Every third head of the first and the last layer of a model as arrays, with its norm where it can be folded."""
    rng = np.random.default_rng(0)
    if request.param == "gaussian":
        return with_norm({role: rng.normal(0, 0.02, (2, 4, 256, 32)).astype(np.float32) for role in "QKVO"}, "layer")
    if request.param == "small":
        return with_norm(random_model(layers=2, d=12, m=3), "rms")
    fixture = {"gpt2": "gpt2_dir", "minilm": "minilm_dir", "smollm2": "smollm2_gguf"}[request.param]
    model = hs.open(str(request.getfixturevalue(fixture)))
    ends = model.layers[0], model.layers[-1]
    arrays: Arrays = {str(role): np.stack([model.read(role, layer)[::3] for layer in ends]) for role in ROLES}
    if not model.foldable:
        return arrays
    norms = [model.norm(layer) for layer in ends]
    return {**arrays, "norm": model.norm_kind, "gain": np.stack([norm.gain for norm in norms if norm is not None])}


def moved(change: Diff) -> int:
    assert not any(np.isnan(line.floor) for line in change.drift)
    return sum(line.moved for line in change.drift)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("fold", [False, True], ids=["raw", "folded"])
def test_rounding_moves_nothing_and_three_times_as_much_everything(weights: Arrays, kind: str, fold: bool) -> None:
    if fold and "norm" not in weights:
        pytest.skip("the norms of this model cannot be folded")
    once = hs.diff(weights, stored(weights, kind), fold=fold, k=1)
    again = hs.diff(weights, upcast(weights, kind), fold=fold, k=1)
    assert moved(once) == moved(again) == 0
    assert max(line.drift for line in once.drift) > 1e-9  # it is not that nothing happened
    assert [line.drift for line in once.drift] == [line.drift for line in again.drift]
    assert [line.floor for line in once.drift] == [line.floor for line in again.drift]
    more = hs.diff(weights, disturbed(weights, kind, 3), fold=fold, k=1)
    assert moved(more) >= len(more.drift) * (0.9 if weights["Q"].shape[2] < 20 else 1)


@pytest.mark.parametrize("kinds", [("bfloat16", "float16"), ("float16", "bfloat16"), ("float8_e4m3fn", "bfloat16")])
@pytest.mark.parametrize("fold", [False, True], ids=["raw", "folded"])
def test_two_roundings_of_one_model_are_not_a_change(kinds: tuple[str, str], fold: bool) -> None:
    base = with_norm(random_model(seed=2, layers=2, d=64), "layer")
    assert moved(hs.diff(*(stored(base, kind) for kind in kinds), fold=fold)) == 0
    assert moved(hs.diff(*(upcast(base, kind) for kind in kinds), fold=fold)) == 0


@pytest.mark.parametrize("fold", [False, True], ids=["raw", "folded"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_another_stored_basis_is_not_a_change(kind: str, fold: bool) -> None:
    """What was rounded are other numbers than those of the first model, and the steps of both count."""
    base = with_norm(random_model(seed=4, layers=2, d=64), "layer")
    rng, other = np.random.default_rng(5), dict(base)
    for role in "QKVO":
        turns = np.linalg.qr(rng.normal(size=(*base[role].shape[:2], 6, 6)))[0] * np.geomspace(1, 9, 6)
        other[role] = (base[role].astype(np.float64) @ turns).astype(np.float32).astype(TYPES.get(kind, np.float32))
    change = hs.diff(base, other, fold=fold)
    assert moved(change) == 0 and max(line.drift for line in change.drift) > 1e-16


def test_a_fine_tuned_copy_of_upcast_numbers_is_noticed() -> None:
    base = upcast(random_model(layers=2, d=64), "bfloat16")
    other = {role: array.copy() for role, array in base.items()}
    other["K"][1, 2] *= 1 + 0.02 * np.random.default_rng(6).normal(size=other["K"][1, 2].shape)
    assert [f"{line.head}.{line.role}" for line in hs.diff(base, other).drift if line.moved] == ["L1H2.K"]


@pytest.mark.parametrize("fold", [False, True], ids=["raw", "folded"])
def test_one_edited_head_of_an_upcast_copy_is_the_only_one_that_moved(fold: bool) -> None:
    rng = np.random.default_rng(0)
    before = with_norm({role: rng.normal(0, 0.02, (2, 4, 96, 12)).astype(np.float32) for role in "QKVO"}, "layer")
    after = upcast(before, "bfloat16")
    after["Q"][1, 2] += rng.normal(0, 0.002, (96, 12)).astype(np.float32)
    assert [str(line.head) for line in hs.diff(before, after, fold=fold, k=1).drift if line.moved] == ["L1H2"]


def test_gains_that_both_models_share_do_not_hide_a_change() -> None:
    """The coarse gains of a model stored in bfloat16 once moved nothing between two later copies of it."""
    base = with_norm(random_model(layers=2, d=64), "rms")
    base["gain"] = base["gain"].astype(ml_dtypes.bfloat16).astype(np.float32)
    other = each(base, lambda value: value.copy())
    other["V"] *= 1 + 1e-5 * np.random.default_rng(7).normal(size=other["V"].shape)
    assert {str(line.role) for line in hs.diff(base, other, fold=True).drift if line.moved} == {"V"}


def numbers_of_one_step(rng: np.random.Generator, *shape: int, bits: int = 7) -> np.ndarray:
    """Numbers between 1 and 2, or -1 and -2, where those of bfloat16 (7 bits) or float32 (23) are equally spaced."""
    numbers = rng.uniform(1, 2, size=shape) * rng.choice([-1, 1], size=shape)
    return (np.trunc(numbers * 2**bits) / 2**bits).astype(np.float32)


def moved_by_noise(weights: np.ndarray, noisy: np.ndarray) -> np.ndarray:
    """Rank times drift, m − ‖UᵀU'‖², of (n, d, m) weights and (draws, n, d, m) of them with noise."""
    bases, turned = np.linalg.qr(weights)[0], np.linalg.qr(noisy)[0]
    return weights.shape[-1] - np.square(np.swapaxes(bases, -1, -2) @ turned).sum(axis=(-1, -2))


def assert_as_drawn(expected: Expected, drawn: np.ndarray) -> None:
    np.testing.assert_allclose(expected.mean, drawn.mean(axis=0), rtol=0.03)
    np.testing.assert_allclose(expected.variance, drawn.var(axis=0), rtol=0.2)


@pytest.mark.parametrize(("coarse", "fold"), [("weights", False), ("weights", True), ("gains", True)])
def test_the_estimated_mean_and_variance_are_those_of_random_noise(coarse: str, fold: bool) -> None:
    """Weights or gains are stored in bfloat16, the others in float32, whose rounding hardly counts."""
    rng, sd = np.random.default_rng(1), 2.0**-7 / math.sqrt(12)
    bits = {"weights": (7, 23), "gains": (23, 7)}[coarse]
    arrays: Arrays = {role: numbers_of_one_step(rng, 1, 2, 64, 2, bits=bits[0]) for role in "QKVO"}
    arrays |= {"norm": "rms", "gain": np.abs(numbers_of_one_step(rng, 1, 64, bits=bits[1]))}
    arrays["gain"][0, 5] = 0
    keys, gain = arrays["K"][0].astype(np.float64), arrays["gain"][0].astype(np.float64)
    weights = hs.open(arrays)
    port = StoredPort(folded(weights) if fold else weights, Role.K, 0)
    noisy, noisy_gain = keys, gain
    if coarse == "weights":
        noisy = keys + sd * rng.normal(size=(4000, *keys.shape))
    else:
        noisy_gain = gain + sd * rng.normal(size=(4000, 1, 64)) * (gain > 0)
    if fold:
        keys, noisy = keys * gain[:, None], noisy * noisy_gain[..., None]
    noise = PortNoise(port)
    assert_as_drawn(noise.expected(same_gains=coarse == "weights"), moved_by_noise(keys, noisy))
    if coarse == "gains":  # equal gains move nothing
        assert (noise.expected(same_gains=True).mean < 1e-6 * noise.expected(same_gains=False).mean).all()


@pytest.mark.parametrize("coarse", ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"])
def test_the_same_for_each_factor_of_a_latent(coarse: str) -> None:
    """Heads are products of three tensors. One is stored in bfloat16, so the rounding of the others hardly counts."""
    from families import MLA

    n, d, r, m, rotary = 2, 64, 24, 3, 5
    rng, sd = np.random.default_rng(2), 2.0**-7 / math.sqrt(12)
    config = MLA | {"model_type": "deepseek_v3", "hidden_size": d, "num_attention_heads": n, "num_key_value_heads": n,
                    "q_lora_rank": None, "kv_lora_rank": r, "qk_nope_head_dim": m, "qk_rope_head_dim": rotary,
                    "v_head_dim": m, "num_hidden_layers": 1}  # fmt: skip
    shapes = {"q_proj": (n * (m + rotary), d), "kv_a_proj_with_mqa": (r + rotary, d), "kv_a_layernorm": (r,),
              "kv_b_proj": (n * 2 * m, r), "o_proj": (d, n * m)}  # fmt: skip
    # Most dimensions of the latent are small.
    scales = {"kv_a_layernorm": np.where(np.arange(r) < 6, 1, 2.0**-5).astype(np.float32)}
    tensors = {
        name: numbers_of_one_step(rng, *shape, bits=7 if name == coarse else 23) * scales.get(name, 1)
        for name, shape in shapes.items()
    }
    gain = np.abs(numbers_of_one_step(rng, d))
    state = {f"model.layers.0.self_attn.{name}.weight": tensor for name, tensor in tensors.items()}
    weights = folded(hs.open((state | {"model.layers.0.input_layernorm.weight": gain}, config)))

    def products(tensors: Mapping[str, np.ndarray], rows: slice) -> np.ndarray:
        stored, gains, heads = (tensors[name] for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"))
        heads = heads.reshape(*heads.shape[:-2], n, 2 * m, r)[..., rows, :] * gains[..., None, None, :]
        return gain[:, None] * np.swapaxes(heads @ stored[..., None, :r, :], -1, -2)

    exact = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    draws = 8000 if coarse == "kv_a_layernorm" else 2000  # a few gains cause most of the noise
    noisy = exact | {coarse: exact[coarse] + sd * scales.get(coarse, 1) * rng.normal(size=(draws, *shapes[coarse]))}
    keys, values = (PortNoise(StoredPort(weights, role, 0)).expected(True) for role in (Role.K, Role.V))
    assert_as_drawn(values, moved_by_noise(products(exact, np.s_[m:]), products(noisy, np.s_[m:])))
    heads = Expected(keys.mean[:n], keys.variance[:n])  # they are narrower than the rotary key
    assert_as_drawn(heads, moved_by_noise(products(exact, np.s_[:m]), products(noisy, np.s_[:m])))
    if coarse == "kv_a_proj_with_mqa":  # which holds the rotary key itself
        drawn = [gain[:, None] * np.swapaxes(one[coarse][..., None, r:, :], -1, -2) for one in (exact, noisy)]
        assert_as_drawn(Expected(keys.mean[n:], keys.variance[n:]), moved_by_noise(*drawn))


def test_the_same_for_a_direction_that_the_noise_nearly_hides() -> None:
    """Two columns that differ by two steps: the estimate is not only that of first order."""
    rng = np.random.default_rng(4)
    keys = np.clip(np.abs(numbers_of_one_step(rng, 1, 2, 64, 2)), 1.125, 1.875)
    keys[..., 1] = keys[..., 0] + rng.choice([-1, 1], size=keys.shape[:-1]) * np.float32(2.0**-6)
    expected = PortNoise(StoredPort(hs.open(dict.fromkeys("QKVO", keys)), Role.K, 0)).expected(True)
    exact = keys[0].astype(np.float64)
    noisy = exact + 2.0**-7 / math.sqrt(12) * rng.normal(size=(4000, *exact.shape))
    assert (expected.mean > 0.03).all()
    assert_as_drawn(expected, moved_by_noise(exact, noisy))


@pytest.mark.parametrize("unknown", [0, 1, 2], ids=["map", "heads", "gains"])
def test_one_factor_of_an_unknown_format_is_enough_to_have_no_estimate(unknown: int) -> None:
    rng = np.random.default_rng(3)
    kinds = tuple("IQ2_XS" if i == unknown else "float32" for i in range(3))
    factors = LatentFactors(rng.normal(size=(16, 6)), rng.normal(size=(2, 3, 6)), np.ones(6), 1.0, kinds)
    assert not LatentNoise(factors, kinds, np.ones(16)).known
    assert LatentNoise(factors, ("float32",) * 3, np.ones(16)).known


@pytest.mark.parametrize("d", [4, 96], ids=["few-numbers", "many"])
def test_the_floor_of_stored_numbers_is_twice_the_mean_or_what_one_weight_in_a_million_exceeds(d: int) -> None:
    weights = hs.open(random_model(layers=1, d=d, m=2))
    ports = [StoredPort(weights, Role.O, 0) for _ in range(2)]
    mean, variance = (2 * one for one in ports[0].expected(ports[1]))
    rare = gamma.isf(1e-6, mean**2 / variance, scale=variance / mean)
    assert (rare > 2 * mean).all() if d == 4 else (rare > mean).all()
    floor = rounding_floor(ports[0], ports[1], np.zeros(len(mean)))
    np.testing.assert_allclose(floor, np.maximum(rare, 2 * mean) / 2, rtol=1e-6)


@pytest.mark.parametrize("exponent", [-310, -200, 200, 300])
@pytest.mark.parametrize("fold", [False, True], ids=["raw", "folded"])
@pytest.mark.filterwarnings("error")
def test_weights_of_any_size_have_a_floor(exponent: int, fold: bool) -> None:
    base = with_norm(random_model(layers=2), "layer")
    for role in "QKVO":
        base[role] = base[role].astype(np.float64) * 10.0**exponent
    assert moved(hs.diff(base, base, fold=fold)) == 0
    other = each(base, lambda value: value.copy())
    other["O"] *= 1 + 1e-9 * np.random.default_rng(8).normal(size=other["O"].shape)
    assert {str(line.role) for line in hs.diff(base, other, fold=fold).drift if line.moved} == {"O"}
    assert moved(hs.diff(base, other, fold=fold)) == 8


@pytest.mark.parametrize("kind", ["float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64"])
def test_the_narrowest_type_of_numbers(kind: str) -> None:
    numbers = np.random.default_rng(9).normal(size=(40, 30))
    rounded = round_to(numbers, kind)
    assert narrowest(rounded) == kind and np.array_equal(round_to(rounded, kind), rounded)
    rounded[3, 4] *= 1 + 2.0**-40  # one number that does not fit is enough
    assert narrowest(rounded) == "float64"


@pytest.mark.parametrize("numbers", [np.zeros((3, 3)), np.eye(5), 2.0 ** -np.arange(9), np.arange(-3.0, 4.0)])
def test_simple_numbers_were_not_rounded(numbers: np.ndarray) -> None:
    assert narrowest(numbers) == "float32"


def test_numbers_too_large_for_a_type_become_its_largest() -> None:
    assert round_to(np.array([1e9, -1e9, 1.0]), "float16").tolist() == [65504.0, -65504.0, 1.0]
