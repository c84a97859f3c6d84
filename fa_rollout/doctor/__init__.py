"""`fa-rollout-proc doctor`: checks everything that a run depends on.

In addition to `preflight`, it calls engines, imports and calls user code, and encodes prompts. Each check is
a function that returns `Outcome`s; `examination` calls them in order.
"""
