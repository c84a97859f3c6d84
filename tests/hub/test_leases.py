"""A lease is somebody's fault only after its step: while a rank trains, its records are in nobody's way."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fa_rollout.hub.requests.deadlines import Watch
from shm.statistics import Obstacle

OBSTACLE = Obstacle(sequence=7, holders=(1,), age_s=5000.0, length=64, stuck_bytes=128)


class Hub:
    """What the watch looks at: one rank, which holds the record at the ring's tail."""

    def __init__(self) -> None:
        self.in_step = True
        self.warnings: list[str] = []
        self.ends: list[str] = []
        self.obstacle: Obstacle | None = OBSTACLE
        uses: Callable[[Any, int], bool] = lambda rank, sequence: self.in_step  # noqa: E731
        self.watch = Watch(
            SimpleNamespace(  # type: ignore[arg-type]
                table=SimpleNamespace(obstacle=lambda: self.obstacle),
                world=SimpleNamespace(members={0: SimpleNamespace(number=1, name="rank 0")}),
                steps=SimpleNamespace(uses=uses),
                config=SimpleNamespace(ring=SimpleNamespace(lease_warning_s=120.0, lease_deadline_s=1800.0)),
                warn=self.warnings.append,
                give_up=lambda error, text: self.ends.append(text),
            )
        )

    def look(self, *times_s: float) -> None:
        for now_s in times_s:
            self.watch._watch_leases(now_s)


@pytest.fixture
def hub() -> Hub:
    return Hub()


def test_a_step_may_take_as_long_as_it_likes(hub: Hub) -> None:
    hub.look(0.0, 1000.0, 10_000.0)
    assert hub.warnings == hub.ends == []


def test_views_that_outlive_their_step_are_named_once_and_end_the_run_at_the_deadline(hub: Hub) -> None:
    hub.look(0.0, 5000.0)
    hub.in_step = False
    hub.look(5001.0, 5120.0)
    assert hub.warnings == []
    hub.look(5122.0, 5130.0)
    assert len(hub.warnings) == 1
    assert "rank 0 left the step of record 7 (64 bytes) 121 s ago and still holds views" in hub.warnings[0]
    hub.look(6800.0)
    assert hub.ends == []
    hub.look(6802.0)
    assert "ring.lease_deadline_s" in hub.ends[0]


def test_a_record_that_comes_free_ends_the_count(hub: Hub) -> None:
    hub.in_step = False
    hub.look(0.0)
    hub.obstacle = None
    hub.look(100.0)
    hub.obstacle = OBSTACLE
    hub.look(101.0, 200.0)
    assert hub.warnings == []
