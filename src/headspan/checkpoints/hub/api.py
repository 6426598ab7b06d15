"""Requests to a hub: the files of a revision, branches and tags, the identity of a file, and bytes.

Every answer is checked before use, because commits and etags become file names on this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

from headspan.checkpoints.hub.network import connection
from headspan.checkpoints.hub.wire import Answer, BadAnswer, ask, origin
from headspan.checkpoints.untrusted import check_parts

LISTING_LIMIT = 50_000_000  # bytes of an answer in JSON
COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+=:-]{0,199}")  # neither a path nor a hidden file
_NUMBER = re.compile(r"[0-9]{1,18}")
_ANSWERS = {
    "RepoNotFound": "there is no such model, or it is private",
    "GatedRepo": "its owner must grant access first: accept its terms on the hub and log in",
    "RevisionNotFound": "it has no such revision",
    "EntryNotFound": "there is no such file in the repository",
}


class About(NamedTuple):
    """What the hub reports about a file.

    etag: what identifies its content. linked: the hub redirects to a store of large files, and the etag is the sha256
    of the content. xet: that store has etags of another kind that look the same. size: None where it does not say.
    location: where the bytes are.
    """

    etag: str
    size: int | None
    location: str
    linked: bool
    xet: bool


def endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT).rstrip("/")


def is_own(address: str) -> bool:
    """Whether the hub itself is at an address: the same scheme, host and port."""
    return origin(address) == origin(endpoint())


@contextmanager
def get(address: str, most: int, headers: dict[str, str] | None = None) -> Iterator[Answer]:
    """The answer to a GET, redirects followed. Only the hub itself receives the user's token."""
    with connection, ask("GET", address, most, _headers(address) | (headers or {}), lambda answer, there: True) as got:
        yield got


def list_files(repo: str, revision: str | None) -> tuple[str, list[str]]:
    """The commit of a revision, and the names of its files."""
    at = "" if revision is None else f"/revision/{quote(revision, safe='')}"
    said = _json(f"{endpoint()}/api/models/{repo}{at}", f"the list of files of {repo}")
    try:
        commit, names = said["sha"], [file["rfilename"] for file in said["siblings"] or []]
    except (KeyError, TypeError):
        raise BadAnswer("the hub did not send a list of files") from None
    if not (_is_text(commit) and COMMIT.fullmatch(commit) and all(map(_is_text, names))):
        raise BadAnswer("the hub sent a list of files without a commit or without names")
    return commit, list(dict.fromkeys(names))


def list_revisions(repo: str) -> dict[str, str]:
    """Branches and tags of a repository with their commits."""
    said = _json(f"{endpoint()}/api/models/{repo}/refs", f"the list of revisions of {repo}")
    try:
        found = {ref["name"]: ref["targetCommit"] for kind in ("tags", "branches") for ref in said.get(kind) or []}
    except (KeyError, TypeError, AttributeError):
        raise BadAnswer("the hub did not send a list of revisions") from None
    if not all(_is_text(name) and _is_text(commit) and COMMIT.fullmatch(commit) for name, commit in found.items()):
        raise BadAnswer("the hub sent a list of revisions without commits or without names")
    return found


def _is_text(value: Any) -> bool:
    """Whether a value is valid text: JSON can contain lone surrogates."""
    return isinstance(value, str) and not any("\ud800" <= mark <= "\udfff" for mark in value)


def file_address(repo: str, commit: str, name: str) -> str:
    return f"{endpoint()}/{repo}/resolve/{commit}/{quote(name)}"


def about_file(address: str, commit: str) -> About:
    """What the hub reports about a file of a commit."""

    def follow(answer: Answer, there: str) -> bool:  # a repository that was renamed; not the store of large files
        return "X-Linked-Etag" not in answer.headers and is_own(there)

    with connection, ask("HEAD", address, 0, _headers(address), follow) as answer:
        _check_status(answer, sent_on=True)
        if answer.headers.get("X-Repo-Commit", commit) != commit:
            raise BadAnswer("the hub answered for a different commit than requested")
        linked, moved = answer.headers.get("X-Linked-Etag"), answer.location()
        etag = plain_etag(linked or answer.headers.get("ETag"))
        if not etag:
            raise BadAnswer("the hub does not give the version of the file (no ETag)")
        size = answer.headers.get("X-Linked-Size") or (None if moved else answer.headers.get("Content-Length"))
        if size is not None and not _NUMBER.fullmatch(size):
            raise BadAnswer(f"the hub says that the file has {size[:40]!r} bytes")
        number = None if size is None else int(size)
        return About(etag, number, moved or answer.address, linked is not None, "X-Xet-Hash" in answer.headers)


def plain_etag(etag: str | None) -> str:
    """An etag without quotes, or ""; raises if it is not a plain token."""
    token = (etag or "").strip().removeprefix("W/").strip('"')
    if token and not _TOKEN.fullmatch(token):
        raise BadAnswer(f"an ETag that is not a plain token ({token[:40]!r})")
    return token


def _headers(address: str) -> dict[str, str]:
    from huggingface_hub.utils import build_hf_headers

    return dict(build_hf_headers()) if is_own(address) else {}


def _json(address: str, what: str) -> Any:
    with get(address, LISTING_LIMIT) as answer:
        _check_status(answer)
        content = answer.body(LISTING_LIMIT)
    check_parts(content, what)
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise BadAnswer("the hub sent something that is not JSON") from None


def _check_status(answer: Answer, sent_on: bool = False) -> None:
    """Refuse an answer with an error status."""
    if answer.status == 200 or (sent_on and answer.location() is not None):
        return
    code = answer.headers.get("X-Error-Code", "")
    if answer.status == 401 and code not in _ANSWERS:
        code = "RepoNotFound"  # the hub's answer for a private repository
    raise BadAnswer(_ANSWERS.get(code, f"answer {answer.status}"), status=answer.status, headers=answer.headers)
