"""`headspan info`: the facts it prints, as JSON and as text, and its messages about bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import headspan as hs
from headspan.cli import app
from headspan.reading.info import check_ranks, describe

D, HEADS, LAYERS = 24, 4, 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GPT-2 with only attention and norms; one output weight has rank 2."""
    rng = np.random.default_rng(0)
    tensors = {}
    for i in range(LAYERS):
        tensors[f"h.{i}.attn.c_attn.weight"] = rng.normal(size=(D, 3 * D)).astype(np.float32)
        tensors[f"h.{i}.attn.c_proj.weight"] = rng.normal(size=(D, D)).astype(np.float32)
        tensors[f"h.{i}.ln_1.weight"] = np.ones(D, np.float32)
    tensors["h.1.attn.c_proj.weight"][6:10] = 0  # four of the six rows of head 1
    save_file(tensors, tmp_path / "model.safetensors")
    write_config(tmp_path, model_type="gpt2", n_embd=D, n_layer=LAYERS, n_head=HEADS, vocab_size=99)
    return tmp_path


def write_config(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def info(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["info", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_json_has_the_facts(model: Path) -> None:
    facts = json.loads(info(str(model), "--json"))
    expected = {
        "architecture": "gpt2", "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": HEADS, "d_model": D, "d_head": 6,
        "norm": "layer", "foldable": True, "not_foldable_reason": None, "vocab_size": 99, "unembedding": False,
        "tied_embedding": None, "storage_dtypes": ["float32"], "attention_layers": [0, 1], "notes": [],
    }  # fmt: skip
    assert {key: facts[key] for key in expected} == expected
    assert [tensor["name"] for tensor in facts["tensors"]] == [
        f"h.{i}.attn.{name}.weight" for i in range(LAYERS) for name in ("c_attn", "c_proj")
    ]
    assert facts["bytes_to_read"] == sum(t["bytes"] for t in facts["tensors"]) == LAYERS * 4 * D * D * 4
    assert facts["total_bytes"] == facts["bytes_to_read"] + LAYERS * D * 4
    assert "check" not in facts


def test_check_names_the_head_that_falls_short(model: Path) -> None:
    check = json.loads(info(str(model), "--json", "--check"))["check"]
    assert check["rank_deficient"] == [{"head": "L1H1.O", "rank": 2}]
    assert check["ranks"]["Q"] == {"full": 6, "min": 6, "max": 6, "heads": 8}
    assert check["ranks"]["O"] == {"full": 6, "min": 2, "max": 6, "heads": 8}
    text = info(str(model), "--check")
    assert "L1H1.O has only rank 2" in text
    assert "2–6 of 6, 8 heads" in text


def test_text_for_people(model: Path) -> None:
    text = info(str(model))
    for words in ("gpt2", "LayerNorm before attention", "possible", "99 tokens", "h.0.attn.c_attn.weight  6.9 kB"):
        assert words in text
    assert "18.4 kB in 4 tensors, of 18.6 kB" in text


def test_demo_describes_itself() -> None:
    facts = json.loads(info("demo", "--json"))
    assert facts["foldable"]
    assert facts["tied_embedding"]


def test_shared_heads_and_unequal_sizes() -> None:
    shapes = {"Q": (1, 4, 10, 3), "K": (1, 2, 10, 3), "V": (1, 2, 10, 5), "O": (1, 4, 10, 5)}
    rng = np.random.default_rng(0)
    facts = describe(hs.open({role: rng.normal(size=shape) for role, shape in shapes.items()}))
    assert (facts["n_kv_heads"], facts["d_head_by_role"]) == (2, {"Q": 3, "K": 3, "V": 5, "O": 5})
    assert not facts["foldable"]
    assert "no norm" in facts["not_foldable_reason"]


def test_progress_reaches_the_end(model: Path) -> None:
    steps: list[tuple[int, int]] = []
    check_ranks(hs.open(str(model)), lambda done, total: steps.append((done, total)))
    assert steps == [(i + 1, 8) for i in range(8)]


def test_real_gpt2_heads_have_full_rank(gpt2_dir: Path) -> None:
    check = check_ranks(hs.open(str(gpt2_dir)), lambda done, total: None)
    assert check["rank_deficient"] == []
    assert {role: seen["heads"] for role, seen in check["ranks"].items()} == dict.fromkeys("QKVO", 144)
    assert {seen["min"] for seen in check["ranks"].values()} == {64}


def test_folding_is_advised_by_the_kind_of_norm(model: Path, smollm2_gguf: Path) -> None:
    assert "possible; not needed for LayerNorm" in info(str(model))
    assert "possible; advised for RMSNorm" in info(str(smollm2_gguf))


def test_real_encoder_reports_why_it_cannot_be_folded(minilm_dir: Path) -> None:
    facts = json.loads(info(str(minilm_dir), "--json"))
    assert (facts["architecture"], facts["foldable"], facts["norm"]) == ("bert", False, "layer")
    assert "post-norm" in facts["not_foldable_reason"]
    assert "not possible: its blocks normalise after" in info(str(minilm_dir))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "rwkv"}, "'rwkv'"),
        ({"model_type": "gpt2", "n_embd": D, "n_layer": LAYERS}, "n_heads"),
        ({"model_type": "gpt2", "n_embd": D, "n_layer": LAYERS, "n_head": 5}, "d_head"),
        ({"model_type": "gpt2", "n_embd": 25, "n_layer": LAYERS, "n_head": 5}, "(24, 72)"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(model: Path, change: dict[str, Any], words: str) -> None:
    write_config(model, **change)
    command = [sys.executable, "-c", "from headspan.cli import main; main()", "info", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_weight_that_is_not_finite_is_found_by_check(model: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"h.{i}.attn.{name}.weight": rng.normal(size=(D, columns)).astype(np.float32)
               for i in range(LAYERS) for name, columns in (("c_attn", 3 * D), ("c_proj", D))}  # fmt: skip
    tensors["h.1.attn.c_attn.weight"][0, D + 7] = np.nan
    save_file(tensors, model / "model.safetensors")
    info(str(model))
    result = CliRunner().invoke(app, ["info", str(model), "--check"])
    assert isinstance(result.exception, hs.HeadspanError)
    assert "K of head L1H1" in str(result.exception)


def test_facts_wrap_in_a_narrow_terminal() -> None:
    narrow, wide = (
        CliRunner(env={"COLUMNS": columns}).invoke(app, ["info", "demo"]).stdout.splitlines()
        for columns in ("80", "200")
    )
    assert max(map(len, narrow)) <= 80 < max(map(len, wide))
    assert " ".join(narrow).split() == " ".join(wide).split()
    folded = next(i for i, line in enumerate(narrow) if line.startswith("folding"))
    assert narrow[folded + 1].startswith(" " * 14) and narrow[folded + 1][14] != " "
