"""The transcoders of a model's MLPs, one per layer: files of circuit-tracer or Gemma Scope, or directories of SAELens.

They are named by one path with ``{}`` in place of the layer: ``relu/layer_{}.safetensors``, ``scope/{}/params.npz``,
``sae-lens/blocks.{}``. A file has W_enc and W_dec, stored either way round; the axis of d_model tells which.
"""

from __future__ import annotations

import os
from pathlib import Path

from headspan.models.weights import AttentionWeights
from headspan.node_kinds.files import open_vectors
from headspan.node_kinds.node_sets import check_name
from headspan.node_kinds.saes import Features
from headspan.system.inputs import is_directory, mode_of
from headspan.vocabulary.errors import HeadspanError, quoted

INPUT_HOOK = "hook_mlp_in"  # the stream between attention and MLP, before its norm
_PLACE = "{}"


class FileTranscoder(Features):
    """The features of one file."""

    def __init__(self, weights: AttentionWeights, path: Path, layer: int, hook: str) -> None:
        self.label, self.d_model, self.notes = str(path), weights.d_model, []
        self._stem = check_name(f"transcoder{layer}")
        file = open_vectors(path)
        if not {"W_enc", "W_dec"} <= set(file.names()):
            held = ", ".join(sorted(map(str, file.names()))[:6])
            raise HeadspanError(
                f"{path} holds no W_enc and W_dec but {held[:200]}. Give single-layer transcoders; cross-layer "
                "transcoders are not read"
            )
        hooks = {"hook_name": f"blocks.{layer}.{hook}", "hook_name_out": f"blocks.{layer}.hook_mlp_out"}
        self._config = {"architecture": "transcoder", **hooks}
        self._read_from(weights, file, None)


def transcoder(weights: AttentionWeights, pattern: str, layer: int, hook: str = INPUT_HOOK) -> Features:
    """The transcoder of one layer; ``hook``: where those of files read, for example ln2.hook_normalized."""
    if _PLACE not in pattern or "\0" in pattern:
        raise HeadspanError(
            f"{quoted(pattern)} does not name transcoders: write {_PLACE} for the layer, as in tc_{_PLACE}.safetensors"
        )
    path = Path(os.path.expanduser(pattern.replace(_PLACE, str(layer))))
    if mode_of(path) is None:
        raise HeadspanError(
            f"there is no transcoder {quoted(path)} of layer {layer}. Give the transcoders of the graph"
        )
    return Features(weights, path, None) if is_directory(path) else FileTranscoder(weights, path, layer, hook)
