"""The engines of a run that it starts itself, and the router in front of them.

In: the configuration. Out: the addresses that the generator asks; and, while the run goes on, which engine
comes and goes. Invariant: nothing here blocks. A run begins when all are up, and ends when none is left: an
engine that dies too often leaves, and the others go on.

    an engine dies      without a router its requests fail, and the generator probes until it is back
                        behind a router it is taken out at once, since the router knows nothing of weights,
                        and let in again by the generator once it has the current ones
    it has no more lives    it is taken out for good
    the router dies     it is started again on its port; requests wait
"""

import select
from collections.abc import Callable
from pathlib import Path

from fa_rollout.config import Config
from fa_rollout.launcher.engines import program
from fa_rollout.launcher.engines.engine import EngineKeeper
from fa_rollout.launcher.engines.engine_key import engine_key

Change = Callable[[str, bool], None]
"""(address of an engine, whether it joins) to whoever tells the generator."""
Down = Callable[[list[str]], None]
"""Takes the addresses of all that do not listen, each time that these have changed."""


class Engines:
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
        """`log`: the file for the output of a program, by its name; None: where this process's goes."""
        self._config, self._log, self._say, self._change, self._tell_down = config, log, say, change, down
        self._down: list[str] = []
        """As of the last look."""
        self._keepers: list[EngineKeeper] = []
        self._router: EngineKeeper | None = None
        self.key = engine_key(config)
        """Wanted by all of them."""
        for one in program.engines(config, self.key):
            self._keepers.append(self._keeper(one))

    @property
    def urls(self) -> list[str] | None:
        """What the generator asks: the engines, or the router; None until all of it is up."""
        if self._config.engine.router:
            return None if self._router is None or self._router.url is None else [self._router.url]
        return self.members if len(self.members) == len(self._keepers) else None

    @property
    def members(self) -> list[str]:
        """Addresses of the engines themselves, as far as they have been up."""
        return [keeper.url for keeper in self._keepers if keeper.url is not None]

    @property
    def obituary(self) -> str | None:
        """Why there will be no engine; None as long as there is hope."""
        if self._router is not None and self._router.obituary is not None:
            return self._router.obituary
        dead = [keeper.obituary for keeper in self._keepers if keeper.obituary is not None]
        is_over = len(dead) == len(self._keepers) or self.urls is None
        return "\n".join(dead) if dead and is_over else None

    def register(self, poll: "select.poll") -> None:
        """Have a poll return when one listens, or ends."""
        for keeper in self._all():
            keeper.register(poll)

    def look(self) -> None:
        """Take note of starts and deaths, and do what follows."""
        was_running = self.urls is not None
        for keeper in self._all():
            was_hopeless = keeper.obituary is not None
            keeper.look()
            if was_running and keeper is not self._router:
                self._tell(keeper, died_for_good=keeper.obituary is not None and not was_hopeless)
        self._start_router()
        down = [keeper.url for keeper in self._all() if keeper.url is not None and not keeper.is_up]
        if down != self._down:
            self._down = down
            self._tell_down(down)

    def terminate(self) -> None:
        """Ask all to end."""
        for keeper in self._all():
            keeper.terminate()

    @property
    def have_ended(self) -> bool:
        """Whether no process of theirs lives."""
        return all(keeper.child is None or keeper.child.exit_code is not None for keeper in self._all())

    def close(self) -> None:
        """End them by force; idempotent."""
        for keeper in self._all():
            keeper.close()

    def _all(self) -> list[EngineKeeper]:
        return self._keepers if self._router is None else [self._router, *self._keepers]

    def _keeper(self, one: program.Program) -> EngineKeeper:
        launch = self._config.launch
        return EngineKeeper(
            one,
            start_limit_s=launch.start_limit_s,
            max_restarts=launch.max_restarts,
            log=self._log(one.log_name),
            say=self._say,
        )

    def _start_router(self) -> None:
        if self._config.engine.router and self._router is None and len(self.members) == len(self._keepers):
            self._router = self._keeper(program.router(self._config, self.members, self.key))

    def _tell(self, keeper: EngineKeeper, *, died_for_good: bool) -> None:
        assert keeper.url is not None, "a run begins when all engines have an address"
        was_up = keeper.url not in self._down
        if died_for_good:
            self._say(str(keeper.obituary))
            self._change(keeper.url, False)
        elif self._config.engine.router and was_up and not keeper.is_up:
            self._change(keeper.url, False)
        elif self._config.engine.router and keeper.is_up and not was_up:
            self._change(keeper.url, True)
