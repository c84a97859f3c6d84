"""Starts a run's processes, watches them, and sees to it that none is left behind."""
