"""Open any model reference as named tensors, lazily."""

from headspan.checkpoints.base import TensorSource
from headspan.checkpoints.mapping import MappingSource
from headspan.checkpoints.opening import open_source

__all__ = ["MappingSource", "TensorSource", "open_source"]
