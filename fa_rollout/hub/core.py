"""What the hub's parts share: the run's state, and the two ways to speak of trouble."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fa_rollout.account import events
from fa_rollout.config import Config
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.flow.replay import Recording
from fa_rollout.hub.io.event_log import EventLog
from fa_rollout.hub.measures.clocks import TrainerClock
from fa_rollout.hub.measures.pulses import FAILING_S, Pulses
from fa_rollout.hub.measures.recent import History
from fa_rollout.hub.state.evaluations import Evaluations
from fa_rollout.hub.state.membership import EngineMembership
from fa_rollout.hub.state.steps import Steps
from fa_rollout.hub.state.updates import Phase, Updates
from fa_rollout.hub.state.world import Attachment, World
from shm import RingTable
from trainer_hook.messages import Announce, Fatal, Message, Notice, Refused


class HubOutbox(Protocol):
    """Where the hub's messages go; none of these calls blocks or fails."""

    def to_rank(self, rank: Attachment, message: Message) -> None: ...

    def to_generator(self, message: Message) -> None: ...

    def to_launcher(self, message: Message) -> None: ...

    def end(self, exit_code: int, text: str) -> None:
        """The run is over: stop everything, tell the launcher."""


@dataclass(slots=True, kw_only=True)
class Core:
    """State of a run, between events."""

    config: Config
    run: str
    outbox: HubOutbox
    log: EventLog
    table: RingTable
    world: World
    updates: Updates
    evaluations: Evaluations
    membership: EngineMembership
    steps: Steps
    weights_dir: Path
    spool_dir: Path
    """Files of checkpoints on their way to ranks and back."""
    lineage: str
    former_lineages: list[str] = field(default_factory=list)
    """Engines may report labels of them still."""
    recording: Recording | None = None
    """A run whose steps are given out again."""
    flow: Flow | None = None
    """None until the first generator has read the data."""
    fatal: Fatal | None = None
    stop_reason: str | None = None
    """Why the run ends before its last step: no step begins and no group starts from then on."""
    batch_waits_for: str = "the generator to read the data and reach the engines"
    has_given_state: bool = False
    """A trainer may hold a checkpoint of this run."""
    first_weights: str | None = None
    """Folder of what the engines started with, where all of them tell the same."""
    announced: Announce | None = None
    """What a launcher that feeds the prompts announced last."""
    began_s: float = field(default_factory=time.monotonic)
    history: History = field(default_factory=History)
    clock: TrainerClock = field(default_factory=TrainerClock)
    pulses: Pulses = field(default_factory=Pulses)

    @property
    def ring_bytes(self) -> int:
        return self.table.statistics().size_bytes

    def waits_for(self) -> str:
        """Who waits for whom, in words."""
        if self.updates.phase is not Phase.IDLE:
            return f"a weight update is {self.updates.phase}"
        pulse = self.pulses.last
        if pulse is None:
            return f"{self.batch_waits_for}; the generator has not reported yet"
        text = (
            f"{self.batch_waits_for}; the generator has {pulse.num_running} groups in progress, "
            f"{pulse.num_queued} queued, {pulse.num_waiting_for_ring} waiting for ring space"
        )
        out = [engine for engine in pulse.engines if engine.is_out or engine.failing_s > FAILING_S]
        if not out:
            return text
        now_s = time.monotonic()
        names = "; ".join(
            f"{one.url} for {max(one.failing_s, self.pulses.out_s(one.url, now_s)):.0f} s "
            f"({one.last_error or 'no answer'})"
            for one in out[:4]
        )
        which = "no engine answers" if len(out) == len(pulse.engines) else "engines that do not answer"
        return f"{text}; {which}: {names}"

    def warn(self, text: str) -> None:
        """Something degraded that repairs itself: the launcher says it, every rank logs it."""
        self.log.write(events.WarningLogged(text=text))
        self.history.warned(text)
        self.outbox.to_launcher(Notice(text=text))
        for rank in self.world.members.values():
            self.outbox.to_rank(rank, Notice(text=text))

    def give_up(self, error: str, text: str, exit_code: int = 1) -> None:
        """The run cannot go on: every rank's present or next call raises."""
        if self.fatal is not None:
            return
        self.fatal = Fatal(error=error, text=text)
        self.log.write(events.RunFailed(error=error, text=text))
        for rank in self.world.members.values():
            self.outbox.to_rank(rank, self.fatal)
        self.outbox.end(exit_code, text)

    def refuse(self, rank: Attachment, request: int, error: str, text: str) -> None:
        """A request cannot be served; the rank's call raises."""
        self.outbox.to_rank(rank, Refused(request=request, error=error, text=text))

    def refuse_waiting(self, error: str, text: str) -> None:
        """No rank that waits for a batch will get one."""
        for rank in self.world.waiting():
            assert rank.waiting is not None
            self.refuse(rank, rank.waiting.request, error, text)
            rank.waiting = None
