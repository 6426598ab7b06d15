"""Open a model's attention weights: a checkpoint, a live model, or plain arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from headspan.models.weights import AttentionWeights
from headspan.results.scores import is_result
from headspan.system.deprecation import renamed
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Role

if TYPE_CHECKING:
    from headspan.checkpoints.base import TensorSource


class LiveModel(Protocol):
    """A torch model in memory, of transformers (with ``config``) or TransformerLens (with ``cfg``)."""

    def state_dict(self) -> Mapping[str, object]: ...


class Array(Protocol):
    """An array of numpy, torch, …"""

    @property
    def shape(self) -> tuple[int, ...]: ...


# Weights by role, and what else `ArrayWeights` takes by name; or a state dict of TransformerLens.
Arrays: TypeAlias = Mapping[str, Array] | Mapping[str, Array | str | float] | Mapping[Role, Array]
StateAndConfig: TypeAlias = tuple[Mapping[str, Array], object]  # a state dict, and a config or a dict of it
LiveLike: TypeAlias = "LiveModel | tuple[LiveModel, object]"  # a model, or a model and its tokenizer
ModelLike: TypeAlias = (  # everything that `open` takes
    "str | os.PathLike[str] | AttentionWeights | LiveLike | Arrays | Sequence[Array] | StateAndConfig | TensorSource"
)


@renamed(ref="model")
def open(model: ModelLike, *, download: bool = False) -> AttentionWeights:
    """Open a model's attention weights, lazily.

    ``model`` is a directory in Hugging Face layout, a file (.safetensors, .bin, .pth, .gguf), a hub id with optional
    ``@revision``, ``"demo"``, a live torch model or ``(model, tokenizer)``, or four arrays
    ``{"Q": …, "K": …, "V": …, "O": …}`` of shape (layer, head, d_model, d_head); K and V may have fewer heads than Q
    and O.
    See :class:`headspan.models.arrays.ArrayWeights`.

    From the hub, only the tensors that are read are downloaded; ``download`` fetches whole files.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> weights = open({role: rng.normal(size=(2, 4, 16, 3)) for role in "QKVO"})
    >>> weights.read("O", 1).shape
    (4, 16, 3)
    """
    if isinstance(model, AttentionWeights):
        return model
    if isinstance(model, (list, tuple)) and len(model) == 4:
        model = dict(zip("QKVO", model, strict=True))
    if isinstance(model, Mapping) and (not model or any(str(role) in model for role in ROLES)):
        from headspan.models.arrays import ArrayWeights

        return ArrayWeights(model)
    from headspan.checkpoints.base import TensorSource
    from headspan.checkpoints.opening import open_source
    from headspan.models.checkpoint import CheckpointWeights

    refuse_result(model)
    return CheckpointWeights(model if isinstance(model, TensorSource) else open_source(model, download))


def refuse_result(ref: object) -> None:
    """Refuse a headspan result where a model is needed, since both are safetensors files."""
    if is_result(ref):
        raise HeadspanError(f"{os.fspath(ref)} is a headspan result, not a model: give the model it was made from")
