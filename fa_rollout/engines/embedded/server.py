"""The embedded engine as a server: model, application, address, and the wait for the end."""

import argparse
import asyncio
import ipaddress
import json
import logging
import os
import signal
import sys
from pathlib import Path

import torch
from aiohttp import web
from tokenizers import Tokenizer

from fa_rollout.engines.embedded.engine.engine import StepEngine
from fa_rollout.engines.embedded.engine.frontend import Frontend
from fa_rollout.engines.embedded.engine.scheduler import Limits
from fa_rollout.engines.embedded.errors import EngineStartError
from fa_rollout.engines.embedded.model.runner import Runner
from fa_rollout.engines.embedded.routes.about import About, Served
from fa_rollout.engines.embedded.routes.control import Control
from fa_rollout.engines.embedded.routes.door import door
from fa_rollout.engines.embedded.routes.generation import Generation
from fa_rollout.engines.embedded.routes.http import answer_errors
from fa_rollout.engines.embedded.routes.protocol import ModelLimits
from fa_rollout.engines.embedded.routes.reply import Replies
from fa_rollout.engines.with_key import KEY_VARIABLE
from fa_rollout.process.log_level import log_to_stderr

_BODY_BYTES = 64 << 20
"""Of any request; one that brings weights may be larger, but not than two models in base64."""
SHUTDOWN_TIMEOUT_S = 2.0
# The engine's thread and the event loop share the interpreter. At the default of 5 ms a busy loop would
# hold up each of the engine's many short calls into torch for that long.
SWITCH_INTERVAL_S = 0.0001

logger = logging.getLogger("fa_rollout.engines.embedded")


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


def served_of(runner: Runner, limits: Limits, arguments: argparse.Namespace) -> Served:
    about = {
        "model_type": runner.model.config.model_type,
        "architectures": [type(runner.model).__name__],
        "quantization": None,
        "tp_size": 1,
    }
    return Served(
        model_path=arguments.model,
        model=ModelLimits(
            vocab_size=runner.vocab_size, context_length=limits.context_length, eos_ids=runner.eos_ids
        ),
        limits=limits,
        arguments=vars(arguments) | about,
    )


def build_application(
    frontend: Frontend, folder: Path, served: Served, *, key: str | None
) -> web.Application:
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
    host, has_open_health = served.arguments["host"], served.arguments["open_health"]
    application = web.Application(
        client_max_size=_max_body_bytes(frontend.engine),
        middlewares=[door(key=key, host=host, has_open_health=has_open_health), answer_errors],
    )
    application.add_routes(Generation(frontend, Replies(tokenizer), served.model).routes())
    application.add_routes(About(frontend, served).routes())
    application.add_routes(Control(frontend, served).routes())
    return application


def _max_body_bytes(engine: StepEngine) -> int:
    return _BODY_BYTES + engine.num_weight_bytes * 2 * 4 // 3


def take_key(host: str) -> str | None:
    """The key that every request must bring, out of the environment, where children would inherit it.

    Raises:
        EngineStartError: there is none, and other machines could reach this one.
    """
    key = os.environ.pop(KEY_VARIABLE, None) or None
    if key is None and not _is_loopback(host):
        raise EngineStartError(
            f"an engine that other machines reach must have a key, and --host is {host}: "
            f"set {KEY_VARIABLE}, here and where the run is started"
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def announce(address: tuple[str, int], ready_fd: int | None) -> None:
    """One JSON line that says where the server listens."""
    host, port = address
    shown = f"[{host}]" if ":" in host else host
    line = json.dumps({"host": host, "port": port, "url": f"http://{shown}:{port}", "pid": os.getpid()})
    print(line, flush=True)
    if ready_fd is not None:
        os.write(ready_fd, line.encode() + b"\n")
        os.close(ready_fd)


async def serve(arguments: argparse.Namespace, key: str | None) -> int:
    """Load, listen, announce, wait for the end; the exit status."""
    runner = Runner(Path(arguments.model))
    ended = asyncio.Event()
    for number in (signal.SIGTERM,) if arguments.parent_pid else (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    limits = limits_of(runner, arguments)
    frontend = Frontend(
        StepEngine(runner, limits, weight_version=arguments.weight_version),
        ended=ended,
        num_threads=arguments.threads,
        max_queued_requests=limits.max_queued_requests,
    )
    served = served_of(runner, limits, arguments)
    application = build_application(frontend, Path(arguments.model), served, key=key)
    application_runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
    await application_runner.setup()
    frontend.start()
    await web.TCPSite(
        application_runner, arguments.host, arguments.port, shutdown_timeout=SHUTDOWN_TIMEOUT_S
    ).start()
    announce(application_runner.addresses[0][:2], arguments.ready_fd)
    await ended.wait()
    await frontend.stop()
    await application_runner.cleanup()
    return 1 if frontend.has_died else 0


def run(options: argparse.Namespace) -> int:
    """Serve until told to end; the exit status."""
    log_to_stderr(options.log_level, "%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        key = take_key(options.host)
    except EngineStartError as error:
        print(f"fa_rollout.engines.embedded: {error}", file=sys.stderr)
        return 2
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(options.threads)
    return asyncio.run(serve(options, key))
