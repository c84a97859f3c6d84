"""Requests and the model: sampling, KV cache, forward passes, weights. Knows no HTTP and no threads."""
