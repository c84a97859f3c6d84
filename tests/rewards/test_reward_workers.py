"""Plain rewards run in worker processes: each sample gets exactly one outcome, whatever the function does."""

import asyncio
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from reward_kit import children, failure, is_alive, make_sample, running, score, values, wait_until

from fa_rollout.rewards.outcomes import FailureReason, Scored
from fa_rollout.rewards.workers.pool import RewardWorkersLost

QUICK = [make_sample(member) for member in range(4)]


class Unsendable:
    """As a custom generate function might leave one in the metadata."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        raise TypeError("a handle of this process")


class Unreadable:
    """Pickles here, and fails to unpickle in the worker."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __setstate__(self, state: object) -> None:
        raise RuntimeError("made for another process")


def test_outcomes_come_in_the_order_of_the_samples_and_prints_disturb_nothing() -> None:
    samples = [make_sample(member) for member in range(64)]
    assert values(score(samples, "reward_functions.by_member")) == [member / 2 for member in range(64)]


def test_the_function_gets_the_whole_sample_and_a_dict_gives_reward_parts_and_token_rewards() -> None:
    samples = [make_sample(label=[4, True], response="four"), make_sample(label="four", response="four")]
    wrong, right = score(samples, "reward_functions:label_fits", key="score")
    assert isinstance(wrong, Scored)
    assert isinstance(right, Scored)
    assert (wrong.value, right.value) == (0.0, 1.0)
    assert right.parts == {"length": 4.0}
    assert right.token_rewards is not None
    assert right.token_rewards.tolist() == pytest.approx([0, 0.1, 0.2])


def test_a_group_function_gets_the_group_and_a_list_of_another_length_fails_it() -> None:
    samples = [make_sample(0, response="b"), make_sample(1, response="a")]
    assert values(score(samples, "reward_functions.group_ranks", group=True)) == [1.0, 0.0]
    outcomes = score(samples, "reward_functions.group_too_short", group=True)
    assert values(outcomes) == [FailureReason.BAD_VALUE] * 2
    assert "2 samples, found 1" in failure(outcomes[0]).text


