"""GGUF files (llama.cpp): tensors under Hugging Face names, dequantised one at a time."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headspan.checkpoints.base import TensorSource, canonical_json
from headspan.checkpoints.dtypes import row_range
from headspan.checkpoints.gguf.config import make_config
from headspan.checkpoints.gguf.families import family_of
from headspan.checkpoints.gguf.header import GgufHeader, GgufTensor, read_header
from headspan.checkpoints.untrusted import (
    Stamp,
    check_allocation,
    member,
    open_regular,
    open_stamped,
    reason,
    update_with_range,
)
from headspan.vocabulary.errors import HeadspanError, missing_extra

if TYPE_CHECKING:
    from headspan.checkpoints.tokenizer import Vocabulary

_PART_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


class View(NamedTuple):
    """How to obtain a Hugging Face tensor from a stored one."""

    stored: str
    layout: str = "same"  # or "rope", "grouped", "transposed": see the table of families
    start: int = 0  # rows of the stored tensor
    stop: int | None = None
    layer: int = 0


class GgufSource(TensorSource):
    """One GGUF file, or all parts of a split one; ``metadata`` has the key/value pairs as plain Python values."""

    def __init__(self, path: Path, reference: str) -> None:
        super().__init__(reference, {})
        self._quantization = _gguf_package()
        self.metadata: dict[str, Any] = {}
        self._stored: dict[str, GgufTensor] = {}
        self._part_of: dict[str, Path] = {}  # stored name → file
        for part in split_parts(path):
            self._add_part(part)
        if not isinstance(self.metadata.get("general.architecture"), str):
            raise HeadspanError(f"{path} does not name its architecture: general.architecture is missing")
        if self.metadata.get("split.count", 1) not in (0, len(self._stamps)):
            raise HeadspanError(f"{path} is one part of a split GGUF, but the names of the others are not known")
        self._family = family_of(self.metadata["general.architecture"])
        self.config = make_config(self._family, self.metadata, self._stored)
        self.notes += [self._family.note] if self._family.note else []
        self._views = self._make_views()

    def _add_part(self, path: Path) -> None:
        stamp = open_regular(path)
        header = read_header(path)
        self.metadata = {**header.metadata, **self.metadata}  # the first part has the metadata of the model
        twice = self._stored.keys() & header.tensors.keys()
        if twice:
            raise HeadspanError(f"{path} is not a valid GGUF file: another part also holds {min(twice)[:80]!r}")
        self._stamps[path] = stamp
        self._stored |= header.tensors
        self._part_of |= dict.fromkeys(header.tensors, path)
        self._check_layout(path, header)

    def names(self) -> Collection[str]:
        return self._views.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        view = self._view(name)
        shape = self._stored[view.stored].shape
        if view.layout == "transposed":
            return shape[::-1]
        stop = view.stop if view.stop is not None else shape[0] if shape else 0
        return (stop - view.start, *shape[1:]) if shape else ()

    def dtype(self, name: str) -> str:
        kind: str = self._type(self._view(name).stored).name
        return _PLAIN_TYPES.get(kind, kind)

    def nbytes(self, name: str) -> int:
        view = self._view(name)
        total, shape = self._stored_bytes(view.stored), self._stored[view.stored].shape
        return total if view.stop is None else total // shape[0] * (view.stop - view.start)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        view = self._view(name)
        first, last = row_range(rows, self.shape(name), name)
        if view.layout == "same":  # read only these rows
            return self._dequantise(view.stored, view.start + first, view.start + last)
        stop = self._stored[view.stored].shape[0] if view.stop is None else view.stop
        whole = self._dequantise(view.stored, view.start, stop)
        return np.ascontiguousarray(self._undo(whole, view)[first:last])

    def vocabulary(self) -> Vocabulary | None:
        from headspan.checkpoints.tokenizer import Vocabulary

        return Vocabulary.from_gguf(self.metadata)

    def _view(self, name: str) -> View:
        if name not in self._views:
            raise self._missing(name)
        return self._views[name]

    def _make_views(self) -> dict[str, View]:
        views: dict[str, View] = {}
        for stored, tensor in self._stored.items():
            parts = stored.split(".")
            stem = parts[2] if len(parts) in (3, 4) and parts[0] == "blk" and tensor.shape else ""
            layer = int(parts[1]) if stem and parts[1].isdecimal() and len(parts[1]) < 7 else 0
            found = self._views_of(stored, tensor, stem, layer)
            twice = min(views.keys() & found.keys(), default=None)
            if twice is not None:
                raise HeadspanError(
                    f"{self.reference} holds {twice[:80]!r} twice, as {views[twice].stored[:80]!r} and {stored[:80]!r}"
                )
            views |= found
        return views

    def _views_of(self, stored: str, tensor: GgufTensor, stem: str, layer: int) -> dict[str, View]:
        family, layout = self._family, "same"
        if family.unread:
            return {stored: View(stored)}  # unknown: keep its name
        if stem == "attn_qkv" and not family.fused:
            return self._split(stored, tensor, layer)
        if stem in family.transposed and len(tensor.shape) == 2:
            layout = "transposed"
        elif stem == "attn_qkv" and family.grouped:
            layout = "grouped"
        elif stem in ("attn_q", "attn_k") and family.rope:
            layout = "rope"
        return {family.hf_name(stored): View(stored, layout, layer=layer)}

    def _split(self, stored: str, tensor: GgufTensor, layer: int) -> dict[str, View]:
        """Q, K and V as slices of a fused tensor, for families that Hugging Face stores separately."""
        rows, (n_heads, n_kv) = tensor.shape[0], self._heads(layer)
        size = rows // (n_heads + 2 * n_kv)
        keys, values = self.config.get("head_dim"), self.config.get("v_head_dim")
        keys, values = (keys, values) if type(keys) is int and type(values) is int else (size, size)
        if (n_heads + n_kv) * keys + n_kv * values != rows:
            raise HeadspanError(
                f"tensor {stored[:80]} of {self.reference} has {rows} rows, which {n_heads} queries, {n_kv} keys and "
                f"{n_kv} values cannot share"
            )
        bounds = (0, n_heads * keys, (n_heads + n_kv) * keys, rows)
        return {
            self._family.hf_name(stored.replace("attn_qkv", f"attn_{role}")): View(
                stored,
                "rope" if self._family.rope and role != "v" else "same",
                start=bounds[i],
                stop=bounds[i + 1],
                layer=layer,
            )
            for i, role in enumerate("qkv")
        }

    def _heads(self, layer: int) -> tuple[int, int]:
        """Query and key/value heads of a layer; both may be listed layer by layer."""

        def count(key: str) -> Any:
            value = self.metadata.get(f"{self.metadata['general.architecture']}.attention.{key}")
            return value[layer] if isinstance(value, list) and layer < len(value) else value

        n_heads, n_kv = count("head_count"), count("head_count_kv")
        n_kv = n_heads if n_kv is None else n_kv
        if type(n_heads) is not int or type(n_kv) is not int or n_heads < 1 or n_kv < 1:
            raise HeadspanError(f"{self.reference} does not say how many heads layer {layer} has")
        return n_heads, n_kv

    def _undo(self, array: np.ndarray, view: View) -> np.ndarray:
        """Reorder a stored tensor to Hugging Face's layout."""
        if view.layout == "transposed":
            return array.T
        n_heads, n_kv = self._heads(view.layer)
        if view.layout == "rope":
            heads = n_kv if ".attn_k." in view.stored or view.start else n_heads
            self._check_rows(array, 2 * heads, view)
            pairs = array.reshape(heads, -1, 2, *array.shape[1:])
            return pairs.swapaxes(1, 2).reshape(array.shape)
        self._check_rows(array, n_heads + 2 * n_kv, view)
        if n_heads % n_kv:
            raise HeadspanError(f"{self.reference} has {n_heads} query heads, which {n_kv} KV heads cannot share")
        size = len(array) // (n_heads + 2 * n_kv)
        parts = np.split(array, [n_heads * size, (n_heads + n_kv) * size])
        grouped = [part.reshape(n_kv, -1, size, *array.shape[1:]) for part in parts]
        return np.concatenate(grouped, axis=1).reshape(array.shape)

    def _check_rows(self, array: np.ndarray, divisor: int, view: View) -> None:
        if len(array) % divisor:
            raise HeadspanError(
                f"tensor {view.stored} of {self.reference} has {len(array)} rows, not a multiple of {divisor}"
            )

    def _type(self, stored: str) -> Any:
        number = self._stored[stored].type
        try:
            return self._quantization.GGMLQuantizationType(number)
        except ValueError:
            raise HeadspanError(
                f"tensor {stored} of {self.reference} has the unknown quantisation type {number}:"
                " a newer gguf package may know it"
            ) from None

    def _stored_bytes(self, stored: str) -> int:
        shape = self._stored[stored].shape
        block, size = self._quantization.GGML_QUANT_SIZES[self._type(stored)]
        if shape and shape[-1] % block:
            raise HeadspanError(
                f"tensor {stored} of {self.reference} has rows of {shape[-1]}, not in blocks of {block}"
            )
        return math.prod(shape) // block * size

    def _check_layout(self, path: Path, header: GgufHeader) -> None:
        """Refuse tensors that lie outside the file or overlap; unknown types are reported when read."""
        position, size = header.size, self._stamps[path].size
        for stored, tensor in sorted(header.tensors.items(), key=lambda item: item[1].offset):
            try:
                length = self._stored_bytes(stored)
            except HeadspanError:
                continue
            if tensor.offset < position:
                raise HeadspanError(f"{path} is not a valid GGUF file: tensor {stored[:80]!r} overlaps another")
            position = tensor.offset + length
            if position > size:
                raise HeadspanError(
                    f"{path} is truncated: tensor {stored[:80]!r} ends at byte {position}, the file at {size};"
                    " download it again"
                )

    def _dequantise(self, stored: str, first: int, last: int) -> np.ndarray:
        """Rows of one stored tensor as float32 (float64 stays)."""
        kind, shape, path = self._type(stored), self._stored[stored].shape, self._part_of[stored]
        per_row = self._stored_bytes(stored) // max(1, shape[0] if shape else 1)
        wanted = (last - first, *shape[1:]) if shape else ()
        check_allocation(f"tensor {stored} of {path}", math.prod(wanted) * 4)
        stamp = self._stamp_of(path)
        try:
            with path.open("rb") as file:
                stamp.check_open(path, file.fileno())
                file.seek(self._stored[stored].offset + first * per_row)
                raw = np.frombuffer(file.read((last - first) * per_row), np.uint8)
                stamp.check_open(path, file.fileno())
            if kind.name == "F64":
                return raw.view("<f8").reshape(wanted).copy()
            rows = raw.reshape(math.prod(wanted[:-1]), -1) if raw.size else raw.reshape(0, per_row)
            with np.errstate(over="ignore", invalid="ignore"):  # NaN scales are reported where the numbers are used
                numbers = np.asarray(self._quantization.dequantize(rows, kind), np.float32).reshape(wanted)
            return numbers if numbers.flags.writeable else numbers.copy()  # float32 is a view of the bytes read
        except NotImplementedError:
            raise HeadspanError(
                f"tensor {stored} of {self.reference} is stored as {kind.name},"
                " which the gguf package cannot dequantise"
            ) from None
        except (OSError, ValueError, AssertionError) as error:
            raise HeadspanError(f"tensor {stored} of {path} cannot be read: {reason(error)}") from None

    def _stamp_of(self, path: Path) -> Stamp:
        if path not in self._stamps:
            raise HeadspanError(f"{self.reference} is closed and cannot be read: open it again")
        return self._stamps[path]

    def _hash(self, name: str) -> bytes:
        view = self._view(name)
        path, tensor = self._part_of[view.stored], self._stored[view.stored]
        digest = hashlib.sha256(canonical_json([view, self._type(view.stored).name, tensor.shape]))
        end = tensor.offset + self._stored_bytes(view.stored)
        with open_stamped(path, self._stamp_of(path)) as file:
            update_with_range(digest, file, tensor.offset, end, path)
        return digest.digest()


def split_parts(path: Path) -> list[Path]:
    """All parts of a split GGUF file, from the name of any part; for other files, the file itself.

    >>> [part.name for part in split_parts(Path("m-00002-of-00002.gguf"))]
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    names = [f"{match['stem']}-{n:05d}-of-{match['count']}.gguf" for n in range(1, int(match["count"]) + 1)]
    return [path if name == path.name else member(path.parent, name) for name in names]


def _gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise missing_extra("gguf", "gguf", "reading GGUF files") from None
    return gguf
