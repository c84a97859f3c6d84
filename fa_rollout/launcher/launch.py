"""A run from start to end: engine, hub and trainer as children of this process.

In: a configuration, and the trainer's command line (none: standalone). Out: a `ProcessEnded`. Invariant:
when `launch` returns or raises, no process that it started is alive and the run directory is gone. Every
wait has a deadline, except the wait for the trainer while all other processes are alive.

    process     watched by                      if it dies
    trainer     pidfd                           the hub stops; the exit code is the trainer's
    hub         pidfd, and a ping a second      the trainer gets SIGTERM, then SIGKILL; exit code 70
    engine      pidfd                           restarted on the same port; after too many restarts: 69
    launcher    the hub and engines, by pidfd   they exit; ranks raise HubLost
"""

import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from fa_rollout.config import Config, to_dict
from fa_rollout.engines.with_key import KEY_VARIABLE
from fa_rollout.launcher.children.child import Child
from fa_rollout.launcher.children.exporter import ExporterProcess
from fa_rollout.launcher.children.hub_process import RunNames, start_hub
from fa_rollout.launcher.children.hub_watch import HubWatch
from fa_rollout.launcher.children.relay import Relay
from fa_rollout.launcher.children.signals import Signals
from fa_rollout.launcher.ending import Cause, LaunchEnding, ending
from fa_rollout.launcher.engines.engines import LaunchedEngines
from fa_rollout.launcher.output import OutputFolder
from fa_rollout.launcher.rundir import RunDirectory, with_weights_in
from fa_rollout.launcher.running import leave_note
from fa_rollout.launcher.start_lines import StartLines
from fa_rollout.process.masking import masked_text
from fa_rollout.process.orphans import adopted, children, end_orphans
from trainer_hook.messages import ChangeEngines, EnginesDown, HubReady, RunEnded, Stop, Warned
from trainer_hook.printable import printable

START_DEADLINE_S = 60.0
"""For the hub to listen. It loads no model and reads no data before that."""
_TICK_S = 0.25
_LAST_WORD_S = 3.0
"""Added to the grace period, for the hub to write its last records."""
_ENGINE_GRACE_S = 3.0
_EXPORTER_GRACE_S = 15.0
"""Added after the hub's exit: the exporter may still have to upload metrics."""
_ORPHAN_GRACE_S = 1.0
_RELAY_S = 0.5
"""For the trainer's last lines, which are printed before ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded:
    """How a run ended."""

    exit_code: int
    """See `launcher.ending.EXIT_CODES`."""
    text: str
    counts: dict[str, int] | None
    """The hub's counts; None if it died before it sent them."""


