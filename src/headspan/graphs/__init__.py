"""Choosing edges, the graph they make, circuits and paths."""
