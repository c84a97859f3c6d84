"""Samples one turn for a prompt, with as many requests as it needs."""
