"""Backpressure, drops, silent and dying engines: nothing is lost, nothing waits for ever."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.generator.hub_end import LINEAGE, VOCAB_SIZE, HubEnd, prompt_ids, run_tree
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine
from trainer_hook import messages as m

Play = Callable[..., ScriptedEngine]


def test_a_full_ring_holds_dispatch_while_the_loop_goes_on_and_then_every_group_arrives_once(
    tmp_path: Path, play: Play
) -> None:
    engine = play(lengths=Lengths(tokens=500))
    tree = run_tree(
        tmp_path,
        engine.url,
        sampling={"max_new_tokens": 500},
        engine={"max_concurrent_samples": 4},
    )
    with HubEnd(tree, ring_bytes=64 << 10) as hub:
        hub.wait_for(m.GeneratorReady)
        engine.clear()
        hub.issue(*range(20))
        hub.wait_for(m.Pulse, len(hub.all(m.Pulse)) + 3)
        pulse = hub.all(m.Pulse)[-1]
        num_fitting = len(hub.all(m.Commit))
        # Those that were under way, or began in that moment, when the first one found no room.
        assert pulse.num_waiting_for_ring >= 1
        assert pulse.num_queued > 0
        assert pulse.num_queued == 20 - num_fitting - pulse.num_waiting_for_ring
        assert len(engine.requests("/generate")) == 2 * (num_fitting + pulse.num_waiting_for_ring)
        assert pulse.loop_gap_ms < 500
        freed = 0

        def done() -> bool:
            nonlocal freed
            for commit in hub.all(m.Commit)[freed:]:
                hub.free(commit)
                freed += 1
            return len(hub.all(m.Commit)) == 20

        hub.until(done)
        hub.answers(20)


def test_a_group_that_can_never_fit_the_ring_fails_with_the_way_out_and_the_next_is_whole(
    tmp_path: Path, play: Play
) -> None:
    engine = play(
        lengths=Lengths(tokens=3000),
        rules=[Rule(prompt_start=prompt_ids(1).tolist(), abort_after=10, times=2)],
    )
    sampling = {"max_new_tokens": 3000}
    with HubEnd(run_tree(tmp_path, engine.url, sampling=sampling), ring_bytes=64 << 10) as hub:
        hub.issue(0)
        (settled,) = hub.wait_for(m.Settled)
        assert settled.outcome is m.Settlement.FAILED
        assert settled.reason.startswith("RecordTooLarge: ")
        assert "ring.bytes" in settled.reason
        play(lengths=Lengths(tokens=10))
        hub.issue(1)
        hub.wait_for(m.Commit)


def test_dropped_groups_are_forgotten_wherever_they_stand_and_can_be_given_out_again_at_once(
    tmp_path: Path, play: Play
) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url, engine={"max_concurrent_samples": 4})) as hub:
        hub.wait_for(m.GeneratorReady)
        play(tokens_per_s=20.0, lengths=Lengths(tokens=20))
        hub.issue(0, 1, 2, 3)
        hub.until(lambda: sum(len(said.groups) for said in hub.all(m.Dispatched)) == 2)
        hub.send(m.Drop(groups=[1, 3, 17], reason="older than version 4"))
        hub.issue(1, attempt=1)
        settled = hub.wait_for(m.Settled, 2)
        assert {(s.group, s.outcome, s.reason) for s in settled} == {
            (group, m.Settlement.DROPPED, "older than version 4") for group in (1, 3)
        }
        hub.wait_for(m.Commit, 3)
        assert sorted((c.group, c.attempt) for c in hub.all(m.Commit)) == [(0, 0), (1, 1), (2, 0)]
        assert len(hub.all(m.Settled)) == 2


def test_aborted_work_goes_on_from_where_it_was(tmp_path: Path, play: Play) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        hub.wait_for(m.GeneratorReady)
        play(tokens_per_s=40.0, lengths=Lengths(tokens=32))
        engine.clear()
        hub.issue(0, 1)
        hub.until(lambda: engine.state()["num_running"] == 4)
        hub.until(lambda: len(engine.requests("/generate")) == 4)
        hub.send(m.AbortRunning(groups=[1]))
        hub.until(lambda: len(engine.requests("/generate")) == 6)
        aborted = {r.rid for r in engine.requests("/abort_request")}
        ours = {
            r.rid
            for r in engine.requests("/generate")[:4]
            if r.input_ids_start == prompt_ids(1)[:16].tolist()
        }
        assert aborted == ours
        commits = hub.answers(2)
        for commit in commits.values():
            assert isinstance(commit, m.Commit)
            assert commit.response_lens == [32, 32]


def test_requests_that_are_never_answered_are_aborted_at_their_deadline_and_tried_again(
    tmp_path: Path, play: Play
) -> None:
    engine = play()
    tree = run_tree(tmp_path, engine.url, engine={"request_timeout_s": 0.5})
    with HubEnd(tree) as hub:
        hub.wait_for(m.GeneratorReady)
        play(rules=[Rule(skip=10, times=2, silent=True)])
        hub.issue(*range(16))
        answers = hub.answers(16)
        assert all(isinstance(answer, m.Commit) for answer in answers.values())
        assert len(engine.requests("/generate")) == 34
        assert len({r.rid for r in engine.requests("/abort_request")}) == 2


def test_an_engine_that_was_started_anew_makes_no_more_records_before_it_has_the_runs_weights(
    tmp_path: Path, play: Play
) -> None:
    script = Script(vocab_size=VOCAB_SIZE, lengths=Lengths(tokens=12), tokens_per_s=60.0)
    with ScriptedEngine.start(script) as first:
        tree = run_tree(tmp_path, first.url)
        with HubEnd(tree, version=3, weights="/weights/3") as hub:
            hub.wait_for(m.GeneratorReady)
            hub.issue(0)
            hub.wait_for(m.Commit)
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait()
            port = int(first.url.rsplit(":", 1)[1])
            with ScriptedEngine.start(script, port=port) as second:
                for group in range(1, 20):
                    hub.issue(group)
                    hub.wait_for(m.Commit, group + 1)
                    if hub.all(m.Commit)[-1].oldest_version == 3:
                        break
                assert second.state()["weight_version"] == f"{LINEAGE}:3"
                versions = [commit.oldest_version for commit in hub.all(m.Commit)]
                assert set(versions[1:-1]) <= {-1}, (
                    "tokens of the checkpoint's weights are of no known version"
                )
                assert versions[-1] == 3


def test_the_death_of_one_of_two_engines_loses_nothing(tmp_path: Path, play: Play) -> None:
    engine = play(tokens_per_s=60.0)
    with ScriptedEngine.start(vocab_size=VOCAB_SIZE, tokens_per_s=60.0, lengths=Lengths(tokens=12)) as doomed:
        tree = run_tree(tmp_path, engine.url, engine={"urls": [engine.url, doomed.url]})
        with HubEnd(tree) as hub:
            (ready,) = hub.wait_for(m.GeneratorReady)
            assert ready.concurrency == 128
            hub.issue(*range(12))
            hub.until(lambda: doomed.state()["num_running"] > 5)
            os.kill(doomed.process.pid, signal.SIGKILL)
            answers = hub.answers(12)
            assert all(isinstance(answer, m.Commit) for answer in answers.values())
