"""The interface of an opened checkpoint: named tensors, read one at a time.

Every kind of reference (directory, hub id, GGUF file, live model, arrays) becomes a `TensorSource` with
Hugging Face tensor names and a Hugging Face config. This package does not know where the heads are in those tensors.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headspan.checkpoints.untrusted import Stamp, changed, reason
from headspan.system.threads import parallel_map
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    from headspan.checkpoints.tokenizer import Vocabulary


class TensorSource(ABC):
    """One opened checkpoint.

    Attributes
    ----------
    reference : what the user gave, as text.
    config : the model's config.json, or a dict with the same keys made from other metadata. A GGUF file
        adds ``"_gguf": True``.
    notes : messages for the user, for example that the model is random.
    in_memory : whether the tensors are in memory, where other code may change them.
    reads_scales : whether float8 numbers are multiplied by the scales stored next to them.
    """

    in_memory = False
    reads_scales = False

    def __init__(self, reference: str, config: dict[str, Any]) -> None:
        self.reference = reference
        self.config = config
        self.notes: list[str] = []
        self._stamps: dict[Path, Stamp] = {}
        self._hashed: dict[str, bytes] = {}

    @abstractmethod
    def names(self) -> Collection[str]:
        """Names of all tensors, in Hugging Face's spelling."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, known without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """How a tensor is stored: "float32", "bfloat16", "float64", "Q4_1", …"""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """Stored size of a tensor in bytes."""

    @abstractmethod
    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """One tensor (or a slice of its rows) as float32, without rounding; float64 stays float64."""

    def files(self) -> list[Path]:
        """Local files behind this source, in a fixed order; none for live models and arrays."""
        return list(self._stamps)

    def fingerprint(self, names: Iterable[str] | None = None) -> str:
        """sha256 of the config and of every stored byte of these tensors (by default, of all)."""
        hashes = self.hashes(self.names() if names is None else names)
        digest = hashlib.sha256(canonical_json(self.config))
        for name in sorted(hashes):
            digest.update(canonical_json(name) + hashes[name])
        return digest.hexdigest()

    def hashes(self, names: Iterable[str]) -> dict[str, bytes]:
        """sha256 of each stored tensor: number type, shape and every byte.

        A tensor in a file is hashed once, as long as the file's stamp does not change; a tensor in memory every time.
        """
        self._check_stamps()
        wanted = list(dict.fromkeys(names))
        self._hash_all([name for name in wanted if self.in_memory or name not in self._hashed])
        return {name: self._hashed[name] for name in wanted}

    def _hash_all(self, names: Collection[str]) -> None:
        self._hashed |= zip(names, parallel_map(self._hash, names), strict=True)

    @abstractmethod
    def _hash(self, name: str) -> bytes:
        """sha256 of everything that determines the numbers of a tensor."""

    def check_unchanged(self) -> None:
        """Raise if hashed tensors have changed since, or a file of this source changed or disappeared."""
        self._check_stamps()
        before = dict(self._hashed)
        if self.in_memory or any(stamp.young for stamp in self._stamps.values()):  # stamps are not reliable here
            self._hash_all(before)
        if before != self._hashed:
            raise changed(self.reference)

    def _check_stamps(self) -> None:
        for path, stamp in list(self._stamps.items()):
            stamp.check(path)

    def vocabulary(self) -> Vocabulary | None:
        """The tokens of the model's tokenizer, or None if there is no tokenizer."""
        return None

    def close(self) -> None:
        """Release files and memory; the source cannot be read afterwards."""
        self._stamps.clear()
        self._hashed.clear()

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _missing(self, name: str) -> HeadspanError:
        return HeadspanError(f"{self.reference} has no tensor named {name!r}")


def canonical_json(value: object) -> bytes:
    """The same bytes for equal values, whatever the order of their keys."""
    try:
        return json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:  # mixed key types, cycles, deep nesting
        raise HeadspanError(f"the config cannot be written as JSON: {reason(error)}") from None
