"""The command lines and environments of engines and the router, from the configuration.

Pure except for the choice of free ports. Placeholders are replaced literally, so that JSON in an argument
stays as it is.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fa_rollout.config import Config
from fa_rollout.engines import with_key
from fa_rollout.engines.embedded.launch import engine_command
from fa_rollout.engines.service import HOST, free_port
from fa_rollout.engines.with_key import KEY_VARIABLE

SGLANG = ["{python}", "{with_key}", "sglang.launch_server", "--model-path", "{model}"]
SGLANG += ["--host", "{host}", "--port", "{port}"]
ROUTER = ["{python}", "{with_key}", "sglang_router.launch_router", "--host", "{host}", "--port", "{port}"]
# The router must not repeat a request under a used id; its default metrics port is one per host.
ROUTER += ["--disable-retries", "--prometheus-host", "{host}", "--prometheus-port", "{spare_port}"]
_URLS = "{urls}"
_ROUTER_HEALTH = "/readiness"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProgram:
    """One server."""

    name: str
    """Starts sentences in messages to the user."""
    log_name: str
    words: Callable[[int, int], list[str]]
    """Maps (port, descriptor for the address line) to a command line."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Includes the key."""
    picks_port: bool
    """It picks a free port itself if given port 0, and reports it."""


def engines(config: Config, key: str) -> list[ServerProgram]:
    """All engines that a run starts; each requires the key."""
    return [_engine(config, place, key) for place in range(config.launch.number)]


def router(config: Config, urls: Sequence[str], key: str) -> ServerProgram:
    """The router in front of the engines, with the same key."""
    filled = _Filler(config)

    def words(port: int, ready_fd: int) -> list[str]:
        default = [*ROUTER, *router_policy(config.engine.balance), "--worker-urls", _URLS]
        command = config.launch.router_command or default
        spread = [part for word in command for part in (urls if word == _URLS else [word])]
        spare = str(free_port()) if "{spare_port}" in command else ""
        plain = filled(spread, port=str(port), spare_port=spare)
        return _supervised(config, "the router", plain, port, ready_fd, health_path=_ROUTER_HEALTH)

    return ServerProgram(
        name="the router",
        log_name="router.log",
        words=words,
        environment={KEY_VARIABLE: key},
        picks_port=False,
    )


def router_policy(balance: str) -> list[str]:
    """Options of SGLang's router for `engine.balance`.

    Under `manual`, requests with a routing key stay on the worker that got the key's first request; other
    requests, and new keys, go to the worker with the fewest requests. The router's default, `cache_aware`,
    ignores the key and sends prompts with a common prefix to one worker until it is 64 requests ahead.
    """
    if balance == "round_robin":
        return ["--policy", "round_robin"]
    return ["--policy", "manual", "--assignment-mode", "min_load"]


def _engine(config: Config, place: int, key: str) -> ServerProgram:
    launch, name, filled = config.launch, f"engine {place}", _Filler(config)

    def embedded(port: int, ready_fd: int) -> list[str]:
        options = ["--max-running-requests", str(config.engine.max_concurrent_samples)]
        if config.engine.router:
            options.append("--open-health")
        options += filled(launch.arguments, port=str(port), place=str(place))
        threads = config.engine.num_threads
        assert config.engine.model is not None, "a configuration without urls, model and command is refused"
        return engine_command(
            config.engine.model, port=port, threads=threads, ready_fd=ready_fd, options=options
        )

    def other(port: int, ready_fd: int) -> list[str]:
        command = [*(launch.command or SGLANG), *launch.arguments]
        plain = filled(command, port=str(port), place=str(place))
        return _supervised(config, name, plain, port, ready_fd, health_path="/health")

    is_embedded = launch.server == "embedded"
    return ServerProgram(
        name=name,
        log_name=f"engine-{place}.log",
        words=embedded if is_embedded else other,
        environment=_environment(config, place, filled, os.environ) | {KEY_VARIABLE: key},
        picks_port=is_embedded,
    )


class _Filler:
    """Replaces placeholders by their values."""

    def __init__(self, config: Config) -> None:
        model = config.engine.model or ""
        self._values = {
            "python": config.launch.python or sys.executable,
            # A model name on the Hugging Face Hub is not a local folder and stays as it is.
            "model": str(Path(model).absolute()) if Path(model).is_dir() else model,
            "host": HOST,
            "with_key": with_key.__file__,
        }

    def __call__(self, words: Sequence[str], **values: str) -> list[str]:
        return [self._filled(word, self._values | values) for word in words]

    def _filled(self, word: str, values: Mapping[str, str]) -> str:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)
        return word


def _environment(config: Config, place: int, filled: _Filler, ours: Mapping[str, str]) -> dict[str, str]:
    launch = config.launch
    values = filled(list(launch.environment.values()), place=str(place))
    environment = dict(zip(launch.environment, values, strict=True))
    if launch.gpus_per_engine:
        begin = place * launch.gpus_per_engine
        devices = _devices(config, ours)[begin : begin + launch.gpus_per_engine]
        environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(devices))
    return environment


def _devices(config: Config, ours: Mapping[str, str]) -> list[str]:
    if config.launch.gpus is not None:
        return config.launch.gpus
    visible = ours.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device.strip() for device in visible.split(",") if device.strip()]
    return [str(number) for number in range(config.launch.number * config.launch.gpus_per_engine)]


def _supervised(
    config: Config, name: str, command: Sequence[str], port: int, ready_fd: int, *, health_path: str
) -> list[str]:
    launch = config.launch
    supervisor = [sys.executable, "-m", "fa_rollout.engines.supervisor"]
    options = {
        "--name": name,
        "--url": f"http://{HOST}:{port}",
        "--health-path": health_path,
        "--timeout": f"{launch.start_limit_s}",
        "--silence": f"{launch.silence_limit_s}",
        "--ready-fd": f"{ready_fd}",
        "--parent-pid": f"{os.getpid()}",
    }
    return [*supervisor, *(word for option in options.items() for word in option), "--", *command]
