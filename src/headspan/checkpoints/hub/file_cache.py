"""Whole files of the hub on this machine, in the layout of the hub's own cache: ``models--x/snapshots/COMMIT/file``.

What https://huggingface.co sent is in the hub's own cache, where other programs find it. What any other endpoint sent
is in a separate cache beside it, because an endpoint may give its bytes any name and must not replace another's. A
file is kept only if its content matches its etag, where the etag is a hash (git's or sha256).
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from headspan.checkpoints.hub.api import COMMIT, About, endpoint, file_address, get, plain_etag
from headspan.checkpoints.hub.chunk_room import size_text
from headspan.checkpoints.hub.network import passing, patiently
from headspan.checkpoints.hub.wire import BadAnswer
from headspan.checkpoints.untrusted import CONFIG_LIMIT, HASH_BYTES, INDEX_LIMIT, JSON_LIMIT, member, reason
from headspan.system.regular import CAREFUL, read_regular
from headspan.vocabulary.errors import HeadspanError

_HUB = "https://huggingface.co"
_HASHED = JSON_LIMIT  # bytes up to which a cached file is hashed before every use; larger ones are trusted by name
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf")
_STEP = 1 << 20  # bytes from which a broken download is resumed


def root() -> Path:
    """Where files of this endpoint are kept."""
    from huggingface_hub import constants

    if endpoint() == _HUB:
        return Path(constants.HF_HUB_CACHE)
    return Path(constants.HF_HOME) / "endpoints" / hashlib.sha256(endpoint().encode()).hexdigest()[:32]


def repository(repo: str) -> Path:
    """The folder of a repository of this endpoint."""
    return root() / _folder(repo)


def _folder(repo: str) -> str:
    return f"models--{repo.replace('/', '--')}"


def _repositories(repo: str) -> list[Path]:
    """Where a repository may be: in the cache of this endpoint, and in that of the hub, which other programs fill."""
    from huggingface_hub import constants

    return list(dict.fromkeys([repository(repo), Path(constants.HF_HUB_CACHE) / _folder(repo)]))


def find_snapshot(repo: str, revision: str | None, names: Sequence[str]) -> Path | None:
    """The folder of a revision that holds one of some files, for use without a network."""
    for folder in _repositories(repo):
        commit = _commit(folder, revision or "main")
        if commit is not None and any((folder / "snapshots" / commit / name).is_file() for name in names):
            return folder / "snapshots" / commit
    return None


def find_revisions(repo: str) -> dict[str, str]:
    """Revisions that are known by name without a network, with their commits."""
    found: dict[str, str] = {}
    for folder in reversed(_repositories(repo)):
        refs = folder / "refs"
        for path in refs.rglob("*") if refs.is_dir() else ():
            name = path.relative_to(refs).as_posix()
            if path.is_file() and (commit := _commit(folder, name)) is not None:
                found[name] = commit
    return found


def _commit(folder: Path, revision: str) -> str | None:
    with suppress(OSError, ValueError):
        commit = read_regular(folder / "refs" / revision, 100).decode("ascii").strip()
        return commit if COMMIT.fullmatch(commit) else None
    return revision if COMMIT.fullmatch(revision) else None


def remember_revision(repo: str, revision: str | None, commit: str) -> None:
    """Record the commit of a branch or tag, for use without a network."""
    path = repository(repo) / "refs" / (revision or "main")
    if not COMMIT.fullmatch(revision or "") and _commit(repository(repo), revision or "main") != commit:
        with suppress(OSError):  # it serves only runs without a network
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
            temporary.write_text(commit, encoding="ascii")
            os.replace(temporary, path)


def find_file(repo: str, commit: str, name: str, about: About) -> Path | None:
    """A whole cached file that matches what the hub reports."""
    for folder in _repositories(repo) if name.endswith(_WEIGHTS) else [repository(repo)]:
        with suppress(HeadspanError, OSError):
            path = member(folder / "snapshots" / commit, name)
            if _is_sound(path, about):
                return path
    return None


def bring_file(repo: str, commit: str, name: str, about: About) -> Path:
    """A whole file, from here or from the hub."""
    found = find_file(repo, commit, name, about)
    if found is not None:
        return found
    most = _most(name, about)
    folder = repository(repo)
    blob, link = folder / "blobs" / about.etag, folder / "snapshots" / commit / name
    temporary = blob.with_name(f".{secrets.token_hex(8)}.incomplete")
    with _keeping(name):
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(blob.parent).free
    if most > free:
        raise HeadspanError(
            f"{name} has {size_text(most)}, but {root()} has room for {size_text(free)}: free some space"
        )
    try:
        if not _is_sound(blob, about):
            _download(file_address(repo, commit, name), about, most, temporary)
        with _keeping(name):
            if temporary.exists():
                os.replace(temporary, blob)
            _link(blob, link)
    finally:
        temporary.unlink(missing_ok=True)
        _remove_empty(link.parent, folder.parent)
        _remove_empty(blob.parent, folder.parent)
    return member(link.parents[name.count("/")], name)


@contextmanager
def _keeping(name: str) -> Iterator[None]:
    """Report errors of the disk as such, not as errors of the network."""
    try:
        yield
    except OSError as error:
        raise HeadspanError(f"{name} cannot be stored in {root()}: {reason(error)}") from None


def _remove_empty(folder: Path, home: Path) -> None:
    """Remove the folders that were made for a file that did not arrive."""
    with suppress(OSError):  # not empty
        while folder != home:
            folder.rmdir()
            folder = folder.parent


def in_one_folder(repo: str, commit: str, paths: Mapping[str, Path]) -> Path:
    """The folder of a commit, with some whole files in it wherever they are; for programs that take folders."""
    folder = repository(repo) / "snapshots" / commit
    for name, path in paths.items():
        if path != folder / name:
            with _keeping(name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _link(path, folder / name)
    return folder


def _most(name: str, about: About) -> int:
    """The size limit of a file: what the hub reports, and a fixed limit for files that are read as a whole."""
    weights = name.endswith(_WEIGHTS)
    limit = INDEX_LIMIT if name.endswith(".index.json") else CONFIG_LIMIT if name == "config.json" else JSON_LIMIT
    if about.size is None:
        if weights:
            raise BadAnswer("the hub does not give the size of the file")
        return limit
    if about.size > limit and not weights:
        raise BadAnswer(f"it has {about.size} bytes, more than any real file of its kind")
    return about.size


def _link(blob: Path, link: Path) -> None:
    """Make a file of a snapshot, as a link where this system has links."""
    temporary = link.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        temporary.symlink_to(os.path.relpath(blob, link.parent))
    except (OSError, NotImplementedError):  # Windows, where it may not be allowed
        shutil.copyfile(blob, temporary)
    os.replace(temporary, link)


def content_hash(etag: str, size: int) -> Any:
    """The hash function that gives a content's etag; None if the etag is not a hash.

    >>> content_hash("e69de29bb2d1d6434b8b29ae775ad8c2e48c5391", 0).hexdigest()
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    if re.fullmatch(r"[0-9a-f]{64}", etag):
        return hashlib.sha256()
    if re.fullmatch(r"[0-9a-f]{40}", etag):
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return None


