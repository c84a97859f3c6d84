"""Reward workers: processes that call the user's function, and the pool that feeds them."""
