"""Hub models read by byte ranges: a hub on this machine that can be slow, forgetful, private, and change its mind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from local_hub import Answering, LocalHub, serving

REPO, COMMIT = "someone/wide", "0123456789abcdef0123456789abcdef01234567"
LAYERS, D, WIDE, VOCAB = 3, 192, 3000, 5000
CONFIG = {"model_type": "gpt2", "n_layer": LAYERS, "n_head": 4, "n_embd": D, "n_inner": WIDE, "vocab_size": VOCAB}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """A GPT-2 most of whose bytes are not attention."""
    rng = np.random.default_rng(seed)
    shapes = {"wte.weight": (VOCAB, D), "wpe.weight": (16, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
    for layer in range(LAYERS):
        shapes |= {
            f"h.{layer}.attn.c_attn.weight": (D, 3 * D), f"h.{layer}.attn.c_attn.bias": (3 * D,),
            f"h.{layer}.attn.c_proj.weight": (D, D), f"h.{layer}.attn.c_proj.bias": (D,),
            f"h.{layer}.ln_1.weight": (D,), f"h.{layer}.ln_1.bias": (D,),
            f"h.{layer}.mlp.c_fc.weight": (D, WIDE), f"h.{layer}.mlp.c_proj.weight": (WIDE, D),
        }  # fmt: skip
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def repository(seed: int = 0, shards: int = 1) -> dict[str, bytes]:
    """The files of the model, in one or in two shards."""
    files = {"config.json": json.dumps(CONFIG).encode()}
    everything = tensors(seed)
    if shards == 1:
        return files | {"model.safetensors": save(everything)}
    place = {name: f"model-0000{1 + ('h.2' in name)}-of-00002.safetensors" for name in everything}
    for shard in sorted(set(place.values())):
        files[shard] = save({name: array for name, array in everything.items() if place[name] == shard})
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": place}).encode()}


class Hub(LocalHub):
    """One repository. Large files are handed on to a store, as the real hub does it."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(Handler)
        self.files = files
        self.sent: list[tuple[str, int, int]] = []  # name, first byte, last byte
        self.whole: list[str] = []
        self.drops = 0  # so many answers end in the middle
        self.busy = 0  # so many answers are 503
        self.expired = 0  # so many answers of the store are 403
        self.delay = 0.0
        self.ranges = True
        self.token: str | None = None
        self.leaked = False  # the store was told the token
        self.later: dict[str, bytes] | None = None  # the files from the second range on
        self.lock = threading.Lock()


