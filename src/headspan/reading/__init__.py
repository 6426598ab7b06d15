"""The content of single heads, pairs and nodes: tokens, shared directions, overlaps."""
