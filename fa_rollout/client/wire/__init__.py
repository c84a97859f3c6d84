"""Bytes of the protocol: addresses, requests, answers."""
