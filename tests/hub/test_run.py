"""Whole runs of the real hub and its generator: conservation, restarts, departures, checkpoints."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.hub.rig import NUM_PROMPTS, WITH_SPARE, Rig, add_up
from trainer_hook import TrainerHook
from trainer_hook.errors import (
    EndOfData,
    GeneratorFailed,
    HookStateError,
    PeerLost,
    Stalled,
)

MakeRig = Callable[..., Rig]


def train(hook: TrainerHook, num_steps: int, seen: list[tuple[int, int]]) -> None:
    """Steps of a trainer that writes no weights, only the version moves."""
    for _ in range(num_steps):
        with hook.next_batch() as batch:
            seen.extend((sample.group, sample.member) for sample in batch.samples)
        with hook.update_weights():
            pass


def counts(hook: TrainerHook) -> Counter[str]:
    return Counter(hook.statistics().hub["counts"])


def test_a_run_trains_every_group_once_and_ends(rig: MakeRig) -> None:
    seen: list[tuple[int, int]] = []
    with rig() as run:
        with run.attach() as hook:
            train(hook, 6, seen)
            with pytest.raises(EndOfData, match="num_steps"), hook.next_batch():
                pass
        ended = run.hear()
    assert ended.exit_code == 0  # type: ignore[attr-defined]
    assert add_up(ended.counts)  # type: ignore[attr-defined]
    assert ended.counts["trained"] == ended.counts["taken"] == 24  # type: ignore[attr-defined]
    assert sorted(seen) == [(group, member) for group in range(24) for member in range(2)]


def test_prompts_come_in_the_order_of_the_seed_once_an_epoch(rig: MakeRig) -> None:
    rows: list[tuple[int, int, int]] = []
    with rig() as run, run.attach() as hook:
        for _ in range(6):
            with hook.next_batch() as batch:
                rows += {(s.group, s.epoch, s.prompt_index) for s in batch.samples}
            with hook.update_weights():
                pass
    epochs = Counter(epoch for _, epoch, _ in rows)
    assert epochs == {0: NUM_PROMPTS, 1: NUM_PROMPTS, 2: 24 - 2 * NUM_PROMPTS}
    assert len({(epoch, index) for _, epoch, index in rows}) == 24


def test_a_killed_generator_is_replaced_and_nothing_is_lost_or_repeated(rig: MakeRig) -> None:
    seen: list[tuple[int, int]] = []
    with rig(run=WITH_SPARE) as run:
        with run.attach() as hook:
            for _ in range(3):
                train(hook, 2, seen)
                run.generator().send_signal(signal.SIGKILL)
        assert add_up(run.stop().counts)
        assert any("SIGKILL" in text for text in run.notices)
    assert sorted(seen) == [(group, member) for group in range(24) for member in range(2)]


def test_training_goes_on_from_the_backlog_while_the_generator_is_down(rig: MakeRig) -> None:
    seen: list[tuple[int, int]] = []
    with (
        rig(rollout={"num_steps": 3}, run=WITH_SPARE | {"generator_restarts": 3}) as run,
        run.attach() as hook,
    ):
        run.until(lambda: counts(hook)["committed"] >= 12)
        generator = run.generator()
        generator.send_signal(signal.SIGSTOP)
        for _ in range(3):
            with hook.next_batch() as batch:
                seen.extend((sample.group, sample.member) for sample in batch.samples)
        generator.send_signal(signal.SIGKILL)
    assert len(set(seen)) == 24


def test_a_stopped_generator_is_found_by_its_silence_and_replaced(rig: MakeRig) -> None:
    seen: list[tuple[int, int]] = []
    with rig(run=WITH_SPARE | {"heartbeat_s": 2}) as run, run.attach() as hook:
        train(hook, 1, seen)
        run.generator().send_signal(signal.SIGSTOP)
        train(hook, 5, seen)
        run.until(lambda: any("silent" in text for text in run.notices) or run.events("generator_died"))
    assert len(set(seen)) == 48


def test_a_generator_that_keeps_dying_ends_the_run_with_its_cause(rig: MakeRig) -> None:
    with rig(run=WITH_SPARE | {"generator_restarts": 1}) as run:
        hook = run.attach()
        run.until(lambda: run.generator().is_running())
        for _ in range(2):
            generator = run.generator()
            generator.send_signal(signal.SIGKILL)
            run.until(lambda dead=generator: not dead.is_running())
        with pytest.raises(GeneratorFailed, match="SIGKILL"), hook.next_batch():
            pass
        hook.close()


def test_failing_rewards_stop_the_run_and_are_named(rig: MakeRig) -> None:
    with rig(reward={"function": "tests.hub.user_code.broken_reward"}) as run:
        hook = run.attach()
        started_s = time.monotonic()
        with pytest.raises(GeneratorFailed, match=r"(?s)max_failure_rate.*no reward for"), hook.next_batch():
            pass
        assert time.monotonic() - started_s < 30
        hook.close()


def both(action: Callable[[int], Any]) -> list[Any]:
    """Run an action for ranks 0 and 1 side by side; results or errors."""
    results: list[Any] = [None, None]

    def call(rank: int) -> None:
        try:
            results[rank] = action(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_two_ranks_share_each_step_without_overlap_and_with_equal_counts(rig: MakeRig) -> None:
    with rig(trainer={"max_tokens_per_micro_batch": 120}) as run:
        parts: list[list[Any]] = [[], []]

        def job(rank: int) -> None:
            with run.attach(rank, 2) as hook:
                for _ in range(6):
                    with hook.next_batch() as batch:
                        keys = [(s.group, s.member) for s in batch.samples]
                        parts[rank].append((len(batch.micro_batches()), keys, batch.num_tokens_global))
                    with hook.update_weights():
                        pass

        assert both(job) == [None, None]
    for one, other in zip(*parts, strict=True):
        assert one[0] == other[0], "every rank takes as many micro-batches"
        assert one[2] == other[2]
        assert not set(one[1]) & set(other[1])
    everything = [key for part in parts for _, keys, _ in part for key in keys]
    assert sorted(everything) == [(group, member) for group in range(24) for member in range(2)]


def test_fewer_samples_than_ranks_is_refused_with_both_numbers(rig: MakeRig) -> None:
    with rig(rollout={"groups_per_step": 1, "samples_per_group": 1}) as run:

        def job(rank: int) -> None:
            with run.attach(rank, 2) as hook, hook.next_batch():
                pass

        errors = both(job)
    assert any(isinstance(error, HookStateError) for error in errors)
    assert any("1 samples for 2 ranks" in str(error) for error in errors)


def test_ranks_in_different_calls_are_told_instead_of_waiting(rig: MakeRig) -> None:
    with rig() as run:

        def job(rank: int) -> None:
            with run.attach(rank, 2) as hook:
                if rank:
                    hook.next_batch().__enter__()
                else:
                    hook.update_weights().__enter__()

        errors = both(job)
    assert any("update_weights together" in str(error) for error in errors), errors


def test_a_killed_rank_ends_the_other_ranks_wait_within_two_seconds(rig: MakeRig) -> None:
    waiter = (
        "from trainer_hook import TrainerHook\n"
        "hook = TrainerHook.attach(dp_rank=1, dp_size=2)\n"
        "print('up', flush=True)\n"
        "import time; time.sleep(60)"
    )
    with rig() as run:
        other = subprocess.Popen(
            [sys.executable, "-c", waiter], env=run.environment, stdout=subprocess.PIPE, text=True
        )
        hook = run.attach(0, 2)
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        for _ in range(2):  # a rank may be one step ahead of the others
            with hook.next_batch():
                pass
        threading.Timer(0.5, other.kill).start()
        with pytest.raises(PeerLost, match="rank 1"), hook.next_batch():
            pass
        other.wait()
        other.stdout.close()
        hook.close()


def test_what_a_lost_trainer_had_is_given_again_after_it_loads_its_checkpoint(rig: MakeRig) -> None:
    seen: list[tuple[int, int]] = []
    with rig() as run:
        with run.attach() as hook:
            train(hook, 2, seen)
            state = hook.state_dict()
            lost = [(s.group, s.member) for s in hook.next_batch().__enter__().samples]
        with run.attach() as hook:
            with pytest.raises(HookStateError, match="load_state_dict"), hook.next_batch():
                pass
            hook.load_state_dict(state)
            assert hook.step == 2
            with hook.update_weights() as update:
                assert update.version == state["version"]
            train(hook, 4, seen)
        assert add_up(run.stop().counts)
    assert lost
    assert sorted(seen) == [(group, member) for group in range(24) for member in range(2)]


def test_an_older_checkpoint_rewinds_the_books(rig: MakeRig) -> None:
    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []
    with rig() as run:
        with run.attach() as hook:
            train(hook, 1, first)
            state = hook.state_dict()
            train(hook, 3, [])
        with run.attach() as hook:
            hook.load_state_dict(state)
            with hook.update_weights():
                pass
            train(hook, 5, second)
        ended = run.stop()
    assert ended.counts["trained"] == 24
    assert add_up(ended.counts)
    assert sorted(first + second) == [(group, member) for group in range(24) for member in range(2)]


def test_the_generators_report_reaches_a_rank_as_numbers(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook:
        train(hook, 1, [])
        run.until(lambda: hook.statistics().hub["generator"])
        figures = hook.statistics().hub["generator"]
    assert figures["is_paused"] == 0.0
    assert {type(value) for value in figures.values()} == {float}


def test_a_checkpoint_resumes_in_a_new_run(rig: MakeRig) -> None:
    seen: list[tuple[int, int]] = []
    with rig() as run, run.attach() as hook:
        train(hook, 3, seen)
        state = hook.state_dict()
    with rig() as run, run.attach() as hook:
        hook.load_state_dict(state)
        with pytest.raises(HookStateError, match="update_weights"), hook.next_batch():
            pass
        with hook.update_weights():
            pass
        train(hook, 3, seen)
    assert sorted(seen) == [(group, member) for group in range(24) for member in range(2)]


def test_a_state_that_is_none_is_refused_and_says_what_is_wrong(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook, pytest.raises((HookStateError, ValueError), match="state_dict"):
        hook.load_state_dict({"step": 1})


def test_a_step_whose_body_raised_is_given_again(rig: MakeRig) -> None:
    seen: list[tuple[int, int]] = []
    with rig() as run, run.attach() as hook:
        with pytest.raises(ZeroDivisionError), hook.next_batch() as batch:  # noqa: PT012
            first = sorted((s.group, s.member) for s in batch.samples)
            raise ZeroDivisionError
        assert hook.step == 0
        train(hook, 6, seen)
    assert sorted(seen[:8]) == first
    assert len(set(seen)) == 48


def test_a_trainer_that_never_publishes_is_told_why_nothing_comes(rig: MakeRig) -> None:
    with rig(rollout={"staleness": 0}) as run, run.attach() as hook:
        with hook.next_batch():
            pass
        with pytest.raises(Stalled, match="update_weights"), hook.next_batch():
            pass


def test_the_data_ends_with_a_smaller_last_batch_and_a_message(rig: MakeRig) -> None:
    sizes: list[tuple[int, bool]] = []
    with rig(data={"epochs": 1}) as run, run.attach() as hook:
        for _ in range(3):
            with hook.next_batch() as batch:
                sizes.append((batch.num_groups_global, batch.is_last))
            with hook.update_weights():
                pass
        with pytest.raises(EndOfData, match="epochs"), hook.next_batch():
            pass
    assert sizes == [(4, False), (4, False), (3, True)]


def test_a_ring_too_small_for_a_step_is_named_with_the_way_out(rig: MakeRig) -> None:
    many = {"samples_per_group": 8, "groups_per_step": 8}
    with rig(ring={"bytes": 1 << 14}, rollout=many) as run, run.attach() as hook:  # noqa: SIM117
        with pytest.raises(Stalled, match=r"set ring\.bytes to"), hook.next_batch():
            pass


def test_paused_issues_nothing_and_resumed_goes_on(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook:
        run.until(lambda: counts(hook)["committed"] == 12)
        hook.pause()
        with hook.next_batch():
            pass
        time.sleep(0.5)
        assert counts(hook)["taken"] == 12
        hook.resume()
        run.until(lambda: counts(hook)["taken"] == 12)
        with hook.update_weights():
            pass
        run.until(lambda: counts(hook)["taken"] == 16)


def test_a_drop_policy_bounds_staleness_and_counts_what_it_drops(rig: MakeRig) -> None:
    stale: list[int | None] = []
    with rig(rollout={"staleness_policy": "drop", "staleness": 1}) as run:
        with run.attach() as hook:
            for _ in range(6):
                with hook.next_batch() as batch:
                    stale.append(batch.staleness)
                with hook.update_weights():
                    pass
        counts = run.stop().counts
    assert max(s for s in stale if s is not None) <= 1
    assert add_up(counts)
