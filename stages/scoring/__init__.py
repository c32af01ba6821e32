"""How well a finished model answers questions: lm-evaluation-harness, its tasks, and how ranks share the requests."""
