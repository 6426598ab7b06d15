"""One file of the hub as its server gives it: byte ranges of one version, and of no other.

The hub says what identifies a file (its etag) and sends on to a store of large files, which has etags of its own.
Every answer must carry the etag of the first one. The first one is compared with what the hub said where the two are of
one kind: the hub sends the bytes itself, or both are the sha256 of the content. (Etags of a Xet store are hashes of
another kind that look the same.)
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from headspan.errors import HeadspanError
from headspan.sources.network import BUSY, TIMEOUT, TRIES, BadAnswer, body, connection, patiently, streamed
from headspan.sources.untrusted import reason

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PLACE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_GONE = (401, 403, 404, 410)


class NoRanges(Exception):
    """The server sends whole files only, or does not say of which version its ranges are."""


def about_file(url: str) -> Any:
    """What the hub says of a file: etag, size and where its bytes are."""
    from huggingface_hub import get_hf_file_metadata

    with connection:
        return get_hf_file_metadata(url, timeout=TIMEOUT)


class Remote:
    """Asks a server for parts of one file.

    about: what `about_file` said. label: which file that is, for people. forget: called when the file is found to have
    changed, before the error, so that nothing holds on to the version that was expected.
    served: the etag of whoever serves the bytes, once it is known; set by who knows it from an earlier run.
    sha256: of the content, where the hub says it.
    """

    def __init__(self, url: str, about: Any, label: str, forget: Callable[[], None] = lambda: None) -> None:
        self.label, self.etag, self.size = label, str(about.etag), int(about.size)
        self.served: str | None = None
        self._url, self._location, self._forget = url, about.location, forget
        # Only of files that are handed on does the hub give the hash by which the store of large files knows them.
        linked = not self._own(about.location) and _SHA256.fullmatch(self.etag)
        self.sha256 = self.etag if linked else None
        self._xet = getattr(about, "xet_file_data", about) is not None  # or a version that cannot tell
        self._finding, self._seeing = threading.Lock(), threading.Lock()

    def get(self, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` to ``end``, in as many tries as it takes within reason."""
        try:
            return patiently(lambda: self._ask(begin, end))
        except (HeadspanError, NoRanges):
            raise
        except Exception as error:  # whatever the network does
            raise HeadspanError(
                f"{self.label} cannot be read from the hub: {reason(error)}, {TRIES} times at most; "
                "what came is kept: run again"
            ) from None

    def changed(self) -> HeadspanError:
        """The error for a file that is not what it was."""
        self._forget()
        return HeadspanError(f"{self.label} changed on the hub while it was being read: run again")

    def _own(self, address: str) -> bool:
        """Whether the hub itself is at an address."""
        return urlsplit(address).netloc == urlsplit(self._url).netloc

    def _ask(self, begin: int, end: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers

        address = self._resolved()
        own = self._own(address)
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        if own:  # nobody else needs to know who we are
            headers = build_hf_headers() | headers
        with streamed(address, headers) as answer:
            code = answer.status_code
            if code in (200, 416):
                raise NoRanges
            if code != 206:
                expired = code in _GONE and not own  # an address that is good for some time only: ask for another
                if expired and self._location == address:
                    self._location = None
                raise BadAnswer(f"answer {code}", answer, expired or code in BUSY)
            self._check(answer, begin, end, own)
            content = body(answer, end - begin)
            if len(content) != end - begin:
                raise BadAnswer(f"an answer that ended early ({len(content)} bytes)", None, True)
            return content

    def _resolved(self) -> str:
        """Where the bytes are: the hub sends on to a store of large files, for some time."""
        with self._finding:
            if self._location is None:
                about = about_file(self._url)
                if about.etag != self.etag or about.size not in (None, self.size):
                    raise self.changed()
                self._location = about.location
            return self._location

    def _check(self, answer: Any, begin: int, end: int, own: bool) -> None:
        """Refuse an answer of another place or version before its body is read."""
        place = str(answer.headers.get("Content-Range", ""))
        match = _PLACE.fullmatch(place)
        if match is not None and match[3] not in ("*", str(self.size)):
            raise self.changed()
        if match is None or (int(match[1]), int(match[2])) != (begin, end - 1):
            raise BadAnswer(f"an answer for other bytes than were asked for ({place[:60]!r})", None, True)
        etag = _plain(answer.headers.get("ETag"))
        if not etag:
            raise NoRanges
        linked = _plain(answer.headers.get("X-Linked-Etag")) or etag
        with self._seeing:
            if self.served is None and not self._contradicts(linked if own else etag, own):
                self.served = etag
            if etag != self.served:
                raise self.changed()

    def _contradicts(self, etag: str, own: bool) -> bool:
        """Whether an etag cannot be of the content that the hub promised."""
        comparable = own or (self.sha256 is not None and not self._xet and _SHA256.fullmatch(etag))
        return bool(comparable) and etag != self.etag


def _plain(etag: str | None) -> str:
    return (etag or "").removeprefix("W/").strip('"')
