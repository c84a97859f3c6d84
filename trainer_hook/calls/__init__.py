"""The calls of the hook: steps, updates, evaluations, checkpoints."""
