"""A small local hub with one repository and several revisions, each a tiny GPT-2 checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from local_hub import Answering, LocalHub, process, serving

REPO = "someone/series"
CONFIG = {
    "model_type": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 24, "n_positions": 16, "vocab_size": 10,
    "tie_word_embeddings": True,
}  # fmt: skip


def tensors(step: float, seed: int = 0) -> dict[str, np.ndarray]:
    """A model on its way from one random point (step 0) to another (step 8)."""
    random, share = np.random.default_rng(seed), step / 8
    shapes = {"wte.weight": (10, 24), "wpe.weight": (16, 24), "ln_f.weight": (24,), "ln_f.bias": (24,)}
    for layer in range(3):
        shapes |= {
            f"h.{layer}.attn.c_attn.weight": (24, 72), f"h.{layer}.attn.c_attn.bias": (72,),
            f"h.{layer}.attn.c_proj.weight": (24, 24), f"h.{layer}.attn.c_proj.bias": (24,),
            f"h.{layer}.ln_1.weight": (24,), f"h.{layer}.ln_1.bias": (24,),
        }  # fmt: skip
    first, second = ({name: random.normal(size=shape) for name, shape in shapes.items()} for _ in range(2))
    return {name: ((1 - share) * first[name] + share * second[name]).astype(np.float32) for name in shapes}


def checkpoint(step: float) -> dict[str, bytes]:
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": save(tensors(step)),
        "README.md": b"the same at every step",
    }


def write(folder: Path, step: float) -> Path:
    """The same checkpoint as a directory."""
    folder.mkdir(parents=True)
    for name, content in checkpoint(step).items():
        (folder / name).write_bytes(content)
    return folder


class SeriesHub(LocalHub):
    """Revisions by name; counts downloads, and can break off on request."""

    def __init__(self, revisions: dict[str, dict[str, bytes]]) -> None:
        super().__init__(_Handler)
        self.revisions = revisions
        self.commits = {name: hashlib.sha1(name.encode()).hexdigest() for name in revisions}
        self.downloaded: list[tuple[str, str]] = []
        self.broken: set[str] = set()  # revisions that do not come through
        self.unlisted: set[str] = set()  # revisions that are listed but gone


class _Handler(Answering):
    server: SeriesHub

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        hub = self.server
        names = {**{commit: name for name, commit in hub.commits.items()}, **{name: name for name in hub.revisions}}
        info = re.fullmatch(rf"/api/models/{REPO}(?:/revision/(.+))?", path)
        file = re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)", path)
        if path == f"/api/models/{REPO}/refs":
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in hub.commits.items()]
            self.reply(200, json.dumps({"branches": branches, "converts": [], "tags": []}).encode(), with_body)
        elif info and names.get(info[1] or "main") and names[info[1] or "main"] not in hub.unlisted:
            name = names[info[1] or "main"]
            if name in hub.broken:
                self.reply(502, b"", with_body)
                return
            siblings = [{"rfilename": file} for file in hub.revisions[name]]
            content = {"id": REPO, "sha": hub.commits[name], "siblings": siblings}
            self.reply(200, json.dumps(content).encode(), with_body)
        elif info:
            self.reply(404, b"{}", with_body, {"X-Error-Code": "RevisionNotFound"})
        elif file and names.get(file[1]) and file[2] in hub.revisions[names[file[1]]]:
            self.send_file(names[file[1]], file[2], with_body)
        else:
            self.reply(404, b"{}", with_body, {"X-Error-Code": "EntryNotFound"})

    def send_file(self, revision: str, name: str, with_body: bool) -> None:
        hub, body = self.server, self.server.revisions[revision][name]
        if with_body:
            hub.downloaded.append((revision, name))
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": hub.commits[revision]}
        self.reply(200, body, with_body, headers)


def served(revisions: dict[str, dict[str, bytes]]) -> AbstractContextManager[SeriesHub]:
    return serving(SeriesHub(revisions))


def run(code: str, home: Path, address: str, **environment: str) -> subprocess.CompletedProcess[str]:
    start = (
        "import os, sys\nimport headspan as hs\nfrom headspan.vocabulary.errors import HeadspanError\n"
        "def told(*args, **options):\n"
        "    try:\n        return print(hs.track(*args, **options))\n"
        "    except HeadspanError as error:\n        print('refused:', error)\n"
    )
    return process(start + code, home, address, **environment)
