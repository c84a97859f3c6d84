"""Ranks that share records, and the written-down assignment given out again."""

import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fa_rollout.account.events import StepComposed
from fa_rollout.config import ConfigError
from fa_rollout.hub.flow import replay
from tests.hub.rig import VOCAB_SIZE, WITH_SPARE, Rig, add_up
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook.errors import UnsplittableBatch

MakeRig = Callable[..., Rig]
Part = list[list[tuple[int, int]]]
"""By micro-batch: (group, member) of its samples."""


def side_by_side(*actions: Callable[[], None]) -> list[BaseException]:
    """Run actions in threads; what they raised."""
    errors: list[BaseException] = []

    def call(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    return errors


def parts_of_two_ranks(run: Rig, *, num_steps: int, kill_at: int | None = None) -> list[list[Part]]:
    """What ranks 0 and 1 got, step by step."""
    parts: list[list[Part]] = [[], []]

    def job(rank: int) -> None:
        with run.attach(rank, 2) as hook:
            for step in range(num_steps):
                with hook.next_batch() as batch:
                    parts[rank].append(
                        [[(s.group, s.member) for s in mb.samples] for mb in batch.micro_batches()]
                    )
                with hook.update_weights():
                    if step == kill_at and rank == 0:
                        run.generator().send_signal(signal.SIGKILL)

    assert side_by_side(lambda: job(0), lambda: job(1)) == []
    return parts


def test_peers_read_the_same_records_and_a_record_is_free_when_all_have_left_it(rig: MakeRig) -> None:
    seen: list[list[Any]] = [[], []]
    with rig(ring={"bytes": 1 << 16}) as run:  # small: a record that did not come back would stop the run

        def job(peer: int) -> None:
            with run.attach(peer=peer, num_peers=2) as hook:
                for _ in range(6):
                    with hook.next_batch() as batch:
                        seen[peer] += [(s.group, s.member, s.arrays.tokens.tobytes()) for s in batch.samples]
                    with hook.update_weights():
                        pass

        assert side_by_side(lambda: job(0), lambda: job(1)) == []
        assert add_up(run.stop().counts)
    assert seen[0] == seen[1]
    assert len({(group, member) for group, member, _ in seen[0]}) == 48


def test_peers_take_their_own_stripes_of_large_side_data(tmp_path: Path) -> None:
    """Each peer reads every second row, by strides into the ring and by packed rows; together all of them."""
    column = {"name": "routed_experts", "dtype": "int32", "per": "input_token", "shape": [4, 2]}
    script = Script(vocab_size=VOCAB_SIZE, lengths=Lengths(kind="uniform", low=4, high=40), experts=(4, 2))
    packed: list[list[Any]] = [[], []]
    viewed: list[list[Any]] = [[], []]
    whole: list[Any] = []

    def job(run: Rig, peer: int) -> None:
        mine = slice(peer, None, 2)
        with run.attach(peer=peer, num_peers=2) as hook:
            for _ in range(3):
                with hook.next_batch() as batch:
                    for micro_batch in batch.micro_batches():
                        packed[peer].append(micro_batch.extra("routed_experts", mine))
                        if peer == 0:
                            whole.append(micro_batch.extra("routed_experts"))
                    for sample in batch.samples:
                        experts = sample.extras["routed_experts"]
                        stripe = experts[mine]
                        assert stripe.data_ptr() == experts.data_ptr() + peer * 4 * 2 * 4, "a view, no copy"
                        viewed[peer].append(stripe.clone())
                with hook.update_weights():
                    pass

    with (
        ScriptedEngine.start(script) as engine,
        Rig(tmp_path / "run", engine, record={"columns": [column]}, ring={"bytes": 1 << 17}) as run,
    ):
        assert side_by_side(lambda: job(run, 0), lambda: job(run, 1)) == []
        assert add_up(run.stop().counts)
    assert len(whole) == 3
    for one, (even, odd) in zip(whole, zip(*packed, strict=True), strict=True):
        assert one[0::2].equal(even)
        assert one[1::2].equal(odd)
        assert one.any()
    for even, odd in zip(*viewed, strict=True):
        assert 0 <= len(even) - len(odd) <= 1


def test_a_rank_that_asks_late_gets_its_part_though_the_other_is_in_the_update(rig: MakeRig) -> None:
    with rig() as run:

        def job(rank: int) -> None:
            with run.attach(rank, 2) as hook:
                for _ in range(3):
                    time.sleep(0.3 * rank)
                    with hook.next_batch():
                        pass
                    with hook.update_weights():
                        pass

        assert side_by_side(lambda: job(0), lambda: job(1)) == []


def test_a_step_is_not_over_before_the_last_rank_is_done_though_others_have_left(rig: MakeRig) -> None:
    with rig(rollout={"num_steps": 1}) as run, ExitStack() as hooks:
        first, second, third = (hooks.enter_context(run.attach(rank, 3)) for rank in range(3))
        with ExitStack() as slowest:
            slowest.enter_context(third.next_batch())
            for hook in (first, second):
                with hook.next_batch():
                    pass
                if hook is first:
                    first.close()
            assert second.statistics().hub["counts"]["handed"] == 4
        run.until(lambda: second.statistics().hub["counts"]["trained"] == 4)


def test_a_recorded_run_gives_the_same_samples_to_the_same_ranks_in_the_same_order(
    rig: MakeRig, tmp_path: Path
) -> None:
    limit = {"max_tokens_per_micro_batch": 120}
    with rig(trainer=limit) as run:
        recorded = parts_of_two_ranks(run, num_steps=6)
    log = tmp_path / "recorded.jsonl"
    shutil.copy(run.folder / "events.jsonl", log)
    with rig(trainer=limit, run=WITH_SPARE | {"replay": str(log)}) as run:
        again = parts_of_two_ranks(run, num_steps=6, kill_at=2)
        assert add_up(run.stop().counts)
    assert again == recorded


def test_a_replay_with_other_ranks_is_refused_with_both_numbers(rig: MakeRig, tmp_path: Path) -> None:
    with rig(rollout={"num_steps": 1}) as run:
        parts_of_two_ranks(run, num_steps=1)
    log = tmp_path / "recorded.jsonl"
    shutil.copy(run.folder / "events.jsonl", log)
    with rig(rollout={"num_steps": 1}, run={"replay": str(log)}) as run, run.attach() as hook:  # noqa: SIM117
        with pytest.raises(UnsplittableBatch, match="recorded run, 2; found 1"), hook.next_batch():
            pass


def composed(step: int, *groups: int) -> str:
    event = StepComposed(step=step, version=step, groups=list(groups), ranks=[])
    return msgspec.json.encode(event).decode() + "\n"


def test_the_branch_that_was_trained_last_is_replayed(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text(
        composed(0, 1) + composed(1, 2) + composed(2, 3) + composed(1, 4) + '{"event": "x"}\n{"event": "com'
    )
    recording = replay.read(log)
    assert {step: recorded.groups for step, recorded in recording.steps.items()} == {0: [1], 1: [4]}
    assert recording.groups == {1, 4}


def test_a_log_without_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(ConfigError, match="found none in"):
        replay.read(tmp_path / "events.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        replay.read(tmp_path / "none.jsonl")