@pytest.mark.parametrize("deed", ["sleep", "hold_the_interpreter"])
def test_a_reward_that_hangs_is_ended_with_its_worker_and_the_others_go_on(deed: str, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def run() -> None:
        async with running(timeout_s=0.3, num_workers=1) as runner:
            outcomes = await runner.score([*QUICK, make_sample(9, do=deed, log=str(log)), *QUICK])
            assert values(outcomes) == [0, 1, 2, 3, FailureReason.TIMEOUT, 0, 1, 2, 3]
            assert "reward.timeout_s = 0.3 s" in failure(outcomes[4]).text
            assert re.search(rf"it was at .*reward_functions.py:\d+ in _{deed}$", failure(outcomes[4]).text)
            (line,) = log.read_text().splitlines()
            assert not is_alive(int(line.split()[0]))
            statistics = runner.statistics()
            assert (statistics.num_scored, statistics.num_failed) == (8, {FailureReason.TIMEOUT: 1})
            assert (statistics.num_workers, statistics.num_restarts, statistics.num_in_progress) == (1, 1, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("hang_with_a_child", FailureReason.TIMEOUT),
        ("hang_with_a_daemon", FailureReason.TIMEOUT),
        ("die_with_a_daemon", FailureReason.WORKER_DIED),
        ("end_its_process_group", FailureReason.WORKER_DIED),
    ],
)
def test_the_end_of_a_worker_is_the_end_of_the_processes_that_its_reward_started(
    deed: str, reason: FailureReason, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    outcomes = score([make_sample(do=deed, child=str(child))], timeout_s=1.0)
    assert values(outcomes) == [reason]
    wait_until(lambda: not is_alive(int(child.read_text())), "the reward's own child is gone")


@pytest.mark.parametrize(("deed", "cause"), [("be_killed", "signal 9"), ("segfault", "signal 11")])
def test_a_worker_that_dies_costs_the_sample_it_was_on_after_one_retry_and_no_other(
    deed: str, cause: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    outcomes = score([*QUICK, make_sample(9, do=deed, log=str(log)), *QUICK], num_workers=2)
    assert values(outcomes) == [0, 1, 2, 3, FailureReason.WORKER_DIED, 0, 1, 2, 3]
    assert f"2 times, the last time with {cause}" in failure(outcomes[4]).text
    if deed == "be_killed":
        assert len(log.read_text().splitlines()) == 2
    else:
        assert "Segmentation fault" in capfd.readouterr().err, "faulthandler names the line"


def test_a_sample_whose_worker_died_by_accident_gets_its_reward_from_the_retry(tmp_path: Path) -> None:
    assert values(score([make_sample(do="be_killed_once", log=str(tmp_path / "log"))])) == [1.0]


def test_samples_behind_a_slow_one_go_to_other_workers(tmp_path: Path) -> None:
    """Workers that were quick get many items ahead; those must not wait for an item that turns out slow."""

    async def run() -> None:
        async with running(num_workers=2, timeout_s=60) as runner:
            await runner.score([make_sample(member) for member in range(200)])
            slow = asyncio.create_task(runner.score([make_sample(do="sleep")]))
            quick = [runner.score([make_sample(member)]) for member in range(50)]
            assert [values(outcomes) for outcomes in await asyncio.gather(*quick)] == [[m] for m in range(50)]
            assert not slow.done()
            await runner.aclose()
            assert values(await slow) == [FailureReason.CLOSED]

    asyncio.run(run())


def test_an_item_runs_once_although_it_was_taken_back_from_a_slow_worker(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def run() -> None:
        async with running(num_workers=2) as runner:
            await runner.score([make_sample(member) for member in range(200)])
            mixed = [
                make_sample(member, do="sleep" if member % 7 == 3 else "score", seconds=0.05, log=str(log))
                for member in range(100)
            ]
            assert FailureReason.TIMEOUT not in values(await runner.score(mixed))

    asyncio.run(run())
    assert sorted(int(line.split()[1]) for line in log.read_text().splitlines()) == list(range(100))


def test_the_loop_goes_on_while_a_reward_holds_its_interpreter() -> None:
    async def run() -> None:
        async with running(num_workers=2, timeout_s=0.5) as runner:
            stuck = asyncio.create_task(runner.score([make_sample(do="hold_the_interpreter")]))
            beats = 0
            while not stuck.done():
                assert values(await runner.score(QUICK)) == [0, 1, 2, 3]
                beats += 1
            assert beats > 3
            assert values(await stuck) == [FailureReason.TIMEOUT]

    asyncio.run(run())


def test_functions_run_on_a_main_thread_so_alarms_work_and_none_is_left_for_the_next_sample() -> None:
    deeds = [make_sample(do="alarm"), make_sample(do="leave_an_alarm"), make_sample(do="sleep", seconds=0.1)]
    assert values(score(deeds, num_workers=1)) == [0.25, 1.0, 1.0]


def test_a_reward_may_open_a_process_pool() -> None:
    assert values(score([make_sample(do="use_a_pool")])) == [6.0]


def test_a_child_that_a_reward_forks_and_lets_run_on_answers_nothing() -> None:
    deeds = [make_sample(do="fork"), make_sample(do="sleep", seconds=0.6), make_sample(5)]
    assert values(score(deeds, num_workers=1)) == [1.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("deed", "reason", "says"),
    [
        ("raise", FailureReason.RAISED, "KeyError: 'no such answer'"),
        ("exit", FailureReason.RAISED, "SystemExit: 3"),
        ("raise_past_exception", FailureReason.RAISED, "HarshTimeout: too long"),
        ("return_a_coroutine", FailureReason.BAD_VALUE, "async def"),
    ],
)
def test_what_a_function_raises_is_a_failure_with_its_traceback(
    deed: str, reason: FailureReason, says: str
) -> None:
    outcomes = score([make_sample(do=deed), make_sample(5)], num_workers=1)
    assert values(outcomes) == [reason, 5.0]
    assert says in failure(outcomes[0]).text
    if reason is FailureReason.RAISED:
        assert "reward_functions.py" in failure(outcomes[0]).text


def test_a_sample_that_cannot_travel_is_a_failure_of_its_own() -> None:
    outcomes = score([make_sample(thing=Unsendable()), make_sample(thing=Unreadable()), make_sample(5)])
    assert values(outcomes) == [FailureReason.NOT_SENT, FailureReason.NOT_SENT, 5.0]
    assert "a handle of this process" in failure(outcomes[0]).text
    assert "made for another process" in failure(outcomes[1]).text


def test_samples_and_answers_larger_than_any_socket_buffer_arrive_whole() -> None:
    big = [
        make_sample(m, num_tokens=400_000, do="many_token_rewards", text="x" * 3_000_000) for m in range(6)
    ]
    outcomes = score(big, key="score")
    for outcome in outcomes:
        assert isinstance(outcome, Scored)
        assert np.array_equal(outcome.token_rewards, np.arange(400_000, dtype=np.float32))


def test_a_cancelled_score_leaves_the_workers_to_the_others(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def run() -> None:
        async with running(num_workers=1) as runner:
            doomed = asyncio.create_task(
                runner.score([make_sample(m, do="sleep", seconds=0.2, log=str(log)) for m in range(100)])
            )
            await asyncio.sleep(0.1)
            doomed.cancel()
            assert values(await runner.score(QUICK)) == [0, 1, 2, 3]
            assert doomed.cancelled()
            assert runner.statistics().num_in_progress == 0

    asyncio.run(run())
    assert len(log.read_text().splitlines()) <= 3


def test_closing_ends_rewards_that_would_run_for_long_and_leaves_no_process() -> None:
    async def run() -> None:
        before = children()
        async with running(num_workers=4) as runner, asyncio.TaskGroup() as tasks:
            long_ones = tasks.create_task(runner.score([make_sample(do="sleep") for _ in range(8)]))
            await asyncio.sleep(0.1)
            assert len(children() - before) == 4
            async with asyncio.timeout(2.5):
                await runner.aclose()
            assert children() == before
            assert values(await long_ones) == [FailureReason.CLOSED] * 8
            assert values(await runner.score(QUICK)) == [FailureReason.CLOSED] * 4
            await runner.aclose()

    asyncio.run(run())


def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    async def run() -> None:
        before = children()
        for delay_s in (0.0, 0.02, 0.1):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(delay_s), running(num_workers=2):
                    await asyncio.sleep(60)
            assert children() == before

    asyncio.run(run())


def test_workers_that_cannot_be_replaced_end_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    monkeypatch.setenv("REWARD_IMPORT_FAILS", str(broken))

    async def run() -> None:
        async with running(num_workers=1) as runner:
            assert values(await runner.score(QUICK)) == [0, 1, 2, 3]
            broken.touch()
            for _ in range(2):
                with pytest.raises(RewardWorkersLost, match="this module has had enough"):
                    await runner.score([make_sample(do="be_killed"), *QUICK])

    asyncio.run(run())


def test_workers_are_light_and_deaf_to_the_interrupt_of_a_terminal() -> None:
    async def run() -> None:
        before = children()
        async with running(num_workers=2) as runner:
            for pid in children() - before:
                os.kill(pid, signal.SIGINT)
                assert os.getsid(pid) == pid
            assert values(await runner.score([make_sample(do="what_is_imported")])) == [0.0]
            assert runner.statistics().num_restarts == 0

    asyncio.run(run())
