"""Shared by all processes of a run: logging, streams, threads, child processes, private files, masking."""
