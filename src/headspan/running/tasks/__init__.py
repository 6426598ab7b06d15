"""Tasks: prompts in pairs, and the edges of a model that carry a task."""
