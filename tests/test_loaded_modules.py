"""Commands load only what they need: which modules a command must not load, by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRACER = Path(__file__).parents[1] / "benchmarks" / "trace_commands.py"
ENGINE = ("scoring.run", "scoring.plan", "scoring.factors", "scoring.contraction", "scoring.tile", "scoring.screening")
NODES = ("node_kinds", "models.mlp", "models.families.mlp_table", "models.adapters")
ABOVE = ("graphs", "reading", "change", "paper", "plotting", "explorer")
NOT_LOADED = {
    "--help": ("results.scores", "subspaces", "checkpoints", "models", "node_kinds", "scoring", "running", *ABOVE),
    "score": (*NODES, "running", "statistics", *ABOVE, "cli.reading", "cli.pictures", "checkpoints.gguf"),
    "top": (*ENGINE, *NODES, "checkpoints", "models", "running", "plotting", "explorer", "cli.reading", "cli.pictures"),
    "report": (*ENGINE, "node_kinds", "models.mlp", "running.opening", "running.effects", "cli.effects"),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules that each command loads in a process of its own."""
    folder = tmp_path_factory.mktemp("loaded")
    result = str(folder / "r.safetensors")
    commands = {
        "--help": ["--help"],
        "score": ["score", "demo", "--metric", "pk", "--pairing", "OK", "--out", result],
        "top": ["top", result],
        "report": ["report", result, "--out", str(folder / "r.html")],
    }
    found = {}
    for name, words in commands.items():
        run = [sys.executable, str(TRACER), "--one", *words]
        about = json.loads(subprocess.run(run, check=True, capture_output=True).stdout)
        assert about["code"] == 0
        found[name] = {module.removeprefix("headspan.") for module in about["modules"]}
    return found


@pytest.mark.parametrize("command", NOT_LOADED)
def test_a_command_loads_only_what_it_needs(loaded: dict[str, set[str]], command: str) -> None:
    """A folder in the list stands for everything in it."""
    unneeded = {m for m in loaded[command] for name in NOT_LOADED[command] if m == name or m.startswith(f"{name}.")}
    assert not unneeded


def test_the_lists_name_modules_that_exist(loaded: dict[str, set[str]]) -> None:
    """A module that was renamed would otherwise never be found missing."""
    package = Path(__file__).parents[1] / "src" / "headspan"
    for name in {name for names in NOT_LOADED.values() for name in names}:
        path = package.joinpath(*name.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name
    assert set(ENGINE[:-1]) <= loaded["score"]


def test_every_command_is_listed_under_the_module_that_registers_it() -> None:
    import typer.main

    from headspan.cli import _MODULES, _application

    for module, commands in _MODULES.items():
        for command in commands:
            known = list(typer.main.get_command(_application(command)).commands)  # type: ignore[attr-defined]
            assert known == commands, module