def _is_sound(path: Path, about: About) -> bool:
    """Whether a file is the one that an etag identifies: by its hash, or by its name in the cache where it is large."""
    try:
        found = os.stat(path)
        named = path.resolve().name == about.etag
        if not stat.S_ISREG(found.st_mode) or about.size not in (None, found.st_size):
            return False
        digest = content_hash(about.etag, found.st_size)
        if digest is None or (named and found.st_size > _HASHED):
            return named
        with open(os.open(path, os.O_RDONLY | CAREFUL), "rb") as file:
            while piece := file.read(HASH_BYTES):
                digest.update(piece)
        return digest.hexdigest() == about.etag
    except OSError:
        return False


def _download(address: str, about: About, most: int, path: Path) -> None:
    """Write a whole file, of ``most`` bytes at most; a broken download is resumed as long as bytes arrive."""
    with _keeping(path.name):
        file = path.open("xb")
    part = _Part(address, about, most, file)
    try:
        while True:
            before = file.tell()
            try:
                patiently(part.go_on)
                break
            except Exception as error:
                if not passing(error) or file.tell() < before + _STEP:
                    raise
    finally:
        with _keeping(path.name):
            file.close()
    if content_hash(about.etag, 0) is not None and not _is_sound(path, about):
        raise BadAnswer(f"the content does not match the hub's hash ({about.etag[:12]}…)")


class _Part:
    """A partly downloaded file."""

    def __init__(self, address: str, about: About, most: int, file: BinaryIO) -> None:
        self._address, self._about, self._most, self._file = address, about, most, file
        self._served = ""

    def go_on(self) -> None:
        """Download the rest, or everything if the server does not send the rest of the same version."""
        begin = self._file.tell()
        with get(self._address, self._most, {"Range": f"bytes={begin}-"} if begin else {}) as answer:
            if answer.status not in (200, 206, 416):
                raise BadAnswer(f"answer {answer.status}", status=answer.status, headers=answer.headers)
            etag = plain_etag(answer.headers.get("ETag"))
            rest = begin and etag and etag == self._served and answer.status == 206
            if not rest or not answer.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
                self._file.seek(0)
                self._file.truncate()
                if answer.status != 200:
                    raise BadAnswer(f"answer {answer.status}", again=begin > 0)
            self._served = etag
            for piece in answer.pieces(self._most - self._file.tell()):
                with _keeping(self._file.name):
                    self._file.write(piece)
        if self._about.size not in (None, self._file.tell()):
            raise BadAnswer(f"an answer that ended early ({self._file.tell()} of {self._about.size} bytes)", again=True)
