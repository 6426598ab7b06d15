"""Chance, significance, hubs and areas under curves."""
