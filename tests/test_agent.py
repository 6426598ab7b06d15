"""SKILL.md, and the server of tools: a real client and a real process, with good and hostile arguments."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import headspan as hs
from headspan.cli import _run
from headspan.results.tasks.circuit import CircuitEdge

pytest.importorskip("mcp.server.mcpserver")
import anyio
from mcp import Client, StdioServerParameters

DATA = Path(hs.__file__).parent / "data"
SECRET = "the-secret-of-another-folder"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to serve, and beside it files that must not be read."""
    outer = tmp_path_factory.mktemp("agent")
    folder = outer / "served"
    folder.mkdir()
    scores = hs.score("demo")
    scores.save(folder / "demo-scores.safetensors")
    shutil.copytree(DATA / "demo", folder / "models" / "copy")
    hs.diff("demo", "demo", k=2).save(folder / "diff.safetensors")
    hs.Circuit("c", "demo", (CircuitEdge("L0H3.O", "L1H0.K"), CircuitEdge("L0H5.O", "L1H1.K"))).save(folder / "c.json")
    (folder / "labels.csv").write_text("head,label\nL0H3,a\nL0H5,a\nL1H0,b\nL1H1,b\n")
    secret = outer / "secret"
    shutil.copytree(DATA / "demo", secret)
    (secret / "config.json").write_text((secret / "config.json").read_text().replace('"gpt2"', f'"{SECRET}"'))
    scores.save(outer / "secret.safetensors")
    (folder / "link.safetensors").symlink_to(outer / "secret.safetensors")
    (folder / "link").symlink_to(secret)
    shutil.copytree(DATA / "demo", folder / "leaky")
    (folder / "leaky" / "config.json").unlink()
    (folder / "leaky" / "config.json").symlink_to(secret / "config.json")
    pickled = folder / "pickled"
    shutil.copytree(DATA / "demo", pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    shutil.copytree(DATA / "demo", folder / "indexed")
    index = {"weight_map": {"x": "../../secret/model.safetensors"}}
    (folder / "indexed" / "model.safetensors").unlink()
    (folder / "indexed" / "model.safetensors.index.json").write_text(json.dumps(index))
    os.mkfifo(folder / "pipe.safetensors")
    return folder


def asked(folder: Path, ask: Callable[[Client], Awaitable[Any]], *options: str) -> Any:
    """What a client gets from a server in a process of its own."""

    async def talk() -> Any:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HEADSPAN_CACHE_DIR": str(folder.parent / "cache")}
        command = [sys.executable, "-m", "headspan", "mcp", str(folder), *options]
        server = StdioServerParameters(command=command[0], args=command[1:], env=environment)
        with anyio.fail_after(120):
            async with Client(server) as client:
                return await ask(client)

    return anyio.run(talk)


def calls(folder: Path, several: list[tuple[str, dict[str, Any]]], *options: str) -> list[Any]:
    async def ask(client: Client) -> list[Any]:
        return [await client.call_tool(name, arguments) for name, arguments in several]

    return asked(folder, ask, *options)


def text_of(answer: Any) -> str:
    return "".join(block.text for block in answer.content)


GOOD: list[tuple[str, dict[str, Any]]] = [
    ("files", {}),
    ("describe", {"result": "demo-scores.safetensors"}),
    ("describe", {"result": "diff.safetensors"}),
    ("top", {"result": "demo-scores.safetensors", "pairing": "OK", "k": 3}),
    ("top", {"result": "demo-scores.safetensors", "head": "L1H0", "k": 2}),
    ("significance", {"result": "demo-scores.safetensors", "k": 2}),
    ("hubs", {"result": "demo-scores.safetensors", "k": 2}),
    ("baseline", {"result": "demo-scores.safetensors"}),
    ("evaluate", {"result": "demo-scores.safetensors", "labels": "labels.csv"}),
    ("circuit_overlap", {"result": "demo-scores.safetensors", "circuit": "c.json"}),
    ("info", {"model": "models/copy"}),
    ("pair", {"model": "models/copy", "source": "L0H3.O", "target": "L1H0.K", "k": 3}),
    ("tokens", {"model": "demo", "head": "L0H1", "k": 4}),
    ("nodes", {"model": "demo", "words": "the,dog", "k": 2}),
    ("paths", {"model": "demo", "to": "L1H0", "depth": 1}),
]


def test_tools_answer(place: Path) -> None:
    async def ask(client: Client) -> Any:
        tools = (await client.list_tools()).tools
        guide = await client.call_tool("guide_to_headspan", {})
        return tools, guide, [await client.call_tool(name, arguments) for name, arguments in GOOD]

    tools, guide, answers = asked(place, ask)
    assert {tool.name for tool in tools} == {name for name, _ in GOOD} | {"guide_to_headspan"}
    assert all(tool.annotations.read_only_hint and tool.description for tool in tools)
    assert text_of(guide) == (DATA / "SKILL.md").read_text()
    found = [(name, answer.structured_content) for (name, _), answer in zip(GOOD, answers, strict=True)]
    assert not [(name, text_of(a)) for (name, _), a in zip(GOOD, answers, strict=True) if a.is_error]
    assert all(content["rows"] and content["left_out"] >= 0 for _, content in found)
    names = {row["name"] for row in found[0][1]["rows"]}
    assert {"demo", "demo-scores.safetensors", "models/copy", "c.json"} <= names
    assert not {name for name in names if "link" in name or "pipe" in name}
    best = found[3][1]["rows"]
    assert [(row["source"], row["target"]) for row in best] == [
        (str(e.source), str(e.target)) for e in hs.top("demo", "OK", 3)
    ]
    for _, content in found:
        assert str(place) not in json.dumps(content)


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("top", {"result": "../secret.safetensors"}, "without .."),
    ("top", {"result": "models/../../secret.safetensors"}, "without .."),
    ("top", {"result": "{outer}/secret.safetensors"}, "relative"),
    ("top", {"result": "link.safetensors"}, "leads out"),
    ("top", {"result": "~/x.safetensors"}, "relative"),
    ("top", {"result": "pipe.safetensors"}, "neither a file nor a folder"),
    ("top", {"result": "nothing.safetensors"}, "there is no"),
    ("top", {"result": "models"}, "not a file"),
    ("top", {"result": ""}, "not a name"),
    ("top", {"result": "a\0b"}, "not a name"),
    ("top", {"result": "x" * 100_000}, "not a name"),
    ("top", {"result": "demo-scores.safetensors", "k": 10**9}, "k must be"),
    ("top", {"result": "demo-scores.safetensors", "k": -1}, "k must be"),
    ("top", {"result": "demo-scores.safetensors", "head": "L99H99"}, "L99H99"),
    ("top", {"result": "demo-scores.safetensors", "pairing": "XY"}, "XY"),
    ("top", {"result": "demo-scores.safetensors", "k": "many"}, "k"),
    ("top", {}, "result"),
    ("evaluate", {"result": "demo-scores.safetensors", "labels": "/etc/passwd"}, "relative"),
    ("circuit_overlap", {"result": "demo-scores.safetensors", "circuit": "../secret/config.json"}, "without .."),
    ("info", {"model": "link"}, "leads out"),
    ("info", {"model": "../secret"}, "without .."),
    ("info", {"model": "leaky"}, "config.json"),
    ("info", {"model": "pickled"}, "files of torch"),
    ("info", {"model": "pickled/pytorch_model.bin"}, "files of torch"),
    ("info", {"model": "indexed"}, "model"),
    ("info", {"model": "openai-community/gpt2"}, "there is no"),
    ("info", {"model": "hf://openai-community/gpt2"}, "there is no"),
    ("paths", {"model": "demo", "to": "L1H0", "depth": 9}, "depth"),
    ("pair", {"model": "demo", "source": "L0H3.O; rm -rf /", "target": "L1H0.K"}, "head"),
    ("delete_everything", {}, "delete_everything"),
]


