"""Prompts fed by the launcher, instead of data read by the generator.

In: opaque payloads. Out: a payload each time its group is issued.
Invariant: a payload is kept until its group is settled, so that the group can restart after the generator
restarts; every group that ends untrained is reported to the launcher once.
"""

from fa_rollout.account import events
from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.flow.stream import StreamEnd
from trainer_hook import messages as m


class FedStream:
    """A stream of the prompts fed so far."""

    is_open = True
    description = ""

    def __init__(self) -> None:
        self._num_fed = 0
        self._payloads: dict[int, bytes] = {}
        self._untrained: list[tuple[int, StreamEnd]] = []

    @property
    def length(self) -> int:
        """Groups fed so far."""
        return self._num_fed

    def feed(self, payloads: list[bytes]) -> None:
        """Add prompts."""
        for payload in payloads:
            self._payloads[self._num_fed] = payload
            self._num_fed += 1

    def payload(self, group: int) -> bytes:
        """The payload of an unsettled group."""
        return self._payloads[group]

    def locate(self, group: int) -> tuple[int, int]:
        """(epoch, row): there is one epoch, and its rows are the groups."""
        return 0, group

    def settled(self, group: int, end: StreamEnd) -> None:
        """Forget the payload."""
        del self._payloads[group]
        if end is not StreamEnd.TRAINED:
            self._untrained.append((group, end))

    def take_untrained(self) -> list[tuple[int, StreamEnd]]:
        """Groups that ended untrained since the last call."""
        ended, self._untrained = self._untrained, []
        return ended


class LauncherHandler:
    """Handles a launcher that feeds prompts."""

    def __init__(self, core: Core, stream: FedStream) -> None:
        self._core = core
        self._stream = stream
        self._settled: dict[int, m.Settled] = {}
        """Why groups ended, until it is reported to the launcher."""
        self._reported_wanted = 0

    def receive(self, message: m.Message) -> None:
        """Handle a message of the launcher."""
        match message:
            case m.Feed():
                self._stream.feed(message.payloads)
            case m.Announce():
                self._announce(message)

    def committed(self, message: m.Commit) -> None:
        """Forward the payload of a committed record."""
        self._core.outbox.to_launcher(
            m.Enclosed(group=message.group, attempt=message.attempt, payload=message.payload)
        )

    def settled(self, message: m.Settled) -> None:
        """Note a possible reason for the end of a group."""
        self._settled[message.group] = message

    def report(self, flow: Flow) -> None:
        """After each event: report ended groups, and the number of prompts wanted."""
        for group, end in self._stream.take_untrained():
            cause = self._settled.get(group)
            self._core.outbox.to_launcher(
                m.Departed(
                    group=group,
                    outcome=m.Settlement(end.value),
                    reason=cause.reason if cause else "its tokens were too old",
                    payload=cause.payload if cause else b"",
                )
            )
        self._settled.clear()
        wanted = flow.books.cursor + flow.num_credits
        if wanted > self._reported_wanted:
            self._reported_wanted = wanted
            self._core.outbox.to_launcher(m.Wanted(num_groups=wanted))

    def _announce(self, message: m.Announce) -> None:
        self._core.announced = message
        if self._core.flow is not None:
            self._publish(self._core.flow, message)
        self._core.outbox.to_generator(message)

    def flow_begins(self, flow: Flow) -> None:
        """Start the flow: the first generator is ready."""
        if self._core.announced is not None:
            self._publish(flow, self._core.announced)

    def _publish(self, flow: Flow, message: m.Announce) -> None:
        if message.version != flow.version:
            flow.published(message.version)
            self._core.log.write(events.VersionPublished(version=message.version, figures=None))
