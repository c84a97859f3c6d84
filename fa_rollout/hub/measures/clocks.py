"""Where the trainer's time goes, as the hub sees it: each rank's phase, and the phase of all together.

In: looks at the world, after every event. Out: phases with their beginnings, and seconds by phase, mean over
ranks. Invariant: from the first batch of a trainer's life on, every second of it is counted once.

A rank waits for data only while all ranks do. Until the slowest has asked for its batch, or entered the
update, the others wait for that rank.
"""

from collections import Counter

from fa_rollout.account.figures import TimeSpent
from fa_rollout.account.snapshot import TrainerPhase
from fa_rollout.hub.state.steps import Steps
from fa_rollout.hub.state.updates import Phase
from fa_rollout.hub.state.world import Attachment, World

_COUNTED = (
    TrainerPhase.WAITING,
    TrainerPhase.WAITING_FOR_RANKS,
    TrainerPhase.TRAINING,
    TrainerPhase.UPDATING,
    TrainerPhase.OUTSIDE,
)
_IN_UPDATE = (Phase.OPEN, Phase.PUBLISHING)


class TrainerClock:
    """The trainer of one run, over all its lives."""

    def __init__(self) -> None:
        self.phase = TrainerPhase.ABSENT
        self.since_s = 0.0
        self.first_wait_s = 0.0
        self.is_first_lap = True
        """No step has ended in this life of the trainer."""
        self._has_begun = False
        """This life has got its first batch."""
        self._ranks: dict[int, tuple[TrainerPhase, float]] = {}
        self._shares: dict[TrainerPhase, float] = {}
        """Of the ranks, by phase."""
        self._is_away = False
        """No generator is running."""
        self._spent = TimeSpent()
        self._lap = TimeSpent()
        """`_spent` at the end of the last step."""
        self._counted_s = 0.0
        self._update = Phase.IDLE
        self._update_since_s = 0.0
        self.write_s = 0.0
        """How long the ranks wrote in the update that goes on, or in the last one."""

    def look(self, world: World, steps: Steps, update: Phase, now_s: float, *, is_away: bool = False) -> None:
        """Take note of what has changed."""
        if update is not self._update:
            self._turn_update(update, now_s)
        present: Counter[TrainerPhase] = Counter()
        all_ask = all(rank.waiting is not None for rank in world.members.values())
        for rank in world.members.values():
            phase = rank_phase(rank, steps, update, all_ask=all_ask)
            present[phase] += 1
            known = self._ranks.get(rank.number)
            if known is None or known[0] is not phase:
                self._ranks[rank.number] = (phase, now_s)
        if len(self._ranks) > len(world.members):
            numbers = {rank.number for rank in world.members.values()}
            self._ranks = {number: known for number, known in self._ranks.items() if number in numbers}
        phase = trainer_phase(set(present), is_complete=world.is_complete)
        self._count(now_s)
        if phase is not self.phase:
            self._turn(phase, now_s)
        self._is_away = is_away
        self._shares = {one: count / len(world.members) for one, count in present.items()}

    def rank(self, rank: Attachment, now_s: float) -> tuple[TrainerPhase, float]:
        """(phase, seconds in it) of one rank."""
        phase, since_s = self._ranks.get(rank.number, (TrainerPhase.OUTSIDE, now_s))
        return phase, now_s - since_s

    def spent(self, now_s: float) -> TimeSpent:
        """Since the first batch of the run."""
        self._count(now_s)
        return self._spent

    def lap(self, now_s: float) -> TimeSpent:
        """Since the last step's end, or since a trainer's first batch."""
        self._count(now_s)
        return self._spent.minus(self._lap)

    def end_lap(self, now_s: float) -> TimeSpent:
        """A step has ended: the time since the one before."""
        lap = self.lap(now_s)
        self._lap = self._spent
        self.is_first_lap = False
        return lap

    def update_s(self, now_s: float) -> float:
        """Time in the present phase of the weight update."""
        return now_s - self._update_since_s

    def _turn(self, phase: TrainerPhase, now_s: float) -> None:
        if phase is TrainerPhase.TRAINING and not self._has_begun:
            self._has_begun, self.is_first_lap = True, True
            self._lap = self._spent
        elif phase is TrainerPhase.ABSENT:
            self._has_begun = False
        self.phase, self.since_s = phase, now_s

    def _count(self, now_s: float) -> None:
        """Book the time since the last call under the ranks' present phases."""
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        if self.phase in _COUNTED and self._has_begun:
            spent = {phase.value: share * passed_s for phase, share in self._shares.items()}
            if self._is_away:
                spent["without_generator"] = spent.get("waiting", 0.0)
            self._spent = self._spent.plus(TimeSpent(**spent))
        elif self.phase is TrainerPhase.WAITING:
            self.first_wait_s += passed_s

    def _turn_update(self, update: Phase, now_s: float) -> None:
        if self._update is Phase.OPEN:
            self.write_s = now_s - self._update_since_s
        self._update, self._update_since_s = update, now_s


def rank_phase(rank: Attachment, steps: Steps, update: Phase, *, all_ask: bool) -> TrainerPhase:
    """What a rank does now; `all_ask`: every rank is in `next_batch`."""
    if rank.waiting is not None:
        return TrainerPhase.WAITING if all_ask else TrainerPhase.WAITING_FOR_RANKS
    if rank.entered_update is not None and update is Phase.ENTERING:
        return TrainerPhase.WAITING_FOR_RANKS
    if rank.entered_update is not None or update in _IN_UPDATE:
        return TrainerPhase.UPDATING
    return TrainerPhase.OUTSIDE if steps.current(rank) is None else TrainerPhase.TRAINING


def trainer_phase(ranks: set[TrainerPhase], *, is_complete: bool) -> TrainerPhase:
    """What the trainer does whose ranks are in these phases."""
    if not ranks:
        return TrainerPhase.ABSENT
    if not is_complete:
        return TrainerPhase.ATTACHING
    for phase in (TrainerPhase.TRAINING, TrainerPhase.UPDATING, TrainerPhase.OUTSIDE):
        if phase in ranks:
            return phase
    return TrainerPhase.WAITING if TrainerPhase.WAITING in ranks else TrainerPhase.WAITING_FOR_RANKS
