"""Compute the scores of all pairs of heads from their weights."""
