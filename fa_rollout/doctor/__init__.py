"""`fa-rollout-proc doctor`: everything that a run depends on, tried before a run depends on it.

Beside what `preflight` looks at, it executes: engines are asked, user code is imported and called, prompts
are encoded. Each check is a function that returns `Outcome`s; `examination` calls them in their order.
"""
