"""The demo: a real run on one machine without a GPU, small enough to watch."""
