"""Our safetensors files: arrays, everything else as JSON under ``headspan``, and a hash of both.

The hash is SHA-256 over the name, type, shape and bytes of every array in the order of the names, and over the JSON
without the hash itself, keys sorted. It detects a file that was edited after headspan wrote it. It is not a
signature: anyone who edits a file on purpose can recompute it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headspan.system.atomic import write_safetensors
from headspan.system.inputs import input_file, reason
from headspan.system.memory import check_room
from headspan.vocabulary.errors import HeadspanError, warn

KEY = "headspan"  # key of the JSON in the metadata of the file
HASH = "hash"  # key of the hash in that JSON
ALTERED = "altered"  # key in the provenance of a result read from a file with a wrong hash; saving keeps it


def content_hash(tensors: Mapping[str, np.ndarray], head: Mapping[str, Any]) -> str:
    """The hash of arrays and metadata; ``head`` as read back from JSON, without its own hash.

    >>> first = content_hash({"a": np.zeros(2)}, {"k": 1})
    >>> first == content_hash({"a": np.zeros(2)}, {"k": 1, "hash": first}), first == content_hash({}, {"k": 1})
    (True, False)
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(json.dumps([name, array.dtype.name, list(tensors[name].shape)]).encode() + b"\n")
        digest.update(array.reshape(-1).view(np.uint8).data)
    said = {key: value for key, value in head.items() if key != HASH}
    digest.update(json.dumps(said, sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()}"


def write_sealed(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], head: Mapping[str, Any]) -> None:
    """Arrays and metadata as one file, atomically, with their hash."""
    plain = json.loads(json.dumps(head))  # as a reader will see it
    write_safetensors(path, tensors, {KEY: json.dumps({**plain, HASH: content_hash(tensors, plain)})})


def read_sealed(path: str | os.PathLike[str], what: str, missing: str) -> tuple[Any, dict[str, np.ndarray]]:
    """The JSON and the arrays of a file, not yet checked; the JSON is None in a file that is not ours."""
    from safetensors import SafetensorError, safe_open

    found = input_file(path, missing)
    check_room(f"reading {found}", found.stat().st_size)
    try:
        with safe_open(found, framework="numpy") as file:
            text = (file.metadata() or {}).get(KEY)
            if text is None:
                return None, {}
            return json.loads(text), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        # TypeError and others: a number type that numpy does not have
        raise HeadspanError(f"{found} cannot be read as a {what} ({reason(error)}): make it again") from error


def check_seal(
    head: Mapping[str, Any], tensors: Mapping[str, np.ndarray], path: Path, provenance: dict[str, Any], expected: bool
) -> None:
    """Warn about a file whose content was changed, and record it in the provenance.

    expected: whether files of this schema have a hash; older versions have none.
    """
    said = head.get(HASH)
    if provenance.get(ALTERED):
        why = "it was made from a file that had been edited"
    elif said is None and not expected:
        return
    elif said is None:
        why = "it has no hash, but files of its version have one"
    elif said != content_hash(tensors, head):
        why = "its hash does not match its content"
    else:
        return
    provenance[ALTERED] = True
    warn(f"{path} is not as headspan wrote it: {why}. Make it again before relying on it")
