"""Shared base of the generator: tasks, gates, slots, the link to the hub."""
