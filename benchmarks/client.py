"""The engine client against the scripted engine: CPU per sample, loop gaps, refill of slots, memory.

    python -m benchmarks.client --json OUT [--quick] [--slime CHECKOUT]

Each row is measured in a process of its own, with the engine in another. CPU is the client's process time
after a first wave that opens the connections. Beside the pool run an `httpx` and `json` client of the common
shape, and, where a checkout is given, slime's own `post` and `Sample`.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from benchmarks.host import host
from fa_rollout.client import EnginePool
from fa_rollout.client.wire.decode import decode_reply
from fa_rollout.client.wire.request import generate_body
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine

PROMPT = np.arange(2, 258, dtype=np.int32)
SAMPLING = {"max_new_tokens": 1 << 20, "temperature": 1.0, "top_p": 1.0}
Ask = Callable[[int], Coroutine[Any, Any, int]]
"""One sample, by its number; returns how many tokens it has."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement to make."""

    kind: str
    client: str = "pool"
    tokens: int = 512
    in_flight: int = 512
    num_samples: int = 2048
    """Counted ones: between the first wave and the last."""
    latency_s: float = 1.0
    slime: str | None = None


def plan(*, quick: bool, slime: str | None) -> list[Row]:
    """All rows of a run."""
    rows = [Row(kind="idle")] + [Row(kind="decode", tokens=tokens) for tokens in (512, 4096)]
    clients = ["pool", *(["httpx"] if not left_out() else [])]
    if slime:
        clients.append("slime")
    for tokens in (512, 4096):
        for in_flight, latency_s in ((32, 0.1), (512, 2.0), (4096, 10.0)):
            if quick and (in_flight == 4096 or (tokens, in_flight) == (4096, 32)):
                continue
            for client in clients if in_flight < 4096 else clients[:1]:  # the others need minutes there
                num_samples = (512 if quick else 2048) if client == "pool" else 256
                load = Row(kind="load", client=client, tokens=tokens, in_flight=in_flight)
                rows.append(
                    msgspec.structs.replace(load, num_samples=num_samples, latency_s=latency_s, slime=slime)
                )
    most = 1024 if quick else 8192
    rows.append(Row(kind="load", in_flight=most, num_samples=most // 2, latency_s=most / 400))
    rows.append(Row(kind="refill", in_flight=64, num_samples=1024 if quick else 4096, latency_s=0.2))
    rows.append(Row(kind="storm", tokens=40_000 if quick else 180_000, in_flight=16, num_samples=16))
    return rows


def left_out() -> dict[str, str]:
    """Clients that cannot be measured here, and why."""
    return {} if importlib.util.find_spec("httpx") else {"httpx": "package httpx is not installed"}


class Gaps:
    """How long the event loop kept others waiting: a beat every few milliseconds, and how late each was.

    Lateness by the clock counts what else the machine did; by CPU time, the loop's own work alone.
    """

    BEAT_S = 0.004

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._busy_s: list[float] = []

    async def beat(self) -> None:
        """Until cancelled."""
        while True:
            due, busy_s = time.perf_counter() + self.BEAT_S, time.thread_time()
            await asyncio.sleep(self.BEAT_S)
            self._late_s.append(time.perf_counter() - due)
            self._busy_s.append(time.thread_time() - busy_s)

    def take(self) -> dict[str, dict[str, float]]:
        """p50, p99 and the longest of both since the last call."""
        found = {"loop_gap_ms": _spread_ms(self._late_s), "loop_busy_ms": _spread_ms(self._busy_s)}
        self._late_s.clear()
        self._busy_s.clear()
        return found


async def pool_client(stack: AsyncExitStack, url: str, in_flight: int, slime: str | None) -> Ask:
    """The product's client."""
    pool = await stack.enter_async_context(EnginePool([url], max_concurrent_samples=in_flight))

    async def ask(number: int) -> int:
        completion = await pool.generate(rid=f"r{number}", input_ids=PROMPT, sampling_params=SAMPLING)
        return len(completion.output_ids)

    return ask


async def httpx_client(stack: AsyncExitStack, url: str, in_flight: int, slime: str | None) -> Ask:
    """What rollout code commonly does: httpx, json, a list of Python numbers per sample."""
    import httpx

    limits = httpx.Limits(max_connections=in_flight)
    client = await stack.enter_async_context(
        httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None), trust_env=False)
    )

    async def ask(number: int) -> int:
        payload = {"input_ids": PROMPT.tolist(), "sampling_params": SAMPLING, "return_logprob": True}
        response = await client.post(f"{url}/generate", json=payload)
        response.raise_for_status()
        items = json.loads(response.content)["meta_info"]["output_token_logprobs"]
        tokens, logprobs = [item[1] for item in items], [item[0] for item in items]
        return min(len(tokens), len(logprobs))

    return ask


