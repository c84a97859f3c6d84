"""What a trainer's calls say to the hub, and what they make of its answers."""

import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from peer import RUN, Completion, Hub, Line, batch
from safetensors.torch import load_file

from shm.errors import MessageTooLarge
from trainer_hook import (
    DescriptorRefused,
    EndOfData,
    GeneratorFailed,
    HookError,
    HookStateError,
    HubLost,
    PublishFailed,
    Stalled,
    TrainerHook,
    WeightUpdateFailed,
)
from trainer_hook import messages as m
from trainer_hook.messages import Outcome, Part

GROUP = [
    Completion(prompt=[1, 2], response=[3, 4, 5], reward=1.0),
    Completion(prompt=[1, 2], response=[6], reward=0.0),
]
BOTH = [[Part(0, 0), Part(0, 1)]]


def statistics_of(query: m.QueryStatistics) -> m.StatisticsTaken:
    ring = m.RingStatistics(bytes=0, span_bytes=0, live_bytes=0, num_records=0, oldest_lease_s=0.0)
    figures = m.HubStatistics(
        counts={"trained": 1},
        step=3,
        version=0,
        lineage="",
        update="idle",
        waits_for="",
        ring=ring,
        refused_records=0,
        mean_record_bytes=0.0,
        trained_tokens=0,
        dropped_tokens=0.0,
        generator={},
    )
    return m.StatisticsTaken(request=query.request, statistics=figures)


def released(step: int, outcome: Outcome | None, *sequences: int) -> m.Released:
    return m.Released(step=step, outcome=outcome, sequences=list(sequences))


# --- batches --------------------------------------------------------------------------------------------


