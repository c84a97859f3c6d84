"""Generation beside the trainer's work: in a thread of its process, or by this system."""

import asyncio
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.interference.load import SAMPLES_PER_GROUP, Load
from benchmarks.interference.work import WARM_UP, Clocked, train

PROMPT = list(range(3, 35)) * 4


async def keep_asking(
    client: str, url: str, load: Load, put: Callable[[Any], None], over: threading.Event
) -> None:
    """`num_slots` callers, each asking again when it is answered, until `over`."""
    ask, close = _httpx(load) if client == "httpx" else _aiohttp(load)

    sampling = {"max_new_tokens": 1 << 20}
    payload = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling}

    async def caller() -> None:
        while not over.is_set():
            tree = json.loads(await ask(f"{url}/generate", payload))
            items = tree["meta_info"]["output_token_logprobs"]
            put({"tokens": PROMPT + [item[1] for item in items], "logprobs": [item[0] for item in items]})

    async with asyncio.TaskGroup() as group:
        callers = [group.create_task(caller()) for _ in range(load.num_slots)]
        await asyncio.to_thread(over.wait)
        for task in callers:
            task.cancel()
    await close()


def _httpx(load: Load) -> tuple[Any, Any]:
    import httpx

    limits = httpx.Limits(max_connections=load.num_slots)
    client = httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None), trust_env=False)

    async def ask(url: str, payload: dict[str, Any]) -> bytes:
        return (await client.post(url, json=payload)).content

    return ask, client.aclose


def _aiohttp(load: Load) -> tuple[Any, Any]:
    import aiohttp

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=load.num_slots), trust_env=False)

    async def ask(url: str, payload: dict[str, Any]) -> bytes:
        async with session.post(url, json=payload) as response:
            return await response.read()

    return ask, session.close


def beside_a_thread(
    client: str, url: str, load: Load, num_units: int, num_steps: int
) -> tuple[Clocked, float]:
    """Train with generation in a thread; also returns samples taken a second."""
    samples: queue.Queue[Any] = queue.Queue()
    over = threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(keep_asking(client, url, load, samples.put, over)), daemon=True
    )
    thread.start()
    stamps: list[float] = []

    def take() -> float:
        batch = [samples.get() for _ in range(load.groups_per_step * SAMPLES_PER_GROUP)]
        stamps.append(time.perf_counter())
        began_s = time.perf_counter()
        for sample in batch:
            np.array(sample["tokens"], np.int32), np.array(sample["logprobs"], np.float32)
        return time.perf_counter() - began_s

    clocked = train(num_units, num_steps, take)
    over.set()
    thread.join()
    return clocked, _rate(stamps, load)


def beside_the_hub(load: Load, num_units: int, num_steps: int) -> tuple[Clocked, float]:
    """Train with this system's batches, started by it."""
    from trainer_hook import TrainerHook

    stamps: list[float] = []
    with TrainerHook.attach() as hook:
        held: list[Any] = []

        def take() -> float:
            while held:
                held.pop().__exit__(None, None, None)
            block = hook.next_batch()
            batch = block.__enter__()
            held.append(block)
            stamps.append(time.perf_counter())
            began_s = time.perf_counter()
            for sample in batch.samples:
                sample.tokens, sample.logprobs  # noqa: B018
            return time.perf_counter() - began_s

        clocked = train(num_units, num_steps, take)
        while held:
            held.pop().__exit__(None, None, None)
    return clocked, _rate(stamps, load)


def _rate(stamps: list[float], load: Load) -> float:
    counted = stamps[WARM_UP:]
    return (len(counted) - 1) * load.groups_per_step * SAMPLES_PER_GROUP / (counted[-1] - counted[0])