async def slime_client(stack: AsyncExitStack, url: str, in_flight: int, slime: str | None) -> Ask:
    """slime's HTTP helper and its sample, without its tokenizer and its reward."""
    sys.path.insert(0, str(slime))
    from slime.utils import http_utils  # type: ignore[import-not-found]
    from slime.utils.types import Sample  # type: ignore[import-not-found]

    args = SimpleNamespace(
        rollout_num_engines=1, sglang_server_concurrency=in_flight, use_distributed_post=False
    )
    http_utils.init_http_client(args)

    async def ask(number: int) -> int:
        sample = Sample(tokens=PROMPT.tolist())
        payload = {"input_ids": sample.tokens, "sampling_params": SAMPLING, "return_logprob": True}
        output = await http_utils.post(f"{url}/generate", payload)
        items = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            None,
            tokens=[item[1] for item in items],
            log_probs=[item[0] for item in items],
            trainable=True,
            text=output["text"],
        )
        return int(sample.response_length)

    return ask


CLIENTS = {"pool": pool_client, "httpx": httpx_client, "slime": slime_client}


async def measure_load(row: Row, engine: ScriptedEngine) -> dict[str, Any]:
    """`in_flight` callers, each asking again when it is answered; first and last wave do not count."""
    gaps, numbers = Gaps(), iter(range(2 * row.in_flight + row.num_samples))
    marks: dict[int, tuple[float, float, dict[str, Any]]] = {}
    num_done = num_tokens = 0
    async with AsyncExitStack() as stack:
        base_bytes = _resident_bytes()
        ask = await CLIENTS[row.client](stack, engine.url, row.in_flight, row.slime)

        async def caller() -> None:
            nonlocal num_done, num_tokens
            for number in numbers:
                count = await ask(number)
                num_tokens += count
                num_done += 1
                if num_done in (row.in_flight, row.in_flight + row.num_samples):
                    marks[num_done] = (time.process_time(), time.perf_counter(), gaps.take())

        async with asyncio.TaskGroup() as group:
            heart = group.create_task(gaps.beat())
            await asyncio.wait([group.create_task(caller()) for _ in range(row.in_flight)])
            heart.cancel()
        held_bytes = _resident_bytes() - base_bytes
    (cpu_begin_s, begin_s, _), (cpu_end_s, end_s, found) = marks.values()
    return {
        "cpu_ms_per_sample": 1e3 * (cpu_end_s - cpu_begin_s) / row.num_samples,
        "samples_per_s": row.num_samples / (end_s - begin_s),
        "tokens_per_sample": num_tokens / num_done,
        "memory_kib_per_request": held_bytes / 1024 / row.in_flight,
        **found,
    }


async def measure_refill(row: Row, engine: ScriptedEngine) -> dict[str, Any]:
    """More callers than slots: from an answer in the caller's hands to the next request at the engine."""
    done_s: list[float] = []
    async with AsyncExitStack() as stack:
        ask = await pool_client(stack, engine.url, row.in_flight, None)
        numbers = iter(range(row.num_samples))

        async def caller() -> None:
            for number in numbers:
                await ask(number)
                done_s.append(time.monotonic())

        async with asyncio.TaskGroup() as group:
            for _ in range(2 * row.in_flight):
                group.create_task(caller())
    arrived_s = sorted(r.time_s for r in engine.requests("/generate") if "probe" not in (r.rid or ""))
    waits = np.array(arrived_s[row.in_flight :]) - np.sort(done_s)[: row.num_samples - row.in_flight]
    return {"refill_ms": _spread_ms(waits)}