class Handler(Answering):
    server: Hub

    def answer(self, with_body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        file = re.fullmatch(rf"/({REPO}/resolve/(?:main|{COMMIT})|store)/(.+)", path)
        stored = bool(file) and file[1] == "store"
        if stored and "authorization" in map(str.lower, self.headers):
            hub.leaked = True
        if hub.token and not stored and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.reply(401, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})
        elif path in (
            f"/api/models/{REPO}",
            f"/api/models/{REPO}/revision/main",
            f"/api/models/{REPO}/revision/{COMMIT}",
        ):
            siblings = [{"rfilename": name} for name in hub.files]
            self.reply(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode(), with_body)
        elif file and file[2] in hub.files:
            self.file(file[2], stored, with_body)
        else:
            self.reply(404, b"{}", with_body, {"X-Error-Code": "EntryNotFound"})

    def file(self, name: str, stored: bool, body: bool) -> None:
        hub = self.server
        content = hub.files[name]
        etag = hashlib.sha256(content).hexdigest()
        if not stored:
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
            if not name.endswith(".safetensors"):
                self.reply(200, content, body, headers)
                return
            other = f"http://localhost:{hub.server_address[1]}/store/{name}"
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content)), "Location": other}
            self.reply(302, b"", body, headers)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        time.sleep(hub.delay)
        with hub.lock:
            if hub.busy:
                hub.busy -= 1
                self.reply(503, b"", body, {"Retry-After": "0"})
                return
            if hub.expired:
                hub.expired -= 1
                self.reply(403, b"", body)
                return
            if not wanted or not hub.ranges:
                hub.whole.append(name)
                self.reply(200, content, body, {"ETag": f'"{etag}"'})
                return
            begin, end = int(wanted[1]), int(wanted[2]) + 1
            hub.sent.append((name, begin, end))
            headers = {"ETag": f'"{etag}"', "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
            part = content[begin:end]
            if hub.later is not None:
                hub.files, hub.later = hub.later, None
            if hub.drops:
                hub.drops -= 1
                self.send_response(206)
                for key, value in {**headers, "Content-Length": str(len(part))}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(part[: len(part) // 2])
                self.close_connection = True
                self.connection.close()
                return
        self.reply(206, part, body, headers)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub(repository())) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def run(hub: Hub, home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own: the hub's settings are read when its package is imported."""
    variables = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    variables |= {"HF_HOME": str(home / "hf"), "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}
    variables |= {"HEADSPAN_CACHE_DIR": str(home / "ours"), "HF_HUB_OFFLINE": "0"} | environment
    words = words or ("score", REPO, "--out", "r.safetensors", "--metric", "pk", "--pairing", "flow", "--force")
    home.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "headspan", *words], env=variables, cwd=home, capture_output=True, text=True, timeout=120
    )


def scores_are_right(home: Path, files: dict[str, bytes]) -> bool:
    """Whether the result is that of the same files in a directory."""
    import headspan as hs

    folder = home / "copy"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    mine, local = hs.load(home / "r.safetensors"), hs.score(str(folder), "pk", "flow")
    return mine == local and mine.provenance["attention_hash"] == local.provenance["attention_hash"]


def test_only_attention_is_read_and_the_numbers_are_those_of_the_files(hub: Hub, home: Path) -> None:
    size = len(hub.files["model.safetensors"])
    done = run(hub, home)
    assert done.returncode == 0, done.stderr
    assert scores_are_right(home, hub.files)
    read = sum(end - begin for _, begin, end in hub.sent)
    assert not hub.whole and read < 0.6 * size
    before = len(hub.sent)
    assert run(hub, home).returncode == 0 and len(hub.sent) == before  # everything is there
    assert not list((home / "hf").rglob("*model.safetensors*"))


def test_two_shards_of_which_each_is_read_in_part(hub: Hub, home: Path) -> None:
    hub.files = repository(shards=2)
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.files)
    assert {name for name, _, _ in hub.sent} == {n for n in hub.files if n.endswith(".safetensors")} and not hub.whole


def test_whole_files_where_they_are_wanted(hub: Hub, home: Path) -> None:
    words = ("score", REPO, "--out", "r.safetensors", "--metric", "pk", "--pairing", "flow", "--download")
    assert run(hub, home, *words).returncode == 0
    assert hub.whole == ["model.safetensors"] and not hub.sent
    assert scores_are_right(home, hub.files)
    assert run(hub, home).returncode == 0 and not hub.sent  # the whole file serves later runs too


def test_a_server_that_sends_whole_files_only(hub: Hub, home: Path) -> None:
    hub.ranges = False
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.files)


@pytest.mark.parametrize("trouble", [{"drops": 3}, {"busy": 3}, {"expired": 2}, {"delay": 0.2, "drops": 1}])
def test_trouble_on_the_way_is_overcome(hub: Hub, home: Path, trouble: dict[str, float]) -> None:
    for name, value in trouble.items():
        setattr(hub, name, value)
    done = run(hub, home)
    assert done.returncode == 0, done.stderr
    assert scores_are_right(home, hub.files)


def test_a_run_that_gives_up_leaves_what_came(hub: Hub, home: Path) -> None:
    hub.drops = 10**6
    done = run(hub, home)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "what came is kept: run again" in done.stderr and "Traceback" not in done.stderr
    hub.drops = 0
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.files)