def test_a_trained_step_is_reported_with_its_records_and_the_next_one_asked_for(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        for step in range(2):
            record = line.ring.write(step, GROUP)
            assert line.serve([record], BOTH).step == step
            assert line.receive(m.Released) == released(step, Outcome.TRAINED, record.sequence)
        request = line.receive(m.Next)
        line.send(m.Ended(request=request.request, reason="all 2 steps are trained"))
        line.receive(m.Goodbye)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        seen = []
        for step in range(2):
            with hook.next_batch() as batch:
                assert (batch.step, hook.step) == (step, step)
                seen.append([sample.tokens.tolist() for sample in batch.samples])
        assert seen == [[[1, 2, 3, 4, 5], [1, 2, 6]]] * 2
        with pytest.raises(EndOfData, match="all 2 steps"), hook.next_batch():
            pass
        assert hook.step == 2


@pytest.mark.parametrize("failure", [ValueError("a bad loss"), KeyboardInterrupt(), SystemExit(3)])
def test_a_block_that_raises_returns_its_step_and_gets_it_again(
    tmp_path: Path, failure: BaseException
) -> None:
    def script(line: Line) -> None:
        record = line.ring.write(0, GROUP)
        line.serve([record], BOTH)
        assert line.receive(m.Released) == released(0, Outcome.RETURNED, record.sequence)
        line.serve([record], BOTH)
        assert line.receive(m.Released) == released(0, Outcome.TRAINED, record.sequence)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with pytest.raises(type(failure)), hook.next_batch():
            raise failure
        with hook.next_batch() as batch:
            assert batch.step == 0


def test_a_view_kept_beyond_its_block_defers_the_return_of_its_record(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        records = [line.ring.write(group, GROUP) for group in range(2)]
        line.serve(records, [[Part(0, 0)], [Part(1, 0)]])
        assert line.receive(m.Released) == released(0, Outcome.TRAINED, records[1].sequence)
        asked = line.receive(m.QueryStatistics)
        line.send(statistics_of(asked))
        assert line.receive(m.Released) == released(0, None, records[0].sequence)
        asked = line.receive(m.QueryStatistics)
        line.send(statistics_of(asked))

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with hook.next_batch() as batch:
            kept = batch.samples[0].response_tokens
        assert hook.statistics().num_held_records == 1
        assert kept.tolist() == [3, 4, 5]
        del kept
        gc.collect()
        assert hook.statistics().num_held_records == 0


def test_a_record_that_is_not_what_its_descriptor_says_is_refused_and_returned(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        record = line.ring.write(0, GROUP)
        line.ring.overwrite()
        line.serve([record], BOTH)
        assert line.receive(m.Released) == released(0, Outcome.RETURNED, record.sequence)

    with (
        Hub(tmp_path, script) as hub,
        TrainerHook.attach(**hub.where) as hook,
        pytest.raises(DescriptorRefused),
        hook.next_batch(),
    ):
        pass


def test_blocks_do_not_nest(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.serve([line.ring.write(0, GROUP)], BOTH)
        line.receive(m.Released)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook, hook.next_batch():
        with pytest.raises(HookStateError, match="found the batch of step 0 open"), hook.next_batch():
            pass
        with pytest.raises(HookStateError, match="found the batch of step 0 open"), hook.update_weights():
            pass


def test_a_next_batch_that_is_never_entered_asks_for_nothing(tmp_path: Path) -> None:
    with Hub(tmp_path, lambda line: line.receive(m.Goodbye)) as hub, TrainerHook.attach(**hub.where) as hook:
        hook.next_batch()


def test_a_batch_without_a_token_in_the_loss_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(line: Line) -> None:
        line.serve([line.ring.write(0, GROUP)], [[Part(0, 0, True)]], num_tokens_global=0)
        line.receive(m.Released)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook, hook.next_batch() as got:
        assert got.micro_batches()[0].num_loss_tokens == 0
    assert "batch_without_loss step=0" in caplog.text


# --- waits ----------------------------------------------------------------------------------------------


def interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def interrupted_after(seconds: float, action: Callable[[], object] = interrupt) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: action())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_wait_is_taken_up_by_the_next_call(tmp_path: Path) -> None:
    was_interrupted = threading.Event()

    def script(line: Line) -> None:
        request = line.receive(m.Next)
        assert was_interrupted.wait(10)
        record = line.ring.write(0, GROUP)
        line.send(batch(request, [record], BOTH))
        assert line.receive(m.Released) == released(0, Outcome.TRAINED, record.sequence)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with pytest.raises(KeyboardInterrupt), interrupted_after(0.1), hook.next_batch():
            pass
        was_interrupted.set()
        with hook.next_batch() as got:
            assert got.step == 0


def test_a_signal_handler_cannot_make_a_call_inside_a_call(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.receive(m.Next)
        line.receive(m.Goodbye)

    with (
        Hub(tmp_path, script) as hub,
        TrainerHook.attach(**hub.where) as hook,
        pytest.raises(HookStateError, match="set a flag in the handler"),
        interrupted_after(0.1, hook.close),
        hook.next_batch(),
    ):
        pass


def test_a_silent_hub_is_named_as_a_stall_and_the_wait_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_hook.session.session.STALL_MARGIN_S", 0.1)
    stalled = threading.Event()

    def script(line: Line) -> None:
        request = line.receive(m.Next)
        assert stalled.wait(10)
        line.send(batch(request, [line.ring.write(0, GROUP)], BOTH))
        line.receive(m.Released)

    with (
        Hub(tmp_path, script, stall_s=0.0) as hub,
        TrainerHook.attach(dp_rank=0, dp_size=1, **hub.where) as hook,
    ):
        with pytest.raises(Stalled, match=r"waits for step 0.* the hub is running"), hook.next_batch():
            pass
        stalled.set()
        with hook.next_batch():
            pass


def test_a_refusal_is_raised_by_its_name_and_the_step_can_be_asked_for_again(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        request = line.receive(m.Next)
        line.send(m.Refused(request=request.request, error="Stalled", text="3 of 4 groups are ready"))
        request = line.receive(m.Next)
        line.send(m.Refused(request=request.request, error="OfTheFuture", text="who knows"))
        line.serve([line.ring.write(0, GROUP)], BOTH)
        line.receive(m.Released)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with pytest.raises(Stalled, match="3 of 4 groups are ready"), hook.next_batch():
            pass
        with pytest.raises(HookError, match="OfTheFuture: who knows"), hook.next_batch():
            pass
        with hook.next_batch():
            pass


def test_a_run_that_is_given_up_raises_in_the_waiting_call_and_in_every_later_one(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.receive(m.Next)
        line.send(m.Fatal(error="GeneratorFailed", text="ImportError: no module named rewards"))

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with pytest.raises(GeneratorFailed, match="no module named rewards"), hook.next_batch():
            pass
        with pytest.raises(GeneratorFailed, match="no module named rewards"):
            hook.statistics()


def test_a_fatal_that_came_while_training_is_raised_by_the_next_call_not_by_the_end_of_the_block(
    tmp_path: Path,
) -> None:
    is_given_up = threading.Event()

    def script(line: Line) -> None:
        line.serve([line.ring.write(0, GROUP)], BOTH)
        line.send(m.Fatal(error="GeneratorFailed", text="given up"))
        line.channel.close()
        is_given_up.set()

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with hook.next_batch() as got:
            assert is_given_up.wait(10)
            assert got.samples[0].tokens.tolist() == [1, 2, 3, 4, 5]
        with pytest.raises(GeneratorFailed, match="given up"), hook.next_batch():
            pass


def test_a_hub_that_closes_the_connection_is_lost_and_views_stay(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.serve([line.ring.write(0, GROUP)], BOTH)
        line.receive(m.Released)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with hook.next_batch() as got:
            kept = got.samples[0].tokens
        with pytest.raises(HubLost, match="from the trainer's last checkpoint"), hook.next_batch():
            pass
        assert kept.tolist() == [1, 2, 3, 4, 5]


def test_notices_are_logged_and_pings_are_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def script(line: Line) -> None:
        request = line.receive(m.QueryStatistics)
        line.send(m.Notice(text="the generator ended and starts again"))
        line.send(m.Progress(text="step 3/9 reward=0.5"))
        line.send(m.Ping(number=7))
        line.send(m.Reply(request=request.request + 100))
        line.send(statistics_of(request))
        assert line.receive(m.Pong).number == 7

    with (
        caplog.at_level(logging.INFO, logger="trainer_hook"),
        Hub(tmp_path, script) as hub,
        TrainerHook.attach(**hub.where) as hook,
    ):
        assert hook.statistics().hub["step"] == 3
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels["hub_notice text=the generator ended and starts again"] == "WARNING"
    assert levels["progress step 3/9 reward=0.5"] == "INFO"


# --- weights --------------------------------------------------------------------------------------------


def begin(line: Line, folder: Path, *, leader: bool = True, version: int = 1) -> None:
    request = line.receive(m.UpdateEnter)
    line.send(m.UpdateBegun(request=request.request, version=version, path=str(folder), leader=leader))


def test_a_pushed_model_is_published_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    model = torch.nn.Linear(2, 3)

    def script(line: Line) -> None:
        begin(line, folder)
        request = line.receive(m.UpdatePublish)
        assert (request.leader, request.path) == (True, str(folder))
        assert torch.equal(load_file(folder / "model.safetensors")["weight"], model.weight)
        line.send(m.UpdateDone(request=request.request, version=1, bubble_s=0.25))

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with hook.update_weights() as update:
            assert (update.version, update.is_leader, hook.version) == (1, True, 0)
            update.push(model)
        assert hook.version == 1
        with pytest.raises(HookStateError, match=r"update.push\(\) must be called inside"):
            update.push(model)


def test_engines_stand_still_for_a_push_by_hand(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        begin(line, tmp_path)
        line.send(m.Reply(request=line.receive(m.UpdatePause).request))
        request = line.receive(m.UpdatePublish)
        assert request.path is None
        line.send(m.UpdateDone(request=request.request, version=1, bubble_s=0.0))

    with (
        Hub(tmp_path, script) as hub,
        TrainerHook.attach(**hub.where) as hook,
        hook.update_weights() as update,
    ):
        update.pause()


def test_a_rank_that_does_not_lead_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()

    def script(line: Line) -> None:
        begin(line, folder, leader=False)
        request = line.receive(m.UpdatePublish)
        assert (request.leader, request.path) == (False, None)
        line.send(m.UpdateDone(request=request.request, version=1, bubble_s=0.0))

    with (
        Hub(tmp_path, script) as hub,
        TrainerHook.attach(**hub.where) as hook,
        hook.update_weights() as update,
    ):
        update.pause()
        update.push(torch.nn.Linear(2, 3))
    assert list(folder.iterdir()) == []


def test_an_update_whose_block_raises_is_cancelled(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        begin(line, tmp_path / "missing")
        request = line.receive(m.UpdateCancel)
        assert request.text.startswith("PublishFailed: weights must be written whole")
        line.send(m.Reply(request=request.request))
        line.serve([line.ring.write(0, GROUP)], BOTH)
        line.receive(m.Released)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with pytest.raises(PublishFailed), hook.update_weights() as update:
            update.push(torch.nn.Linear(2, 3))
        assert hook.version == 0
        with hook.next_batch():
            pass


def test_engines_that_do_not_load_leave_the_version_as_it_was(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        begin(line, tmp_path)
        request = line.receive(m.UpdatePublish)
        line.send(m.Refused(request=request.request, error="WeightUpdateFailed", text="engine 1 has no room"))

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with pytest.raises(WeightUpdateFailed, match="engine 1 has no room"), hook.update_weights():
            pass
        assert hook.version == 0


def test_an_entry_into_an_update_that_is_interrupted_is_cancelled(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.receive(m.UpdateEnter)
        assert line.receive(m.UpdateCancel).text == "KeyboardInterrupt: "

    with (
        Hub(tmp_path, script) as hub,
        TrainerHook.attach(**hub.where) as hook,
        pytest.raises(KeyboardInterrupt),
        interrupted_after(0.1),
        hook.update_weights(),
    ):
        pass


# --- control and state ----------------------------------------------------------------------------------


def test_control_calls_say_what_they_mean(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        for held in (True, False):
            hold = line.receive(m.Hold)
            assert hold.held is held
            line.send(m.Reply(request=hold.request))
        for group, older_than in ((None, None), (7, None), (None, 3)):
            abort = line.receive(m.Abort)
            assert (abort.group, abort.older_than) == (group, older_than)
            line.send(m.Aborted(request=abort.request, num_groups=2))

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        hook.pause()
        hook.resume()
        assert [hook.abort(), hook.abort(group=7), hook.abort(older_than=3)] == [2, 2, 2]


def test_a_loaded_state_sets_step_version_and_lineage(tmp_path: Path) -> None:
    state = m.RunState(step=4, version=2, lineage="old", cursor=9, unfinished=[3, 8], ends={"trained": 7})

    def script(line: Line) -> None:
        asked = line.receive(m.TakeState)
        line.send(m.StateTaken(request=asked.request, snapshot=5, state=state))
        assert line.receive(m.StateCopied) == m.StateCopied(snapshot=5, sequences=[])
        load = line.receive(m.LoadState)
        assert load.state == state
        line.send(m.StateLoaded(request=load.request, step=4, version=2, lineage="new"))
        assert line.receive(m.Next).step == 4

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        hook.load_state_dict(hook.state_dict())
        assert (hook.step, hook.version, hook.lineage) == (4, 2, "new")
        with pytest.raises(HubLost), hook.next_batch():
            pass


def test_a_state_beyond_the_channels_limit_is_refused_and_the_hook_goes_on(tmp_path: Path) -> None:
    data = "d" * (65 << 20)
    state = m.RunState(step=0, version=0, lineage="old", cursor=0, unfinished=[], ends={}, data=data)

    def script(line: Line) -> None:
        line.send(m.Reply(request=line.receive(m.Hold).request))
        line.receive(m.Goodbye)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with pytest.raises(MessageTooLarge):
            hook.load_state_dict(msgspec.to_builtins(state))
        hook.pause()


def test_statistics_count_every_second_once(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.serve([line.ring.write(0, GROUP)], BOTH)
        line.receive(m.Released)
        line.send(statistics_of(line.receive(m.QueryStatistics)))

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with hook.next_batch():
            pass
        figures = hook.statistics()
    assert figures.num_steps == 1
    assert figures.hub["counts"] == {"trained": 1}
    assert 0 < figures.first_wait_s == figures.wait_s
    assert figures.trainer_idle == figures.wait_s / (figures.wait_s + figures.train_s)


def test_calls_from_several_threads_take_turns(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        for _ in range(40):
            request = line.receive(m.Abort)
            assert request.group is not None
            line.send(m.Aborted(request=request.request, num_groups=request.group))

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        answers: list[tuple[int, int]] = []
        threads = [
            threading.Thread(
                target=lambda n=number: answers.extend((g, hook.abort(group=g)) for g in range(n, n + 10))
            )
            for number in range(0, 40, 10)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [(group, group) for group in range(40)]


# --- the end --------------------------------------------------------------------------------------------


def test_close_says_goodbye_once_and_later_calls_are_refused(tmp_path: Path) -> None:
    with Hub(tmp_path, lambda line: line.receive(m.Goodbye) and None) as hub:
        hook = TrainerHook.attach(**hub.where)
        hook.close()
        hook.close()
        with pytest.raises(HookStateError, match="closed"), hook.next_batch():
            pass
        with pytest.raises(HookStateError, match="closed"):
            hook.pause()


def test_tensors_kept_beyond_the_hook_keep_their_bytes(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        records = [line.ring.write(group, GROUP) for group in range(40)]
        line.serve(records, [[Part(group, 0) for group in range(40)]])
        line.receive(m.Released)
        line.receive(m.Goodbye)
        line.ring.overwrite()

    with Hub(tmp_path, script) as hub:
        hook = TrainerHook.attach(**hub.where)
        with hook.next_batch() as got:
            kept = [sample.tokens for sample in got.samples[::3]]
        hook.close()
    assert [tensor.tolist() for tensor in kept] == [[1, 2, 3, 4, 5]] * 14


def test_a_hook_closed_inside_its_block_leaves_it_quietly(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.serve([line.ring.write(0, GROUP)], BOTH)
        line.receive(m.Goodbye)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook, hook.next_batch():
        hook.close()


def test_what_the_run_is_like_can_be_read(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        assert line.hello is not None
        assert (line.hello.dp_rank, line.hello.dp_size, line.hello.peer, line.hello.num_peers) == (1, 4, 1, 2)
        line.receive(m.Goodbye)

    with (
        Hub(tmp_path, script, step=3, version=2, lineage="branch") as hub,
        TrainerHook.attach(dp_rank=1, dp_size=4, peer=1, num_peers=2, **hub.where) as hook,
    ):
        assert (hook.step, hook.version, hook.lineage) == (3, 2, "branch")
        assert (hook.run.run, hook.run.num_steps, hook.run.samples_per_group) == (RUN, 10, 2)
