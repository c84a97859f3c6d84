"""Checkpoints on their way out to the ranks and back in."""
