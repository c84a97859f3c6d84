"""The trainer's time by phase: every second once, from the first batch on."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from fa_rollout.account.figures import TimeSpent
from fa_rollout.account.snapshot import TrainerPhase
from fa_rollout.hub.measures.clocks import TrainerClock, trainer_phase
from fa_rollout.hub.state.updates import Phase
from fa_rollout.hub.state.world import Attachment, World
from trainer_hook.messages import Hello, Next, UpdateEnter

P = TrainerPhase


@dataclass
class Trainer:
    """Two ranks that a test moves by hand, at times that it names."""

    clock: TrainerClock = field(default_factory=TrainerClock)
    world: World = field(default_factory=lambda: World(2))
    in_step: set[int] = field(default_factory=set)
    update: Phase = Phase.IDLE

    def current(self, rank: Attachment) -> int | None:
        """What the clock asks the steps."""
        return 0 if rank.hello.dp_rank in self.in_step else None

    def attach(self, number: int) -> Attachment:
        hello = Hello(
            protocol=1, run="r", token="t", role="rank", pid=number, schema=0, dp_rank=number, dp_size=2
        )
        rank = Attachment(number=number, hello=hello, connection=None)
        self.world.join(rank)
        return rank

    def at(self, now_s: float) -> None:
        steps: Any = self
        self.clock.look(self.world, steps, self.update, now_s)


def spent(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(TimeSpent.__struct_fields__, 0.0) | seconds


def figures(time: TimeSpent) -> dict[str, float]:
    return {name: round(getattr(time, name), 6) for name in TimeSpent.__struct_fields__}


def test_each_second_is_counted_once_and_start_up_apart() -> None:
    trainer = Trainer()
    clock = trainer.clock
    trainer.at(100.0)
    ranks = [trainer.attach(number) for number in (0, 1)]
    for rank in ranks:
        rank.waiting = Next(request=1, step=0)
    trainer.at(101.0)
    assert clock.phase is P.WAITING
    for rank in ranks:
        rank.waiting = None
    trainer.in_step = {0, 1}
    trainer.at(111.0)  # the first batch, after 10 s
    trainer.in_step = {1}  # rank 0 is done, and waits for the next step
    ranks[0].waiting = Next(request=2, step=1)
    trainer.at(113.0)
    assert clock.phase is P.TRAINING, "the trainer trains as long as a rank does"
    trainer.in_step = set()
    assert clock.is_first_lap
    assert figures(clock.end_lap(114.0)) == spent(training=2.5, waiting_for_ranks=0.5)
    trainer.at(114.0)
    assert clock.phase is P.OUTSIDE
    ranks[0].waiting = None
    for rank in ranks:
        rank.entered_update = UpdateEnter(request=3)
    trainer.update = Phase.ENTERING
    trainer.at(115.0)
    trainer.update = Phase.OPEN
    for rank in ranks:
        rank.entered_update = None
    trainer.at(115.5)
    trainer.update = Phase.PUBLISHING
    trainer.at(117.0)
    assert clock.write_s == pytest.approx(1.5)
    assert clock.update_s(118.0) == pytest.approx(1.0)
    trainer.update = Phase.IDLE
    for rank in ranks:
        rank.waiting = Next(request=4, step=1)
    trainer.at(118.0)
    assert figures(clock.lap(122.0)) == spent(outside=0.5, waiting_for_ranks=1.0, updating=2.5, waiting=4.0)
    whole = spent(training=2.5, waiting_for_ranks=1.5, outside=0.5, updating=2.5, waiting=4.0)
    assert figures(clock.spent(122.0)) == whole
    assert clock.first_wait_s == pytest.approx(10.0)
    assert not clock.is_first_lap


def test_a_trainer_that_comes_again_starts_up_again() -> None:
    trainer = Trainer()
    for life in range(2):
        start_s = 1000.0 * life
        ranks = [trainer.attach(10 * life + number) for number in (0, 1)]
        # Numbers below the size, as a rank's must be.
        for number, rank in enumerate(ranks):
            trainer.world.members.pop(rank.key, None)
            rank.hello = Hello(
                protocol=1, run="r", token="t", role="rank", pid=1, schema=0, dp_rank=number, dp_size=2
            )
            trainer.world.join(rank)
            rank.waiting = Next(request=1, step=0)
        trainer.at(start_s)
        for rank in ranks:
            rank.waiting = None
        trainer.in_step = {0, 1}
        trainer.at(start_s + 5.0)
        assert trainer.clock.is_first_lap
        trainer.clock.end_lap(start_s + 7.0)
        for rank in ranks:
            trainer.world.leave(rank)
        trainer.in_step = set()
        trainer.at(start_s + 7.0)
        assert trainer.clock.phase is P.ABSENT
    assert trainer.clock.first_wait_s == pytest.approx(10.0)
    assert figures(trainer.clock.spent(5000.0)) == spent(training=4.0)


@pytest.mark.parametrize(
    ("ranks", "is_complete", "phase"),
    [
        (set(), True, P.ABSENT),
        ({P.WAITING}, False, P.ATTACHING),
        ({P.WAITING}, True, P.WAITING),
        ({P.WAITING, P.TRAINING}, True, P.TRAINING),
        ({P.WAITING, P.UPDATING}, True, P.UPDATING),
        ({P.WAITING, P.OUTSIDE}, True, P.OUTSIDE),
        ({P.TRAINING, P.UPDATING}, True, P.TRAINING),
        ({P.TRAINING, P.WAITING_FOR_RANKS}, True, P.TRAINING),
        ({P.WAITING_FOR_RANKS}, True, P.WAITING_FOR_RANKS),
    ],
)
def test_the_trainer_waits_only_when_all_its_ranks_do(
    ranks: set[TrainerPhase], is_complete: bool, phase: TrainerPhase
) -> None:
    assert trainer_phase(ranks, is_complete=is_complete) is phase
