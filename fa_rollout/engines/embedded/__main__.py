"""`python -m fa_rollout.engines.embedded --model DIR`: serve until SIGTERM, or until the parent is gone."""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

import torch
from aiohttp import web
from tokenizers import Tokenizer

from fa_rollout.engines.embedded.control import Control
from fa_rollout.engines.embedded.engine import Engine
from fa_rollout.engines.embedded.frontend import Frontend
from fa_rollout.engines.embedded.protocol import ModelLimits
from fa_rollout.engines.embedded.reply import Replies
from fa_rollout.engines.embedded.runner import Runner
from fa_rollout.engines.embedded.scheduler import Limits
from fa_rollout.engines.embedded.server import Served, Server, answer_errors

MAX_BODY_BYTES = 4 << 30
# The engine's thread and the event loop share the interpreter. At the default of 5 ms a busy loop would
# hold up each of the engine's many short calls into torch for that long.
SWITCH_INTERVAL_S = 0.0001

logger = logging.getLogger("fa_rollout.engines.embedded")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fa_rollout.engines.embedded", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder with config.json, safetensors and, for text, tokenizer.json")
    add("--host", default="127.0.0.1", help="address to bind; IPv6 works")
    add("--port", type=int, default=0, help="0: any free one, told on stdout")
    add("--threads", type=int, default=1, help="CPU threads of the model")
    add("--max-running-requests", type=int, default=256)
    add("--max-queued-requests", type=int, default=None)
    add("--max-prefill-tokens", type=int, default=8192, help="padded tokens of one prefill pass")
    add("--kv-cache-mib", type=int, default=1024, help="budget of the KV cache")
    add("--context-length", type=int, default=None, help="shorter than the model's own")
    add("--weight-version", default="default", help="label of the weights at the start")
    add(
        "--ready-fd", type=int, default=None, help="file descriptor that gets the address line, and is closed"
    )
    add("--parent-pid", type=int, default=None, help="exit when this process is gone; ignore SIGINT")
    add("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    return parser.parse_args(arguments)


def limits_of(runner: Runner, arguments: argparse.Namespace) -> Limits:
    context_length = min(arguments.context_length or runner.context_length, runner.context_length)
    budget = (arguments.kv_cache_mib << 20) // runner.cache.bytes_per_token
    return Limits(
        context_length=context_length,
        max_running_requests=arguments.max_running_requests,
        max_total_tokens=max(budget, context_length),
        max_prefill_tokens=arguments.max_prefill_tokens,
        max_queued_requests=arguments.max_queued_requests,
    )


def load_tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None


def build_application(frontend: Frontend, replies: Replies, served: Served) -> web.Application:
    application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer_errors])
    application.add_routes(Server(frontend, replies, served).routes())
    application.add_routes(Control(frontend, served).routes())
    return application


def announce(address: tuple[str, int], ready_fd: int | None) -> None:
    """One JSON line that says where the server listens."""
    host, port = address
    shown = f"[{host}]" if ":" in host else host
    line = json.dumps({"host": host, "port": port, "url": f"http://{shown}:{port}", "pid": os.getpid()})
    print(line, flush=True)
    if ready_fd is not None:
        os.write(ready_fd, line.encode() + b"\n")
        os.close(ready_fd)


def watch_ends(stop: asyncio.Event, parent_pid: int | None) -> None:
    """Set `stop` on SIGTERM, on SIGINT unless we have a parent, and at the parent's end."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if parent_pid is None:
        loop.add_signal_handler(signal.SIGINT, stop.set)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pidfd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        stop.set()
        return
    loop.add_reader(pidfd, lambda: (loop.remove_reader(pidfd), stop.set()))


async def serve(arguments: argparse.Namespace) -> int:
    """Load, listen, announce, wait for the end; the exit status."""
    stop = asyncio.Event()
    watch_ends(stop, arguments.parent_pid)
    folder = Path(arguments.model)
    runner = Runner(folder)
    limits = limits_of(runner, arguments)
    engine = Engine(runner, limits, weight_version=arguments.weight_version)
    frontend = Frontend(
        engine, num_threads=arguments.threads, max_queued_requests=arguments.max_queued_requests
    )
    served = Served(
        model_path=str(folder),
        model=ModelLimits(
            vocab_size=runner.vocab_size, context_length=limits.context_length, eos_ids=runner.eos_ids
        ),
        limits=limits,
        arguments={
            **vars(arguments),
            "model_type": runner.model.config.model_type,
            "architectures": [type(runner.model).__name__],
        },
    )
    application = build_application(frontend, Replies(load_tokenizer(folder)), served)
    application_runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
    await application_runner.setup()
    frontend.start()
    site = web.TCPSite(application_runner, arguments.host, arguments.port, shutdown_timeout=1.0)
    await site.start()
    announce(application_runner.addresses[0][:2], arguments.ready_fd)
    await _first_of(stop, frontend.died)
    await frontend.stop()
    await application_runner.cleanup()
    return 1 if frontend.died.is_set() else 0


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(options.threads)
    return asyncio.run(serve(options))


if __name__ == "__main__":
    sys.exit(main())
