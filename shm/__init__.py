"""Bytes between processes: memfd segment, ring of variable-length records, control channel. No word of RL."""
