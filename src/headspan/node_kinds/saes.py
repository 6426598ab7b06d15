"""Sparse autoencoders and transcoders in SAELens format: a directory with ``cfg.json`` and
``sae_weights.safetensors``.

A feature reads its column of W_enc and writes its row of W_dec. Its config names the hook it was trained on, and the
hook determines its position in the stream:

=====================================  =====================================  =================================
hook                                   reads                                  writes
=====================================  =====================================  =================================
hook_resid_pre L                       the stream entering layer L            before layer L
hook_resid_mid L                       between attention and MLP of layer L   there
hook_resid_post L                      the stream entering layer L + 1        before layer L + 1
hook_attn_in L, hook_mlp_in L          before attention, before the MLP
ln1.hook_normalized L, ln2, mlp.in     the same, after the norm
hook_attn_out L, hook_mlp_out L        (one output only, not the stream)      with attention, with the MLP
=====================================  =====================================  =================================

Hooks inside a block (hook_z, mlp.hook_post …) do not see vectors of the stream and are refused.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headspan.checkpoints.huggingface import LocalFiles
from headspan.checkpoints.safetensors_file import SafetensorsFile
from headspan.checkpoints.untrusted import CONFIG_LIMIT, read_json
from headspan.models.folding import FoldedWeights, through
from headspan.models.mlp import Mlps, has_parallel_blocks
from headspan.models.weights import AttentionWeights, Norm
from headspan.node_kinds.files import VectorFile, gather
from headspan.node_kinds.neurons import joined, parse_indices
from headspan.node_kinds.node_sets import NodeSet, Numbered, Place, centred_writers, check_name, stream_places
from headspan.system.inputs import is_directory
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import EMBEDDING_POSITION, NODE_ROLES, Role, attention_position, mlp_position

CONFIG = "cfg.json"
WEIGHTS = ("sae_weights.safetensors", "sae.safetensors")
# Old names -> current names.
_OLDER = {"hook_point": "hook_name", "hook_point_layer": "hook_layer", "hook_point_head_index": "hook_head_index",
          "hook_point_out": "hook_name_out", "out_hook_point": "hook_name_out"}  # fmt: skip
_SEVERAL = ("hook_name", "hook_names", "hook_points", "hooks")  # where a config may name several
_OLDER_TENSORS = {"W_enc": ("W_enc", "encoder.weight"), "W_dec": ("W_dec", "decoder.weight")}
_HOOK = re.compile(r"blocks\.(?P<layer>[0-9]{1,6})\.(?P<what>.+)")
_LAYER_OUTPUT = re.compile(r"(?:\w+\.)*(?:layers|h|blocks)\.(?P<layer>[0-9]{1,6})(?:\.hook_out)?")
_NEAR = 256  # gaps of up to this many columns of W_enc are read rather than skipped


class Hook(NamedTuple):
    """The place of a hook as a reader and as a writer, and the norm that it follows ("ln1" or "ln2")."""

    reads: Place | None
    writes: Place | None
    norm: str = ""
    layer: int = 0


def parse_hook(name: Any, weights: AttentionWeights, parallel: bool) -> Hook:
    """The position in the stream of a hook of TransformerLens (or a layer of transformers); raises if it has none."""
    text = name.strip() if isinstance(name, str) else ""
    if text == "hook_embed":
        return Hook(None, Place(EMBEDDING_POSITION, -1))
    match, output = _HOOK.fullmatch(text), _LAYER_OUTPUT.fullmatch(text)
    if match is None and output is None:
        raise HeadspanError(f"unknown hook {str(name)[:80]!r}: give a name like blocks.5.hook_resid_pre")
    layer = int((match or output)["layer"])  # type: ignore[index]
    what = "hook_resid_post" if output is not None else match["what"]  # type: ignore[index]
    if layer >= weights.n_layers:
        raise HeadspanError(
            f"{text[:80]} is not in {weights.reference}, which has the layers 0 to {weights.n_layers - 1}"
        )
    attention, mlp = Place(attention_position(layer), layer), Place(mlp_position(layer, parallel), layer)
    if what in ("hook_resid_pre", "hook_resid_post"):
        stream = stream_places(layer + (what == "hook_resid_post"), weights)
        return Hook(stream[Role.R], stream[Role.W], layer=layer)
    known = {
        "hook_resid_mid": Hook(mlp, attention),
        "hook_attn_in": Hook(attention, None),
        "hook_mlp_in": Hook(mlp, None),
        "ln1.hook_normalized": Hook(attention, None, "ln1"),
        "ln1.hook_out": Hook(attention, None, "ln1"),
        "attn.hook_in": Hook(attention, None, "ln1"),
        "ln2.hook_normalized": Hook(mlp, None, "ln2"),
        "ln2.hook_out": Hook(mlp, None, "ln2"),
        "mlp.hook_in": Hook(mlp, None, "ln2"),
        "hook_attn_out": Hook(None, attention),
        "attn.hook_out": Hook(None, attention),
        "hook_mlp_out": Hook(None, mlp),
        "mlp.hook_out": Hook(None, mlp),
    }.get(what)
    if known is None:
        raise HeadspanError(
            f"{text[:80]} is not in the residual stream, so its directions cannot be compared with what heads read and "
            "write: use hook_resid_pre, hook_resid_mid, hook_resid_post, hook_mlp_in, hook_mlp_out or hook_attn_out"
        )
    return known._replace(layer=layer)


def directory_and_features(text: str) -> tuple[Path, str | None]:
    """The directory of ``DIR`` or ``DIR:0,5,10-20``, and which features are chosen."""
    if not text.strip() or "\0" in text:
        raise HeadspanError(f"{text!r} is not a directory of a sparse autoencoder: write DIR or DIR:0,5,10-20")
    directory, chosen = Path(os.path.expanduser(text)), None
    if not is_directory(directory) and ":" in text:
        front, _, chosen = text.rpartition(":")
        directory = Path(os.path.expanduser(front))
    if not is_directory(directory):
        raise HeadspanError(f"{text[:200]}: no such directory; give the one that SAELens wrote, with its {CONFIG}")
    return directory, chosen


def sae_sets(weights: AttentionWeights, text: str) -> list[NodeSet]:
    """The features of ``DIR`` or ``DIR:0,5,10-20``."""
    return [Features(weights, *directory_and_features(text))]


class Features(Numbered):
    """Features of one sparse autoencoder or transcoder."""

    kind = "feature"

    def __init__(self, weights: AttentionWeights, directory: Path, chosen: str | None) -> None:
        self.label, self.d_model, self.notes = str(directory), weights.d_model, []
        self._stem = check_name(directory.resolve().name or "sae")
        files = LocalFiles(directory)
        present = files.names()
        name = next((name for name in WEIGHTS if name in present), None)
        if CONFIG not in present or name is None:
            raise HeadspanError(
                f"{directory} is not a sparse autoencoder of SAELens: it needs {CONFIG} and {WEIGHTS[0]}"
            )
        self._config = _flat(read_json(files.path(CONFIG), CONFIG_LIMIT))
        self._read_from(weights, SafetensorsFile(files.path(name)), chosen)

    def _read_from(self, weights: AttentionWeights, file: VectorFile, chosen: str | None) -> None:
        self._file = file
        self._encoder = self._matrix("W_enc", rows_read=False)
        self._decoder = self._matrix("W_dec", rows_read=True)
        self.population = self._count()
        self.ids = range(self.population) if chosen is None else joined(
            parse_indices(chosen, self.population, f"features of {self.label}")
        )  # fmt: skip
        self._set_places(weights)

    # -- the config ------------------------------------------------------------------------------------------

    def _set_places(self, weights: AttentionWeights) -> None:
        config = self._config
        if config.get("hook_head_index") is not None:
            raise HeadspanError(f"{self.label} was trained on one head (hook_head_index), not on the residual stream")
        parallel = has_parallel_blocks(weights)
        if not isinstance(config.get("hook_name"), str):
            seen = next((f": {key} is {str(config[key])[:80]}" for key in _SEVERAL if config.get(key)), "")
            raise HeadspanError(
                f"{self.label} does not name one hook in its {CONFIG}{seen}; a hook_name like "
                "blocks.5.hook_resid_pre is needed"
            )
        hook = parse_hook(config.get("hook_name"), weights, parallel)
        said = config.get("hook_layer")
        if isinstance(said, int) and said != hook.layer and "blocks." in config["hook_name"]:
            self.notes.append(
                f"{self._stem} names the hook {config['hook_name'][:80]} and the layer {said}: the hook's name was used"
            )
        out_name = config.get("hook_name_out")
        if self._is_transcoder() and out_name is None:
            raise HeadspanError(f"{self.label} is a transcoder, but its {CONFIG} does not name its hook_name_out")
        out = parse_hook(out_name, weights, parallel) if out_name is not None else hook
        found = {Role.R: hook.reads, Role.W: out.writes}
        if out is not hook and hook.reads and out.writes and out.writes.position < hook.reads.position:
            raise HeadspanError(
                f"{self.label} reads at {config['hook_name'][:80]} and writes at {str(out_name)[:80]}, which comes "
                f"before it: check hook_name and hook_name_out in its {CONFIG}"
            )
        self.places = {role: place for role in NODE_ROLES if (place := found[role]) is not None}
        missing = {Role.R: "has no R: its hook sees one output, not the stream", Role.W: "has no W"}
        self.notes += [f"{self._stem} {missing[role]}" for role in NODE_ROLES if found[role] is None]
        layer_norm = config.get("normalize_activations") == "layer_norm"
        self._norm = self._norm_behind(weights, hook)
        reads = layer_norm or (self._norm is not None and self._norm.kind == "layer")
        self.centred_roles = centred_writers(weights) | ({Role.R} if reads else set())

    def _is_transcoder(self) -> bool:
        return "transcoder" in str(self._config.get("architecture", "")) or "d_out" in self._config

    def _norm_behind(self, weights: AttentionWeights, hook: Hook) -> Norm | None:
        """The norm between the stream and a hook, for folded weights."""
        if not isinstance(weights, FoldedWeights) or not hook.norm:
            return None
        return weights.inner.norm(hook.layer) if hook.norm == "ln1" else Mlps(weights).norm(hook.layer)

    # -- the weights -----------------------------------------------------------------------------------------

    def _matrix(self, name: str, rows_read: bool) -> tuple[str, bool]:
        """The tensor of W_enc or W_dec, and whether its rows are the features."""
        found = next((tensor for tensor in _OLDER_TENSORS[name] if tensor in self._file.names()), None)
        if found is None:
            raise HeadspanError(f"{self.label} has no tensor {name}: it is not a sparse autoencoder of SAELens")
        shape = self._file.shape(found)
        if len(shape) > 2:
            raise HeadspanError(
                f"{name} of {self.label} has shape {tuple(shape)}, a matrix for each of several positions: crosscoders "
                "and cross-layer transcoders are not read; save the part of one position, or its vectors "
                "in a file for `nodes`"
            )
        if len(shape) != 2 or self.d_model not in shape or 0 in shape:
            raise HeadspanError(
                f"{name} of {self.label} has shape {tuple(shape)}: no axis is of d_model {self.d_model}, so it belongs "
                "to another model or another position"
            )
        if shape[0] == shape[1]:
            return found, rows_read if found == name else not rows_read
        return found, shape[1] == self.d_model

    def _count(self) -> int:
        sizes = [self._file.shape(tensor)[0 if rows else 1] for tensor, rows in (self._encoder, self._decoder)]
        if sizes[0] != sizes[1]:
            raise HeadspanError(
                f"{self.label} has {sizes[0]} features in W_enc and {sizes[1]} in W_dec: one is damaged"
            )
        return sizes[0]

    def _read(self, role: Role, ids: np.ndarray) -> np.ndarray:
        tensor, rows = self._encoder if role is Role.R else self._decoder

        def run(members: slice) -> np.ndarray:
            return self._file.read(tensor, members) if rows else self._file.read(tensor, columns=members).T

        vectors = gather(ids, run, _NEAR)[:, :, None]
        return self.centre(role, through(vectors, self._norm) if role is Role.R else vectors)


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """A config with its metadata at the top level and old names replaced by current ones."""
    metadata = config.get("metadata")
    both: dict[str, Any] = dict(metadata) if isinstance(metadata, dict) else {}
    both |= {key: value for key, value in config.items() if key != "metadata"}
    found: dict[str, Any] = {_OLDER.get(key, key): value for key, value in both.items() if value is not None}
    if isinstance(found.get("hook_name"), str) and "{layer}" in found["hook_name"]:
        found["hook_name"] = found["hook_name"].replace("{layer}", str(found.get("hook_layer")))
    return found
