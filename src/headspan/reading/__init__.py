"""What single heads, pairs and nodes have in them: tokens, shared directions, overlaps."""
