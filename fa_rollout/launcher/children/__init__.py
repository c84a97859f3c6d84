"""Processes that the launcher starts, watches and ends, including the hub."""
