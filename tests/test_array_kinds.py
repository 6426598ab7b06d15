"""Numbers of every kind and byte order are read exactly or refused, and odd calls get a message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import headspan as hs
from headspan.scoring.run import score
from headspan.vocabulary.errors import HeadspanError

SHAPE = (2, 3, 16, 4)


def arrays(seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {role: scale * random.normal(size=SHAPE) for role in "QKVO"}


def nearly_deficient() -> dict[str, np.ndarray]:
    """Weights whose last column is 1e-9 away from the first: float32 cannot tell them apart, float64 can."""
    found = arrays()
    for array in found.values():
        array[..., -1] = array[..., 0] + 1e-9 * array[..., -1]
    return found


def scores_of(content: Any) -> np.ndarray:
    return score(hs.open(content), "pk", "OQ")["pk", "OQ"].values


@pytest.mark.parametrize("order", [">f8", "<f8"])
def test_float64_of_either_byte_order_keeps_its_precision(order: str) -> None:
    plain, given = nearly_deficient(), {k: v.astype(order) for k, v in nearly_deficient().items()}
    np.testing.assert_array_equal(scores_of(given), scores_of(plain))
    assert hs.open(given).storage_dtype("Q", 0) == "float64"
    assert (score(hs.open(given), "pk", "OQ").ranks("O") == 4).all()


@pytest.mark.parametrize("name", [">f4", "<f4", ">f2", "f2", "bfloat16", "float8_e4m3fn"])
def test_narrow_floats_are_widened_exactly_and_judged_as_they_are_stored(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
    given = {k: v.astype(dtype) for k, v in arrays().items()}
    opened = hs.open(given)
    assert opened.read("Q", 1).dtype == np.float32
    np.testing.assert_array_equal(opened.read("Q", 1), given["Q"][1].astype(np.float64))
    assert opened.storage_dtype("Q", 0) == (name if hasattr(ml_dtypes, name) else dtype.newbyteorder("=").name)


@pytest.mark.parametrize("dtype", ["i1", "u1", ">i4", "i8", ">u8", "?"])
def test_integers_are_exact_and_keep_their_rank(dtype: str) -> None:
    random = np.random.default_rng(0)
    top = 2 if dtype == "?" else 100 if dtype.endswith("1") else 2**30
    whole = {role: random.integers(0, top, size=SHAPE).astype(dtype) for role in "QKVO"}
    np.testing.assert_array_equal(hs.open(whole).read("V", 0), whole["V"][0].astype(np.float64))
    plain = {role: array.astype(np.float64) for role, array in whole.items()}
    np.testing.assert_array_equal(scores_of(whole), scores_of(plain))
    ranks = score(hs.open(whole), "pk", "OQ").ranks("O")
    np.testing.assert_array_equal(ranks, np.linalg.matrix_rank(plain["O"]).reshape(-1))


REFUSED: dict[str, Any] = {
    "wide integers": np.full(SHAPE, 2**60 + 1),
    "python integers": [[[[10**30] * 4] * 16] * 3] * 2,
    "complex": np.ones(SHAPE, complex),
    "objects": np.full(SHAPE, None),
    "text": np.full(SHAPE, "1"),
    "bytes": np.full(SHAPE, b"1"),
    "times": np.zeros(SHAPE, "M8[s]"),
    "records": np.zeros(SHAPE, [("a", float)]),
    "long doubles": np.full(SHAPE, np.longdouble(1) / 3),
    "masked": np.ma.masked_greater(np.random.default_rng(0).normal(size=SHAPE), 1),
    "ragged": [[1, 2], [3]],
    "a number": 3,
    "nothing": None,
    "a word": "Q",
    "a function": len,
    "three axes": np.ones(SHAPE[1:]),
    "empty": np.ones((0, 3, 16, 4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_an_exact_real_number_is_refused(name: str) -> None:
    if name == "long doubles" and np.dtype(np.longdouble) == np.dtype(np.float64):
        pytest.skip("long doubles are float64 here")
    with pytest.raises(HeadspanError) as caught:
        hs.open(arrays() | {"Q": REFUSED[name]})
    assert "\n" not in str(caught.value)


def test_forms_of_arrays_do_not_matter() -> None:
    plain = arrays()
    expected = scores_of(plain)
    frozen = {k: v.copy() for k, v in plain.items()}
    for array in frozen.values():
        array.flags.writeable = False
    forms: dict[str, Any] = {
        "fortran": {k: np.asfortranarray(v) for k, v in plain.items()},
        "strided": {k: np.repeat(v, 2, axis=3)[..., ::2] for k, v in plain.items()},
        "reversed": {k: v[..., ::-1].copy()[..., ::-1] for k, v in plain.items()},
        "lists": {k: v.tolist() for k, v in plain.items()},
        "unmasked": {k: np.ma.array(v) for k, v in plain.items()},
        "read-only": frozen,
        "long doubles that fit": {k: v.astype(np.longdouble) for k, v in plain.items()},
        "tuple": tuple(plain[k] for k in "QKVO"),
    }
    for name, form in forms.items():
        np.testing.assert_array_equal(scores_of(form), expected, err_msg=name)


def test_memory_maps(tmp_path: Path) -> None:
    plain = arrays()
    for name, array in plain.items():
        np.save(tmp_path / f"{name}.npy", array.astype(">f8"))
    mapped = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in plain}
    np.testing.assert_array_equal(scores_of(mapped), scores_of(plain))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32"])
def test_torch_tensors_with_and_without_gradients(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensors = {k: torch.from_numpy(4 * v).to(getattr(torch, dtype)) for k, v in arrays().items()}
    if dtype != "int32":
        tensors["Q"].requires_grad_(True)
    opened = hs.open(tensors)
    np.testing.assert_array_equal(opened.read("Q", 1), tensors["Q"][1].detach().double().numpy())
    assert opened.storage_dtype("Q", 0) == ("float64" if dtype == "int32" else dtype)


def test_state_dicts_of_another_byte_order() -> None:
    random = np.random.default_rng(0)
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8}
    state = {}
    for i in range(2):
        state[f"h.{i}.attn.c_attn.weight"] = random.normal(size=(8, 24))
        state[f"h.{i}.attn.c_proj.weight"] = random.normal(size=(8, 8))
        state[f"h.{i}.ln_1.weight"] = np.ones(8)
    swapped = {name: array.astype(">f8") for name, array in state.items()}
    opened = hs.open((swapped, config))
    assert opened.storage_dtype("Q", 0) == "float64"
    np.testing.assert_array_equal(opened.read("K", 1), hs.open((state, config)).read("K", 1))
    for bad in (np.ma.masked_greater(state["h.0.attn.c_attn.weight"], 0), state["h.0.attn.c_attn.weight"].astype(int)):
        with pytest.raises(HeadspanError):
            hs.open((state | {"h.0.attn.c_attn.weight": bad}, config)).read("Q", 0)


def test_quantised_torch_tensors_are_named() -> None:
    torch = pytest.importorskip("torch")
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8}
    weight = torch.quantize_per_tensor(torch.randn(8, 24), 0.1, 0, torch.qint8)
    state = {"h.0.attn.c_attn.weight": weight, "h.0.attn.c_proj.weight": torch.randn(8, 8)}
    with pytest.raises(HeadspanError, match="qint8"):
        hs.open((state, config)).read("Q", 0)


# Odd calls

ODD = [
    None,
    3,
    -1,
    2.5,
    b"x",
    "",
    " ",
    "a",
    [],
    {},
    (),
    object(),
    True,
    10**30,
    float("nan"),
    np.float64(1),
    [1],
    {1: 2},
]


@pytest.mark.parametrize(
    "ref", [*ODD, {"Q": 1}, {"x": 1}, ({}, {}), ({}, None), ([], {}), (1, 2, 3, 4), dict, type(None)]
)
def test_odd_references(ref: Any) -> None:
    with pytest.raises(HeadspanError):
        hs.open(ref)
    with pytest.raises(HeadspanError):
        hs.fold(ref)


@pytest.mark.parametrize("kind", ["arrays", "demo", "folded"])
def test_odd_arguments_of_weights(kind: str) -> None:
    weights = hs.open(arrays()) if kind == "arrays" else hs.open("demo")
    weights = hs.fold(weights) if kind == "folded" else weights
    odd_layers = [v for v in ODD if not (isinstance(v, int) and not isinstance(v, bool) and v in weights.layers)]
    for layer in odd_layers:
        for call in (weights.read, weights.bias, weights.heads_in, weights.storage_dtype):
            with pytest.raises(HeadspanError):
                call("Q", layer)  # type: ignore[operator]
        with pytest.raises(HeadspanError):
            weights.norm(layer)
    for role in (*ODD, "X", "R", "W", "QK"):
        for call in (weights.read, weights.bias, weights.storage_dtype):
            with pytest.raises(HeadspanError):
                call(role, 0)  # type: ignore[operator]
        with pytest.raises(HeadspanError):
            weights.d_head(role)
    for head in (*ODD, "L0H0", "L0H0.X", "L99H0.Q", "L0H99.O"):
        with pytest.raises(HeadspanError):
            weights.read_head(head)
    for rows in (("a", 2), (None, None), (-1, 2), (0.5, 2), ([], {})):
        with pytest.raises(HeadspanError):
            weights.unembedding_rows(*rows)
    assert np.array_equal(weights.read("Q", np.int64(1)), weights.read("q", 1))
    with pytest.raises(HeadspanError):
        hs.fold(hs.fold("demo"))
