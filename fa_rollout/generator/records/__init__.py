"""Finished groups become records in the ring and entries of the sample log."""
