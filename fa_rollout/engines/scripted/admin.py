"""The front of a scripted process: its handle's own calls, and all others to the engine or the router."""

import msgspec

from fa_rollout.engines.scripted.router import RouterServer
from fa_rollout.engines.scripted.script import Script
from fa_rollout.engines.scripted.server import EngineServer
from fa_rollout.engines.scripted.wire import Exchange

PREFIX = "/_scripted/"


class Front:
    """Engine or router, by the script."""

    def __init__(self, script: Script) -> None:
        self._server: EngineServer | RouterServer = (
            RouterServer(script) if script.workers else EngineServer(script)
        )

    @property
    def script(self) -> Script:
        """What is obeyed now."""
        return self._server.script

    async def start(self) -> None:
        """What needs a running loop."""
        if isinstance(self._server, RouterServer):
            await self._server.start()

    async def aclose(self) -> None:
        """Leave nothing behind."""
        if isinstance(self._server, RouterServer):
            await self._server.aclose()

    def handle(self, exchange: Exchange) -> None:
        """Every request."""
        if not exchange.path.startswith(PREFIX):
            self._server.handle(exchange)
        elif exchange.path == PREFIX + "requests":
            exchange.send_json(list(self._server.recorded))
        elif exchange.path == PREFIX + "clear":
            self._server.recorded.clear()
            exchange.send_json({})
        elif exchange.path == PREFIX + "configure":
            changes = msgspec.json.decode(exchange.body)
            tree = msgspec.to_builtins(self.script) | changes
            self._server.configure(msgspec.convert(tree, Script))
            exchange.send_json({})
        elif exchange.path == PREFIX + "state":
            exchange.send_json(self._server.state())
        else:
            exchange.send_json({}, 404)
