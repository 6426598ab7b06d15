"""Open any reference to a model as named tensors, lazily."""