def _say(text: str) -> None:
    print(f"fa-rollout-proc: {printable(masked_text(text), lines=True)}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchHooks:
    """Callbacks of the caller."""

    say: Callable[[str], None] = _say
    """Prints one message to the user."""
    progress: Callable[[str], None] = _say
    """Prints a progress line, every `trainer.progress_s` seconds."""
    tick: Callable[[], None] = lambda: None
    """Called about four times a second."""
    ready: Callable[[Mapping[str, str]], None] = lambda environment: None
    """Called with the trainer's environment variables once the hub listens."""
    logs: Path | None = None
    """Folder for the children's output; None: they inherit the caller's streams."""


def launch(config: Config, command: Sequence[str] = (), *, hooks: LaunchHooks | None = None) -> ProcessEnded:
    """Run `command` as the trainer of a new run; without one, run until an interrupt or the end of the data.

    Must be called in the main thread, since it handles signals.

    Raises:
        RunDirectoryError: the run's private folder cannot be created.
        OutputFolderError: `run.output_dir` cannot be used, or another run uses it.
    """
    with (
        adopted(),
        Signals() as signals,  # first: an interrupt leaves no folder behind
        OutputFolder.open(config.run.output_dir) as output,
        RunDirectory.create() as directory,
        with_weights_in(config.trainer.weights_dir, directory),
        _Launch(config, command, output, directory, signals, hooks or LaunchHooks()) as run,
    ):
        return run.go()


class _Launch:
    def __init__(
        self,
        config: Config,
        command: Sequence[str],
        output: OutputFolder,
        directory: RunDirectory,
        signals: Signals,
        hooks: LaunchHooks,
    ) -> None:
        self._config, self._command = config, command
        self._output, self._directory, self._signals, self._hooks = output, directory, signals, hooks
        self._names = RunNames()
        self._before = set(children())
        self._engines: LaunchedEngines | None = None
        self._hub: HubWatch | None = None
        self._trainer: Child | None = None
        self._trainer_code: int | None = None
        """As of the last `_look`, so that a trainer that dies because the hub died is never seen first."""
        self._relay: Relay | None = None
        self._exporter: ExporterProcess | None = None
        self._is_winding_down = False

    def go(self) -> ProcessEnded:
        plan = self._plan(self._start() or self._watch())
        if self._trainer_code is not None and self._relay is not None:
            self._relay.drain(_RELAY_S)
        self._hooks.say(plan.text)
        self._wind_down(plan)
        counts = None if self._run_ended is None else self._run_ended.counts
        return ProcessEnded(exit_code=plan.exit_code, text=plan.text, counts=counts)

    # --- start ------------------------------------------------------------------------------------------

    def _start(self) -> Cause | None:
        """Start engines, hub and trainer, each once the previous is ready; returns the cause of a failure.

        The trainer starts last, so that ranks load no model for a run that cannot start.
        """
        if not self._config.engine.urls:
            self._engines = LaunchedEngines(
                self._config,
                log=self._engine_log,
                say=self._say_of_engine,
                change=self._change_engine,
                down=self._engines_down,
            )
            self._wait(lambda: self._engine_urls is not None or self._event() is not None)
            if self._engine_urls is None:
                return self._event()
        self._start_hub()
        deadline = time.monotonic() + START_DEADLINE_S
        self._wait(lambda: self._ready is not None or self._event() is not None, deadline)
        if self._ready is None:
            return self._event() or Cause.HUB_LOST
        environment = self._introduce(self._ready.address)
        lines = StartLines(self._config, self._engine_urls or self._config.engine.urls, self._hooks.say)

        def is_decided() -> bool:
            lines.look()
            return self._is_open or self._event() is not None

        self._wait(is_decided)
        if not self._is_open:
            return self._event()
        self._start_trainer(environment)
        return None

    def _introduce(self, address: str) -> Mapping[str, str]:
        """Publish the run's address; returns the trainer's environment variables."""
        running = leave_note(
            self._directory,
            address=address,
            run=self._names.run,
            token=self._names.token,
            output_dir=self._config.run.output_dir,
        )
        environment = running.environment
        if ExporterProcess.is_wanted(self._config):
            self._exporter = ExporterProcess(
                self._config, environment, log=self._log("metrics"), say=self._hooks.say
            )
        return environment

    def _start_trainer(self, environment: Mapping[str, str]) -> None:
        self._hooks.ready(environment)
        if self._command:
            log = self._log("trainer")
            self._relay = Relay() if log is None else None
            self._trainer = Child(
                "trainer", self._command, environment=environment, log=log, relay=self._relay
            )

    @property
    def _engine_urls(self) -> list[str] | None:
        return None if self._engines is None else self._engines.urls

    def _start_hub(self) -> None:
        tree = to_dict(self._config)
        if self._engine_urls is not None:
            tree["engine"]["urls"] = self._engine_urls
        child, channel = start_hub(
            tree,
            self._names,
            self._directory,
            self._output,
            environment={} if self._engines is None else {KEY_VARIABLE: self._engines.key},
            log=self._log("hub"),
        )
        self._hub = HubWatch(
            child,
            channel,
            limit_s=self._config.run.heartbeat_s,
            say=self._hooks.say,
            progress=self._hooks.progress,
        )

    def _change_engine(self, url: str, joins: bool) -> None:
        if self._hub is not None:
            self._hub.send(ChangeEngines(request=0, url=url, joins=joins, drain_s=0.0))

    def _engines_down(self, urls: list[str]) -> None:
        if self._hub is not None:
            self._hub.send(EnginesDown(urls=urls))

    def _say_of_engine(self, text: str) -> None:
        """Send it through the hub if there is one, so that `top` and the records show it too."""
        if self._hub is None or self._hub.ready is None or self._hub.is_gone:
            self._hooks.say(text)
        else:
            self._hub.send(Warned(text=text))

    def _log(self, name: str) -> Path | None:
        return None if self._hooks.logs is None else self._hooks.logs / f"{name}.log"

    def _engine_log(self, name: str) -> Path | None:
        """Engines log a lot: to a file if there is a folder for it, else to the terminal."""
        folder = self._hooks.logs or self._config.run.output_dir
        return None if folder is None else Path(folder, name)

    @property
    def _ready(self) -> HubReady | None:
        return None if self._hub is None else self._hub.ready

    @property
    def _is_open(self) -> bool:
        return self._hub is not None and self._hub.is_open

    @property
    def _run_ended(self) -> RunEnded | None:
        return None if self._hub is None else self._hub.run_ended

    # --- watch ------------------------------------------------------------------------------------------

    def _watch(self) -> Cause:
        self._wait(lambda: self._event() is not None)
        event = self._event()
        assert event is not None
        return event

    def _event(self) -> Cause | None:
        """What ends the run, as of the last `_look`; causes are checked before their consequences."""
        trainer_code = self._trainer_code
        if self._signals.received:
            return Cause.INTERRUPTED
        if trainer_code == 0:
            return Cause.TRAINER
        if self._run_ended is not None and (self._run_ended.exit_code or self._trainer is None):
            return Cause.HUB_ENDED
        if self._run_ended is None and self._hub is not None and self._hub.is_gone:
            return Cause.HUB_LOST
        if self._run_ended is None and self._engines is not None and self._engines.failure:
            return Cause.ENGINE_LOST
        # After a normal RunEnded the trainer may evaluate and save for as long as it needs.
        return None if trainer_code is None else Cause.TRAINER

    def _wait(self, until: Callable[[], bool], deadline: float | None = None) -> bool:
        """Watch all processes until `until()` holds (True) or the deadline has passed (False)."""
        while True:
            self._look()
            if until():
                return True
            left_s = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
            if left_s <= 0:
                return False
            self._poll(left_s)

    def _poll(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._signals.fileno(), select.POLLIN)
        trainer = self._trainer
        if trainer is not None and trainer.pidfd is not None and trainer.exit_code is None:
            poll.register(trainer.pidfd, select.POLLIN)
        for party in (self._engines, self._hub):
            if party is not None:
                party.register(poll)
        poll.poll(timeout_s * 1000)

    def _look(self) -> None:
        self._signals.drain()
        self._trainer_code = None if self._trainer is None else self._trainer.exit_code
        if self._hub is not None:
            self._hub.look()
        if self._engines is not None and not self._is_winding_down:
            self._engines.look()
        if self._exporter is not None and not self._is_winding_down:
            self._exporter.look()
        self._hooks.tick()

    # --- end --------------------------------------------------------------------------------------------

    def _plan(self, cause: Cause) -> LaunchEnding:
        run_ended, hub = self._run_ended, self._hub
        hub_code = None if hub is None else hub.child.exit_code
        return ending(
            cause,
            grace_s=self._config.run.grace_s,
            trainer_code=self._trainer_code,
            hub_code=hub_code if run_ended is None else run_ended.exit_code,
            hub_text="" if run_ended is None else run_ended.text,
            signum=self._signals.received[0] if self._signals.received else 0,
            engine_text=(self._engines and self._engines.failure) or "",
            silent_s=self._config.run.heartbeat_s if hub is not None and hub.was_silent else None,
        )

    def _wind_down(self, plan: LaunchEnding) -> None:
        """End trainer, hub and engines, in this order; another signal kills the rest at once."""
        self._is_winding_down = True
        num_signals = -1 if self._signals.is_urgent else len(self._signals.received)
        started = time.monotonic()

        def wait(child: Child, until_s: float) -> bool:
            def is_over() -> bool:
                return child.exit_code is not None or len(self._signals.received) > num_signals

            self._wait(is_over, started + until_s)
            return child.exit_code is not None

        total_s = plan.patience_s + plan.grace_s
        if self._hub is not None:
            self._hub.send(Stop(grace_s=total_s, reason=plan.text), urgent=True)
        if self._trainer is not None and not wait(self._trainer, plan.patience_s):
            self._trainer.signal(signal.SIGTERM)
            wait(self._trainer, total_s)
        if self._hub is not None and not wait(self._hub.child, total_s + _LAST_WORD_S):
            self._hooks.say(f"the hub did not end within {total_s + _LAST_WORD_S:.0f} s and is killed")
        engines = self._engines
        if engines is not None:
            engines.terminate()
            deadline_s = time.monotonic() + _ENGINE_GRACE_S
            self._wait(lambda: engines.have_ended or len(self._signals.received) > num_signals, deadline_s)
        if self._exporter is not None:
            wait(self._exporter.child, time.monotonic() - started + _EXPORTER_GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the processes that are left, however the run ended, and wait for them."""
        if self._trainer is not None:
            self._trainer.end()
        if self._relay is not None:
            self._relay.drain(_RELAY_S)
        for party in (self._hub, self._engines, self._exporter):
            if party is not None:
                party.close()
        end_orphans(self._before, _ORPHAN_GRACE_S)
