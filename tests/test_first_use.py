"""What a first-time user sees: names with roles, short texts, progress bars, helpful messages."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import headspan as hs
from headspan.cli import app
from headspan.models.arrays import ArrayWeights
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Node, Role, mlp_position
from headspan.vocabulary.ports import PortTable


@pytest.fixture(scope="module")
def shared() -> hs.Scores:
    """Three layers of four query heads on two key/value heads."""
    rng = np.random.default_rng(0)
    ports = {role: rng.standard_normal((3, 2 if role in "KV" else 4, 24, 4)) for role in "QKVO"}
    return hs.score(hs.open(ports), "pk")


def test_a_port_has_its_own_neighbourhood(shared: hs.Scores) -> None:
    asked, held = shared.around("L1H3.K", k=3), shared.around("L1KV1.K", k=3)
    assert [str(e.pairing) for e in asked.incoming] == ["OK"] * 3 and not asked.outgoing
    assert asked.incoming == held.incoming and held.note is None
    assert asked.note is not None
    assert all(fact in asked.note for fact in ("L1H3.K", "L1KV1.K", "L1H2, L1H3"))
    assert "L1H3.K" in repr(asked)
    whole = shared.around("L1H3", k=3)
    assert {str(e.pairing) for e in whole.incoming} == {"OQ", "OK", "OV"} and whole.note == asked.note
    assert not shared.around("L1H3.O").incoming and shared.around("L1H3.O").note is None


def test_the_command_explains_a_name_with_a_role(shared: hs.Scores, tmp_path: Path) -> None:
    shared.save(path := tmp_path / "r.safetensors")
    done = CliRunner().invoke(app, ["top", str(path), "--head", "l1h3.k", "-k", "1"])
    assert done.exit_code == 0 and "L1H3.K is L1KV1.K" in done.stderr and done.stdout.count("L1KV1") == 1


def test_a_port_outside_the_pairings_is_refused(shared: hs.Scores) -> None:
    with pytest.raises(HeadspanError, match=r"L1H3\.K .*OQ.* OK"):
        hs.around(shared, "L1H3.K", pairing="OQ")
    with pytest.raises(HeadspanError, match="not a head with a role"):
        shared.around("L1H3.X")


def test_texts_of_objects_are_short_and_say_what_they_are(shared: hs.Scores, tmp_path: Path) -> None:
    for thing in (hs.open("demo"), hs.fold("demo"), hs.pair("demo", "L0H3.O", "L1H0.K"), shared):
        assert len(repr(thing).splitlines()) <= 10 and "object at 0x" not in repr(thing)
    assert all(fact in repr(hs.open("demo")) for fact in ("demo", "gpt2", "2 layers", "8 heads", "d_model 256"))
    assert repr(hs.fold("demo")).endswith(", folded")
    shared.provenance["reference"] = "/a/long/way/" * 10 + "model-7b"
    assert "way/model-7b: 12 heads, 6 shared" in repr(shared)


@pytest.mark.parametrize("function", [hs.effects, hs.behaviour, hs.pair, hs.tokens, hs.info])
def test_a_result_where_a_model_is_needed(function, shared: hs.Scores, tmp_path: Path) -> None:
    shared.save(path := tmp_path / "r.safetensors")
    more = {"pair": ("L0H0.O", "L1H0.K"), "tokens": ("L0H0",)}.get(function.__name__, ())
    with pytest.raises(HeadspanError, match="result, not a model"):
        function(path, *more)


def test_the_name_that_is_proposed_for_a_result_can_be_written() -> None:
    with pytest.raises(HeadspanError, match=r"hs\.score\(model, out='nowhere\.safetensors'\)`$"):
        hs.load("nowhere")


@pytest.mark.parametrize("command", ["effects", "behaviour"])
def test_what_is_stored_into_must_be_a_result(command: str, tmp_path: Path) -> None:
    for name, content, told in (
        ("empty", b"", "cannot be read as a headspan result"),
        ("none", None, "there is no result"),
    ):
        path = tmp_path / f"{name}.safetensors"
        if content is not None:
            path.write_bytes(content)
        done = CliRunner().invoke(app, [command, "demo", "--into", str(path)])
        assert done.exit_code == 2 or isinstance(done.exception, HeadspanError)
        assert told in str(done.exception) + done.stderr and "--force" not in str(done.exception) + done.stderr


def test_what_a_result_lacks_is_reported_with_what_it_has(tmp_path: Path) -> None:
    hs.score("demo", "pk", "OK", out=(path := tmp_path / "r.safetensors"))
    with pytest.raises(HeadspanError, match=r"OQ.*pk for OK"):
        hs.top(path, "OQ")


def test_nodes_are_scored_and_kept_as_heads_are(tmp_path: Path) -> None:
    """As CONTRIBUTING describes how to add a kind of node."""
    rng = np.random.default_rng(0)
    heads = {role: rng.standard_normal((2, 3, 16, 4)) for role in "QKVO"}
    rows = rng.standard_normal((2, 2, 16, 1))
    nodes = tuple(Node.at(mlp_position(layer), layer, f"L{layer}N{i}", "neuron") for layer in (0, 1) for i in (0, 1))

    class WithNeurons(ArrayWeights):
        def read(self, role, layer):
            return rows[layer] if Role.parse(role) in (Role.R, Role.W) else super().read(role, layer)

        def d_head(self, role):
            return 1 if Role.parse(role) in (Role.R, Role.W) else super().d_head(role)

        def storage_dtype(self, role, layer):
            return "float64" if Role.parse(role) in (Role.R, Role.W) else super().storage_dtype(role, layer)

    weights = WithNeurons(heads)
    weights.ports = PortTable({**weights.ports.ports, Role.W: nodes, Role.R: nodes})
    hs.score(weights, "pk", ["WQ", "OR"], out=(path := tmp_path / "r.safetensors"))
    kept = hs.load(path)
    expected = hs.projection_kernel(rows[0, 1], heads["Q"][1, 2])
    assert kept["pk", "WQ"].values[1, 5] == pytest.approx(expected, rel=1e-5)
    assert kept["pk", "OR"].values[0, 0] == pytest.approx(hs.projection_kernel(heads["O"][0, 0], rows[0, 0]), rel=1e-5)
    assert np.isnan(kept["pk", "WQ"].values[:, :3]).all()  # a neuron of layer 0 comes after the heads of layer 0


@pytest.mark.parametrize("call", ["hs.score('demo', 'pk', 'OK')", "hs.hubs('demo')"])
def test_a_bar_is_shown_by_default_in_a_terminal(call: str) -> None:
    leader, follower = pty.openpty()
    script = f"import headspan as hs; {call}"
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", script], stderr=follower, env=environment) as process:
        os.close(follower)
        seen = b""
        while chunk := _read(leader):
            seen += chunk
        assert process.wait() == 0
    os.close(leader)
    assert b"scoring" in seen


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 4096)
    except OSError:  # the other side was closed
        return b""


def test_whatever_is_tabular_compares_to_a_bool() -> None:
    """Arrays inside must not make a comparison ambiguous, and missing numbers equal each other."""
    scores = hs.score("demo", "pk", "flow")
    for make in (
        lambda: hs.hubs(scores, "OK"),
        lambda: hs.hubs(scores, "OK").inlet,
        lambda: hs.significance(scores, "OK"),
        lambda: hs.wiring(scores, k=3),
        lambda: hs.around(scores, "L1H0"),
        lambda: hs.pair("demo", "L0H3.O", "L1H0.K"),
        lambda: hs.diff("demo", "demo"),
    ):
        assert (make() == make()) is True
        assert (make() == 3) is False
    assert (hs.hubs(scores, "OK") == hs.hubs(scores, "OQ")) is False


def test_a_result_of_one_pairing_is_listed(tmp_path: Path) -> None:
    """The default, flow, means the available pairings among OQ, OK and OV; a named pairing must exist."""
    scores = hs.score("demo", "pk", "OK", out=tmp_path / "ok.safetensors")
    assert {str(edge.pairing) for edge in hs.top(scores)} == {"OK"}
    assert hs.wiring(tmp_path / "ok.safetensors").pairings == (hs.Pairing.parse("OK"),)
    assert list(hs.hubs(scores, "flow")) == ["OK"]
    for command in ("top", "wiring", "hubs"):
        run = subprocess.run(
            [sys.executable, "-m", "headspan", command, str(tmp_path / "ok.safetensors"), "--json"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert {row["pairing"] for row in json.loads(run.stdout)} == {"OK"}
    with pytest.raises(hs.HeadspanError, match="no pk scores for OQ"):
        hs.top(scores, ["OQ", "OK"])
