"""One engine: its endpoints, control calls and capabilities."""
