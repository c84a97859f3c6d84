"""A real SGLang on a machine without a GPU, from a virtual environment of its own.

SGLang 0.5.15 runs on a plain CPU under these settings: torch's own attention, float32, no CUDA graphs.
"""

import os
from pathlib import Path

from fa_rollout.config import to_toml
from fa_rollout.engines.service import ServiceError

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


def cpu_environment(threads: int) -> dict[str, str]:
    """Variables of a server without a GPU that may use so many threads."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
    }


def launch_section() -> str:
    """`[launch]` of a run that starts one, as TOML.

    Raises:
        SGLangError: it is not installed.
    """
    launch = {
        "server": "sglang",
        "python": interpreter(),
        "arguments": [*CPU_SETTINGS],
        "environment": cpu_environment(threads=1),
    }
    return "\n" + to_toml({"launch": launch})