def test_hostile_arguments_are_refused(place: Path) -> None:
    outer = place.parent
    before = sorted(outer.rglob("*"))
    several = [
        (
            name,
            {
                key: value.replace("{outer}", str(outer)) if isinstance(value, str) else value
                for key, value in given.items()
            },
        )
        for name, given, _ in HOSTILE
    ]

    async def ask(client: Client) -> list[tuple[bool, str]]:
        found = []
        for name, arguments in several:
            try:
                answer = await client.call_tool(name, arguments)
                found.append((answer.is_error, text_of(answer)))
            except Exception as error:  # the protocol refuses it
                found.append((True, str(error)))
        working = await client.call_tool("files", {})
        return [*found, (working.is_error, "")]

    *answers, (broken, _) = asked(place, ask)
    assert not broken
    for (name, given, words), (refused, said) in zip(HOSTILE, answers, strict=True):
        case = (name, str(given)[:80], said[:300])
        assert refused and words in said, case
        assert len(said) < 2_000 and "Traceback" not in said and SECRET not in said, case
        assert str(place) not in said, case
    assert sorted(outer.rglob("*")) == before


def test_the_hub_is_closed_unless_opened(place: Path) -> None:
    """With --hub a name of the hub is asked for, which fails offline; names of files still stay in the folder."""
    several = [
        ("info", {"model": "some-org/some-model"}),
        ("info", {"model": "../secret"}),
        ("info", {"model": "/etc"}),
    ]
    answers = [text_of(answer) for answer in calls(place, several, "--hub")]
    assert "in the folder" not in answers[0] and "HF_HUB_OFFLINE" in answers[0]
    assert "without .." in answers[1] and "relative" in answers[2]


