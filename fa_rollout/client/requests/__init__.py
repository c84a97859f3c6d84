"""Requests in flight: deadlines, aborts, retries, and what is counted."""
