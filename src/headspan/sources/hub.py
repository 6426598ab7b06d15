"""Models on the Hugging Face hub: ``owner/name`` or ``owner/name@revision``, through the hub's own cache.

Only what is needed is fetched, when it is first used: the config, the index, the tokenizer when tokens are asked for;
of weights in safetensors files the headers and the bytes of the tensors that are read, of other files the whole file
(and of all, with ``--download``). Without a network the caches alone are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from headspan.errors import HeadspanError
from headspan.sources.base import TensorSource
from headspan.sources.chunk_records import Known, Records
from headspan.sources.huggingface import WEIGHT_SUFFIXES, LocalFiles, WeightFile, open_checkpoint
from headspan.sources.network import AT_ONCE, busy, cause, patiently, unreachable
from headspan.sources.ranges import RangeFile
from headspan.sources.remote import NoRanges, Remote, about_file
from headspan.sources.safetensors_file import SafetensorsFile
from headspan.sources.untrusted import member, reason

_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REFERENCE = re.compile(rf"(?P<repo>(?:{_PART}/)?{_PART})(?:@(?P<revision>[\w.][\w./-]{{0,200}}))?", re.ASCII)
_TIMEOUT = 10.0  # seconds until the hub counts as unreachable


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
        super().__init__(Path())  # known once the first file is there
        self.hub = hub
        self.download = download
        self.commit = commit
        self._names = names
        self._records = Records(hub.repo, commit)

    def names(self) -> list[str]:
        return self._names

    def path(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        # The first download goes by the revision's name, which makes the cache remember what the name stands for.
        revision = self.hub.revision if self.directory == Path() else self.commit
        with _explained(self.hub, name):
            path = Path(patiently(lambda: hf_hub_download(self.hub.repo, name, revision=revision)))
        self.directory = path.parents[name.count("/")]
        if self.directory.name != self.commit:
            raise HeadspanError(f"the hub model {self.hub} changed while it was being opened: try again")
        return member(self.directory, name)

    def open(self, name: str) -> WeightFile:
        return self._open_ranges(name) or super().open(name)

    def open_ahead(self, names: Iterable[str]) -> dict[str, WeightFile]:
        def attempt(name: str) -> WeightFile | None:
            with suppress(HeadspanError):  # said when the file is needed
                return self._open_ranges(name)
            return None

        if self.download or len(names := list(dict.fromkeys(names))) < 2:
            return {}
        with _quiet(), ThreadPoolExecutor(AT_ONCE) as pool:
            return {name: file for name, file in zip(names, pool.map(attempt, names), strict=True) if file is not None}

    def _open_ranges(self, name: str) -> WeightFile | None:
        """A file that is read by ranges; None where the whole file is wanted, or here, or all that the server sends."""
        from huggingface_hub import hf_hub_url, try_to_load_from_cache

        here = isinstance(try_to_load_from_cache(self.hub.repo, name, revision=self.commit), str)
        if here or self.download or not name.endswith(".safetensors"):
            return None
        with _explained(self.hub, name):
            url = hf_hub_url(self.hub.repo, name, revision=self.commit)
            about = patiently(lambda: about_file(url))
        if not about.etag or not about.size:
            return None
        remote = Remote(url, about, f"{self.hub.repo}/{name}", lambda: self._records.forget(name))
        known = self._records.known().get(name)
        if known is not None and known[:2] == (remote.etag, remote.size):
            remote.served = known.served
        try:
            file = SafetensorsFile(Path(remote.label), RangeFile.opened(remote, lambda: self.path(name)))
        except NoRanges:
            self.download = True  # its other files would not come in ranges either
            return None
        if remote.served:
            self._records.remember(name, Known(remote.etag, remote.size, remote.served))
        return file


class CachedFiles(LocalFiles):
    """The files of one commit that are in the cache already, for use without a network."""

    def __init__(self, hub: HubReference, directory: Path) -> None:
        super().__init__(directory)
        self.hub = hub
        self.commit = directory.name
        self._records = Records(hub.repo, directory.name)

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
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        try:
            with _quiet():
                info = patiently(lambda: HfApi().model_info(hub.repo, revision=hub.revision, timeout=_TIMEOUT), busy)
            names = [sibling.rfilename for sibling in info.siblings or [] if "/" not in sibling.rfilename]
            return HubFiles(hub, str(info.sha), names, download)
        except Exception as error:
            if not unreachable(error):
                raise _failure(hub, error) from None
    directory = _cached_snapshot(hub)
    state = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
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


def _cached_snapshot(hub: HubReference) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        try:
            found = try_to_load_from_cache(hub.repo, name, revision=hub.revision)
        except (OSError, ValueError) as error:
            raise _failure(hub, error) from None
        if isinstance(found, str):
            return Path(found).parent
    return None


_ANSWERS = {
    "RepositoryNotFoundError": "there is no such model, or it is private",
    "GatedRepoError": "its owner must grant access first: accept its terms on the hub and log in",
    "RevisionNotFoundError": "it has no such revision",
    "HFValidationError": "this is not a valid id",
    "LocalEntryNotFoundError": "the hub does not answer, and it is not in the local cache",
    "EntryNotFoundError": "there is no such file in the repository",
}


def _failure(hub: HubReference, error: BaseException, name: str | None = None) -> HeadspanError:
    error = cause(error)
    answer = next((_ANSWERS[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _ANSWERS), None)
    if name is None:
        what, hint = f"the hub model {hub}", "no local file or directory has that name either; "
    else:
        what, hint = f"the file {name} of the hub model {hub}", ""
    return HeadspanError(
        f"{what} could not be opened: {answer or reason(error)} ({hint}a local copy can be given by its path)"
    )


@contextmanager
def _explained(hub: HubReference, name: str | None = None) -> Iterator[None]:
    """Turn any failure of a download into one sentence. ``name`` is the file that was asked for."""
    try:
        with _quiet():
            yield
    except Exception as error:
        raise _failure(hub, error, name) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the hub's own retry messages off the terminal: we say once what went wrong."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
