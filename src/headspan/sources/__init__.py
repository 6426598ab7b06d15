"""Open any reference to a model as named tensors, lazily."""

from headspan.sources.base import TensorSource
from headspan.sources.mapping import MappingSource
from headspan.sources.opening import open_source

__all__ = ["MappingSource", "TensorSource", "open_source"]
