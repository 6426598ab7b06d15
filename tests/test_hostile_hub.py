"""Hubs that are slow, endless or lie: every response has limits, content is verified, and no pipe blocks."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

import hostile_server as bad
from hostile_hub import Behaviour, HostileHub, behaviours
from hostile_server import COMMIT, OTHER, REPO, Act, Hub, Reply, serving
from place import Finding

import headspan as hs
from headspan.checkpoints.hub import api as hub_api
from headspan.checkpoints.hub import wire
from headspan.checkpoints.hub.chunk_room import contents, sweep
from headspan.checkpoints.hub.chunks import CHUNK, MARKER, ChunkStore, Known, Records, root
from headspan.checkpoints.opening import open_source
from headspan.vocabulary.errors import HeadspanError
from series_hub import CONFIG, tensors

SLOW = [bad.silent, bad.slow_headers, bad.slow_body, bad.slow_chunks]
ENDLESS = [
    bad.endless_headers, bad.endless_line, bad.endless_continue, bad.endless_body, bad.endless_chunks,
    bad.endless_trailers, bad.claims_much, bad.gzip_bomb,
]  # fmt: skip
SAMPLE = [
    "config: slow headers",
    "listing: gzip bomb",
    "whole: endless body",
    "config about: ETag '/tmp/headspan-evil-e'",
]


def model(step: float = 0) -> dict[str, bytes]:
    """A tiny model, in a file of more than one part."""
    arrays = {"a": np.zeros(CHUNK // 2, np.float32), **tensors(step)}
    return {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": save(arrays), "vocab.json": b'{"x": 0}'}


Pointed = Callable[[Hub], None]


@pytest.fixture
def pointed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pointed:
    """Makes this process take a server for the hub."""
    from huggingface_hub import constants

    monkeypatch.setenv("HEADSPAN_HUB_TIMEOUT", "0.5")
    for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return lambda hub: monkeypatch.setattr(constants, "ENDPOINT", hub.address)


@pytest.fixture
def hub(pointed: Pointed) -> Iterator[Hub]:
    with serving(model()) as server:
        pointed(server)
        yield server


def expected(files: dict[str, bytes], folder: Path) -> hs.Scores:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return hs.score(str(folder), "pk", "flow")


def numbers_of(repo: str = REPO) -> hs.Scores:
    return hs.score(repo, "pk", "flow")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> HostileHub:
    return HostileHub(tmp_path_factory.mktemp("hostile"))


def test_there_are_many_behaviours() -> None:
    names = [str(case) for case in behaviours()]
    assert len(names) >= 90 and len(set(names)) == len(names) and set(SAMPLE) <= set(names)


@pytest.mark.parametrize("name", SAMPLE)
def test_time_memory_and_disk_from_outside(hostile: HostileHub, name: str) -> None:
    hostile.measure(next(case for case in hostile.table if str(case) == name))


def test_the_measure_notices_what_it_is_for(hostile: HostileHub) -> None:
    with pytest.raises(Finding, match="the exit code"):  # an honest hub gives an answer where none is expected
        hostile.measure(Behaviour("nothing", "honest", lambda hub: bad.honest))


@pytest.mark.parametrize(
    ("place", "act"),
    [*((p, a) for p in ("listing", "config") for a in [*SLOW, *ENDLESS]), ("header", SLOW[1]), ("range", SLOW[2])],
)
def test_bounds(hub: Hub, place: str, act: Act, tmp_path: Path) -> None:
    assert hub.store is not None
    for server in (hub, hub.store):
        server.place, server.act = place, act
    began = time.monotonic()
    with pytest.raises(HeadspanError):
        numbers_of()
    assert time.monotonic() - began < 15
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".tmp", ".incomplete"))]


def test_a_server_that_sends_enough_may_take_its_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "RATE", 1000)

    def pieces(reply: Reply) -> Iterator[bytes | float]:
        yield reply.head()
        for place in range(0, len(reply.body), 1 << 18):
            yield reply.body[place : place + (1 << 18)]
            yield 0.3

    assert hub.store is not None
    hub.store.place, hub.store.act = "header", pieces
    assert numbers_of().arrays


def test_a_window_that_is_not_a_number(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSPAN_HUB_TIMEOUT", "nan")
    with pytest.raises(HeadspanError, match=r"HEADSPAN_HUB_TIMEOUT.*'nan'"):
        numbers_of()


@pytest.mark.parametrize("etag", ["/tmp/x", "../x", "..", "a/b", "a b", "a\tb", "x" * 300, ".hidden"])
def test_an_etag_that_is_not_a_plain_token_is_refused(hub: Hub, etag: str, tmp_path: Path) -> None:
    hub.place, hub.act = "config about", bad.headers(ETag=f'"{etag}"')
    with pytest.raises(HeadspanError, match="ETag"):
        numbers_of()
    assert not list(tmp_path.rglob("*x*")) and not list((tmp_path / "hf").rglob("*.json"))


@pytest.mark.parametrize(
    "name",
    ["..\\evil.safetensors", "a\\..\\..\\b.safetensors", "C:x.safetensors", "x\0.safetensors", "\ud800.safetensors"],
)
def test_invalid_names_in_a_listing(hub: Hub, name: str) -> None:
    hub.place, hub.act = "listing", bad.listing(names=[name])
    with pytest.raises(HeadspanError):
        numbers_of()


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("how", ["ranges", "config", "weights"])
def test_what_one_hub_sends_serves_no_other(pointed: Pointed, tmp_path: Path, how: str, linked: bool) -> None:
    """A hub sends other bytes under true names; then an honest hub is asked for the same and another repository."""
    files, wrong = model(), model(step=8)
    right = expected(files, tmp_path / "copy")

    def lie(reply: Reply) -> Iterator[bytes | float]:
        begin = int(reply.headers["Content-Range"].split()[1].partition("-")[0])
        yield reply.head() + wrong["model.safetensors"][begin : begin + len(reply.body)]

    served = dict(files)
    if how == "config":
        served["config.json"] = json.dumps(CONFIG | {"n_head": 4}).encode()
    if how == "weights":
        served["model.safetensors"] = wrong["model.safetensors"]
    with serving(served, linked) as evil:
        pointed(evil)
        for server in filter(None, (evil, evil.store)) if how == "ranges" else ():
            server.place, server.act = "range", lie
        with suppress(HeadspanError):  # a lie that shows when the whole file is there, or one that cannot show
            assert numbers_of() != right
    with serving(files, linked) as honest:
        pointed(honest)
        assert numbers_of(REPO) == right and numbers_of(OTHER) == right
        assert "range" in (honest.store or honest).asked


@pytest.mark.parametrize("linked", [True, False])
def test_a_whole_file_must_have_the_announced_hash(pointed: Pointed, tmp_path: Path, linked: bool) -> None:
    with serving(model(), linked) as hub:
        pointed(hub)
        for server in filter(None, (hub, hub.store)):
            server.place, server.act = "whole", bad.other_bytes
        with pytest.raises(HeadspanError, match="does not match the hub's hash"):
            open_source(REPO, download=True)
    assert not [path for path in (tmp_path / "hf").rglob("*") if path.is_file() and path.stat().st_size > 1000]


def test_a_server_without_ranges_sends_the_whole_file_which_is_compared(hub: Hub, tmp_path: Path) -> None:
    assert hub.store is not None
    wrong = model(step=8)["model.safetensors"]

    def everything(reply: Reply) -> Iterator[bytes | float]:
        yield Reply(200, {"ETag": reply.headers["ETag"]}, wrong).whole()

    hub.store.place, hub.store.act = "header", everything
    assert numbers_of() == expected(hub.files, tmp_path / "copy")  # asked without a range it is honest


def test_a_token_is_for_one_scheme_host_and_port(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert numbers_of().arrays
    assert hub.store is not None and hub.told and not hub.store.told
    address = hub.address
    assert hub_api.is_own(address + "/x")
    for other in ("https" + address[4:], address[:-1] + ("1" if address[-1] != "1" else "2"), "http://localhost:80"):
        assert not hub_api.is_own(other)
    assert wire.origin("https://Hub.example/a") == wire.origin("https://hub.example:443/b")
    assert wire.origin("https://hub.example/a") != wire.origin("http://hub.example:443/a")


def test_a_token_does_not_follow_a_redirect(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert hub.store is not None
    hub.place, hub.act = "config", bad.status(302, Location=f"{hub.store.address}/store/config.json")
    assert numbers_of().arrays and not hub.store.told


def test_from_https_to_http_nothing_is_followed() -> None:
    class Response:
        status, headers = 302, {"Location": "http://hub.example/x"}

    with pytest.raises(wire.BadAnswer, match="from https to http"):
        wire.Answer(Response(), wire.Pace(0), "https://hub.example/y").location()  # type: ignore[arg-type]


def odd_files() -> dict[str, Callable[[Path], object]]:
    def connected(path: Path) -> None:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)

    return {
        "pipe": os.mkfifo, "socket": connected, "device": lambda path: path.symlink_to("/dev/zero"),
        "terminal": lambda path: path.symlink_to("/dev/tty"), "loop": lambda path: path.symlink_to(path.name),
        "folder": Path.mkdir,
    }  # fmt: skip


@pytest.mark.parametrize("kind", odd_files())
@pytest.mark.parametrize("what", ["part", "marker", "record", "revision", "config"])
def test_odd_files_in_the_caches(hub: Hub, tmp_path: Path, kind: str, what: str) -> None:
    right = numbers_of()
    folder = next(path for path in root().iterdir() if path.is_dir())
    kept = tmp_path / "hf" / "endpoints"
    path = {
        "part": max(folder.glob("0000000?")), "marker": folder / MARKER, "record": next(root().glob("*.json")),
        "revision": next(kept.rglob("refs/main")), "config": next(kept.rglob("config.json")),
    }[what]  # fmt: skip
    path.unlink()
    odd_files()[kind](path)
    sweep()
    assert len(contents()) <= 1
    assert Records(f"{hub.address} {REPO}", COMMIT).known().keys() <= {"model.safetensors"}
    if kind != "folder":
        assert numbers_of() == right
        return
    with suppress(HeadspanError):  # a folder is not replaced
        assert numbers_of() == right


def test_a_part_is_never_read_from_a_pipe(cache: Path) -> None:
    store = Known("e", 3 * CHUNK, "s", "http://hub.example x").store("x")
    store.write(1, bytes(CHUNK))
    other = ChunkStore("e", 3 * CHUNK, "s", "http://other.example x", "x")
    assert store.has(1) and not other.has(1)
    part = store.folder / "00000001"
    part.unlink()
    os.mkfifo(part)
    assert not store.has(1) and store.read(1) is None


def test_a_model_of_the_hub_is_run_from_files_that_were_compared(hub: Hub) -> None:
    pytest.importorskip("transformers")
    from headspan.running.opening import load

    with pytest.raises(HeadspanError, match="its checkpoint lacks"):  # it has no MLP
        load(REPO)
    assert hub.store is not None and hub.store.asked == ["whole"]
    assert set(hub.asked) == {"listing", "config about", "config", "tokenizer about", "tokenizer", "about", "sent on"}


def test_the_index_names_a_sensible_number_of_shards(hub: Hub) -> None:
    hub.files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {f"x.{i}": f"x-{i}.safetensors" for i in range(10_001)}}
    ).encode()
    del hub.files["model.safetensors"]
    with pytest.raises(HeadspanError, match="names 10001 weight files"):
        numbers_of()