def test_answers_are_bounded(tmp_path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    hs.score({role: rng.normal(size=(4, 12, 16, 2)) for role in "QKVO"}, "pk").save(tmp_path / "r.safetensors")
    for n in range(300):
        (tmp_path / f"{'x' * 150}{n}.json").touch()
    listed, best = calls(tmp_path, [("files", {}), ("top", {"result": "r.safetensors", "k": 100, "pairing": "flow"})])
    for answer in (listed, best):
        content = answer.structured_content
        assert len(content["rows"]) <= 100 and content["left_out"] > 0
        assert len(json.dumps(content["rows"])) < 25_000


def test_untrusted_names_are_shown_plainly(place: Path, tmp_path: Path) -> None:
    served = tmp_path / "é served"
    served.mkdir()
    name = "\x1b[31mred\u202e"
    hs.Circuit(name, "m", (CircuitEdge("L0H3.O", "L1H0.K"),)).save(served / "c.json")
    shutil.copy(place / "demo-scores.safetensors", served / "r.safetensors")
    found, missing = calls(served, [
        ("circuit_overlap", {"result": "r.safetensors", "circuit": "c.json"}), ("top", {"result": "c.json"}),
    ])  # fmt: skip
    assert r"\x1b[31mred\u202e" in found.structured_content["about"] and "\x1b" not in found.structured_content["about"]
    assert missing.is_error and str(served) not in text_of(missing)


def test_the_guide_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    """Its commands and options exist, and it is printed."""
    import typer

    from headspan.cli import app

    assert _run(["skill"]) == 0
    text = capsys.readouterr().out
    assert text == (DATA / "SKILL.md").read_text() and text.startswith("---\nname: headspan\ndescription: ")
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = re.findall(r"`headspan ([a-z]+)([^`]*)`", text)
    assert len(lines) >= 14
    for name, rest in lines:
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert set(re.findall(r"(?<= )--?[a-z][a-z-]*", rest)) <= options, (name, rest)


@pytest.mark.parametrize("folder", ["nowhere", "file"])
def test_a_wrong_folder_is_refused(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert _run(["mcp", str(tmp_path / folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
