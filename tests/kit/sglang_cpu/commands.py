"""What is run: the arguments of server and router.

In: a model folder or the workers' addresses, a port, further arguments. Out: a `Service`.
"""

from collections.abc import Sequence
from pathlib import Path

from fa_rollout.demo.sglang import CPU_SETTINGS, cpu_environment, interpreter
from fa_rollout.engines.service import HOST, Service, free_port


def server(model: Path, *, port: int, threads: int, options: Sequence[str] = ()) -> Service:
    """A server of one model; `options` overrule what is said here."""
    place = ["--model-path", str(model.absolute()), "--host", HOST, "--port", str(port)]
    return Service(
        name="SGLang",
        command=[interpreter(), "-m", "sglang.launch_server", *place, *CPU_SETTINGS, *options],
        url=f"http://{HOST}:{port}",
        health_path="/health",
        environment=cpu_environment(threads),
    )


def router(worker_urls: Sequence[str], *, port: int, options: Sequence[str] = ()) -> Service:
    """A round-robin router over workers that run."""
    settings = ["--policy", "round_robin", "--prometheus-port", str(free_port())]
    place = ["--host", HOST, "--port", str(port), "--worker-urls", *worker_urls]
    return Service(
        name="SGLang's router",
        command=[interpreter(), "-m", "sglang_router.launch_router", *place, *settings, *options],
        url=f"http://{HOST}:{port}",
        health_path="/readiness",
    )
