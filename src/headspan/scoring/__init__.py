"""Weights become scores of all pairs."""
