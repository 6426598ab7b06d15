"""A local hub that serves byte ranges and can be slow, lossy, private, or change its files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from local_hub import Answering, LocalHub

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
    """The files of the model, in one to three shards; the first mebibyte of a shard is something else."""
    files = {"config.json": json.dumps(CONFIG).encode()}
    everything = tensors(seed)
    if shards == 1:
        return files | {"model.safetensors": save(everything)}
    everything |= {f"a.{shard}": np.zeros(1 << 18, np.float32) for shard in range(shards)}
    place = {}
    for name in everything:
        layer = re.match(r"h\.(\d+)", name)
        number = int(name[2:]) if name.startswith("a.") else int(layer[1]) * shards // LAYERS if layer else 0
        place[name] = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
    for shard in sorted(set(place.values())):
        files[shard] = save({name: array for name, array in everything.items() if place[name] == shard})
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": place}).encode()}


class Hub(LocalHub):
    """One repository. Large files are redirected to a store, as on the real hub."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(Handler)
        self.files = files
        self.store: dict[str, bytes] | None = None  # what the store has, if not the same
        self.redirect = True  # otherwise the hub sends large files itself
        self.etags = "sha256"  # of the store: or "md5", of another form, "xet", which looks like a sha256, and "none"
        self.total = True  # answers say how large the file is
        self.sent: list[tuple[str, int, int]] = []  # name, first byte, last byte
        self.whole: list[str] = []
        self.whole_bytes = 0
        self.drops = 0  # so many answers end in the middle
        self.busy = 0  # so many answers are 503
        self.expired = 0  # so many answers of the store are 403
        self.trouble: dict[str, list[str]] = {}  # of the hub: for the end of a path codes to answer with, or "drop"
        self.delay = 0.0
        self.ranges = True
        self.stops: tuple[int, int] | None = None  # after so many ranges there are only answers with this code
        self.token: str | None = None
        self.leaked = False  # the store received the token
        self.later: dict[str, bytes] | None = None  # the files from the second range on
        self.together: threading.Barrier | None = None  # so many ranges of the first two mebibytes must come at once
        self.alone = 0  # ranges that waited in vain for others
        self.lock = threading.Lock()


class Handler(Answering):
    server: Hub

    def answer(self, with_body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        file = re.fullmatch(rf"/({REPO}/resolve/(?:main|{COMMIT})|store)/(.+)", path)
        stored = bool(file) and file[1] == "store"
        if stored and "authorization" in map(str.lower, self.headers):
            hub.leaked = True
        trouble = next((hub.trouble[end] for end in hub.trouble if path.endswith(end) and not stored), [])
        if trouble:
            self.fail(trouble.pop(0), with_body)
        elif hub.token and not stored and self.headers.get("Authorization") != f"Bearer {hub.token}":
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

    def fail(self, how: str, body: bool) -> None:
        if how == "drop":
            self.close_connection = True
            self.connection.close()
        else:
            self.reply(int(how), b"", body, {"Retry-After": "0"})

    def file(self, name: str, stored: bool, body: bool) -> None:
        hub = self.server
        content = hub.files[name]
        if stored or (body and not hub.redirect and name.endswith(".safetensors")):
            self.stored(name, (hub.store or hub.files)[name], body)
            return
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        if not name.endswith(".safetensors") or not hub.redirect:
            self.reply(200, content, body, headers)
            return
        other = f"http://localhost:{hub.server_address[1]}/store/{name}"
        headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content)), "Location": other}
        if hub.etags == "xet":
            headers |= {"X-Xet-Hash": hashlib.sha256(b"xet" + content).hexdigest(), "X-Xet-Refresh-Route": "/xet"}
        self.reply(302, b"", body, headers)

    def etag(self, content: bytes) -> dict[str, str]:
        hashes = {
            "sha256": hashlib.sha256(content),
            "xet": hashlib.sha256(b"bridge" + content),
            "md5": hashlib.md5(content),
        }
        kind = self.server.etags
        return {} if kind == "none" else {"ETag": f'"{hashes[kind].hexdigest()}{"-2" if kind == "md5" else ""}"'}

    def stored(self, name: str, content: bytes, body: bool) -> None:
        """Bytes of a large file."""
        hub = self.server
        headers = self.etag(content) | ({} if hub.redirect else {"X-Repo-Commit": COMMIT})
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        time.sleep(hub.delay)
        if hub.together is not None and wanted and int(wanted[1]) < 1 << 21:
            try:
                hub.together.wait(20)
            except threading.BrokenBarrierError:
                hub.alone += 1
        with hub.lock:
            if hub.busy:
                hub.busy -= 1
                self.reply(503, b"", body, {"Retry-After": "0"})
                return
            if hub.expired:
                hub.expired -= 1
                self.reply(403, b"", body)
                return
            if wanted and hub.stops is not None and len(hub.sent) >= hub.stops[0] and hub.stops[1] != 200:
                self.reply(hub.stops[1], b"", body)
                return
            stopped = hub.stops is not None and len(hub.sent) >= hub.stops[0]
            if wanted and hub.ranges and not stopped:
                begin, end = int(wanted[1]), int(wanted[2]) + 1
                hub.sent.append((name, begin, end))
                total = str(len(content)) if hub.total else "*"
                headers |= {"Content-Range": f"bytes {begin}-{end - 1}/{total}"}
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
                return
            hub.whole.append(name)
        self.reply(200, content, False, headers)
        for place in range(0, len(content) if body else 0, 1 << 16):
            hub.whole_bytes += self.wfile.write(content[place : place + (1 << 16)])


def run(hub: Hub, home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a separate process, because the hub's settings are read at import."""
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
