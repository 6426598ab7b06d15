"""Models of the hub: a small hub on this machine, its cache, and what happens without a network."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headspan.checkpoints.hub.repository import HubReference
from headspan.checkpoints.opening import open_source
from headspan.vocabulary.errors import HeadspanError
from local_hub import Answering, LocalHub, process, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/tiny"


class Hub(LocalHub):
    """Serves one repository in the hub's protocol and keeps a list of the files that were downloaded."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(Handler)
        self.repository = files
        self.downloaded: list[str] = []
        self.down = False


class Handler(Answering):
    server: Hub

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if self.server.down:
            self.close_connection = True
            return
        match = re.fullmatch(rf"/{REPO}/resolve/(?:main|{COMMIT})/(.+)", path)
        name = match[1] if match else None
        if path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
            siblings = [{"rfilename": file} for file in self.server.repository]
            self.reply(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode(), with_body)
        elif path == f"/api/models/{REPO}/revision/nope":
            self.reply(404, b"{}", with_body, {"X-Error-Code": "RevisionNotFound"})
        elif name in self.server.repository:
            if with_body:
                self.server.downloaded.append(name)
            body = self.server.repository[name]
            etag = hashlib.sha256(body).hexdigest()
            self.reply(200, body, with_body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self.reply(404, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    shards = {"one-00001-of-00002.safetensors": "a", "one-00002-of-00002.safetensors": "b"}
    files = {"config.json": b'{"model_type": "gpt2"}', "generation_config.json": b"{}", "README.md": b"hello"}
    for number, (shard, name) in enumerate(shards.items()):
        save_file({name: np.full((2, 2), number + 1, np.float32)}, tmp_path / shard)
        files[shard] = (tmp_path / shard).read_bytes()
    weight_map = {name: shard for shard, name in shards.items()}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    files["vocab.json"] = b'{"x": 0, "y": 1}'
    with serving(Hub(files)) as server:
        yield server


def run(code: str, home: Path, address: str, **environment: str) -> subprocess.CompletedProcess[str]:
    start = (
        "from headspan.checkpoints.opening import open_source\nfrom headspan.vocabulary.errors import HeadspanError\n"
    )
    return process(start + code, home, address, **environment)


def test_only_needed_files_are_downloaded_and_then_work_offline(hub, tmp_path):
    home = tmp_path / "home"
    code = f"""
source = open_source("{REPO}")
assert sorted(source.names()) == ["a", "b"] and source.config["model_type"] == "gpt2"
first = source.fingerprint(["b"])
print(source.read("b").tolist(), first)
"""
    result = run(code, home, hub.address)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("[[2.0, 2.0], [2.0, 2.0]]")
    assert set(hub.downloaded) == {"config.json", "model.safetensors.index.json", "one-00002-of-00002.safetensors"}
    offline = run(code, home, hub.address, HF_HUB_OFFLINE="1")
    assert offline.stdout == result.stdout, offline.stderr
    hub.down = True
    unreachable = run(code, home, hub.address)
    assert unreachable.stdout == result.stdout, unreachable.stderr
    other = run(code, home, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")  # what one hub sent does not serve another
    assert other.returncode != 0 and "is not in the local cache" in other.stderr
    code = f"""
try:
    open_source("{REPO}").read("a")
except HeadspanError as error:
    print(error)
"""
    missing = run(code, home, hub.address, HF_HUB_OFFLINE="1")
    assert all(fact in missing.stdout for fact in ("one-00001-of-00002.safetensors", "someone/tiny", "cache"))


def test_tokenizer_is_fetched_when_it_is_asked_for(hub, tmp_path):
    code = f'print(open_source("{REPO}").vocabulary().size)'
    result = run(code, tmp_path / "home", hub.address)
    assert result.stdout.strip() == "2", result.stderr
    assert "vocab.json" in hub.downloaded


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("someone/other", "could not be opened: there is no such model"),
        (f"{REPO}@nope", "could not be opened: it has no such revision"),
    ],
)
def test_refusals_of_the_hub_are_one_message(hub, tmp_path, reference, sentence):
    code = f"""
try:
    open_source("{reference}")
except HeadspanError as error:
    print(error)
"""
    result = run(code, tmp_path / "home", hub.address)
    assert sentence in result.stdout, result.stderr
    assert reference in result.stdout
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_hub_index_cannot_lead_out_of_the_cache(hub, tmp_path):
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    hub.repository["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {"a": "../../../../../secret.safetensors"}}
    ).encode()
    code = f"""
try:
    open_source("{REPO}").read("a")
except HeadspanError as error:
    print(error)
"""
    assert "outside the directory" in run(code, tmp_path / "home", hub.address).stdout


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {}], ids=["offline", "unreachable"])
def test_without_network_and_cache_the_id_and_the_way_out_are_named(tmp_path, environment):
    code = """
try:
    open_source("openai-community/gpt2@main")
except HeadspanError as error:
    print(error)
"""
    result = run(code, tmp_path / "home", "http://127.0.0.1:9", **environment)
    assert "openai-community/gpt2@main" in result.stdout
    assert "give the path" in result.stdout
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


@pytest.mark.parametrize(
    "text",
    [
        "../x", "a/../b", "a/b/c", "/a", "a/", "a//b", ".a/b", "a/b@", "a/b@../c", "a/b@/c", "a\\b", "a--b/c",
        "models/x.safetensors", "x.gguf", "a b", "a/b@c d", "~x", "a:b", "-a/b", "é/x", "x" * 300,
    ],
)  # fmt: skip
def test_texts_that_are_not_a_hub_id(text):
    assert HubReference.parse(text) is None
    with pytest.raises(HeadspanError, match=r"no such file or directory|cannot be opened"):
        open_source(text)


@pytest.mark.parametrize("text", ["gpt2", "openai-community/gpt2", "a/b.c_d-1", "a/b@v1.0", "a/b@refs/pr/3"])
def test_texts_that_are_hub_ids(text):
    reference = HubReference.parse(text)
    assert reference is not None
    assert str(reference) == text
