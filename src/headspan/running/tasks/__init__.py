"""Which edges of a model carry a task: prompts, attribution, exact values and circuits."""
