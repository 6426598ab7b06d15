"""The command line of benchmarks/run.py; what it measures is run by hand."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
_spec = importlib.util.spec_from_file_location("run", FOLDER / "run.py")
assert _spec is not None and _spec.loader is not None
RUN = importlib.util.module_from_spec(_spec)
sys.path.append(str(FOLDER))  # as for the script
_spec.loader.exec_module(RUN)


def test_parts_are_named_by_letters_and_measured_once() -> None:
    assert RUN.chosen("d,f") == [RUN.part_d_f]
    assert RUN.chosen("b, c,a") == [RUN.part_a_b, RUN.part_c]
    assert set(RUN.chosen(",".join(RUN.PARTS))) == set(RUN.PARTS.values())
    with pytest.raises(argparse.ArgumentTypeError, match="'x' is not a part"):
        RUN.chosen("a,x")


def test_a_small_model_of_each_kind_is_scored_in_its_own_process(tmp_path: Path) -> None:
    model, out = RUN.random_llama(tmp_path / "llama", 2, 2, 16, 8, "bfloat16"), tmp_path / "r.safetensors"
    run = RUN.child(RUN.OURS, str(model), "pk", "flow", str(out), "1GB")
    assert out.exists() and min(run[key] for key in ("wall", "cpu", "peak_mb")) > 0
    screened = RUN.child(RUN.SEEDED, "8,4,2,64,16", "1", "1GB")
    assert json.loads(screened["stderr"].splitlines()[-1])["OK"]["found"] == 1
