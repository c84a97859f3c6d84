"""Batches, micro-batches and samples: read-only views of records."""
