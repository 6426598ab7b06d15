"""HTTP requests to a server that may be slow, endless or malicious: all requests to a hub go through `ask`.

Every answer has limits set in advance: the most bytes, the fewest bytes in a window of time, and the total time. The
HTTP library that huggingface_hub uses has no such limits (its timeout applies to each read), so the connection is made
here. Compressed answers are refused, so that the limit on bytes holds. Only the hub's own scheme, host and port receive
the user's token.
"""

from __future__ import annotations

import base64
import functools
import http.client
import io
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from headspan.vocabulary.errors import HeadspanError

WINDOW = 20.0  # seconds, if HEADSPAN_HUB_TIMEOUT does not say otherwise
RATE = 4_000  # bytes a second that must come, on average over every window
HEADERS = 200_000  # bytes before the body
HOPS = 5
_PIECE = 1 << 16
_MOVED = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int]


class Stalled(OSError):
    """A server that sends nothing, or too little."""


class BadAnswer(Exception):
    """An answer that is not what was asked for.

    status, headers: of the answer, where there is one. again: whether the same request may get a better one.
    """

    def __init__(
        self, said: str, again: bool = False, status: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(said)
        self.again, self.status, self.headers = again, status, headers or {}


def window() -> float:
    """Seconds in which a server must send a minimum of bytes."""
    given = os.environ.get("HEADSPAN_HUB_TIMEOUT") or str(WINDOW)
    with suppress(ValueError):
        if 0.1 <= float(given) <= 86_400:
            return float(given)
    raise HeadspanError(f"HEADSPAN_HUB_TIMEOUT is {given[:40]!r}, not a number of seconds like 20")


def origin(address: str) -> Origin:
    """Scheme, host and port of an address."""
    parts = _parts(address)
    return parts.scheme, str(parts.hostname), parts.port or _PORTS[parts.scheme]


class Pace:
    """How much and how fast a server has sent; the time that we take ourselves between two reads does not count."""

    def __init__(self, most: int) -> None:
        self._window = window()
        self._left = 10 * self._window + most / RATE  # seconds in all
        self.begin(HEADERS)

    def begin(self, most: int) -> None:
        """A new part of the answer, of so many bytes at most."""
        self._most, self._spent, self._came = most, 0.0, 0

    def read(self, receive: Callable[[float], int]) -> int:
        """Bytes from ``receive``, which is given a timeout."""
        while True:
            began, got = time.monotonic(), None
            with suppress(TimeoutError):
                got = receive(max(0.01, min(self._window - self._spent, self._left)))
            took = time.monotonic() - began
            self._spent += took
            self._left -= took
            if self._left <= 0:
                raise BadAnswer("the server took too long")
            if got is not None:
                self._came += got
                self._most -= got
                if self._most < 0:
                    raise BadAnswer("the server sent more than allowed")
            if self._spent >= self._window:
                if got != 0 and self._came < RATE * self._window:
                    raise Stalled(f"the server sent {self._came} bytes in {self._window:g} seconds")
                self._spent, self._came = 0.0, 0
            if got is not None:
                return got


class _Wire(io.RawIOBase):
    """What a socket receives, at a bounded pace."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._socket, self._pace = sock, pace

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        def receive(seconds: float) -> int:
            self._socket.settimeout(seconds)
            return self._socket.recv_into(buffer)

        return self._pace.read(receive)


class _Line:
    """As much of a socket as http.client needs; who made the socket closes it."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._socket, self._pace = sock, pace

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Wire(self._socket, self._pace), _PIECE)

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(window())
        self._socket.sendall(data)

    def close(self) -> None:
        """Nothing: the owner of the socket closes it."""


class Answer:
    """Status and headers of an answer; its body can be read inside the block."""

    def __init__(self, response: http.client.HTTPResponse, pace: Pace, address: str) -> None:
        self._response, self._pace, self.address = response, pace, address
        self.status: int = response.status
        self.headers: Any = response.headers  # a mapping whose keys are compared without regard to case

    def location(self) -> str | None:
        """The address of a redirect, or None."""
        where = self.headers.get("Location") if self.status in _MOVED else None
        if where is None:
            return None
        try:
            there = urljoin(self.address, where)
            scheme, *_ = origin(there)
        except ValueError:
            raise BadAnswer("the server redirects to an invalid address") from None
        if scheme == "http" and origin(self.address)[0] == "https":
            raise BadAnswer("the server redirects from https to http")
        return there

    def pieces(self, most: int) -> Iterator[bytes]:
        """The body, of which ``most`` bytes are expected at most."""
        if self.headers.get("Content-Encoding", "identity").strip().lower() not in ("identity", ""):
            raise BadAnswer("a compressed answer, which was not requested")
        told = self._response.length
        if told is not None and told > most:
            raise BadAnswer(f"an answer of {told} bytes, more than the {most} allowed")
        self._pace.begin(2 * most + HEADERS)  # the marks between chunks count too
        came = 0
        while piece := self._response.read(_PIECE):
            came += len(piece)
            if came > most:
                raise BadAnswer(f"an answer of more than the {most} bytes allowed")
            yield piece
        if told is not None and came < told:
            raise BadAnswer(f"an answer that ended early ({came} bytes of {told})", again=True)

    def body(self, most: int) -> bytes:
        return b"".join(self.pieces(most))


