"""The metrics process of a run: started, restarted a few times, ended.

In: the exporters of `[metrics]` other than `metrics.jsonl`. Out: a child that observes the run.
Invariant: its failure never ends the run, and delays its end only by the time it gets to write its last
metrics.
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
    """Runs one metrics process and restarts it if it dies."""

    def __init__(
        self, config: Config, environment: Mapping[str, str], *, log: Path | None, say: Callable[[str], None]
    ) -> None:
        """`environment`: the variables by which an observer finds the run."""
        self._config, self._environment, self._log, self._say = config, environment, log, say
        self._num_restarts = 0
        self._next_start_s: float | None = None
        self.child = self._start()

    @staticmethod
    def is_wanted(config: Config) -> bool:
        """Whether an exporter is configured that the hub does not run itself."""
        metrics = config.metrics
        return any((metrics.prometheus_port, metrics.tensorboard_dir, metrics.wandb_project))

    def look(self) -> None:
        """Restart the process if it died, up to `MAX_RESTARTS` times."""
        if self._next_start_s is not None:
            if time.monotonic() >= self._next_start_s:
                self._next_start_s = None
                self.child.end()
                self.child = self._start()
        elif self.child.exit_code and self._num_restarts <= MAX_RESTARTS:
            self._handle_exit(self.child.exit_code)

    def close(self) -> None:
        """Kill it if it still runs; idempotent."""
        self.child.end()

    def _handle_exit(self, code: int) -> None:
        self._num_restarts += 1
        how = f"the metrics process exited with code {code}"
        if self._num_restarts > MAX_RESTARTS:
            self._say(f"{how} after {MAX_RESTARTS} restarts; the run continues without it")
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
