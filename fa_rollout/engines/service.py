"""A third-party server that is run as it is: SGLang or its router."""

import random
import socket
from dataclasses import dataclass, field
from pathlib import Path

from shm.errors import FaRolloutError

HOST = "127.0.0.1"


class ServiceError(FaRolloutError, RuntimeError):
    """A server did not start, or stopped answering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One process to run, and its health check."""

    name: str
    command: list[str]
    url: str
    health_path: str
    """Returns 200 once the server is ready."""
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    """Working directory; None: a scratch folder."""


def free_port() -> int:
    """A free port whose number plus 10000 is free too, since SGLang uses both.

    Below the kernel's range for outgoing connections, so that it stays free for a while.

    Raises:
        ServiceError: none was found.
    """
    for port in random.sample(range(20000, 31000), k=100):
        if _is_free(port) and _is_free(port + 10000):
            return port
    raise ServiceError("found no free port between 20000 and 31000 in 100 tries")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
