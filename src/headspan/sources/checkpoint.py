"""Checkpoints in Hugging Face layout: config.json beside one weight file or several shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headspan.errors import HeadspanError
from headspan.sources.base import TensorSource
from headspan.sources.files import Stamp, member, read_json, update_with_samples
from headspan.sources.safetensors_file import SafetensorsFile
from headspan.sources.transformer_lens import is_hooked_state, state_config

if TYPE_CHECKING:
    from headspan.sources.vocabulary import Vocabulary

TORCH_SUFFIXES = (".bin", ".pth", ".pt")
WEIGHT_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
# In the order in which transformers looks for them.
STANDARD_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Files of trainers and adapters that end like weight files.
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "adapter", "consolidated")


class WeightFile(Protocol):
    """One opened file of tensors: `SafetensorsFile` or `TorchFile`."""

    path: Path
    stamp: Stamp
    header_digest: bytes

    def names(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def nbytes(self, name: str) -> int: ...
    def read(self, name: str, rows: slice | None = None) -> np.ndarray: ...


def open_weight_file(path: Path) -> WeightFile:
    """Open one weight file by its suffix."""
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    from headspan.sources.torch_file import TorchFile

    return TorchFile(path)


class CheckpointSource(TensorSource):
    """Tensors spread over the weight files of one directory.

    A shard is located, checked and opened when one of its tensors is first asked for, so a shard that holds
    nothing we need may be missing. ``locate`` turns the name of a shard into a local path (and may download it).
    """

    def __init__(
        self,
        reference: str,
        config: dict[str, Any],
        directory: Path,
        weight_map: dict[str, str],
        opened: dict[str, WeightFile] | None = None,
        locate: Callable[[str], Path] | None = None,
    ) -> None:
        super().__init__(reference, config)
        self.directory = directory
        self._weight_map = weight_map
        self._opened: dict[str, WeightFile] = {}
        self._locate = locate or (lambda shard: member(directory, shard))
        for shard, file in (opened or {}).items():
            self._add(shard, file)

    def names(self) -> Collection[str]:
        return self._weight_map.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of(name).shape(name)

    def dtype(self, name: str) -> str:
        return self._file_of(name).dtype(name)

    def nbytes(self, name: str) -> int:
        return self._file_of(name).nbytes(name)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        return self._file_of(name).read(name, rows)

    def files(self) -> list[Path]:
        """The weight files opened so far."""
        return sorted(self._stamps)

    def vocabulary(self) -> Vocabulary | None:
        from headspan.sources.vocabulary import Vocabulary

        return Vocabulary.from_directory(self.directory)

    def close(self) -> None:
        super().close()
        self._opened.clear()

    def _add(self, shard: str, file: WeightFile) -> WeightFile:
        self._opened[shard] = file
        self._stamps[file.path] = file.stamp
        return file

    def _open(self, shard: str) -> WeightFile:
        if shard not in self._opened:
            return self._add(shard, open_weight_file(self._locate(shard)))
        return self._opened[shard]

    def _file_of(self, name: str) -> WeightFile:
        if name not in self._weight_map:
            raise self._missing(name)
        shard = self._weight_map[name]
        file = self._open(shard)
        if name not in file.names():
            raise HeadspanError(f"the index of {self.reference} says {name!r} is in {shard}, but it is not there")
        return file

    def _update_fingerprint(self, digest: hashlib._Hash) -> None:
        for shard in sorted(set(self._weight_map.values())):
            digest.update(shard.encode("utf-8", "surrogatepass"))
            try:
                file = self._open(shard)
            except HeadspanError:
                digest.update(b"absent")  # a shard with nothing we need may be missing or broken
                continue
            digest.update(file.header_digest)
            update_with_samples(digest, file.path, file.stamp.size)


def open_directory(directory: Path, reference: str) -> TensorSource:
    """Open a directory in Hugging Face layout."""
    for standard in STANDARD_FILES:
        if _exists(directory, standard):
            if standard.endswith(".json"):
                weight_map = read_index(member(directory, standard), directory)
                return CheckpointSource(reference, read_config(directory, reference), directory, weight_map)
            return _from_files(directory, [standard], reference)
    present = _list_names(directory)
    for suffix in WEIGHT_SUFFIXES:
        names = [name for name in present if name.endswith(suffix) and not name.startswith(NOT_WEIGHTS)]
        if len(names) == 1 or (names and all("-of-" in name for name in names)):
            return _from_files(directory, names, reference)
        if names:
            raise HeadspanError(f"{reference} holds several models ({', '.join(names[:5])}): give one of the files")
    models = [name for name in present if name.endswith(".gguf")]
    if len(models) == 1:
        from headspan.sources.gguf_file import GgufSource

        return GgufSource(member(directory, models[0]), reference)
    if models:
        raise HeadspanError(f"{reference} holds several models ({', '.join(models[:5])}): give one of the files")
    raise HeadspanError(
        f"{reference} holds no weights: expected model.safetensors, a sharded checkpoint with its index,"
        " pytorch_model.bin or a .gguf file"
    )


def open_weight_path(path: Path, reference: str) -> TensorSource:
    """Open one weight file given by its own path, with the config.json beside it."""
    return _from_files(path.parent, [path.name], reference, locate=lambda name: path.parent / name)


def _from_files(
    directory: Path, shards: list[str], reference: str, locate: Callable[[str], Path] | None = None
) -> TensorSource:
    """A source whose tensor names come from the files themselves."""
    opened = {shard: open_weight_file(locate(shard) if locate else member(directory, shard)) for shard in shards}
    weight_map = {name: shard for shard, file in opened.items() for name in file.names()}
    hooked = is_hooked_state(weight_map)
    config = {} if hooked and not _exists(directory, "config.json") else read_config(directory, reference)
    source = CheckpointSource(reference, config, directory, weight_map, opened, locate)
    if hooked:
        source.config = state_config(source, config)
    return source


def read_config(directory: Path, reference: str) -> dict[str, Any]:
    """config.json of a directory."""
    if not _exists(directory, "config.json"):
        raise HeadspanError(f"{reference} has no config.json: put the model's config.json beside its weights")
    return read_json(member(directory, "config.json"))


def read_index(path: Path, directory: Path) -> dict[str, str]:
    """The tensor → shard map of an index file, every shard name checked before any is opened."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeadspanError(f"{path} has no weight_map: it is not the index of a sharded checkpoint")
    for shard in dict.fromkeys(str(value) if isinstance(value, str) else None for value in weight_map.values()):
        if not member(directory, shard).name.endswith(WEIGHT_SUFFIXES):
            raise HeadspanError(f"{path} names the shard {shard!r}, which is not a weight file")
    return weight_map


def _exists(directory: Path, name: str) -> bool:
    path = directory / name
    return path.is_symlink() or path.exists()


def _list_names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise HeadspanError(f"{directory} cannot be listed: {error.strerror}") from None
