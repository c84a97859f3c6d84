"""The embedded engine: the part of SGLang's HTTP protocol that RL uses, over a causal language model.

A request's way: `generation` takes the HTTP call, `protocol` checks it and makes a `request`, `frontend`
waits for it, `worker` carries it to the one thread that owns the model. There `engine.step()` schedules
(`scheduler`), runs (`runner` over `kv_cache`), samples (`sampler`) and hands on what changed; `reply` builds
the answer.

`control` has the routes that pause and that bring new `weights`, `about` those that tell how things are.
`launch.EmbeddedEngine` starts a server in a process of its own.
"""