@pytest.mark.parametrize("size", ["same", "other"])
def test_a_file_that_changes_in_between_is_refused(hub: Hub, home: Path, size: str) -> None:
    later = repository(seed=1)
    if size == "other":
        later["model.safetensors"] = save(tensors(1) | {"more": np.zeros(10, np.float32)})
    hub.later = later
    done = run(hub, home)
    assert done.returncode == 2 and "changed on the hub while it was being read: run again" in done.stderr
    assert not (home / "r.safetensors").exists()
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, later)


def test_a_private_model_needs_the_token_and_only_the_hub_hears_it(hub: Hub, home: Path) -> None:
    hub.token = "hf_secret"
    refused = run(hub, home)
    assert refused.returncode == 2 and "private" in refused.stderr
    assert run(hub, home, HF_TOKEN="hf_secret").returncode == 0
    assert scores_are_right(home, hub.files)
    assert not hub.leaked


def test_without_a_network_the_cache_serves(hub: Hub, home: Path) -> None:
    assert run(hub, home).returncode == 0
    (home / "r.safetensors").unlink()
    assert run(hub, home, HF_HUB_OFFLINE="1").returncode == 0
    assert scores_are_right(home, hub.files)
    part = next(path for path in (home / "ours" / "ranges").rglob("0000000*"))
    part.unlink()
    done = run(hub, home, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "not in the local cache" in done.stderr


def test_damaged_and_foreign_parts_are_fetched_again(hub: Hub, home: Path) -> None:
    assert run(hub, home).returncode == 0
    parts = sorted(path for path in (home / "ours" / "ranges").rglob("0000000*"))
    content = bytearray(parts[1].read_bytes())
    content[1000] ^= 1
    parts[1].write_bytes(content)
    parts[2].write_bytes(parts[3].read_bytes())  # a sound part in a wrong place
    parts[0].write_bytes(b"")
    before = len(hub.sent)
    assert run(hub, home).returncode == 0
    assert len(hub.sent) > before
    assert scores_are_right(home, hub.files)


def test_looking_and_clearing(hub: Hub, home: Path) -> None:
    assert "nothing of the hub" in run(hub, home, "cache").stderr
    assert run(hub, home).returncode == 0
    (row,) = json.loads(run(hub, home, "cache", "--json").stdout)
    assert row["file"] == f"{REPO}/model.safetensors" and 0 < row["mb"] < row["of_mb"] and row["days_unused"] < 1
    folder = next(path for path in (home / "ours" / "ranges").iterdir() if path.is_dir())
    (folder / "mine.txt").write_text("not of the program")
    assert json.loads(run(hub, home, "cache", "elsewhere", "--json").stdout) == []
    run(hub, home, "cache", "WIDE", "--clear")
    assert sorted(path.name for path in folder.iterdir()) == ["headspan-ranges.json", "mine.txt"]
    (folder / "mine.txt").unlink()
    run(hub, home, "cache", "--clear")
    assert not folder.exists()


def test_the_cache_stays_under_its_limit(hub: Hub, home: Path) -> None:
    assert run(hub, home).returncode == 0
    size = sum(path.stat().st_size for path in (home / "ours" / "ranges").rglob("0*"))
    small = run(
        hub,
        home,
        "score",
        REPO,
        "--out",
        "s.safetensors",
        HEADSPAN_CACHE_LIMIT="1MB",
        HEADSPAN_CACHE_DIR=str(home / "b"),
    )
    assert small.returncode == 2 and "set HEADSPAN_CACHE_LIMIT to more" in small.stderr
    hub.files = repository(seed=2)  # another content: the one that was not used for longest goes
    assert run(hub, home, HEADSPAN_CACHE_LIMIT=str(int(1.5 * size))).returncode == 0
    assert scores_are_right(home, hub.files)
    assert sum(path.stat().st_size for path in (home / "ours" / "ranges").rglob("0*")) < 1.5 * size
    wrong = run(hub, home, "cache", HEADSPAN_CACHE_LIMIT="much")
    assert wrong.returncode == 2 and "not a size like 50GB" in wrong.stderr
