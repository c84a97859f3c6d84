"""What the client's tests share: a prompt, a quick failure policy, and ways to ask many times at once."""

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from fa_rollout.client import Completion, EnginePool, FailurePolicy
from tests.kit.scripted import (
    Recorded,
    ScriptedEngine,
    expected_ids,
    expected_logprobs,
    sequence_key,
)

T = TypeVar("T")

PROMPT = np.arange(5, 45, dtype=np.int32)
VOCAB_SIZE = 32000


def quick(**changes: Any) -> FailurePolicy:
    """A policy whose waits are short."""
    settings: dict[str, Any] = {
        "request_timeout_s": 20.0,
        "connect_timeout_s": 2.0,
        "start_timeout_s": 10.0,
        "unavailable_timeout_s": 5.0,
        "control_timeout_s": 3.0,
        "pause_timeout_s": 3.0,
        "update_timeout_s": 3.0,
        "abort_grace_s": 0.5,
        "backoff_base_s": 0.05,
        "overload_base_s": 0.1,
        "backoff_cap_s": 0.4,
        "probe_interval_s": 0.05,
    }
    return FailurePolicy(**(settings | changes))


async def ask(pool: EnginePool, rid: str = "r", **changes: Any) -> Completion:
    """One sample."""
    settings: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1 << 16}}
    return await pool.generate(rid=rid, **(settings | changes))


async def ask_many(pool: EnginePool, count: int, **changes: Any) -> list[Completion | BaseException]:
    """That many at once; failures are results."""
    calls = [ask(pool, f"r{i}", **changes) for i in range(count)]
    return await asyncio.gather(*calls, return_exceptions=True)


def assert_true(completion: Completion, prompt: Any = PROMPT, *, vocab_size: int = VOCAB_SIZE) -> None:
    """Ids, log-probabilities and versions are what the scripted engine must have sampled."""
    key, begin = sequence_key(prompt), len(prompt)
    ends = completion.finish == "stop"
    count = len(completion.output_ids)
    ids = expected_ids(key, begin, begin + count, vocab_size)
    stop = count - 1 if ends else count
    np.testing.assert_array_equal(completion.output_ids[:stop], ids[:stop])
    start = 0
    for label, end in completion.versions:
        expected = expected_logprobs(key, begin + start, begin + end, str(label))
        np.testing.assert_array_equal(completion.logprobs[start:end], expected)
        start = end
    assert start == count


def sent(engine: ScriptedEngine, path: str = "/generate") -> list[Recorded]:
    """Requests to a path, without those of the pool's own probes."""
    return [r for r in engine.requests(path) if "probe" not in (r.rid or "")]


def run_with(
    engine: ScriptedEngine | list[str], work: Callable[[EnginePool], Awaitable[T]], **settings: Any
) -> T:
    """Open a pool, do the work, close it."""
    urls = engine if isinstance(engine, list) else [engine.url]

    async def main() -> T:
        async with EnginePool(urls, **({"policy": quick()} | settings)) as pool:
            return await work(pool)

    return asyncio.run(main())


def as_started(engine: ScriptedEngine) -> None:
    """It reports the weights of its own start, whatever runs before have given it."""
    post(engine, "/update_weight_version", {"new_version": "default", "abort_all_requests": False})


def post(engine: ScriptedEngine, path: str, value: dict[str, Any]) -> None:
    """A control call by somebody else."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(engine.url + path, msgspec.json.encode(value)), timeout=5):
        pass


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for a condition that must come true."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - conditions are seen in other processes
            await asyncio.sleep(0.01)


def body(**changes: Any) -> bytes:
    """A reply of two tokens, with changed fields; `meta` changes meta_info, and None removes a field."""
    meta: dict[str, Any] = {
        "id": "r",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 4,
        "weight_version": "7",
        "cached_tokens": 1,
        "e2e_latency": 0.25,
        "output_token_logprobs": [[-0.5, 11, None], [-0.25, 12, None]],
        "output_token_logprobs_length": 2,
        "completion_tokens": 2,
    }
    meta |= changes.pop("meta", {})
    tree = {"text": 'so "output_ids":[1] it is', "output_ids": [11, 12], "meta_info": meta} | changes
    return msgspec.json.encode(tree)
