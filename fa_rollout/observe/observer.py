"""A read-only connection to a run: questions out, snapshots in.

Invariant: nothing here changes the run, or waits for it without a deadline.
"""

import select
import time
from types import TracebackType
from typing import Self

import msgspec

from fa_rollout.account.snapshot import Snapshot
from fa_rollout.launcher.running import ActiveRun, open_channel
from shm.errors import ChannelClosed, ChannelError, ChannelTimeout, FaRolloutError
from trainer_hook.messages import QuerySnapshot, RunEnded, SnapshotTaken, decode, encode


class RunOver(FaRolloutError, EOFError):
    """The run has ended; `ended` has its last words, if it could speak them."""

    def __init__(self, ended: RunEnded | None, last: Snapshot | None) -> None:
        text = "the run's hub is gone without a word" if ended is None else ended.text
        super().__init__(text)
        self.ended = ended
        self.last = last
        """Where it stood at its end; None where that did not come any more."""

    def __reduce__(self) -> tuple[type["RunOver"], tuple[RunEnded | None, Snapshot | None]]:
        return RunOver, (self.ended, self.last)


class Observer:
    """One observer of one run; each snapshot brings the steps since the one before."""

    def __init__(self, running: ActiveRun) -> None:
        """
        Raises:
            AttachTimeout: nobody answers.
            HandshakeRefused: it is another run, or another release.
        """
        self._channel = open_channel(running)
        self._request = 0
        self._is_asked = False
        self._seen = (0, 0)

    def fileno(self) -> int:
        """Readable when the hub has said something."""
        return self._channel.fileno()

    def ask(self) -> None:
        """Ask where the run stands, unless an answer is still to come."""
        if self._is_asked:
            return
        self._request += 1
        self._is_asked = True
        steps_seen, updates_seen = self._seen
        self._channel.queue(
            encode(
                QuerySnapshot(
                    request=self._request,
                    steps_seen=steps_seen,
                    updates_seen=updates_seen,
                )
            )
        )
        self._channel.flush()

    def take(self) -> Snapshot | None:
        """The answer, if it has come.

        Raises:
            RunOver: the run has ended.
        """
        found, ended = None, None
        try:
            for payload in self._channel.read_ready():
                message = decode(payload)
                if isinstance(message, RunEnded):
                    ended = message
                elif isinstance(message, SnapshotTaken):
                    found = self._snapshot(message)
        except ChannelClosed:
            raise RunOver(None, found) from None
        if ended is not None:
            raise RunOver(ended, found)
        return found

    def snapshot(self, timeout_s: float) -> Snapshot:
        """Ask, and wait for the answer.

        Raises:
            RunOver: the run has ended.
            ChannelTimeout: its hub does not answer: it is stopped or starved.
        """
        self.ask()
        deadline_s = time.monotonic() + timeout_s
        while (found := self.take()) is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ChannelTimeout(f"the hub must answer within {timeout_s:g} s: it is stopped or starved")
            select.select([self], [], [], left_s)
        return found

    def close(self) -> None:
        """Look no more."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _snapshot(self, reply: SnapshotTaken) -> Snapshot:
        self._is_asked = self._is_asked and reply.request != self._request
        try:
            snapshot = msgspec.msgpack.decode(reply.snapshot, type=Snapshot)
        except msgspec.ValidationError as error:
            raise ChannelError(f"the run is of another release than this command: {error}") from None
        self._seen = (snapshot.totals.steps, snapshot.totals.updates)
        return snapshot