@contextmanager
def ask(
    method: str, address: str, most: int, headers: Mapping[str, str], follow: Callable[[Answer, str], bool]
) -> Iterator[Answer]:
    """The answer to a request that has no body.

    most: bytes of the answer. follow: decides, from an answer and the address of its redirect, whether to follow it.
    headers: a token in them is sent to the first address only.
    """
    pace, first = Pace(most), origin(address)
    for _ in range(HOPS):
        own = origin(address) == first
        told = {name: value for name, value in headers.items() if own or name.lower() != "authorization"}
        with _answered(method, address, told, pace) as answer:
            there = answer.location()
            if there is None or not follow(answer, there):
                yield answer
                return
        address = there
        pace.begin(HEADERS)
    raise BadAnswer("the server redirects too many times")


@contextmanager
def _answered(method: str, address: str, headers: Mapping[str, str], pace: Pace) -> Iterator[Answer]:
    """One answer over a connection of its own. All network errors become an OSError or a `BadAnswer`."""
    try:
        with _connected(_parts(address), pace) as (sock, target, more):
            connection = http.client.HTTPConnection(_parts(address).netloc.rpartition("@")[2])
            connection.sock = _Line(sock, pace)  # type: ignore[assignment]
            connection.request(method, target, headers={**headers, **more, "Connection": "close"})
            response = connection.getresponse()
            try:
                yield Answer(response, pace, address)
            finally:
                response.close()
    except http.client.IncompleteRead as error:
        raise BadAnswer(f"an answer that ended early ({len(error.partial)} bytes)", again=True) from None
    except http.client.RemoteDisconnected:
        raise ConnectionResetError("the server closed the connection") from None
    except (http.client.HTTPException, UnicodeError) as error:  # or an invalid host name
        raise BadAnswer(f"an answer that is not HTTP ({str(error)[:60]!r})") from None


@contextmanager
def _connected(parts: SplitResult, pace: Pace) -> Iterator[tuple[socket.socket, str, dict[str, str]]]:
    """A connection to the server or to a proxy, the path to request, and the headers for a proxy."""
    host, port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    proxy = _proxy(parts)
    sock = socket.create_connection((proxy.hostname, proxy.port or 80) if proxy else (host, port), window())
    try:
        more = _proxy_headers(proxy)
        if proxy and parts.scheme == "https":
            _tunnel(sock, f"{host}:{port}", more, pace)
        if parts.scheme == "https":
            sock.settimeout(window())  # of the whole handshake
            sock = _trust().wrap_socket(sock, server_hostname=host)
        plain = proxy is not None and parts.scheme == "http"
        yield sock, f"http://{host}:{port}{path}" if plain else path, more if plain else {}
    finally:
        sock.close()


def _parts(address: str) -> SplitResult:
    """An address in parts, if it is one that can be asked: ValueError otherwise."""
    parts = urlsplit(address)
    plain = address.isascii() and address.isprintable() and " " not in address and len(address) <= 16_000
    if not plain or parts.scheme not in _PORTS or not parts.hostname or parts.port == 0:
        raise ValueError(f"not an address: {address[:80]!r}")
    return parts


def _proxy(parts: SplitResult) -> SplitResult | None:
    """The proxy that the environment names for an address."""
    if proxy_bypass(str(parts.hostname)):
        return None
    proxies = getproxies()
    given = proxies.get(parts.scheme) or proxies.get("all")
    if not given:
        return None
    proxy = urlsplit(given if "://" in given else f"http://{given}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise HeadspanError(f"the proxy {given[:80]!r} cannot be used: give one as http://HOST:PORT")
    return proxy


def _proxy_headers(proxy: SplitResult | None) -> dict[str, str]:
    if proxy is None or proxy.username is None:
        return {}
    login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(login.encode()).decode()}


def _tunnel(sock: socket.socket, target: str, more: Mapping[str, str], pace: Pace) -> None:
    """Ask a proxy for a connection to another server."""
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", *(f"{name}: {value}" for name, value in more.items())]
    line = _Line(sock, pace)
    line.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    response = http.client.HTTPResponse(line, method="CONNECT")  # type: ignore[arg-type]
    response.begin()
    if response.status != 200:
        raise ConnectionRefusedError(f"the proxy answers {response.status}")
    pace.begin(HEADERS)


@functools.cache
def _trust() -> ssl.SSLContext:
    """Trusted certificates: the system's, those of certifi, and a bundle that the environment names."""
    context = ssl.create_default_context()
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    with suppress(ImportError, OSError):
        import certifi

        context.load_verify_locations(certifi.where())
    with suppress(OSError):
        if bundle:
            context.load_verify_locations(*((None, bundle) if os.path.isdir(bundle) else (bundle,)))
    return context
