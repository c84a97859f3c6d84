"""The embedded engine: the part of SGLang's HTTP protocol that RL uses, over a causal language model.

A request's way: `generation` takes the HTTP call, `protocol` checks it and makes a `request`, `frontend`
waits for it, `worker` carries it to the one thread that owns the model. There `engine.step()` schedules
(`scheduler`), runs (`runner` over `kv_cache`), samples (`sampler`) and hands on what changed; `reply` builds
the answer.

`control` has the routes that pause and that bring new `weights`, `about` those that tell how things are.

Where it differs from SGLang, on purpose (`docs/engines.md` has all of it, and why): an abort takes effect at
once, also while paused and for requests held at the door; `/health` answers while paused; `sampling_seed`
works, and the samples of n > 1 differ; an update that flushes the cache under requests paused in place is
refused before it changes anything; tensors come as base64 of safetensors bytes, never as a pickle; token ids
beyond the vocabulary are refused.
Not there: sessions, LoRA, grammars, multimodal input, and the OpenAI endpoints.
"""
