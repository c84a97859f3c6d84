"""The embedded engine, and what runs servers that somebody else wrote."""
