"""Which model a result came from, which two can be compared, and a result where a model is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import headspan as hs
from headspan.change.compare import check_same_shape, compare
from headspan.cli import app
from headspan.scoring.model_of_result import check_same_model, weights_of
from headspan.vocabulary.errors import HeadspanError


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 in Hugging Face layout."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=30, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def other(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with one number changed."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "config.json").write_text((gpt2 / "config.json").read_text())
    tensors = load_file(gpt2 / "model.safetensors")
    name = next(name for name in tensors if name.endswith("h.1.attn.c_attn.weight"))
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] += 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def result(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("result") / "r.safetensors"
    hs.score(hs.open(gpt2), out=path)
    return path


def run(*arguments: object) -> str:
    """The error message, or an empty text if there was none."""
    outcome = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if outcome.exit_code == 0:
        return ""
    assert isinstance(outcome.exception, HeadspanError), outcome.output
    return str(outcome.exception)


def test_figures_and_report_refuse_other_content_of_the_same_shape(
    result: Path, gpt2: Path, other: Path, tmp_path: Path
) -> None:
    drawn = run("figures", result, "--weights", other, "--only", "norms", "--out", tmp_path / "f")
    page = run("report", result, "--weights", other, "--out", tmp_path / "r.html")
    assert drawn == page
    assert "different models" in drawn
    assert not list(tmp_path.iterdir())
    assert run("figures", result, "--weights", gpt2, "--only", "norms", "--out", tmp_path / "f") == ""
    assert run("report", result, "--weights", gpt2, "--out", tmp_path / "r.html") == ""


def test_weights_are_folded_as_the_result_is(gpt2: Path, result: Path, tmp_path: Path) -> None:
    scores = hs.score(hs.fold(hs.open(gpt2)), out=tmp_path / "folded.safetensors")
    assert weights_of(scores, str(gpt2)).folding == "folded"
    assert weights_of(hs.Scores.load(result), str(gpt2)).folding == "none"
    assert run("figures", tmp_path / "folded.safetensors", "--weights", gpt2, "--only", "norms", "-o", tmp_path) == ""
    assert run("report", tmp_path / "folded.safetensors", "--weights", gpt2, "--out", tmp_path / "r.html") == ""
    with pytest.raises(HeadspanError, match="the folding differs"):
        check_same_model(scores, hs.open(gpt2))
    with pytest.raises(HeadspanError, match=r"d_model 12.* 4 heads, d_model 8"):
        check_same_model(scores, hs.open({role: np.ones((2, 2, 12, 3)) for role in "QKVO"}))


@pytest.mark.parametrize(
    "command",
    [
        ("pair", "{}", "L0H0.O", "L1H0.K"),
        ("info", "{}"),
        ("reproduce", "{}"),
        ("tokens", "{}", "L0H0"),
        ("score", "{}"),
    ],
)
def test_a_result_in_place_of_a_model_is_called_one(result: Path, command: tuple[str, ...], tmp_path: Path) -> None:
    out = ("--out", tmp_path / "o.safetensors") if command[0] == "score" else ()
    told = run(*(part.format(result) for part in command), *out)
    assert f"{result} is a headspan result" in told


def test_shapes_are_compared_before_anything_is_scored(gpt2: Path, result: Path, monkeypatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("scored before the shapes were checked")

    assert run("compare", result, gpt2) == ""
    monkeypatch.setattr("headspan.scoring.run.score", never)
    said = run("compare", "demo", gpt2)
    assert all(fact in said for fact in ("different heads", "16 heads, d_model 256", "4 heads, d_model 8"))
    assert "different heads" in run("compare", result, "demo")


def flow_scores(d: int, kv_heads: int) -> hs.Scores:
    rng = np.random.default_rng(0)
    arrays = {role: rng.normal(size=(2, kv_heads if role in "KV" else 2, d, 2)) for role in "QKVO"}
    return hs.score(hs.open(arrays), "pk", "flow")


def test_models_of_different_width_are_not_compared() -> None:
    for check in (check_same_shape, compare):
        with pytest.raises(HeadspanError, match=r"different width \(8 against 6\)"):
            check(flow_scores(8, 2), flow_scores(6, 2))
        with pytest.raises(HeadspanError, match="4 query and 2 key/value heads"):
            check(flow_scores(8, 2), flow_scores(8, 1))
