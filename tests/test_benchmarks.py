"""The command line of benchmarks/run.py; what it measures is run by hand."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("run", Path(__file__).parents[1] / "benchmarks" / "run.py")
assert _spec is not None and _spec.loader is not None
RUN = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(RUN)


def test_parts_are_named_by_letters_and_measured_once() -> None:
    assert RUN.chosen("d,f") == [RUN.part_d_f]
    assert RUN.chosen("b, c,a") == [RUN.part_a_b, RUN.part_c]
    assert set(RUN.chosen(",".join(RUN.PARTS))) == set(RUN.PARTS.values())
    with pytest.raises(argparse.ArgumentTypeError, match="'x' is not a part"):
        RUN.chosen("a,x")
