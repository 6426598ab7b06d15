"""Shared by all local test hubs: a server, replies, and processes that use it as the hub."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar


class LocalHub(ThreadingHTTPServer):
    """A server at a free port of this machine."""

    def __init__(self, handler: type[Answering]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class Answering(BaseHTTPRequestHandler):
    """Answer HEAD and GET the same way except for the body; ``answer`` gives the response."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_body: bool) -> None:
        raise NotImplementedError

    def reply(self, code: int, body: bytes, with_body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


AnyHub = TypeVar("AnyHub", bound=LocalHub)


@contextmanager
def serving(hub: AnyHub) -> Iterator[AnyHub]:
    """The hub while it answers."""
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join()


def process(code: str, home: Path, address: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process: the hub's settings are read when its package is imported."""
    variables = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    variables |= {"HF_HOME": str(home), "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", code], env=variables | environment, capture_output=True, text=True, timeout=120
    )
