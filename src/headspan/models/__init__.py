"""Named tensors become the d×m weights of every head."""
