"""One file of the hub: byte ranges of a single version from its server.

The hub says what identifies a file (its etag) and redirects to a store of large files, which has its own etags.
Every answer must carry the etag of the first one. The first one is compared with what the hub said where the two are of
one kind: the hub sends the bytes itself, or both are the sha256 of the content. (Etags of a Xet store are hashes of
another kind that look the same.)
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from headspan.checkpoints.hub.api import About, about_file, get, is_own, plain_etag
from headspan.checkpoints.hub.network import TRIES, patiently
from headspan.checkpoints.hub.wire import Answer, BadAnswer
from headspan.checkpoints.untrusted import reason
from headspan.vocabulary.errors import HeadspanError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PLACE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_GONE = (401, 403, 404, 410)


class NoRanges(Exception):
    """The server sends whole files only, or does not identify the version of its ranges."""


class Remote:
    """Asks a server for parts of one file.

    address, commit: of the file on the hub. about: what the hub reports about it. label: its name in messages.
    forget: called when the file is found to have changed, before the error, so that nothing holds on to the version
    that was expected.
    served: the etag of the server that sends the bytes, once known; set from an earlier run's record.
    """

    def __init__(
        self, address: str, commit: str, about: About, label: str, forget: Callable[[], None] = lambda: None
    ) -> None:
        assert about.size is not None
        self.about, self.label, self.etag, self.size = about, label, about.etag, about.size
        self.served: str | None = None
        self._address, self._commit, self._forget = address, commit, forget
        self._location: str | None = about.location
        self._finding, self._seeing = threading.Lock(), threading.Lock()

    def get(self, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` to ``end``, with a limited number of retries."""
        try:
            return patiently(lambda: self._ask(begin, end))
        except (HeadspanError, NoRanges):
            raise
        except Exception as error:  # any error of the network
            raise HeadspanError(
                f"{self.label} cannot be read from the hub: {reason(error)}, after up to {TRIES} attempts; "
                "what arrived is kept: run again"
            ) from None

    def changed(self) -> HeadspanError:
        """The error for a file that changed."""
        self._forget()
        return HeadspanError(f"{self.label} changed on the hub while it was being read: run again")

    def _ask(self, begin: int, end: int) -> bytes:
        address = self._resolved()
        with get(address, end - begin, {"Range": f"bytes={begin}-{end - 1}"}) as answer:
            code, own = answer.status, is_own(answer.address)
            if code in (200, 416):
                raise NoRanges
            if code != 206:
                expired = code in _GONE and not own  # the address has expired: request another
                if expired and self._location == address:
                    self._location = None
                raise BadAnswer(f"answer {code}", expired, code, answer.headers)
            self._check(answer, begin, end, own)
            content = answer.body(end - begin)
            if len(content) != end - begin:
                raise BadAnswer(f"an answer that ended early ({len(content)} bytes)", again=True)
            return content

    def _resolved(self) -> str:
        """Where the bytes are: the hub redirects to a temporary address in a store of large files."""
        with self._finding:
            if self._location is None:
                about = about_file(self._address, self._commit)
                if about.etag != self.etag or about.size not in (None, self.size):
                    raise self.changed()
                self._location = about.location
            return self._location

    def _check(self, answer: Answer, begin: int, end: int, own: bool) -> None:
        """Refuse an answer with another range or version before its body is read."""
        place = str(answer.headers.get("Content-Range", ""))
        match = _PLACE.fullmatch(place)
        if match is not None and match[3] not in ("*", str(self.size)):
            raise self.changed()
        if match is None or (int(match[1]), int(match[2])) != (begin, end - 1):
            raise BadAnswer(f"an answer for other bytes than requested ({place[:60]!r})", again=True)
        etag = plain_etag(answer.headers.get("ETag"))
        if not etag:
            raise NoRanges
        linked = plain_etag(answer.headers.get("X-Linked-Etag")) or etag
        with self._seeing:
            if self.served is None and not self._contradicts(linked if own else etag, own):
                self.served = etag
            if etag != self.served:
                raise self.changed()

    def _contradicts(self, etag: str, own: bool) -> bool:
        """Whether an etag contradicts the one that the hub reported."""
        comparable = own or (self.about.linked and not self.about.xet and bool(_SHA256.fullmatch(etag)))
        return comparable and etag != self.etag
