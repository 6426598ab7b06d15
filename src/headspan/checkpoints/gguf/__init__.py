"""GGUF files: header, tensors, families, vocabulary."""
