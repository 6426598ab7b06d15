"""Edge selection, the resulting graph, circuits and paths."""
