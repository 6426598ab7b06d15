"""Open a reference with the source for its kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headspan.checkpoints.base import TensorSource
from headspan.checkpoints.huggingface import WEIGHT_SUFFIXES, LocalFiles, open_checkpoint
from headspan.checkpoints.untrusted import reason
from headspan.vocabulary.errors import HeadspanError


def open_source(ref: Any, download: bool = False) -> TensorSource:
    """Open a model as named tensors, without reading its weights; ``download`` brings whole files from the hub.

    Parameters
    ----------
    ref : a directory in Hugging Face layout, a ``.safetensors``, ``.bin``, ``.pth``, ``.pt`` or ``.gguf`` file,
        a hub id with optional ``@revision``, ``"demo"``, a live model (transformers or TransformerLens), a pair
        ``(state_dict, config)``, or a `TensorSource`, which is returned unchanged.

    >>> open_source("demo").config["model_type"]
    'gpt2'
    """
    if isinstance(ref, TensorSource):
        return ref
    if isinstance(ref, (str, os.PathLike)):
        return _open_text(os.fspath(ref), not isinstance(ref, str), download)
    from headspan.checkpoints.live import open_live

    return open_live(ref)


def _open_text(text: Any, is_path: bool, download: bool) -> TensorSource:
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise HeadspanError(f"{text!r} is not a model reference: give a path, a hub id or demo")
    if text == "demo" and not is_path:  # a directory of that name is ./demo
        from headspan.checkpoints.demo import open_demo

        return open_demo()
    path = Path(os.path.expanduser(text))  # an unknown ~name stays unchanged
    try:
        if path.is_dir():
            return open_checkpoint(LocalFiles(path), text)
        if path.exists() or path.is_symlink():
            return _open_file(path, text)
    except (OSError, RuntimeError) as error:
        raise HeadspanError(f"{text[:200]} cannot be opened: {reason(error)}") from None
    from headspan.checkpoints.hub.repository import HubReference, open_hub

    hub = None if is_path else HubReference.parse(text)
    if hub is None:
        raise HeadspanError(f"{text[:200]}: no such file or directory, and not the id of a model on the hub")
    return open_hub(hub, download)


def _open_file(path: Path, text: str) -> TensorSource:
    if path.suffix == ".gguf":
        from headspan.checkpoints.gguf.file import GgufSource

        return GgufSource(path, text)
    if path.suffix in WEIGHT_SUFFIXES:
        return open_checkpoint(LocalFiles(path.parent, given=path.name), text, [path.name])
    raise HeadspanError(
        f"{text} is not a model: expected a directory or a file ending in {', '.join(WEIGHT_SUFFIXES)} or .gguf"
    )
