"""Results of a run: scores and their file, and what every result has in common."""
