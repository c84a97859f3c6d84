"""Finished groups on their way into a real ring."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from fa_rollout.generator.records.assemble import GroupRecord, build_record
from fa_rollout.generator.records.outbox import Outbox
from shm import Descriptor, RingReader, RingTable, RingWriter
from shm.errors import RecordTooLarge
from shm.ring.segment import Segment
from tests.generator.samples import identity, scored_sample
from trainer_hook.messages import Commit

RING_BYTES = 64 << 10
NUM_TOKENS = 1200  # about 11 KB a record: five fit the ring


def _record(group: int, num_tokens: int = NUM_TOKENS) -> GroupRecord:
    sample = scored_sample(group=group, num_tokens=num_tokens)
    sample.response_ids = np.full(num_tokens, group, np.int32)
    return build_record([sample], identity(group), [1.0], 2.0)


class Bench:
    """An outbox with the hub's table behind it."""

    def __init__(self) -> None:
        self.segment = Segment.create(RING_BYTES)
        self.table = RingTable(RING_BYTES)
        head, sequence = self.table.restart()
        writer = RingWriter(
            self.segment, run=1, schema=2, incarnation=1, head=head, tail=self.table.tail, sequence=sequence
        )
        self.commits: list[Commit] = []
        self.backlog: list[bool] = []
        self.outbox = Outbox(writer, send=self._commit, on_backlog=self.backlog.append)

    def _commit(self, commit: Commit) -> None:
        descriptor = Descriptor(commit.incarnation, commit.sequence, commit.position, commit.length)
        self.table.admit(descriptor, commit.lowest_open)
        self.commits.append(commit)

    def free_oldest(self) -> None:
        self.table.retire(self.commits[len(self.commits) - len(self.table_live())].sequence)
        self.outbox.set_tail(self.table.tail)

    def table_live(self) -> list[Commit]:
        return [commit for commit in self.commits if commit.position >= self.table.tail]

    @property
    def groups(self) -> list[int]:
        return [commit.group for commit in self.commits]


def on_a_bench(
    scenario: Callable[[Bench, asyncio.TaskGroup], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    """Run a scenario on a loop, with a bench and a task group of its own."""

    async def run() -> None:
        bench = Bench()
        with bench.segment:
            async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
                await scenario(bench, tasks)

    def test() -> None:
        asyncio.run(run())

    test.__name__ = test.__qualname__ = scenario.__name__
    return test


async def _fill(bench: Bench) -> int:
    """Put groups 0, 1, ... until one would have to wait; how many went in."""
    for group in range(100):
        try:
            async with asyncio.timeout(0.05):
                await bench.outbox.put(_record(group))
        except TimeoutError:
            return group
    raise AssertionError("the ring must fill up")


@on_a_bench
async def test_records_are_committed_whole_and_in_order(bench: Bench, tasks: asyncio.TaskGroup) -> None:
    for group in range(3):
        await bench.outbox.put(_record(group))
    assert bench.groups == [0, 1, 2]
    assert bench.backlog == []
    reader = RingReader(bench.segment, run=1, schema=2)
    for commit in bench.commits:
        descriptor = Descriptor(commit.incarnation, commit.sequence, commit.position, commit.length)
        tokens = reader.open(descriptor, copy=True).arrays[0]
        assert tokens[3:].tolist() == [commit.group] * NUM_TOKENS


@on_a_bench
async def test_a_record_without_room_waits_for_the_tail_and_then_goes_first_come_first_served(
    bench: Bench, tasks: asyncio.TaskGroup
) -> None:
    num_fitting = await _fill(bench)
    waiting = [tasks.create_task(bench.outbox.put(_record(100 + i))) for i in range(3)]
    await asyncio.sleep(0.05)
    assert bench.outbox.num_waiting == 3
    assert bench.backlog[-1] is True
    for _ in range(num_fitting):
        bench.free_oldest()
    await asyncio.gather(*waiting)
    assert bench.groups[num_fitting:] == [100, 101, 102]
    assert bench.backlog[-1] is False


@on_a_bench
async def test_a_small_record_does_not_overtake_a_large_one_that_waits(
    bench: Bench, tasks: asyncio.TaskGroup
) -> None:
    await _fill(bench)
    large = tasks.create_task(bench.outbox.put(_record(200, 3 * NUM_TOKENS // 2)))
    await asyncio.sleep(0)
    small = tasks.create_task(bench.outbox.put(_record(201, 1)))
    await asyncio.sleep(0.05)
    assert not small.done()
    while not large.done():
        bench.free_oldest()
        await asyncio.sleep(0)
    await small
    assert bench.groups[-2:] == [200, 201]


@on_a_bench
async def test_a_group_that_is_dropped_while_it_waits_leaves_no_trace(
    bench: Bench, tasks: asyncio.TaskGroup
) -> None:
    num_fitting = await _fill(bench)
    doomed = tasks.create_task(bench.outbox.put(_record(300)))
    heir = tasks.create_task(bench.outbox.put(_record(301)))
    await asyncio.sleep(0.01)
    doomed.cancel()
    await asyncio.sleep(0.01)
    assert bench.outbox.num_waiting == 1
    for _ in range(num_fitting):
        bench.free_oldest()
    await heir
    assert 300 not in bench.groups


@on_a_bench
async def test_a_group_that_is_dropped_in_the_very_moment_of_its_commit_is_committed(
    bench: Bench, tasks: asyncio.TaskGroup
) -> None:
    num_fitting = await _fill(bench)
    doomed = tasks.create_task(bench.outbox.put(_record(400)))
    await asyncio.sleep(0.01)
    for _ in range(num_fitting):
        bench.free_oldest()
    doomed.cancel()
    await asyncio.wait([doomed])
    assert not doomed.cancelled()
    assert bench.groups[-1] == 400


@on_a_bench
async def test_a_cancellation_just_before_the_tail_moves_wins_over_the_commit(
    bench: Bench, tasks: asyncio.TaskGroup
) -> None:
    num_fitting = await _fill(bench)
    doomed = tasks.create_task(bench.outbox.put(_record(500)))
    await asyncio.sleep(0.01)
    doomed.cancel()
    for _ in range(num_fitting):
        bench.free_oldest()
    await asyncio.wait([doomed])
    assert doomed.cancelled()
    assert 500 not in bench.groups
    assert bench.outbox.num_waiting == 0
    assert bench.backlog[-1] is False


@on_a_bench
async def test_a_record_that_can_never_fit_is_refused_at_once_and_the_next_is_whole(
    bench: Bench, tasks: asyncio.TaskGroup
) -> None:
    with pytest.raises(RecordTooLarge, match=r"raise ring\.bytes"):
        await bench.outbox.put(_record(0, RING_BYTES))
    await bench.outbox.put(_record(1))
    assert bench.groups == [1]


@on_a_bench
async def test_a_record_that_can_never_fit_does_not_hold_up_those_behind_it(
    bench: Bench, tasks: asyncio.TaskGroup
) -> None:
    await _fill(bench)
    waiting = tasks.create_task(bench.outbox.put(_record(600)))
    await asyncio.sleep(0)
    too_large = asyncio.ensure_future(bench.outbox.put(_record(601, RING_BYTES)))
    behind = tasks.create_task(bench.outbox.put(_record(602)))
    await asyncio.sleep(0)
    while not behind.done():
        bench.free_oldest()
        await asyncio.sleep(0)
    with pytest.raises(RecordTooLarge):
        await too_large
    assert waiting.done()
    assert bench.groups[-2:] == [600, 602]
