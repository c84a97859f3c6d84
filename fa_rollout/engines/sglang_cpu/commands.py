"""What is run: the interpreter of the virtual environment, the arguments of server and router.

In: a model folder or the workers' addresses, a port, further arguments. Out: a `Service`. Settings are those
under which SGLang 0.5.15 runs on a plain CPU: torch's own attention, float32, no CUDA graphs.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from fa_rollout.engines.service import HOST, Service, ServiceError, free_port

VENV_VARIABLE = "FA_ROLLOUT_SGLANG_VENV"
# The warm-up is an English sentence, which a small tokenizer need not know; health checks do the same.
CPU_SETTINGS = (
    *("--device", "cpu", "--tp", "1", "--attention-backend", "torch_native", "--disable-cuda-graph"),
    *("--dtype", "float32", "--max-total-tokens", "32768", "--mem-fraction-static", "0.3"),
    *("--max-running-requests", "256", "--skip-server-warmup"),
)


class SGLangError(ServiceError):
    """A real SGLang server, or router, that is not installed or does not come up."""


def venv() -> Path:
    """Where SGLang is, or would be, installed."""
    folder = os.environ.get(VENV_VARIABLE) or Path.home() / ".cache" / "fa_rollout" / "sglang-cpu"
    return Path(folder).absolute()


def interpreter() -> str:
    """Python of the virtual environment.

    Raises:
        SGLangError: there is none.
    """
    python = venv() / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise SGLangError(
            f"SGLang must be installed in {venv()}, found nothing there; run scripts/sglang_cpu install, or "
            f"name another folder in {VENV_VARIABLE}"
        )
    return str(python)


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


def cpu_environment(threads: int) -> dict[str, str]:
    """Variables of a server without a GPU that may use so many threads."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
    }


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
