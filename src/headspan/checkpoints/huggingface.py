"""Checkpoints in Hugging Face layout: config.json with one weight file or several shards."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headspan.checkpoints.base import TensorSource
from headspan.checkpoints.dtypes import apply_scale, row_range
from headspan.checkpoints.safetensors_file import SafetensorsFile
from headspan.checkpoints.transformer_lens import is_hooked_state, state_config
from headspan.checkpoints.untrusted import CONFIG_LIMIT, INDEX_LIMIT, Stamp, config_part, member, read_json, reason
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    from headspan.checkpoints.tokenizer import Vocabulary

TORCH_SUFFIXES = (".bin", ".pth", ".pt")
WEIGHT_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
# In the order in which transformers looks for them.
STANDARD_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
SHARDS_LIMIT = 10_000  # a real model has a few hundred weight files at most
# Files of trainers and adapters that end like weight files.
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "adapter", "consolidated")


_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{1,6})-of-(?P<count>[0-9]{1,6})\.\w+")
_NUMBER = re.compile(r"[0-9]+")


class WeightFile(Protocol):
    """One opened file of tensors: `SafetensorsFile` or `TorchFile`."""

    path: Path
    stamp: Stamp

    def names(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def nbytes(self, name: str) -> int: ...
    def hash(self, name: str) -> bytes: ...
    def read(self, name: str, rows: slice | None = None) -> np.ndarray: ...


def open_weight_file(path: Path) -> WeightFile:
    """Open one weight file by its suffix."""
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    from headspan.checkpoints.torch_file import TorchFile

    return TorchFile(path)


class LocalFiles:
    """The files of one directory. Links out of it are refused, except for a file that the user named."""

    commit: str | None = None  # of a hub repository

    def __init__(self, directory: Path, given: str | None = None) -> None:
        self.directory = directory
        self._given = given

    def names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.directory.iterdir())
        except OSError as error:
            raise HeadspanError(f"{self.directory} cannot be listed: {reason(error)}") from None

    def path(self, name: str) -> Path:
        return self.directory / name if name == self._given else member(self.directory, name)

    def folder(self, names: Iterable[str]) -> Path:
        """The directory, after making sure that it has these files."""
        for name in names:
            self.path(name)
        return self.directory

    def open(self, name: str) -> WeightFile:
        """A weight file, by its name."""
        return open_weight_file(self.path(name))

    def open_ahead(self, names: Iterable[str]) -> dict[str, WeightFile]:
        """Weight files that are better opened together than one by one. Only remote files are, so there are none
        here, and the names are ignored.
        """
        return {}


class CheckpointSource(TensorSource):
    """Tensors spread over the weight files of one checkpoint.

    A shard is located, checked and opened when one of its tensors is first needed, so shards that are not needed may
    be missing and are not downloaded.
    """

    reads_scales = True

    def __init__(
        self,
        reference: str,
        config: dict[str, Any],
        files: LocalFiles,
        weight_map: dict[str, str],
        opened: dict[str, WeightFile] | None = None,
    ) -> None:
        super().__init__(reference, config)
        self._files = files
        self._weight_map = weight_map
        self._opened: dict[str, WeightFile] = {}
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
        file = self._file_of(name)
        array = file.read(name, rows)
        scale = self._scale_of(name)
        if array.size == 0 or scale is None:
            return array
        first, _ = row_range(rows, file.shape(name), name)
        return apply_scale(array, self._file_of(scale).read(scale), self._scale_block(), first, name)

    @property
    def commit(self) -> str | None:
        """The hub commit of the files."""
        return self._files.commit

    def files(self) -> list[Path]:
        """The weight files opened so far."""
        return sorted(self._stamps)

    def vocabulary(self) -> Vocabulary | None:
        from headspan.checkpoints.tokenizer import TOKENIZER_FILES, Vocabulary

        present = set(self._files.names())
        for name in TOKENIZER_FILES:
            if name in present:
                self._files.path(name)  # refuses a link out of the directory; downloads from the hub
        return Vocabulary.from_directory(self._files.directory)

    def whole_folder(self) -> Path:
        """A directory with the config and all complete weight files, for programs that need a directory."""
        beside = [name for name in self._files.names() if name == "config.json" or name.endswith(".index.json")]
        return self._files.folder([*beside, *dict.fromkeys(self._weight_map.values())])

    def close(self) -> None:
        super().close()
        self._opened.clear()

    def _scale_of(self, name: str) -> str | None:
        """The tensor with the scales of a float8 tensor."""
        if not self.dtype(name).startswith("float8"):
            return None
        return next((name + end for end in ("_scale_inv", "_scale") if name + end in self._weight_map), None)

    def _scale_block(self) -> tuple[int, int]:
        """Rows and columns that share one scale in a float8 checkpoint."""
        block = config_part(self.config, "quantization_config").get("weight_block_size")
        if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            return block[0], block[1]
        return 128, 128

    def _add(self, shard: str, file: WeightFile) -> WeightFile:
        copy = next((name for name in file.names() if self._weight_map.get(name, shard) != shard), None)
        if copy is not None:
            self.notes.append(
                f"{shard} also holds {copy[:80]!r}, which the index places in {self._weight_map[copy]}: "
                "the copy named by the index was read"
            )
        self._opened[shard] = file
        self._stamps[file.path] = file.stamp
        return file

    def _open(self, shard: str) -> WeightFile:
        if shard not in self._opened:
            return self._add(shard, self._files.open(shard))
        return self._opened[shard]

    def _open_ahead(self, names: Iterable[str]) -> None:
        """Open the shards of tensors together if that helps; errors are raised when a shard is needed."""
        shards = (self._weight_map[name] for name in names if name in self._weight_map)
        for shard, file in self._files.open_ahead(shard for shard in shards if shard not in self._opened).items():
            self._add(shard, file)

    def _alike(self, name: str) -> Iterator[str]:
        """Tensors with the same name except for numbers, since those of other layers will be needed too."""
        pattern = _NUMBER.sub("0", name)
        return (other for other in self._weight_map if _NUMBER.sub("0", other) == pattern)

    def _file_of(self, name: str) -> WeightFile:
        if name not in self._weight_map:
            raise self._missing(name)
        shard = self._weight_map[name]
        if shard not in self._opened:
            self._open_ahead(self._alike(name))
        file = self._open(shard)
        if name not in file.names():
            raise HeadspanError(f"the index of {self.reference} says {name[:80]!r} is in {shard}, but it is not there")
        return file

    def _hash_all(self, names: Collection[str]) -> None:
        self._fetch(names)
        super()._hash_all(names)

    def _fetch(self, names: Collection[str]) -> None:
        """Download the bytes of all tensors that are not on this machine, together."""
        self._open_ahead(names)
        wanted = [*names, *(scale for name in names if (scale := self._scale_of(name)) is not None)]
        files = [(self._file_of(name), name) for name in wanted]
        ranges = [(f.remote, f.byte_range(n)) for f, n in files if isinstance(f, SafetensorsFile) and f.remote]
        if ranges:
            from headspan.checkpoints.hub.ranges import fetch_all

            fetch_all(ranges)

    def _hash(self, name: str) -> bytes:
        scale = self._scale_of(name)
        own = self._file_of(name).hash(name)
        return own if scale is None else hashlib.sha256(own + self._file_of(scale).hash(scale)).digest()


def open_checkpoint(files: LocalFiles, reference: str, weights: Sequence[str] = ()) -> TensorSource:
    """Open a checkpoint from its files; ``weights`` names the weight files if they are known already."""
    present = files.names()
    chosen = list(weights) or choose_weights(present, reference)
    if chosen[0].endswith(".gguf"):
        from headspan.checkpoints.gguf.file import GgufSource

        paths = [files.path(name) for name in chosen]  # all parts of a split file are needed
        return GgufSource(paths[0], reference)
    config = read_json(files.path("config.json"), CONFIG_LIMIT) if "config.json" in present else None
    if chosen[0].endswith(".json"):
        weight_map = read_index(files.path(chosen[0]))
        source = CheckpointSource(reference, _required(config, reference), files, weight_map)
    else:
        ahead = files.open_ahead(chosen)
        opened = {shard: ahead.get(shard) or files.open(shard) for shard in chosen}
        weight_map = _joined(opened, reference)
        if is_hooked_state(weight_map):
            source = CheckpointSource(reference, {}, files, weight_map, opened)
            source.config = state_config(source, config or {})
        else:
            source = CheckpointSource(reference, _required(config, reference), files, weight_map, opened)
    if len(chosen) > 1:  # names and sizes cannot reveal a shard of another model
        source.notes.append(
            f"the {len(chosen)} shards have no index, so headspan cannot check that they belong to one model"
        )
    others = [name for name in STANDARD_FILES if name in present and name not in chosen]
    if others and not weights and files.commit is None:  # hub repositories often hold the same weights in two formats
        source.notes.append(f"{', '.join(others)} in the same directory was not read: the weights are from {chosen[0]}")
    return source


def _joined(opened: dict[str, WeightFile], reference: str) -> dict[str, str]:
    """The tensor → shard map of shards without an index, if no tensor is in two of them."""
    weight_map: dict[str, str] = {}
    for shard, file in opened.items():
        twice = next((name for name in file.names() if name in weight_map), None)
        if twice is not None:
            raise HeadspanError(
                f"{reference} has no index, and both {weight_map[twice]} and {shard} hold {twice[:80]!r}: "
                "they are not the shards of one model"
            )
        weight_map |= dict.fromkeys(file.names(), shard)
    return weight_map


def choose_weights(present: Sequence[str], reference: str) -> list[str]:
    """The weight files (or the index of the shards) among the files of a checkpoint.

    >>> choose_weights(["config.json", "pytorch_model.bin", "training_args.bin"], "x")
    ['pytorch_model.bin']
    """
    for standard in STANDARD_FILES:
        if standard in present:
            return [standard]
    for suffix in (*WEIGHT_SUFFIXES, ".gguf"):
        names = [name for name in present if name.endswith(suffix) and not name.startswith(NOT_WEIGHTS)]
        if len(names) == 1 or (names and all("-of-" in name for name in names)):
            _check_shard_names(names, reference)
            return names
        if names:
            raise HeadspanError(
                f"{reference} holds several models ({', '.join(names[:5])}): give the path of one of these files"
            )
    if "adapter_config.json" in present:
        raise HeadspanError(
            f"{reference} is an adapter, not a model: compare it with its base, `hs.diff(base, adapter)`,"
            " or merge it into its base in Python, hs.adapt(base, adapter)"
        )
    raise HeadspanError(
        f"{reference} holds no weights: expected model.safetensors, a sharded checkpoint with its index,"
        " pytorch_model.bin or a .gguf file"
    )


def _check_shard_names(names: Sequence[str], reference: str) -> None:
    """Check that shards without an index form one complete set by name: ``model-00001-of-00003``, …"""
    matches = [_SHARD_NAME.fullmatch(name) for name in names]
    if len(names) == 1 and matches[0] is None:
        return
    sets = {(match["stem"], match["count"]) for match in matches if match}
    numbers = {int(match["number"]) for match in matches if match}
    if None in matches or len(sets) != 1 or len(names) != len(numbers) or len(names) != int(next(iter(sets))[1]):
        raise HeadspanError(
            f"{reference} has no index, and {', '.join(names[:4])} are not all shards of one model: "
            "add the index file or the shards that are missing"
        )


def read_index(path: Path) -> dict[str, str]:
    """The tensor → shard map of an index file; all shard names are checked before any file is opened."""
    weight_map = read_json(path, INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeadspanError(f"{path} has no weight_map: it is not the index of a sharded checkpoint")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise HeadspanError(f"{path} has a weight_map whose values are not all file names")
    shards = dict.fromkeys(weight_map.values())
    if len(shards) > SHARDS_LIMIT:
        raise HeadspanError(f"{path} names {len(shards)} weight files, more than any real model has")
    for shard in shards:
        member(path.parent, shard)
        if not shard.endswith(WEIGHT_SUFFIXES):
            raise HeadspanError(f"{path} names the shard {shard[:80]!r}, which is not a weight file")
    return weight_map


def _required(config: dict[str, Any] | None, reference: str) -> dict[str, Any]:
    if config is None:
        raise HeadspanError(f"{reference} has no config.json: put the model's config.json next to its weights")
    return config
