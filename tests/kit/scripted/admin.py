"""The front of a scripted process: its handle's own calls, and all others to the engine or the router."""

from collections import deque
from typing import Any, Protocol

import msgspec

from tests.kit.scripted.script import ADMIN_PREFIX, Recorded, Script
from tests.kit.scripted.wire import Exchange


class Server(Protocol):
    """What engine and router have in common."""

    recorded: deque[Recorded]

    @property
    def script(self) -> Script:
        """What is obeyed now."""

    async def start(self) -> None:
        """What needs a running loop."""

    async def aclose(self) -> None:
        """Leave nothing behind."""

    def configure(self, script: Script) -> None:
        """Another script from now on."""

    def state(self) -> dict[str, Any]:
        """Counts."""

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, now or later."""


class Front:
    """Sorts requests."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def handle(self, exchange: Exchange) -> None:
        """Every request."""
        server = self.server
        if not exchange.path.startswith(ADMIN_PREFIX):
            server.handle(exchange)
        elif exchange.path == ADMIN_PREFIX + "requests":
            exchange.send_json(list(server.recorded))
        elif exchange.path == ADMIN_PREFIX + "clear":
            server.recorded.clear()
            exchange.send_json({})
        elif exchange.path == ADMIN_PREFIX + "configure":
            tree = msgspec.to_builtins(server.script) | msgspec.json.decode(exchange.body)
            server.configure(msgspec.convert(tree, Script))
            exchange.send_json({})
        elif exchange.path == ADMIN_PREFIX + "state":
            exchange.send_json(server.state())
        else:
            exchange.send_json({}, 404)
