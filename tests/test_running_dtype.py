"""The dtype in which a model runs: float32 by default, whatever it is stored in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from families import FAMILIES, build
from headspan.cli import _run
from headspan.running.behaviour import behaviour
from headspan.running.effects import effects
from headspan.vocabulary.errors import HeadspanError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headspan.running.opening import running  # noqa: E402

TOKENS = [[5, 10, 15, 20, 25, 30, 35, 40], [7, 3, 44, 3, 12, 48, 9, 21]]
QUICK: dict[str, Any] = {"sequences": 2, "length": 8}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16, as most checkpoints are."""
    folder = tmp_path_factory.mktemp("bf16")
    build(FAMILIES["llama"]).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exact(stored: Path) -> Any:
    """The same weights in float32."""
    with running(stored) as model:
        return model.model.float()


@pytest.mark.parametrize("live", [False, True], ids=["directory", "live"])
def test_float32_by_default(live: bool, stored: Path, exact: Any) -> None:
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(stored, dtype=torch.bfloat16) if live else stored
    found, right = effects(model, tokens=TOKENS), effects(exact, tokens=TOKENS)
    habits, right_habits = behaviour(model, **QUICK), behaviour(exact, **QUICK)
    for key, values in found.arrays.items():
        np.testing.assert_array_equal(values, right.arrays[key])
    for kind in habits:
        np.testing.assert_array_equal(habits.arrays[kind], right_habits.arrays[kind])
    if live:
        assert model.dtype == torch.bfloat16, "what somebody else holds is not changed"


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("stored", "bfloat16")],
)
@pytest.mark.parametrize("live", [False, True], ids=["directory", "live"])
def test_the_option_is_obeyed(dtype: str, seen: str, live: bool, stored: Path) -> None:
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(stored, dtype=torch.bfloat16) if live else stored
    with running(model, dtype=dtype) as ready:
        assert ready.model.dtype == getattr(torch, seen)
        pattern = next(iter(ready.attentions(torch.tensor(TOKENS[:1])).values()))
        assert pattern.dtype == getattr(torch, seen)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "olmo2", "gpt_neox"])
def test_half_precision_measures_the_same_to_its_rounding(family: str) -> None:
    model = build(FAMILIES[family]).bfloat16()
    exact = effects(model, tokens=TOKENS)
    half = effects(model, tokens=TOKENS, dtype="bfloat16")
    different = False
    for key, values in half.arrays.items():
        np.testing.assert_allclose(values, exact.arrays[key], atol=0.05)
        different = different or not np.array_equal(values, exact.arrays[key], equal_nan=True)
    assert different, "it was run in half precision"


def test_head_scores_in_half_precision(stored: Path) -> None:
    exact, half = behaviour(stored, **QUICK), behaviour(stored, dtype="bfloat16", **QUICK)
    assert any(not np.array_equal(exact.arrays[kind], half.arrays[kind]) for kind in exact)
    for kind in exact:
        np.testing.assert_allclose(half.arrays[kind], exact.arrays[kind], atol=0.02)


@pytest.mark.parametrize("command", ["effects", "behaviour"])
def test_a_wrong_word_is_one_message(command: str, stored: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run([command, str(stored), "--dtype", "int8"]) == 2
    said = capfd.readouterr().err
    assert "'int8'" in said and "float32, bfloat16, float16 or stored" in said and "Traceback" not in said
    with pytest.raises(HeadspanError, match="float32, bfloat16, float16 or stored"):
        (effects if command == "effects" else behaviour)(stored, dtype="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_commands_hand_it_on(dtype: str, stored: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import json

    line = ["behaviour", str(stored), "--sequences", "2", "--length", "8", "--dtype", dtype, "--json"]
    assert _run(line) == 0
    told = json.loads(capfd.readouterr().out)
    right = behaviour(stored, dtype=dtype, **QUICK).rows()
    assert json.loads(json.dumps(right)) == told
