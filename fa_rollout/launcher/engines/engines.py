"""The engines that a run starts, and the router in front of them.

In: the configuration. Out: the addresses for the generator and, during the run, which engines join and leave.
Invariant: nothing here blocks. A run starts when all engines are up, and ends when none is left: an engine
that dies too often is removed, and the run continues with the others.

    an engine dies      without a router its requests fail, and the generator probes until it is back;
                        behind a router it is removed at once, since the router knows nothing about weights,
                        and the generator adds it again once it has the current weights
    ... too often       it is removed for good
    the router dies     it is restarted on its port; requests wait
"""

import select
from collections.abc import Callable
from pathlib import Path

from fa_rollout.config import Config
from fa_rollout.launcher.engines import program
from fa_rollout.launcher.engines.engine import EngineKeeper
from fa_rollout.launcher.engines.engine_key import engine_key

Change = Callable[[str, bool], None]
"""Called with (address of an engine, whether it joins)."""
Down = Callable[[list[str]], None]
"""Called with the addresses of all servers that are down, each time the list changes."""


class LaunchedEngines:
    """All servers that a run starts."""

    def __init__(
        self,
        config: Config,
        *,
        log: Callable[[str], Path | None],
        say: Callable[[str], None],
        change: Change,
        down: Down,
    ) -> None:
        """`log`: returns the log file of a program, by name; None: it inherits this process's streams."""
        self._config, self._log, self._say, self._change, self._report_down = config, log, say, change, down
        self._down: list[str] = []
        """As of the last `look`."""
        self._keepers: list[EngineKeeper] = []
        self._router: EngineKeeper | None = None
        self.key = engine_key(config)
        """Required by all of them."""
        for engine in program.engines(config, self.key):
            self._keepers.append(self._keeper(engine))

    @property
    def urls(self) -> list[str] | None:
        """The addresses for the generator: engines or router; None until all are up."""
        if self._config.engine.router:
            return None if self._router is None or self._router.url is None else [self._router.url]
        return self.members if len(self.members) == len(self._keepers) else None

    @property
    def members(self) -> list[str]:
        """Addresses of the engines that have been up at least once."""
        return [keeper.url for keeper in self._keepers if keeper.url is not None]

    @property
    def failure(self) -> str | None:
        """Why no engine is left; None while there is one, or one may come up."""
        if self._router is not None and self._router.failure is not None:
            return self._router.failure
        dead = [keeper.failure for keeper in self._keepers if keeper.failure is not None]
        is_over = len(dead) == len(self._keepers) or self.urls is None
        return "\n".join(dead) if dead and is_over else None

    def register(self, poll: "select.poll") -> None:
        """Have a poll return when a server listens, or exits."""
        for keeper in self._all():
            keeper.register(poll)

    def look(self) -> None:
        """Check all servers and report changes."""
        was_running = self.urls is not None
        for keeper in self._all():
            had_failed = keeper.failure is not None
            keeper.look()
            if was_running and keeper is not self._router:
                self._report(keeper, has_failed=keeper.failure is not None and not had_failed)
        self._start_router()
        down = [keeper.url for keeper in self._all() if keeper.url is not None and not keeper.is_up]
        if down != self._down:
            self._down = down
            self._report_down(down)

    def terminate(self) -> None:
        """Send SIGTERM to all."""
        for keeper in self._all():
            keeper.terminate()

    @property
    def have_ended(self) -> bool:
        """Whether all processes have exited."""
        return all(keeper.child is None or keeper.child.exit_code is not None for keeper in self._all())

    def close(self) -> None:
        """Kill them; idempotent."""
        for keeper in self._all():
            keeper.close()

    def _all(self) -> list[EngineKeeper]:
        return self._keepers if self._router is None else [self._router, *self._keepers]

    def _keeper(self, server: program.ServerProgram) -> EngineKeeper:
        launch = self._config.launch
        return EngineKeeper(
            server,
            start_limit_s=launch.start_limit_s,
            max_restarts=launch.max_restarts,
            log=self._log(server.log_name),
            say=self._say,
        )

    def _start_router(self) -> None:
        if self._config.engine.router and self._router is None and len(self.members) == len(self._keepers):
            self._router = self._keeper(program.router(self._config, self.members, self.key))

    def _report(self, keeper: EngineKeeper, *, has_failed: bool) -> None:
        assert keeper.url is not None, "a run starts when all engines have an address"
        was_up = keeper.url not in self._down
        if has_failed:
            self._say(str(keeper.failure))
            self._change(keeper.url, False)
        elif self._config.engine.router and was_up and not keeper.is_up:
            self._change(keeper.url, False)
        elif self._config.engine.router and keeper.is_up and not was_up:
            self._change(keeper.url, True)
