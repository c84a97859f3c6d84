"""Where the trainer's time goes, as the hub sees it: each rank's phase, and the phase of all together.

In: looks at the world, after every event. Out: phases with their beginnings, and seconds by phase.
Invariant: from the first batch of a trainer's life on, every second of it is counted once.
"""

from fa_rollout.hub.state.steps import Steps
from fa_rollout.hub.state.updates import Phase
from fa_rollout.hub.state.world import Attachment, World
from fa_rollout.observe.snapshot import TimeSpent, TrainerPhase

_COUNTED = (TrainerPhase.WAITING, TrainerPhase.TRAINING, TrainerPhase.UPDATING, TrainerPhase.OUTSIDE)
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
        self._spent: dict[TrainerPhase, float] = dict.fromkeys(_COUNTED, 0.0)
        self._lap = dict(self._spent)
        """`_spent` at the end of the last step."""
        self._counted_s = 0.0
        self._update = Phase.IDLE
        self._update_since_s = 0.0
        self.write_s = 0.0
        """How long the ranks wrote in the update that goes on, or in the last one."""

    def look(self, world: World, steps: Steps, update: Phase, now_s: float) -> None:
        """Take note of what has changed."""
        if update is not self._update:
            self._turn_update(update, now_s)
        present = set()
        for rank in world.members.values():
            phase = rank_phase(rank, steps, update)
            present.add(phase)
            known = self._ranks.get(rank.number)
            if known is None or known[0] is not phase:
                self._ranks[rank.number] = (phase, now_s)
        if len(self._ranks) > len(world.members):
            numbers = {rank.number for rank in world.members.values()}
            self._ranks = {number: known for number, known in self._ranks.items() if number in numbers}
        phase = trainer_phase(present, is_complete=world.is_complete)
        if phase is not self.phase:
            self._turn(phase, now_s)

    def rank(self, rank: Attachment, now_s: float) -> tuple[TrainerPhase, float]:
        """(phase, seconds in it) of one rank."""
        phase, since_s = self._ranks.get(rank.number, (TrainerPhase.OUTSIDE, now_s))
        return phase, now_s - since_s

    def spent(self, now_s: float) -> TimeSpent:
        """Since the first batch of the run."""
        self._count(now_s)
        return _figures(self._spent)

    def lap(self, now_s: float) -> TimeSpent:
        """Since the last step's end, or since a trainer's first batch."""
        self._count(now_s)
        return _figures({phase: self._spent[phase] - self._lap[phase] for phase in _COUNTED})

    def end_lap(self, now_s: float) -> TimeSpent:
        """A step has ended: the time since the one before."""
        lap = self.lap(now_s)
        self._lap = dict(self._spent)
        self.is_first_lap = False
        return lap

    def update_s(self, now_s: float) -> float:
        """Time in the present phase of the weight update."""
        return now_s - self._update_since_s

    def _turn(self, phase: TrainerPhase, now_s: float) -> None:
        self._count(now_s)
        if phase is TrainerPhase.TRAINING and not self._has_begun:
            self._has_begun, self.is_first_lap = True, True
            self._lap = dict(self._spent)
        elif phase is TrainerPhase.ABSENT:
            self._has_begun = False
        self.phase, self.since_s = phase, now_s
        self._counted_s = now_s

    def _count(self, now_s: float) -> None:
        """Book the time since the last call under the present phase."""
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        if self.phase in _COUNTED and self._has_begun:
            self._spent[self.phase] += passed_s
        elif self.phase is TrainerPhase.WAITING:
            self.first_wait_s += passed_s

    def _turn_update(self, update: Phase, now_s: float) -> None:
        if self._update is Phase.OPEN:
            self.write_s = now_s - self._update_since_s
        self._update, self._update_since_s = update, now_s


def rank_phase(rank: Attachment, steps: Steps, update: Phase) -> TrainerPhase:
    """What a rank does now."""
    if rank.waiting is not None:
        return TrainerPhase.WAITING
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
    return TrainerPhase.WAITING


def _figures(spent: dict[TrainerPhase, float]) -> TimeSpent:
    return TimeSpent(**{phase.value: seconds for phase, seconds in spent.items()})
