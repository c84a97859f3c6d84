"""A server that somebody else wrote, and that is run as it is: SGLang, its router."""

import random
import socket
from dataclasses import dataclass, field
from pathlib import Path

from shm.errors import FaRolloutError

HOST = "127.0.0.1"


class ServiceError(FaRolloutError, RuntimeError):
    """A server that does not come up, or does not answer any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One process to be run, and where it tells that it works."""

    name: str
    command: list[str]
    url: str
    health_path: str
    """Answered by 200 once it works."""
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    """That it works in; None: a scratch folder of its own."""


def free_port() -> int:
    """A port that nobody listens on now, nor on the one 10000 above, which SGLang wants too.

    Below those that the kernel hands out for connections, so that it stays free for a while.

    Raises:
        ServiceError: none was found.
    """
    for port in random.sample(range(20000, 31000), k=100):
        if _is_free(port) and _is_free(port + 10000):
            return port
    raise ServiceError("a port between 20000 and 31000 must be free, found none in 100 tries")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
