"""Open any model reference as named tensors, lazily."""
