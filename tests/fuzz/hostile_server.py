"""A hub on this machine that answers one kind of question as a hostile one would, and all others honestly.

A behaviour is a generator: the bytes that it yields are sent, a number that it yields is a pause in seconds, and when
it ends the connection is closed.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

REPO, OTHER, COMMIT = "someone/wide", "someone/copy", "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


class Reply(NamedTuple):
    """An answer, as an honest hub gives it."""

    status: int
    headers: dict[str, str]
    body: bytes

    def head(self, **changed: str | None) -> bytes:
        """Status line and headers; some changed, or left out where the value is None."""
        headers = {"Content-Length": str(len(self.body)), **self.headers}
        headers |= {name.replace("_", "-"): value for name, value in changed.items() if value is not None}
        left_out = {name.replace("_", "-") for name, value in changed.items() if value is None}
        lines = [f"{name}: {value}" for name, value in headers.items() if name not in left_out]
        return f"HTTP/1.1 {self.status} Some\r\n{''.join(line + chr(13) + chr(10) for line in lines)}\r\n".encode(
            "latin-1"
        )

    def whole(self, **changed: str | None) -> bytes:
        return self.head(**changed) + self.body


Act = Callable[[Reply], Iterator[bytes | float]]


class Hub(socketserver.ThreadingTCPServer):
    """Serves one repository under two names. ``store`` is another server, to which large files are handed on.

    act: what is done at ``place``; everything else is honest.
    """

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 64

    def __init__(self, files: dict[str, bytes], store: Hub | None = None, linked: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.store, self.linked = files, store, linked
        self.place, self.act = "", None
        self.told = False  # somebody sent a token here
        self.asked: list[str] = []

    act: Act | None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class _Handler(socketserver.BaseRequestHandler):
    server: Hub

    def handle(self) -> None:
        raw = b""
        while b"\r\n\r\n" not in raw:
            more = self.request.recv(1 << 16)
            if not more or len(raw) > 1 << 20:
                return
            raw += more
        lines = raw.decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        self.server.told |= "authorization" in headers
        place, reply = self._honest(method, path.partition("?")[0], headers)
        self.server.asked.append(place)
        act = self.server.act if self.server.act and place == self.server.place else None
        with suppress(OSError):
            for step in act(reply) if act else [reply.head() if method == "HEAD" else reply.whole()]:
                if isinstance(step, float):
                    time.sleep(step)
                else:
                    self.request.sendall(step)

    def _honest(self, method: str, path: str, headers: dict[str, str]) -> tuple[str, Reply]:
        """What is asked for, and the answer of an honest hub."""
        hub = self.server
        file = re.fullmatch(rf"/(?:(?:{REPO}|{OTHER})/resolve/[^/]+|store)/(.+)", path)
        if re.fullmatch(rf"/api/models/(?:{REPO}|{OTHER})(?:/revision/[^/]+)?", path):
            listed = {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in hub.files]}
            return "listing", Reply(200, {}, json.dumps(listed).encode())
        if path.endswith("/refs"):
            refs = [{"name": f"step{n}", "ref": f"refs/heads/step{n}", "targetCommit": COMMIT} for n in range(2)]
            return "refs", Reply(200, {}, json.dumps({"branches": refs, "tags": []}).encode())
        if file is None or file[1] not in hub.files:
            return "other", Reply(404, {"X-Error-Code": "EntryNotFound"}, b"{}")
        return self._file(method, file[1], path.startswith("/store/"), headers.get("range", ""))

    def _file(self, method: str, name: str, stored: bool, wanted: str) -> tuple[str, Reply]:
        hub, content = self.server, self.server.files[name]
        large = name.endswith(".safetensors")
        etag = {"ETag": f'"{hashlib.sha256(content).hexdigest() if large else blob_hash(content)}"'}
        kind = "index" if "index" in name else "config" if name == "config.json" else "tokenizer"
        if not stored:
            etag |= {"X-Repo-Commit": COMMIT}
            if not large:
                return f"{kind} about" if method == "HEAD" else kind, Reply(200, etag, content)
            if hub.store is not None:
                there = {"Location": f"{hub.store.address}/store/{name}", "X-Linked-Size": str(len(content))}
                about = {**etag, "X-Linked-Etag": etag["ETag"], **there}
                return "about" if method == "HEAD" else "sent on", Reply(302, about, b"")
            if method == "HEAD":
                return "about", Reply(200, etag, content)
        place = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if place is None:
            return "whole", Reply(200, etag, content)
        part = content[int(place[1]) : int(place[2]) + 1]
        etag |= {"Content-Range": f"bytes {place[1]}-{place[2]}/{len(content)}"}
        return "header" if place[1] == "0" else "range", Reply(206, etag, part)


def blob_hash(content: bytes) -> str:
    """The hash by which git knows a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serving(files: dict[str, bytes], linked: bool = True) -> Iterator[Hub]:
    """A hub and its store while they answer; the store is ``hub.store``."""
    store = Hub(files)
    hub = Hub(files, store if linked else None)
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in (store, hub)]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in (store, hub):
            server.shutdown()
            server.server_close()


