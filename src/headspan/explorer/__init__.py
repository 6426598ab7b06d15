"""The explorer: HTML pages of results, changes and galleries."""
