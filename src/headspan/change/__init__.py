"""Compare two results, two models, or a series of checkpoints."""
