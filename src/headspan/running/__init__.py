"""Everything that runs a model: attention patterns, head scores, effects of edges."""
