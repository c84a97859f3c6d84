"""The hub's body: processes, signals and timers around `Hub`. One thread, one `select`.

Invariant: it always reads and never blocks in a send, so that no peer can hold another up; what a dead peer
had sent is handled before its death is.
"""

import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fa_rollout.account import event_file, events
from fa_rollout.config import Config
from fa_rollout.hub.hub import Hub
from fa_rollout.hub.io.event_log import EventLog
from fa_rollout.hub.io.plugin import Plugin
from fa_rollout.hub.io.selector import Selector
from fa_rollout.hub.reporting.figures import counts
from fa_rollout.hub.reporting.metrics_log import MetricsLog
from fa_rollout.hub.reporting.progress import ProgressLines
from fa_rollout.hub.requests.fed import FedStream
from fa_rollout.hub.server.connections import Reception
from fa_rollout.hub.server.generator_process import GENERATOR, GeneratorLife, preamble
from fa_rollout.hub.state.world import Attachment
from shm import RingTable
from shm.channels.channel import Channel
from shm.channels.endpoint import listen
from shm.errors import ChannelClosed, ChannelError
from shm.liveness import ParentWatch
from shm.ring.segment import Segment
from trainer_hook import messages as m

TICK_S = 0.2
FAREWELL_S = 1.0
"""Grace of a run that ends in error, and time to hand the last messages to the kernel."""
RANKS_SHARE = 0.6
"""Of the grace, for ranks to end their step; the rest is the generator's."""
POISON = 0xDB
"""Byte that returned records are overwritten with when `ring.poison` is set."""


