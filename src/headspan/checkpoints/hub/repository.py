"""Models on the Hugging Face hub: ``owner/name`` or ``owner/name@revision``, through the hub's own cache.

Files are fetched when they are first used: the config, the index, the tokenizer if tokens are needed. For weights in
safetensors files, only the headers and the tensors that are read; other files as a whole (all files with
``--download``). Without a network the caches alone are used.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from headspan.checkpoints.base import TensorSource
from headspan.checkpoints.hub.api import About, about_file, endpoint, file_address, list_files
from headspan.checkpoints.hub.chunks import Known, Records
from headspan.checkpoints.hub.file_cache import (
    bring_file,
    find_file,
    find_snapshot,
    in_one_folder,
    remember_revision,
    repository,
)
from headspan.checkpoints.hub.network import AT_ONCE, busy, patiently, unreachable
from headspan.checkpoints.hub.ranges import RangeFile
from headspan.checkpoints.hub.remote import NoRanges, Remote
from headspan.checkpoints.huggingface import WEIGHT_SUFFIXES, LocalFiles, WeightFile, open_checkpoint
from headspan.checkpoints.safetensors_file import SafetensorsFile
from headspan.checkpoints.untrusted import check_name, reason
from headspan.vocabulary.errors import HeadspanError

_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REFERENCE = re.compile(rf"(?P<repo>(?:{_PART}/)?{_PART})(?:@(?P<revision>[\w.][\w./-]{{0,200}}))?", re.ASCII)
# One of these is in every snapshot that can be used without a network.
_FIRST = ("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


class HubReference(NamedTuple):
    """A repository of the hub and a branch, tag or commit of it."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubReference | None:
        """The reference in a text, or None if the text cannot be one (paths, tricks with dots).

        >>> HubReference.parse("EleutherAI/pythia-70m@step1000")
        HubReference(repo='EleutherAI/pythia-70m', revision='step1000')
        >>> HubReference.parse("../../etc/passwd") is None
        True
        """
        match = _REFERENCE.fullmatch(text)
        if match is None or "--" in match["repo"] or ".." in text or "//" in text:
            return None
        if match["repo"].endswith((".git", ".gguf", ".json", *WEIGHT_SUFFIXES)):
            return None
        return cls(match["repo"], match["revision"])

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


class HubFiles(LocalFiles):
    """The files of one commit on the hub; asking for a path downloads the file into the cache."""

    def __init__(self, hub: HubReference, commit: str, names: list[str], download: bool = False) -> None:
        super().__init__(repository(hub.repo) / "snapshots" / commit)
        self.hub = hub
        self.download = download
        self.commit = self._commit = commit
        self._names = names
        self._records = Records(_origin(hub), commit)

    def names(self) -> list[str]:
        return self._names

    def path(self, name: str) -> Path:
        with explained(self.hub, name):
            path = bring_file(self.hub.repo, self._commit, name, self._about(name))
            remember_revision(self.hub.repo, self.hub.revision, self._commit)
        return path

    def folder(self, names: Iterable[str]) -> Path:
        return in_one_folder(self.hub.repo, self._commit, {name: self.path(name) for name in names})

    def open(self, name: str) -> WeightFile:
        return self._open_ranges(name) or super().open(name)

    def open_ahead(self, names: Iterable[str]) -> dict[str, WeightFile]:
        failed = threading.Event()  # a server that is slow for one file is not asked for the others

        def attempt(name: str) -> WeightFile | None:
            try:
                return None if failed.is_set() else self._open_ranges(name)
            except HeadspanError:  # reported when the file is needed
                failed.set()
                return None

        if self.download or len(names := list(dict.fromkeys(names))) < 2:
            return {}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return {name: file for name, file in zip(names, pool.map(attempt, names), strict=True) if file is not None}

    def _about(self, name: str) -> About:
        check_name(str(self.hub), name)
        return patiently(lambda: about_file(file_address(self.hub.repo, self._commit, name), self._commit))

    def _open_ranges(self, name: str) -> WeightFile | None:
        """A file that is read by ranges; None where the whole file is wanted, or here, or all that the server sends."""
        if self.download or not name.endswith(".safetensors"):
            return None
        with explained(self.hub, name):
            about = self._about(name)
            if not about.size or find_file(self.hub.repo, self._commit, name, about) is not None:
                return None
        address, label = file_address(self.hub.repo, self._commit, name), f"{self.hub.repo}/{name}"
        remote = Remote(address, self._commit, about, label, lambda: self._records.forget(name))
        known = self._records.known().get(name)
        if known is not None and known[:2] == (remote.etag, remote.size):
            remote.served = known.served
        try:
            opened = RangeFile.opened(remote, self._records.origin, lambda: self.path(name))
            file = SafetensorsFile(Path(remote.label), opened)
        except NoRanges:
            self.download = True  # its other files would not come in ranges either
            return None
        if remote.served:
            self._records.remember(name, Known(remote.etag, remote.size, remote.served, self._records.origin))
        return file


