"""The embedded engine: SGLang's HTTP protocol, as far as RL needs it, over a causal language model on the CPU.

A request's way: `server` takes the HTTP call, `protocol` checks it and makes a `request`, `worker` carries it
to the one thread that owns the model, where `engine.step()` schedules (`scheduler`), runs (`runner` over
`kv_cache`), samples (`sampler`) and hands on what finished; `reply` writes the answer.

Weights enter through `weights`. `launch.EmbeddedEngine` starts a server in a process of its own.
"""
