"""Looking at a real run: what is told is true, and who looks is never in the way."""

import json
import re
import signal
import time

import pytest

from fa_rollout.account.snapshot import RunPhase, TrainerPhase
from fa_rollout.hub.reporting.observers import MAX_OBSERVERS, MAX_UNREAD_BYTES
from fa_rollout.observe.observer import Observer, RunOver
from shm.channels.channel import Channel
from shm.channels.endpoint import connect
from shm.errors import ChannelClosed, ChannelTimeout, HandshakeRefused
from tests.observe.watching import MakeRig, running, train, until
from trainer_hook import messages as m


def test_a_run_is_seen_from_its_start_to_its_last_step(rig: MakeRig) -> None:
    with rig() as run, Observer(running(run)) as observer:
        now = until(run, observer, lambda now: now.generator.is_up and now.generator.pulse_age_s)
        assert now.run.phase is RunPhase.RUNNING
        assert now.trainer.phase is TrainerPhase.ABSENT
        assert now.engines[0].url == run.engine.url
        with run.attach() as hook:
            train(hook, 3)
            now = observer.snapshot(10.0)
            assert [step.step for step in now.steps] == [0, 1, 2]
            assert [step.is_first for step in now.steps] == [True, False, False]
            assert (now.run.num_trained, now.run.version, now.totals.updates) == (3, 3, 3)
            assert [update.version for update in now.updates] == [1, 2, 3]
            assert now.totals.trained_tokens == sum(step.response_tokens for step in now.steps)
            with hook.next_batch() as batch:
                now = until(run, observer, lambda now: now.trainer.phase is TrainerPhase.TRAINING)
                assert now.trainer.ranks[0].step == batch.step == 3
                assert now.ring.oldest_lease_of is not None
                assert now.groups.handed == 4
            now = until(run, observer, lambda now: now.totals.steps == 4)
            assert [step.step for step in now.steps] == [3]
            assert now.groups.trained == 16
            places = ("queued", "issued", "running", "committed", "handed")
            ends = ("trained", "filtered", "failed", "dropped")
            assert sum(getattr(now.groups, name) for name in places + ends) == now.groups.taken
            spent = now.trainer.spent
            assert spent.total_s <= now.run.uptime_s
            assert abs(sum(step.spent.total_s for step in now.steps)) <= spent.total_s
    assert len(run.progress) >= 2, "the first step, and the last word"
    assert re.match(r"step [123]/6 reward=", run.progress[0])
    assert run.progress[-1].startswith("step 4/6 reward=")


def test_each_step_is_in_one_line_of_the_metrics(rig: MakeRig) -> None:
    with rig(metrics={"interval_s": 0.1}, trainer={"progress_s": 0.0}) as run, run.attach() as hook:
        train(hook, 4)
        run.until(lambda: sum(len(line["steps"]) for line in lines(run.folder)) == 4)
    written = lines(run.folder)
    assert [step["step"] for line in written for step in line["steps"]] == [0, 1, 2, 3]
    assert [update["version"] for line in written for update in line["updates"]] == [1, 2, 3, 4]
    assert {line["event"] for line in written} == {"snapshot"}
    assert written[-1]["run"]["phase"] == "ending"
    assert written[-1]["totals"]["steps"] == 4
    assert written[0]["t"] < written[-1]["t"]
    assert run.progress == []


def _ask_on(deaf: Channel, question: bytes) -> None:
    for _ in range(MAX_UNREAD_BYTES):
        deaf.send(question, timeout_s=5.0)


def lines(folder: object) -> list[dict[str, object]]:
    with open(f"{folder}/metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_a_missing_rank_is_named_as_what_the_others_wait_for(rig: MakeRig) -> None:
    with rig() as run, Observer(running(run)) as observer, run.attach(0, 2) as hook:
        assert not hook.is_batch_ready()
        now = until(run, observer, lambda now: len(now.waits) > 1)
        told = {f"{wait.who} for {wait.what}" for wait in now.waits}
        assert "the run for 1 ranks to attach" in told
        assert any(text.startswith("rank 0 for a batch") for text in told)
        assert now.trainer.phase is TrainerPhase.ATTACHING
        assert now.trainer.ranks[0].phase is TrainerPhase.WAITING


def test_lost_groups_are_told_by_their_reason(rig: MakeRig) -> None:
    reward = {"function": "tests.hub.user_code.broken_reward", "in_loop": True}
    with rig(reward=reward, rollout={"num_steps": 6, "groups_per_step": 4, "samples_per_group": 2,
             "max_failure_rate": 1.0}) as run, Observer(running(run)) as observer:  # fmt: skip
        now = until(run, observer, lambda now: now.reasons and now.reasons[0].count > 3)
        assert now.reasons[0].outcome == "failed"
        assert now.reasons[0].reason.startswith("reward: ")


def test_an_observer_hears_how_the_run_ended(rig: MakeRig) -> None:
    with rig() as run, Observer(running(run)) as observer:
        observer.snapshot(10.0)
        run.stop()
        with pytest.raises(RunOver, match="the test is over") as over:
            observer.snapshot(10.0)
        assert over.value.ended is not None
        assert over.value.ended.exit_code == 0
        assert over.value.last is not None
        assert over.value.last.run.phase is RunPhase.ENDING


def test_a_hub_that_is_killed_or_stopped_is_told_apart(rig: MakeRig) -> None:
    with rig() as run, Observer(running(run)) as observer:
        run.process.send_signal(signal.SIGSTOP)
        with pytest.raises(ChannelTimeout, match="stopped or starved"):
            observer.snapshot(0.5)
        run.process.send_signal(signal.SIGCONT)
        assert observer.snapshot(10.0).run.name == run.run_id
        run.process.kill()
        run.process.wait(10)
        with pytest.raises(RunOver, match="without a word"):
            observer.snapshot(10.0)


def test_one_who_asks_and_does_not_read_is_dropped_and_the_run_goes_on(rig: MakeRig) -> None:
    with rig() as run, connect(run.address, time.monotonic() + 5) as deaf, run.attach() as hook:
        hello = m.Hello(
            protocol=m.PROTOCOL, run=run.run_id, token=run.token, role="observer", pid=1, schema=0
        )
        deaf.send(m.encode(hello))
        train(hook, 1)
        question = m.encode(m.QuerySnapshot(request=1))
        with pytest.raises((ChannelClosed, ChannelTimeout)):
            _ask_on(deaf, question)
        train(hook, 2)
        assert hook.step == 3


def test_there_are_not_more_observers_than_a_hub_bears(rig: MakeRig) -> None:
    with rig() as run:
        observers = [Observer(running(run)) for _ in range(MAX_OBSERVERS)]
        with pytest.raises(HandshakeRefused, match=f"{MAX_OBSERVERS} observers"):
            Observer(running(run))
        for observer in observers:
            assert observer.snapshot(10.0).run.name == run.run_id
        observers.pop().close()
        run.until(lambda: _is_let_in(run))
        for observer in observers:
            observer.close()


def _is_let_in(run: object) -> bool:
    try:
        Observer(running(run)).close()  # type: ignore[arg-type]
    except HandshakeRefused:
        return False
    return True