def _origin(hub: HubReference) -> str:
    """The endpoint and repository that identify the files."""
    return f"{endpoint()} {hub.repo}"


class CachedFiles(LocalFiles):
    """The files of one commit that are in the cache already, for use without a network."""

    def __init__(self, hub: HubReference, directory: Path) -> None:
        super().__init__(directory)
        self.hub = hub
        self.commit = directory.name
        self._records = Records(_origin(hub), directory.name)

    def names(self) -> list[str]:
        return sorted({*super().names(), *self._records.known()})

    def open(self, name: str) -> WeightFile:
        known = self._records.known().get(name)
        if known is None or LocalFiles.path(self, name).exists():
            return super().open(name)
        label = f"{self.hub.repo}/{name}"
        return SafetensorsFile(Path(label), RangeFile(known.store(label)))

    def path(self, name: str) -> Path:
        path = super().path(name)
        if not path.exists():
            raise HeadspanError(
                f"the file {name} of the hub model {self.hub} is not in the local cache and the hub cannot be reached:"
                " connect once, or give the path of a local copy"
            )
        return path


def open_hub(hub: HubReference, download: bool = False) -> TensorSource:
    """Open a model of the hub, from the network or else from the cache; ``download`` brings whole files."""
    return open_checkpoint(_find_files(hub, download), str(hub))


def _find_files(hub: HubReference, download: bool) -> LocalFiles:
    from huggingface_hub import constants

    state = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            commit, names = patiently(lambda: list_files(hub.repo, hub.revision), busy)
            return HubFiles(hub, commit, [name for name in names if "/" not in name], download)
        except HeadspanError:
            raise
        except Exception as error:
            if not unreachable(error):
                raise _failure(hub, error) from None
            state = f"the hub cannot be reached, {reason(error)}"
    directory = find_snapshot(hub.repo, hub.revision, _FIRST)
    if directory is None:
        raise HeadspanError(
            f"the hub model {hub} is not in the local cache and {state} (and there is no file or directory of that"
            " name): download it elsewhere and give the path of its directory"
        )
    files = CachedFiles(hub, directory)
    if not any(name.endswith((*WEIGHT_SUFFIXES, ".index.json", ".gguf")) for name in files.names()):
        raise HeadspanError(
            f"the weights of the hub model {hub} are not in the local cache and {state}: connect once, or give the path"
            " of a local copy"
        )
    return files


def _failure(hub: HubReference, error: BaseException, name: str | None = None) -> HeadspanError:
    if name is None:
        what, hint = f"the hub model {hub}", "no local file or directory has that name either; "
    else:
        what, hint = f"the file {name[:80]} of the hub model {hub}", ""
    return HeadspanError(f"{what} could not be opened: {reason(error)} ({hint}a local copy can be given by its path)")


@contextmanager
def explained(hub: HubReference, name: str | None = None) -> Iterator[None]:
    """Turn any failure of a download into one `HeadspanError`. ``name`` is the requested file."""
    try:
        yield
    except HeadspanError:
        raise
    except Exception as error:
        raise _failure(hub, error, name) from None
