"""The metrics process of a run: started, started again a few times, ended.

In: what `[metrics]` asks for beyond `metrics.jsonl`. Out: a child that looks at the run as an observer.
Invariant: nothing that befalls it ends the run, or holds it up for longer than its last words may take.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fa_rollout.config import Config, to_dict
from fa_rollout.launcher.children.child import Child

MAX_RESTARTS = 3
_RESTART_AFTER_S = 2.0


class ExporterProcess:
    """Keeps one metrics process alive."""

    def __init__(
        self, config: Config, environment: Mapping[str, str], *, log: Path | None, say: Callable[[str], None]
    ) -> None:
        """`environment`: what an observer needs to find the run."""
        self._config, self._environment, self._log, self._say = config, environment, log, say
        self._num_restarts = 0
        self._next_start_s: float | None = None
        self.child = self._start()

    @staticmethod
    def is_wanted(config: Config) -> bool:
        """Whether anything is asked for that the hub does not do itself."""
        metrics = config.metrics
        return any((metrics.prometheus_port, metrics.tensorboard_dir, metrics.wandb_project))

    def look(self) -> None:
        """Take note of a death, and start again after it, some times."""
        if self._next_start_s is not None:
            if time.monotonic() >= self._next_start_s:
                self._next_start_s = None
                self.child.end()
                self.child = self._start()
        elif self.child.exit_code and self._num_restarts <= MAX_RESTARTS:
            self._mourn(self.child.exit_code)

    def close(self) -> None:
        """End it by force if it still runs; idempotent."""
        self.child.end()

    def _mourn(self, code: int) -> None:
        self._num_restarts += 1
        how = f"the metrics process ended with exit code {code}"
        if self._num_restarts > MAX_RESTARTS:
            self._say(f"{how} and is not started again; the run goes on without it")
            return
        self._say(f"{how}; restart {self._num_restarts} of {MAX_RESTARTS}")
        self._next_start_s = time.monotonic() + _RESTART_AFTER_S

    def _start(self) -> Child:
        config_fd = os.memfd_create("config")
        try:
            os.write(config_fd, json.dumps(to_dict(self._config)).encode())
            os.lseek(config_fd, 0, os.SEEK_SET)
            command = [sys.executable, "-m", "fa_rollout.observe.exporter"]
            command += ["--config-fd", str(config_fd), "--parent-pid", str(os.getpid())]
            return Child(
                "metrics",
                command,
                environment=self._environment,
                pass_fds=(config_fd,),
                log=self._log,
                own_session=True,
            )
        finally:
            os.close(config_fd)