_STAGE_PATIENCE = 6
"""Heartbeats that a generator may miss in a stage of a weight stream: gigabytes may hold it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubEnding:
    """How the run ends, and when at the latest."""

    exit_code: int
    text: str
    ranks_by_s: float
    """Until then the generator stays at work for ranks that are in a step or an update."""
    by_s: float


class Server:
    """Runs a hub until its end."""

    def __init__(
        self,
        config: Config,
        tree: dict[str, object],
        *,
        run: str,
        token: str,
        directory: Path,
        launcher: Channel,
        parent_pid: int,
        plugin: Plugin | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._launcher = launcher
        self._parent = ParentWatch(parent_pid)
        self._selector = Selector()
        self._segment = Segment.create(config.ring.bytes)
        on_free = self._poison if config.ring.poison else None
        folder = Path(config.run.output_dir) if config.run.output_dir else None
        self._log = EventLog(None if folder is None else folder / event_file.FILE_NAME)
        self._hub = Hub(
            config,
            run=run,
            directory=directory,
            table=RingTable(self._segment.size_bytes, on_free=on_free),
            outbox=self,
            log=self._log,
            fed=None if plugin is None else FedStream(),
        )
        self._metrics = MetricsLog(
            self._hub.core,
            folder=folder if config.metrics.jsonl else None,
            interval_s=config.metrics.interval_s,
        )
        self._progress = ProgressLines(self._hub.core)
        self._plugin = plugin
        self._life = GeneratorLife(
            preamble=preamble(run, tree),
            module=GENERATOR if plugin is None else plugin.module,
            ring_fd=self._segment.fd,
            max_restarts=config.run.generator_restarts,
            has_spare=config.run.spare_generator and plugin is None,  # a plug-in needs its payload first
        )
        self._listener = listen(directory)
        self._reception = Reception(
            self._hub,
            self._selector,
            self._listener,
            run=run,
            token=token,
            ring_fd=self._segment.open_reader(),
        )
        self._ending: HubEnding | None = None
        self._is_generator_dismissed = False
        self._directory = directory
        self._is_orphan = False
        self._next_flush_s = 0.0

    # --- life -------------------------------------------------------------------------------------

    def serve(self) -> int:
        """Run until the end; returns the exit code."""
        self._begin()
        next_tick_s = 0.0
        while not self._is_over():
            self._selector.run_once(TICK_S)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                self._tick(now_s)
            self._hub.advance()
            self._dismiss_generator()
            self._selector.flush()
        return self._finish()

    def _begin(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.end(143, "the hub got SIGTERM"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._wake = self._selector.watch_signals()
        signal.set_wakeup_fd(self._wake.fileno())
        self._selector.watch(self._launcher, self._from_launcher)
        if self._parent.pidfd is not None:
            self._selector.watch(self._parent.pidfd, self._launcher_died)
        self._start_generator()
        ready = m.HubReady(address=self._listener.address, run=self._run, pid=os.getpid())
        self.to_launcher(ready)

    def _tick(self, now_s: float) -> None:
        self._hub.watch.tick(now_s)
        self._reception.tick(now_s)
        self._watch_generator(now_s)
        self._metrics.tick(now_s)
        self._progress.tick(now_s)
        if self._hub.is_complete:
            self.end(0, "the run is complete")
        if now_s >= self._next_flush_s:
            self._next_flush_s = now_s + 1.0
            self._log.flush()
            if self._log.failure is not None:
                self._hub.core.warn(self._log.failure)
                self._log.failure = None

    def end(self, exit_code: int, text: str) -> None:
        """Begin to end: ranks leave, the generator drains, both within the grace; then all is closed."""
        self._end_within(self._config.run.grace_s if exit_code == 0 else FAREWELL_S, exit_code, text)

    def _end_within(self, grace_s: float, exit_code: int, text: str) -> None:
        if self._ending is None:
            now_s = time.monotonic()
            ranks_by_s = now_s + RANKS_SHARE * grace_s if exit_code == 0 else now_s
            self._ending = HubEnding(
                exit_code=exit_code, text=text, ranks_by_s=ranks_by_s, by_s=now_s + grace_s
            )
            self._life.next_start_s = None
            self._life.dismiss_spare()
            self._hub.stop(text)

    def _dismiss_generator(self) -> None:
        """Once no rank needs it any more, or has had its time."""
        if self._ending is None or self._is_generator_dismissed:
            return
        now_s = time.monotonic()
        if not self._hub.core.world.members or now_s >= self._ending.ranks_by_s:
            self._is_generator_dismissed = True
            grace_s = max(0.0, self._ending.by_s - now_s)
            self.to_generator(m.Stop(grace_s=grace_s, reason=self._ending.text))

    def _is_over(self) -> bool:
        if self._ending is None:
            return False
        return self._life.pid is None or time.monotonic() >= self._ending.by_s

    def _finish(self) -> int:
        assert self._ending is not None
        if self._life.pid is not None:
            self._life.kill()
            self._end_generator()
        self._life.dismiss_spare()
        exit_code, text, books = self._ending.exit_code, self._ending.text, counts(self._hub.core)
        self._metrics.close()
        self._progress.close()
        spent = self._hub.core.clock.spent(time.monotonic())
        self._log.write(events.HubEnded(exit_code=exit_code, text=text, counts=books, spent=spent))
        self._log.close()
        ended = m.RunEnded(exit_code=exit_code, text=text, counts=books)
        self.to_launcher(ended)
        self._reception.observers.farewell(ended)
        deadline_s = time.monotonic() + FAREWELL_S
        while not self._selector.flush() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._reception.close()
        # The folder is the launcher's to remove, unless there is no launcher any more.
        folder = self._directory if self._is_orphan else self._hub.core.weights_dir
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self._hub.core.spool_dir, ignore_errors=True)
        return exit_code

    def _from_launcher(self) -> None:
        try:
            for payload in self._launcher.read_ready():
                message = m.decode(payload)
                if isinstance(message, m.Stop):
                    self._end_within(message.grace_s, 0, message.reason)
                elif isinstance(message, m.Ping):
                    self.to_launcher(m.Pong(number=message.number))
                elif isinstance(message, m.ChangeEngines):
                    self._hub.core.membership.request(message)
                elif isinstance(message, m.EnginesDown):
                    self._hub.core.membership.down = message.urls
                elif isinstance(message, m.Warned):
                    self._hub.core.warn(message.text)
                elif self._hub.launcher is not None:
                    self._hub.launcher.receive(message)
        except ChannelError:
            self._selector.unwatch(self._launcher)
            self._launcher_died()

    def _launcher_died(self) -> None:
        self._is_orphan = True
        self.end(1, "the launcher died")

    # --- the hub's outbox -------------------------------------------------------------------------

    def to_rank(self, rank: Attachment, message: m.Message) -> None:
        """Queue a message for a rank."""
        self._selector.send(rank.connection, message)

    def to_generator(self, message: m.Message) -> None:
        """Queue a message for the generator; dropped while none lives: the next one learns all it needs."""
        if self._life.channel is not None:
            self._selector.send(self._life.channel, message)

    def to_launcher(self, message: m.Message) -> None:
        """Queue a message for the launcher."""
        self._selector.send(self._launcher, message)

    def _poison(self, position: int, length: int) -> None:
        offset = position % self._segment.size_bytes
        self._segment.array[offset : offset + length] = POISON

    # --- the generator ----------------------------------------------------------------------------

    def _start_generator(self) -> None:
        resume = self._hub.generator.resume_message()
        if self._plugin is not None:
            resume = msgspec.structs.replace(resume, payload=self._plugin.payload)
        self._log.write(events.GeneratorStarted(incarnation=resume.incarnation))
        channel = self._life.start(resume)
        self._selector.mark(channel)
        self._selector.watch(channel, lambda: self._from_generator(channel))
        if self._life.pidfd is not None:
            self._selector.watch(self._life.pidfd, self._generator_died)

    def _from_generator(self, channel: Channel) -> None:
        try:
            for payload in channel.read_ready():
                message = m.decode(payload)
                self._life.heard(is_ready=isinstance(message, m.GeneratorReady))
                self._hub.generator.receive(message)
        except ChannelClosed:
            # A hint: its death is its pidfd. Without one, the heartbeat decides.
            self._life.is_drained = True
            self._selector.unwatch(channel)
        except ChannelError as error:
            self._life.is_drained = True
            self._selector.unwatch(channel)
            self._hub.core.warn(f"the generator broke the protocol and is replaced: {error}")
            self._life.kill()

    def _generator_died(self) -> None:
        channel = self._life.channel
        if channel is not None:
            channel.peer_ended()
            while not self._life.is_drained:
                self._from_generator(channel)
        how = self._end_generator()
        if self._ending is None:
            now_s = time.monotonic()
            will_restart = self._life.plan_restart(now_s)
            self._hub.generator.gone(how, will_restart=will_restart)
            self._watch_generator(now_s)

    def _end_generator(self) -> str:
        if self._life.channel is not None:
            self._selector.unwatch(self._life.channel)
        if self._life.pidfd is not None:
            self._selector.unwatch(self._life.pidfd)
        return self._life.reap()

    def _watch_generator(self, now_s: float) -> None:
        life, limit_s = self._life, self._config.run.heartbeat_s
        if self._hub.core.updates.has_stage:
            limit_s *= _STAGE_PATIENCE
        if life.next_start_s is not None and now_s >= life.next_start_s:
            self._start_generator()
        elif life.pid is not None and life.is_silent(now_s, limit_s):
            self._hub.core.warn(f"the generator was silent for {limit_s:.0f} s and is replaced")
            life.kill()
        elif self._ending is None:
            life.keep_spare(now_s)
