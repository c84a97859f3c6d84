"""Prompts that the launcher feeds, in place of data that the generator reads.

In: payloads, which nobody here looks into. Out: each of them again whenever its group is issued.
Invariant: a payload is kept until its group is settled, so that a group can begin anew in a generator's next
life; of every group that ends untrained the launcher is told once.
"""

from fa_rollout.account import events
from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.flow.stream import StreamEnd
from trainer_hook import messages as m


class FedStream:
    """A stream as long as what was fed so far."""

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
        """Prompts of further groups."""
        for payload in payloads:
            self._payloads[self._num_fed] = payload
            self._num_fed += 1

    def payload(self, group: int) -> bytes:
        """What was fed for a group that is not settled."""
        return self._payloads[group]

    def locate(self, group: int) -> tuple[int, int]:
        """There is one epoch, and its rows are the groups."""
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
    """Serves a launcher that feeds the prompts; with any other it has nothing to do."""

    def __init__(self, core: Core, stream: FedStream) -> None:
        self._core = core
        self._stream = stream
        self._settled: dict[int, m.Settled] = {}
        """Why groups ended, until the launcher is told."""
        self._told_wanted = 0

    def receive(self, message: m.Message) -> None:
        """The launcher speaks."""
        match message:
            case m.Feed():
                self._stream.feed(message.payloads)
            case m.Announce():
                self._announce(message)

    def committed(self, message: m.Commit) -> None:
        """Pass on what came along with a record that the books took."""
        self._core.outbox.to_launcher(
            m.Enclosed(group=message.group, attempt=message.attempt, payload=message.payload)
        )

    def settled(self, message: m.Settled) -> None:
        """A group may have ended for this reason."""
        self._settled[message.group] = message

    def tell(self, flow: Flow) -> None:
        """After each event: what ended, and how much more could be used."""
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
        if wanted > self._told_wanted:
            self._told_wanted = wanted
            self._core.outbox.to_launcher(m.Wanted(num_groups=wanted))

    def _announce(self, message: m.Announce) -> None:
        self._core.announced = message
        if self._core.flow is not None:
            self._publish(self._core.flow, message)
        self._core.outbox.to_generator(message)

    def flow_begins(self, flow: Flow) -> None:
        """The first generator is ready."""
        if self._core.announced is not None:
            self._publish(flow, self._core.announced)

    def _publish(self, flow: Flow, message: m.Announce) -> None:
        if message.version != flow.version:
            flow.published(message.version)
            self._core.log.write(events.VersionPublished(version=message.version, figures=None))