# Behaviours that any answer can have.


def silent(reply: Reply) -> Iterator[bytes | float]:
    yield 600.0


def hangs_up(reply: Reply) -> Iterator[bytes | float]:
    yield b""


def not_http(reply: Reply) -> Iterator[bytes | float]:
    yield b"\x16\x03\x01 SSH-2.0 what is this?\r\n\r\n" * 20


def slow_headers(reply: Reply) -> Iterator[bytes | float]:
    for byte in reply.head() * 50:
        yield bytes([byte])
        yield 0.1


def slow_body(reply: Reply) -> Iterator[bytes | float]:
    yield reply.head(Content_Length=str(max(2000, len(reply.body))))
    for byte in itertools.cycle(reply.body[:1000] or b"x"):
        yield bytes([byte])
        yield 0.1


def slow_chunks(reply: Reply) -> Iterator[bytes | float]:
    yield reply.head(Content_Length=None, Transfer_Encoding="chunked")
    while True:
        yield b"1\r\n \r\n"
        yield 0.1


def endless_headers(reply: Reply) -> Iterator[bytes | float]:
    yield b"HTTP/1.1 200 OK\r\n"
    while True:
        yield b"X-More: " + b"x" * 60_000 + b"\r\n"


def endless_line(reply: Reply) -> Iterator[bytes | float]:
    yield b"HTTP/1.1 200 OK\r\nX-More: "
    while True:
        yield b"x" * 60_000


def endless_continue(reply: Reply) -> Iterator[bytes | float]:
    while True:
        yield b"HTTP/1.1 100 Continue\r\n\r\n" * 1000


def endless_body(reply: Reply) -> Iterator[bytes | float]:
    yield reply.head(Content_Length=None)
    while True:
        yield b" " * (1 << 20)


def endless_chunks(reply: Reply) -> Iterator[bytes | float]:
    yield reply.head(Content_Length=None, Transfer_Encoding="chunked")
    while True:
        yield b"100000\r\n" + b" " * (1 << 20) + b"\r\n"


def endless_trailers(reply: Reply) -> Iterator[bytes | float]:
    yield reply.head(Content_Length=None, Transfer_Encoding="chunked") + b"0\r\n"
    while True:
        yield b"X-More: " + b"x" * 60_000 + b"\r\n"


def claims_much(reply: Reply) -> Iterator[bytes | float]:
    yield reply.head(Content_Length=str(10**15))
    while True:
        yield b" " * (1 << 20)


_BOMB = gzip.compress(b" " * (64 << 20), 9)


def gzip_bomb(reply: Reply) -> Iterator[bytes | float]:
    yield reply.head(Content_Length=str(200 * len(_BOMB)), Content_Encoding="gzip")
    for _ in range(200):  # 12 GB
        yield _BOMB


def ends_early(reply: Reply) -> Iterator[bytes | float]:
    yield reply.head() + reply.body[: len(reply.body) // 2]


def other_bytes(reply: Reply) -> Iterator[bytes | float]:
    yield reply.head() + reply.body[: len(reply.body) // 2] + bytes(len(reply.body) - len(reply.body) // 2)


def status(code: int, **headers: str) -> Act:
    def act(reply: Reply) -> Iterator[bytes | float]:
        yield Reply(code, {}, b"no").whole(**headers)

    return act


def headers(**changed: str | None) -> Act:
    """The honest answer, but for some headers."""

    def act(reply: Reply) -> Iterator[bytes | float]:
        yield reply.head(**changed)
        yield reply.body

    return act


def body(content: bytes) -> Act:
    """Another body, with honest headers for it."""

    def act(reply: Reply) -> Iterator[bytes | float]:
        yield Reply(reply.status, reply.headers, content).whole()

    return act


def listing(**changed: object) -> Act:
    """The honest list of files, but for some values; ``names`` are names of files."""

    def act(reply: Reply) -> Iterator[bytes | float]:
        said = json.loads(reply.body)
        if "names" in changed:
            said["siblings"] = [{"rfilename": name} for name in ("config.json", *changed["names"])]  # type: ignore[misc]
        else:
            said |= changed
        yield Reply(200, {}, json.dumps(said).encode()).whole()

    return act


def steps(*acts: Act) -> Act:
    """One behaviour for the first answer, another for the second, …; the last for all others."""
    count, lock = 0, threading.Lock()

    def act(reply: Reply) -> Iterator[bytes | float]:
        nonlocal count
        with lock:
            now, count = acts[min(count, len(acts) - 1)], count + 1
        yield from now(reply)

    return act


def honest(reply: Reply) -> Iterator[bytes | float]:
    yield reply.whole()
