"""Failure policy, clocks and circuits: pure parts without HTTP."""
