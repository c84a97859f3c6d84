"""A small stand-in for slime, built from its contract: the types, calls and orders that the plug-in meets."""
