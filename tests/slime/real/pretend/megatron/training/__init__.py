"""Pretended."""
