"""Turn named tensors into the d×m weights of every head."""
