"""Processes that the launcher starts, the hub among them: watched, read and ended."""
