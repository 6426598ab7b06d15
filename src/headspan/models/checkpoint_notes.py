"""Notes on a checkpoint for the user: what is left out, what is unusual, what is contradictory."""

from __future__ import annotations

import numpy as np

from headspan.models.families.latent_attention import latent_notes
from headspan.models.families.tensor_map import TensorMap, weight_of
from headspan.models.weights import AttentionWeights
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role

# Masked language models: the layer between the last norm and the unembedding.
_HEADS = (
    "cls.predictions.transform.dense.weight", "generator_predictions.dense.weight", "head.dense.weight",
    "lm_head.dense.weight", "vocab_transform.weight",
)  # fmt: skip
_STREAMS = (
    "it has several residual streams in one set of coordinates, which heads read and write with weights for each "
    "token: spans do not change, but effects cannot be measured"
)
_SAMPLED = 32  # number of rows compared between two tensors


def checkpoint_notes(weights: AttentionWeights, tensors: TensorMap) -> list[str]:
    """Notes on the weights of a checkpoint, from the weights and the map of their tensors."""
    entry, notes = tensors.entry, []
    left_out = sorted(set(range(tensors.n_layers)) - set(tensors.layers))
    if left_out:
        notes.append(
            f"{len(left_out)} of {tensors.n_layers} layers have no softmax attention and are left out "
            f"({_ranges(left_out)}); the other layers keep their numbers"
        )
    if len({tensors.sizes[layer] for layer in tensors.layers if layer not in tensors.kv_layers}) > 1:
        notes.append(
            f"its layers differ: {weights.ports.a_layer(Role.O)} heads with {weights.ports.a_layer(Role.V)} key/value "
            "heads; reported sizes of a layer are the largest"
        )
    if tensors.kv_layers:
        notes.append(
            f"layers {_ranges(sorted(tensors.kv_layers))} have no keys and values of their own: their heads use "
            f"those of layers {_ranges(sorted(set(tensors.kv_layers.values())))}, where they are listed once"
        )
    if entry.streams:
        notes.append(_STREAMS)
    notes += [] if entry.remark is None else [entry.remark]
    qk_norm = tensors.in_layer(tensors.layers[0], entry.qk_norm) + "."
    if any(name.startswith(qk_norm) for name in tensors.names):
        notes.append(
            "queries and keys are normalised after projection (QK-norm): the weights are those before the norm; "
            "its gains do not change what a head's weight spans"
        )
    if tensors.latents:
        shapes = {layer: tensors.latents[layer] for layer in tensors.layers}
        notes += latent_notes(shapes, effects=tensors.even and not (entry.streams or entry.rotary_norm))
    if any(name in tensors.names for name in _HEADS):
        notes.append(
            "there is an extra layer between the stream and the unembedding: the tokens of heads are computed "
            "without it"
        )
    if not weights.value_bias_is_constant:
        notes.append(
            "a value bias does not give a constant output here (attention sinks, clipped or normalised values, or an "
            "output gate): folding leaves it unchanged"
        )
    return notes + _contradictions(weights, tensors)


def _contradictions(weights: AttentionWeights, tensors: TensorMap) -> list[str]:
    """Notes on contradictions in a checkpoint that can still be read."""
    notes = []
    kinds = weights.storage_dtypes()
    if len(kinds) > 1 and not tensors.source.config.get("_gguf"):
        notes.append(
            f"the weights are stored in {len(kinds)} number types ({', '.join(kinds)}): each weight's rank is "
            "judged by its own type"
        )
    if tensors.tied and not weights.tied_embedding:
        notes.append(
            f"the config ties the unembedding to the embedding, but {tensors.unembedding} differs "
            f"from {_embedding(tensors)}: tokens are read from {tensors.unembedding}"
        )
    return notes


def unembedding_differs(tensors: TensorMap) -> bool:
    """Whether the config ties the unembedding to the embedding but the checkpoint holds a different one."""
    own, embedding = tensors.unembedding, _embedding(tensors)
    if own is None or own == embedding or not tensors.tied or embedding not in tensors.names:
        return False
    return not _same_rows(tensors, own, embedding)


def _embedding(tensors: TensorMap) -> str:
    return weight_of(tensors.in_body(tensors.entry.embedding))


def _same_rows(tensors: TensorMap, first: str, second: str) -> bool:
    """Whether two tensors are equal, by shape and by a sample of rows; True if they cannot be read."""
    if getattr(tensors.source, "commit", None):
        return True  # do not download an unneeded shard for a note
    try:
        shape = tensors.shape(first)
        if shape != tensors.shape(second):
            return False
        starts = np.unique(np.linspace(0, max(0, shape[0] - 1), _SAMPLED).astype(int)).tolist()
        rows = [slice(start, start + 1) for start in starts]
        read = tensors.source.read
        return all(np.array_equal(read(first, row), read(second, row)) for row in rows)
    except (HeadspanError, IndexError):
        return True  # not needed yet; reading it later will raise


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0–2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)
