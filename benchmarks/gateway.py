"""The agents' gateway: CPU per call and memory per session, beside a bare server that parses the same bodies.

    python -m benchmarks.gateway [--json OUT] [--quick]

| server | does |
|---|---|
| `gateway` | parses, finds the history, encodes what is new, answers; its engine answers at once |
| `bare` | aiohttp and msgspec: parses the body, answers a constant |

Each row has a server process of its own; its CPU is that process's time over the counted calls, without the
client's. `history` is the number of turns that every session has before the first counted call.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.engines.tiny_model import write_tiny_model
from fa_rollout.generator.agents.gateway import Gateway
from fa_rollout.generator.agents.history import History
from fa_rollout.generator.agents.parsing import parser_of
from fa_rollout.generator.agents.rendering import Rendering
from fa_rollout.generator.agents.session import Session
from fa_rollout.generator.turns.turn import Turn
from fa_rollout.sample import FinishReason, Sample
from trainer_hook.record import VersionSpan

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = "What comes next? "
ANSWER = "This does, by all that is known so far."
NUM_COUNTED = 2
"""Counted turns of each session, at least."""
MIN_CALLS = 100


class Engines:
    """Answers the same at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(ANSWER + "<eos>")

    async def generate(self, input_ids: npt.ArrayLike, sampling_params: dict[str, Any]) -> Turn:
        ids = self._ids
        return Turn(
            input_ids=np.asarray(input_ids, np.int32),
            output_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            version_spans=(VersionSpan(0, len(ids)),),
            finish_reason=FinishReason.STOP,
        )

    def decode(self, ids: npt.ArrayLike, *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def main() -> None:
    """Measure all rows and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", choices=("gateway", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--sessions", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve, arguments.sessions))
        return
    rows = []
    sizes = (
        [(1, 1), (50, 1), (1, 20)]
        if arguments.quick
        else [(1, 1), (100, 1), (2000, 1), (100, 20), (1, 100), (100, 100)]
    )
    for num_sessions, history in sizes:
        for server in ("bare", "gateway"):
            row = {"server": server, "sessions": num_sessions, "history": history}
            row |= asyncio.run(measure(server, num_sessions, history))
            rows.append(row)
            print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


async def serve(kind: str, num_sessions: int) -> None:
    """A server's process: its addresses on standard output, then until its input ends."""
    if kind == "bare":
        addresses = [f"{await bare()}/{index}" for index in range(1)] * num_sessions
        keys = ["key"] * num_sessions
    else:
        addresses, keys = await gateway(num_sessions)
    print(json.dumps([addresses, keys]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def bare() -> str:
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
        ],
    }

    async def handle(request: web.Request) -> web.Response:
        msgspec.json.decode(await request.read())
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/{session}/v1/chat/completions", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def gateway(num_sessions: int) -> tuple[list[str], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", characters=CHARACTERS)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        tokenizer = Tokenizer.load(model)
    server = Gateway("127.0.0.1", 0, "policy")
    await server.start()
    rendering, engines = Rendering(tokenizer, {}), Engines(tokenizer)
    addresses, keys = [], []
    for member in range(num_sessions):
        session = Session(
            engines=engines,
            history=History(rendering, _sample(member)),
            parse=parser_of("hermes", opens_thinking=False),
            params={"max_new_tokens": 1000, "temperature": 1.0},
            eos_ids=tokenizer.eos_ids,
        )
        server.add(session)
        addresses.append(server.address_of(session))
        keys.append(session.secret)
    return addresses, keys


def _sample(member: int) -> Sample:
    return Sample(
        group=0,
        member=member,
        attempt=0,
        epoch=0,
        prompt_index=0,
        prompt="",
        label=None,
        metadata={},
        prompt_ids=np.zeros(1, np.int32),
    )


async def measure(kind: str, num_sessions: int, history: int) -> dict[str, float]:
    """One row: warm-up turns in every session, then counted ones."""
    command = [sys.executable, "-m", "benchmarks.gateway", "--serve", kind, "--sessions", str(num_sessions)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 26
    )
    assert process.stdin is not None
    assert process.stdout is not None
    addresses, keys = json.loads(await process.stdout.readline())
    empty_kib = _resident_kib(process.pid)
    conversations: list[list[Any]] = [[] for _ in addresses]
    connector = aiohttp.TCPConnector(limit=100)
    async with aiohttp.ClientSession(connector=connector) as client:

        async def turn(index: int) -> None:
            messages = conversations[index]
            messages.append({"role": "user", "content": QUESTION * 8})
            headers = {"Authorization": f"Bearer {keys[index]}"}
            body = {"model": "policy", "messages": messages}
            url = f"{addresses[index]}/v1/chat/completions"
            async with client.post(url, json=body, headers=headers) as answer:
                reply = await answer.json()
                assert answer.status == 200, reply
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})

        for _ in range(history):
            await asyncio.gather(*map(turn, range(num_sessions)))
        full_kib = _resident_kib(process.pid)
        rounds = max(NUM_COUNTED, MIN_CALLS // num_sessions)
        before_s, begun_s = _cpu_s(process.pid), time.perf_counter()
        for _ in range(rounds):
            await asyncio.gather(*map(turn, range(num_sessions)))
        cpu_s, wall_s = _cpu_s(process.pid) - before_s, time.perf_counter() - begun_s
    process.stdin.close()
    await process.wait()
    num_calls = rounds * num_sessions
    return {
        "calls": num_calls,
        "cpu_ms_per_call": round(1e3 * cpu_s / num_calls, 3),
        "calls_per_s": round(num_calls / wall_s, 1),
        "kib_per_session": round((full_kib - empty_kib) / num_sessions, 1),
        "body_kib": round(len(json.dumps(conversations[0])) / 1024, 1),
    }


def _cpu_s(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def _resident_kib(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line)
    return int(line.split()[1])


if __name__ == "__main__":
    main()
