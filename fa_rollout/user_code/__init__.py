"""Runs user code: generate, rewards, filters, hooks, and slime's functions.

Invariant: whatever user code does, its caller gets a result or a `UserCodeFailed` that names the line in the
user's code. What it raises, cancels or never returns from does not reach the generator's own tasks.
"""