async def measure_storm(row: Row, engine: ScriptedEngine) -> dict[str, Any]:
    """Large answers that all land at once."""
    gaps = Gaps()
    async with AsyncExitStack() as stack:
        ask = await pool_client(stack, engine.url, row.in_flight, None)
        async with asyncio.TaskGroup() as group:
            heart = group.create_task(gaps.beat())
            calls = [group.create_task(ask(number)) for number in range(row.num_samples)]
            await asyncio.wait(calls)
            heart.cancel()
    return {"tokens": sum(call.result() for call in calls), **gaps.take()}


async def measure_idle(row: Row, engine: ScriptedEngine) -> dict[str, Any]:
    """Loop gaps of a loop that does nothing: what the machine's other work costs."""
    gaps = Gaps()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(gaps.beat(), 3.0)
    return {**gaps.take()}


async def measure_decode(row: Row, engine: ScriptedEngine) -> dict[str, Any]:
    """The decoding of one answer alone; the best of many, in milliseconds."""
    import aiohttp

    body = generate_body("r", PROMPT, SAMPLING, options={})
    async with (
        aiohttp.ClientSession(trust_env=False) as session,
        session.post(f"{engine.url}/generate", data=body) as response,
    ):
        answer = await response.read()

    def plain() -> None:
        tree = json.loads(answer)
        items = tree["meta_info"]["output_token_logprobs"]
        np.array([item[1] for item in items], np.int32)
        np.array([item[0] for item in items], np.float32)

    return {
        "bytes": len(answer),
        "decode_ms": _best_ms(lambda: decode_reply(answer)),
        "json_ms": _best_ms(plain),
    }


_KINDS = {
    "idle": measure_idle,
    "load": measure_load,
    "refill": measure_refill,
    "storm": measure_storm,
    "decode": measure_decode,
}


def _spread_ms(times_s: Any) -> dict[str, float]:
    return {
        name: float(np.percentile(times_s, q) * 1e3) for name, q in (("p50", 50), ("p99", 99), ("max", 100))
    }


def _best_ms(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(100):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def script_of(row: Row) -> Script:
    """The engine that a row needs: latencies are spread, so that requests do not march in step."""
    if row.kind == "storm":
        rules = [Rule(rid="-r", delay_s=1.0)]
        return Script(lengths=Lengths(tokens=row.tokens), rules=rules)
    if row.kind == "decode":
        return Script(lengths=Lengths(tokens=row.tokens))
    spread = Lengths(kind="uniform", low=int(row.tokens * 0.8), high=int(row.tokens * 1.2))
    return Script(lengths=spread, tokens_per_s=row.tokens / row.latency_s)


def run_row(row: Row) -> dict[str, Any]:
    """One measurement, in this process."""
    logging.disable(logging.INFO)
    gc.freeze()
    gc.set_threshold(2_000, 10, 1_000)  # a full collection walks every object of every request in flight
    with ScriptedEngine.start(script_of(row)) as engine:
        return asyncio.run(_KINDS[row.kind](row, engine))


def _in_own_process(row: Row) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.client", "--row", msgspec.json.encode(row).decode()]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    """All rows, printed as they come and written as one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rows")
    parser.add_argument("--slime", help="a checkout of slime, to measure its client too")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(run_row(msgspec.json.decode(arguments.row, type=Row))))
        return
    results = []
    for row in plan(quick=arguments.quick, slime=arguments.slime):
        results.append(msgspec.to_builtins(row) | {"results": _in_own_process(row)})
        print(_line(results[-1]), flush=True)
    for name, reason in left_out().items():
        print(f"left out: {name}: {reason}")
    if arguments.json:
        report = {"benchmark": "client", "quick": arguments.quick, "host": host(), "rows": results}
        report["left_out"] = left_out()
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def _line(result: dict[str, Any]) -> str:
    name = (
        f"{result['kind']:7}{result['client']:6}{result['tokens']:>7} tokens {result['in_flight']:>5} at once"
    )
    return f"{name}  " + " ".join(f"{key}={_shown(value)}" for key, value in result["results"].items())


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(f"{part:.3g}" for part in value.values())
    return f"{value:.4g}"


if __name__ == "__main__":
    main()
