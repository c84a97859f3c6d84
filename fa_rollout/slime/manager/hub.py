"""The run's hub as a child of slime's rollout manager, which is attached to it as the only rank.

Invariant: the hub ends with this process: it is closed at exit, and if this process is killed, the hub
notices and exits.
"""

import atexit
import os
import select
import signal
import sys
import time
from typing import Any

from fa_rollout.hub.io.plugin import Plugin
from fa_rollout.launcher.children.heartbeat import Heartbeat
from fa_rollout.launcher.children.hub_process import RunNames, start_hub
from fa_rollout.launcher.output import OutputFolder
from fa_rollout.launcher.rundir import RunDirectory
from fa_rollout.launcher.running import leave_note
from shm.errors import ChannelError
from trainer_hook import messages as m
from trainer_hook.errors import HubLost
from trainer_hook.hook import TrainerHook

START_DEADLINE_S = 60.0
SILENCE_LIMIT_S = 30.0
"""A hub that does not answer for this long while the manager waits is killed."""
_TICK_S = 1.0
_GRACE_S = 2.0


class HubChild:
    """A hub that this process started."""

    def __init__(
        self, tree: dict[str, Any], plugin: Plugin, directory: RunDirectory, output: OutputFolder
    ) -> None:
        """Returns when the hub listens, and this process is attached as its rank.

        Raises:
            HubLost: it did not start; the text says why, if known.
        """
        self._pid = os.getpid()
        self._directory, self._output = directory, output
        self._hook: TrainerHook | None = None
        self._heartbeat = Heartbeat()
        names = RunNames()
        # Children must be able to import the same functions by path as this process.
        environment = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._child, self._channel = start_hub(
            tree, names, directory, output, plugin=plugin, environment=environment
        )
        atexit.register(self.close)
        running = leave_note(
            directory,
            address=self._address(),
            run=names.run,
            token=names.token,
            output_dir=tree.get("run", {}).get("output_dir"),
        )
        self.hook = self._hook = TrainerHook.attach(
            address=running.address, run=names.run, token=names.token, dp_rank=0, dp_size=1
        )

    def _address(self) -> str:
        deadline_s = time.monotonic() + START_DEADLINE_S
        while True:
            for message in self.read():
                if isinstance(message, m.HubReady):
                    return message.address
                if isinstance(message, m.RunEnded):
                    raise HubLost(f"the hub failed to start: {message.text}")
            if self._child.exit_code is not None:
                raise HubLost(
                    f"the hub failed to start: it exited with code {self._child.exit_code}; see its log"
                )
            if time.monotonic() > deadline_s:
                raise HubLost(f"the hub did not listen within {START_DEADLINE_S:.0f} s; see its log")
            self.wait(_TICK_S)

    def send(self, message: m.Message) -> None:
        """Queue a message; the part that the socket does not accept is sent by the next `read`."""
        if not self._channel.is_closed:
            self._channel.queue(m.encode(message))
            self._channel.flush()

    def read(self) -> list[m.Message]:
        """Messages of the hub; empty once it has exited, which the hook reports.

        Raises:
            HubLost: it did not answer, and was killed.
        """
        self._check_heartbeat()
        try:
            self._channel.flush()
            messages = [m.decode(payload) for payload in self._channel.read_ready()]
        except ChannelError:
            return []
        if any(isinstance(message, m.Pong) for message in messages):
            self._heartbeat.answered()
        return [message for message in messages if not isinstance(message, m.Pong)]

    def _check_heartbeat(self) -> None:
        """Kill a hub that hangs: its pidfd does not show that."""
        if self._hook is None or self._channel.is_closed:
            return
        if self._heartbeat.is_due(time.monotonic()):
            self._channel.queue(m.encode(m.Ping(number=0)))
        if self._heartbeat.silent_s > SILENCE_LIMIT_S and self._child.exit_code is None:
            self._child.signal(signal.SIGKILL)
            raise HubLost(
                f"the hub (process {self._child.pid}) did not answer for {SILENCE_LIMIT_S:.0f} s and was "
                "killed; check whether it was stopped, or the machine is out of memory"
            )

    def wait(self, timeout_s: float) -> None:
        """Wait until the hub sends a message on either socket, or exits, or the timeout has passed."""
        poll = select.poll()
        events = select.POLLIN | (select.POLLOUT if self._channel.wants_write else 0)
        poll.register(self._channel.fileno(), events)
        if self._hook is not None:
            poll.register(self._hook.fileno(), select.POLLIN)
        if self._child.pidfd is not None:
            poll.register(self._child.pidfd, select.POLLIN)
        poll.poll(timeout_s * 1000)

    def close(self) -> None:
        """End hub and generator and remove the run directory; idempotent, no effect in a forked child."""
        if os.getpid() != self._pid or self._channel.is_closed:
            return
        atexit.unregister(self.close)
        if self._hook is not None:
            self._hook.close()
        self._channel.queue(m.encode(m.Stop(grace_s=_GRACE_S, reason="the training ends")), urgent=True)
        self._channel.flush()
        deadline_s = time.monotonic() + 2 * _GRACE_S
        while self._child.exit_code is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        self._channel.close()
        self._child.end()
        self._directory.close()
        self._output.close()
