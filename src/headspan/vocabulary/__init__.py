"""Shared vocabulary: heads, roles, pairings, ports, positions, errors and warnings."""
