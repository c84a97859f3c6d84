"""Assignments in, running groups, one answer for each: a `Commit` (by the outbox) or a `Settled`.

The number of samples is limited: engines x samples per engine. A free slot goes to the next sample of a
started group, then to the next group: oldest first, retries before new groups.

| dispatch of groups waits for | released by |
|---|---|
| engines that are paused for an update | `updates` |
| a finished group that waits for room in the ring | `Tail` |
| the end | nothing |

Invariant: every assignment is answered exactly once, whatever its group's task raises.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from typing import Protocol

from fa_rollout.client.base.errors import EngineUnavailable
from fa_rollout.config import ConfigError
from fa_rollout.filters import EndlessRejection
from fa_rollout.generator.base.error_text import tellable, traced
from fa_rollout.generator.base.gate import Gate, GateDeadline
from fa_rollout.generator.base.slots import Slots
from fa_rollout.generator.rollouts.execution import Slot
from fa_rollout.generator.turns.job import GroupEnding, HeadStart, Job
from fa_rollout.rewards.outcomes import RewardsLost
from fa_rollout.user_code.failure import told
from trainer_hook.messages import Assignment, Dispatched, Lingering, Message, Settled, Settlement

logger = logging.getLogger(__name__)


class RunsGroups(Protocol):
    """Runs groups."""

    async def run(self, job: Job, slot: Slot, deadline: GateDeadline) -> GroupEnding | None:
        """Run a group; None if it is committed or was already answered."""


class Dispatcher:
    """The groups assigned to this generator."""

    def __init__(
        self,
        *,
        capacity: int,
        samples_per_group: int,
        group_timeout_s: float | None,
        send: Callable[[Message], None],
        published_version: Callable[[], int],
        sending: Gate,
        on_ended: Callable[[Job, GroupEnding], None] = lambda job, ending: None,
    ) -> None:
        """
        Args:
            on_ended: called with each group that became no record, and why.
            capacity: concurrent samples of all engines.
            sending: the gate of requests; closed while engines are paused.
        """
        self._tasks: asyncio.TaskGroup | None = None
        self._capacity = capacity
        self._samples_per_group = samples_per_group
        self._group_timeout_s = group_timeout_s
        self._send = send
        self._published_version = published_version
        self._sending = sending
        self._on_ended = on_ended
        self.gate = Gate(on_open=self._pump)
        """Closed while dispatch of groups must wait."""
        self._runner: RunsGroups | None = None
        self._retries: deque[Job] = deque()
        self._fresh: deque[Job] = deque()
        self._running: set[Job] = set()
        self._slots = Slots(capacity)
        self._num_claimed = 0
        """Samples of running groups that have a slot or wait for one."""
        self._departed: list[int] = []
        self._is_over = False

    async def run(self, runner: RunsGroups) -> None:
        """Run groups until cancelled, which also cancels the groups."""
        self._runner = runner
        async with asyncio.TaskGroup() as self._tasks:
            try:
                self._pump()
                await asyncio.Event().wait()
            finally:
                self._is_over = True
                self.gate.hold("stopping")

    # --- requests of the hub ----------------------------------------------------------------------

    def add(self, assignments: Iterable[Assignment], kept: Iterable[HeadStart] = ()) -> None:
        """Queue groups in the given order. `kept`: unfinished groups from a checkpoint."""
        head_starts = {start.entry.group: start for start in kept}
        for assignment in assignments:
            queue = self._retries if assignment.attempt else self._fresh
            queue.append(Job(assignment=assignment, head_start=head_starts.get(assignment.group)))
        self._pump()

    def drop(self, groups: Iterable[int], reason: str) -> None:
        """Drop these groups, queued or running. Unknown groups have already been answered."""
        names = set(groups)
        self._end(
            lambda job: job.assignment.group in names, GroupEnding(outcome=Settlement.DROPPED, reason=reason)
        )

    def end_endless(self, limit_s: float, rule: str) -> None:
        """End generate functions that have taken turns for `limit_s`, since a rank waits for a batch."""
        for job in self._running:
            job.end_calls(limit_s, rule)

    def give_back(self, reason: str) -> None:
        """End all groups and return them to the hub, to be issued again; start no more."""
        self.gate.hold("stopping")
        self._end(lambda job: True, GroupEnding(outcome=Settlement.RETURNED, reason=reason))

    def resize(self, capacity: int) -> None:
        """Change the number of concurrent samples."""
        self._capacity = capacity
        self._slots.resize(capacity)
        self._pump()

    def running(self, groups: Iterable[int] | None = None) -> list[Job]:
        """Groups at work; of these alone, if given."""
        names = None if groups is None else set(groups)
        return [job for job in self._running if names is None or job.assignment.group in names]

    async def emptied(self) -> None:
        """Wait until no group runs."""
        while self._running:
            await asyncio.wait([job.task for job in self._running if job.task is not None])

    # --- events of the parts ----------------------------------------------------------------------

    def depart(self, job: Job) -> None:
        """A group's first request is being sent; reported to the hub once per loop iteration."""
        if not self._departed:
            asyncio.get_running_loop().call_soon(self._tell_departed)
        self._departed.append(job.assignment.group)

    def on_backlog(self, is_waiting: bool) -> None:
        """Whether finished groups wait for room in the ring."""
        if is_waiting:
            self.gate.hold("ring")
        else:
            self.gate.release("ring")

    def oldest(self, count: int = 3) -> list[Lingering]:
        """The groups that have run longest, oldest first."""
        now_s = time.monotonic()
        begun = [job for job in self._running if job.started_s]
        return [
            Lingering(
                name=f"group {job.assignment.group}",
                age_s=now_s - job.started_s,
                where=_where(job),
            )
            for job in nsmallest(count, begun, key=lambda job: job.started_s)
        ]

    @property
    def num_queued(self) -> int:
        return len(self._retries) + len(self._fresh)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # --- inside -----------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start groups while slots are free."""
        while self.num_queued and self._tasks and self._num_claimed < self._capacity and self.gate.is_open:
            job = (self._retries or self._fresh).popleft()
            job.num_claimed = self._samples_per_group
            self._num_claimed += job.num_claimed
            self._running.add(job)
            job.task = self._tasks.create_task(self._carry(job), name=f"group-{job.assignment.group}")
            job.task.add_done_callback(partial(self._finish, job))

    @asynccontextmanager
    async def _place(self, job: Job) -> AsyncIterator[None]:
        """A slot among the concurrent samples; oldest first."""
        try:
            async with self._slots:
                yield
        finally:
            self._unclaim(job, 1)

    def _unclaim(self, job: Job, num_samples: int) -> None:
        job.num_claimed -= num_samples
        self._num_claimed -= num_samples
        self._pump()

    async def _carry(self, job: Job) -> GroupEnding | None:
        """Run one group to its end; None if it is committed.

        Raises:
            ConfigError, EndlessRejection, EngineUnavailable, RewardsLost: the run must end.
        """
        assert self._runner is not None
        deadline = self._sending.deadline(self._group_timeout_s)
        job.active_s = lambda: deadline.active_s
        try:
            return await self._runner.run(job, self._place, deadline)
        except (ConfigError, EndlessRejection, EngineUnavailable, RewardsLost):
            raise  # no group can become a record any more
        except Exception as error:  # a mistake of ours ends its group, not the run
            logger.warning("event=group_raised group=%d\n%s", job.assignment.group, traced(error))
            return GroupEnding(outcome=Settlement.FAILED, reason=f"raised: {told(error)}")

    def _finish(self, job: Job, task: "asyncio.Task[GroupEnding | None]") -> None:
        """A group's task ended or was cancelled, possibly before its first step."""
        self._running.discard(job)
        self._unclaim(job, job.num_claimed)
        if not task.cancelled() and task.exception() is not None:
            return  # the task group ends the run
        ending = job.ending or self._missing() if task.cancelled() else task.result()
        if ending is not None:
            self._settle(job, ending)

    def _missing(self) -> GroupEnding | None:
        """The ending of a group that other code cancelled; None if all groups are being cancelled."""
        if self._is_over:
            return None
        return GroupEnding(outcome=Settlement.FAILED, reason="cancelled: its task was cancelled from outside")

    def _end(self, chosen: Callable[[Job], bool], ending: GroupEnding) -> None:
        for queue in (self._retries, self._fresh):
            for job in [job for job in queue if chosen(job)]:
                queue.remove(job)
                self._settle(job, ending)
        for job in [job for job in self._running if chosen(job)]:
            job.end(ending)

    def _settle(self, job: Job, ending: GroupEnding) -> None:
        ending = replace(ending, reason=tellable(ending.reason))
        self._send(
            Settled(
                group=job.assignment.group,
                attempt=job.assignment.attempt,
                outcome=ending.outcome,
                reason=ending.reason,
                mean_response_len=ending.mean_response_len,
            )
        )
        self._on_ended(job, ending)

    def _tell_departed(self) -> None:
        groups, self._departed = self._departed, []
        self._send(Dispatched(groups=groups, version=self._published_version()))


def _where(job: Job) -> str:
    """What a group is doing, for people."""
    if not job.num_claimed:
        return "reward, filter or ring"
    return f"{job.num_claimed} sample{'s' if job.num_claimed > 1 else ''} to go"
