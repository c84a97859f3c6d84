"""The one place that runs user code: generate, rewards, filters, hooks, and slime's functions.

Invariant: whatever user code does, its caller gets its result or a `UserCodeFailed` that names the place in
the user's code; nothing that it raises, cancels or never returns from reaches the generator's own tasks.
"""
