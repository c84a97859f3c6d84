"""The whole loop: a generator process between a scripted engine and the test as its hub."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.generator.conftest import NUM_TOKENS
from tests.generator.hub_end import LINEAGE, HubEnd, prompt_ids, run_tree, text_ids
from tests.generator.truth import assert_is_the_engines
from tests.kit.scripted import Lengths, Rule, ScriptedEngine
from trainer_hook import messages as m

Play = Callable[..., ScriptedEngine]
USER = "tests.generator.user_code"


def test_a_group_goes_from_assignment_to_a_record_that_equals_what_the_engine_sampled(
    tmp_path: Path, play: Play
) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        (ready,) = hub.wait_for(m.GeneratorReady)
        assert (ready.num_prompts, ready.spans, ready.concurrency) == (20, True, 64)
        assert engine.state()["weight_version"] == f"{LINEAGE}:0"
        hub.issue(3, 4)
        answers = hub.answers(2)
        assert sorted(g for said in hub.all(m.Dispatched) for g in said.groups) == [3, 4]
        for group in (3, 4):
            commit = answers[group]
            assert isinstance(commit, m.Commit)
            record = hub.read(commit)
            assert (record.head.group, record.head.prompt_index, record.head.label) == (group, group, group)
            assert assert_is_the_engines(record) == [[(0, NUM_TOKENS)]] * 2
            for member in range(2):
                assert record.column("loss_mask", member).tolist() == [1] * NUM_TOKENS
            assert record.arrays["rewards"].tolist() == [NUM_TOKENS, NUM_TOKENS]


def test_samples_are_limited_and_groups_go_oldest_first_with_those_given_back_ahead(
    tmp_path: Path, play: Play
) -> None:
    engine = play(tokens_per_s=150.0)
    tree = run_tree(tmp_path, engine.url, engine={"max_concurrent_samples": 5})
    with HubEnd(tree) as hub:
        hub.wait_for(m.GeneratorReady)
        engine.clear()
        hub.issue(*range(8))
        hub.wait_for(m.Dispatched)
        hub.issue(15, attempt=1)
        most_running = 0

        def done() -> bool:
            nonlocal most_running
            most_running = max(most_running, engine.state()["num_running"])
            return len(hub.all(m.Commit)) == 9

        hub.until(done)
    assert most_running == 5
    order = [g for said in hub.all(m.Dispatched) for g in said.groups]
    assert order == [0, 1, 2, 15, 3, 4, 5, 6, 7]
    started = [tuple(r.input_ids_start) for r in engine.requests("/generate")]
    assert started == [tuple(prompt_ids(group)[:16]) for group in order for _ in range(2)]


def test_a_group_fails_as_a_whole_when_one_of_its_samples_cannot_be_made(tmp_path: Path, play: Play) -> None:
    engine = play()
    damage = {2: "null", 3: "nan", 4: "-inf", 5: "positive", 6: "short", 8: "absent"}
    tree = run_tree(tmp_path, engine.url, data={"max_prompt_tokens": 33})
    prompts = tmp_path / "prompts.jsonl"
    lines = prompts.read_text().splitlines()
    lines[9] = lines[9].replace("prompts number", "much much longer prompts number")
    prompts.write_text("\n".join(lines))
    with HubEnd(tree) as hub:
        hub.wait_for(m.GeneratorReady)
        rules = [Rule(prompt_start=prompt_ids(7).tolist(), status=400, body='{"error":{"message":"no"}}')]
        for group, corrupt in damage.items():
            # One of the two samples is damaged, and so is its second try; the other takes its time.
            rules.append(Rule(prompt_start=prompt_ids(group).tolist(), every=2, times=2, corrupt=corrupt))
            rules.append(Rule(prompt_start=prompt_ids(group).tolist(), delay_s=0.5))
        play(rules=rules)
        hub.issue(*range(12))
        answers = hub.answers(12)
    failed = {g: a.reason for g, a in answers.items() if isinstance(a, m.Settled)}
    assert set(failed) == {7, 9, *damage}
    assert all(answers[g].outcome is m.Settlement.FAILED for g in failed)  # type: ignore[union-attr]
    assert failed[9].startswith("over-long: a prompt may have 33 tokens")
    assert failed[7].startswith("RequestRefused: ")
    assert all(failed[g].startswith("InvalidReply: ") for g in damage)
    requests = [tuple(r.input_ids_start) for r in engine.requests("/generate")]
    assert requests.count(tuple(prompt_ids(7)[:16])) <= 2
    assert tuple(prompt_ids(9)[:16]) not in requests
    assert len({a.sequence for a in answers.values() if isinstance(a, m.Commit)}) == 12 - len(failed)


def test_a_failed_reward_is_a_failed_group_and_never_a_number(tmp_path: Path, play: Play) -> None:
    engine = play()
    reward = {"function": f"{USER}.fails_on_odd_prompts", "in_loop": False}
    with HubEnd(run_tree(tmp_path, engine.url, reward=reward)) as hub:
        hub.issue(*range(8))
        answers = hub.answers(8)
        for group in (0, 2, 4, 6):
            commit = answers[group]
            assert isinstance(commit, m.Commit)
            assert commit.rewards == [1.0, 1.0]
    reasons = {g: a.reason for g, a in answers.items() if isinstance(a, m.Settled)}
    assert set(reasons) == {1, 3, 5, 7}
    assert reasons[1].startswith("reward: ValueError: no verdict (")
    assert "no verdict" in reasons[1]
    assert all(reasons[g].startswith("reward: bad_value: ") for g in (3, 5, 7))
    assert answers[1].mean_response_len == NUM_TOKENS  # type: ignore[union-attr]


def test_a_group_reward_that_spins_holds_nobody_up(tmp_path: Path, play: Play) -> None:
    engine = play()
    reward = {"function": f"{USER}.spinning_ranks", "group": True, "in_loop": False}
    with HubEnd(run_tree(tmp_path, engine.url, reward=reward)) as hub:
        hub.wait_for(m.GeneratorReady)
        hub.issue(0, 1)
        answers = hub.answers(2)
        hub.wait_for(m.Pulse, len(hub.all(m.Pulse)) + 1)
        for commit in answers.values():
            assert isinstance(commit, m.Commit)
            assert commit.rewards == [0.0, 1.0]
            head = hub.read(commit).head
            assert (head.reward_mean, head.reward_count) == (0.5, 2)
    ready_at = hub.said.index(hub.all(m.GeneratorReady)[0])
    gaps_ms = [said.loop_gap_ms for said in hub.said[ready_at:] if isinstance(said, m.Pulse)]
    assert max(gaps_ms[1:]) < 500  # the spinning took 1,500


def test_custom_functions_build_samples_and_their_mistakes_end_their_own_group_alone(
    tmp_path: Path, play: Play
) -> None:
    engine = play(lengths=Lengths(tokens=100))
    tree = run_tree(tmp_path, engine.url, rollout={"generate": f"{USER}.by_prompt"})
    with HubEnd(tree, ring_bytes=1 << 20) as hub:
        hub.issue(*range(6))
        answers = hub.answers(6)
        three_turns, again, branches, raising, forgetful, no_room = (answers[g] for g in range(6))

        assert isinstance(three_turns, m.Commit)
        record = hub.read(three_turns)
        tool_a, tool_b = [text_ids("tool a"), text_ids("tool b")]
        for member in range(2):
            response = record.response(member)
            assert response[5:11].tolist() == tool_a.tolist()
            assert response[16:22].tolist() == tool_b.tolist()
            mask = [1] * 5 + [0] * 6 + [1] * 5 + [0] * 6 + [1] * 5
            assert record.column("loss_mask", member).tolist() == mask
            assert not record.column("logprobs", member)[np.array(mask) == 0].any()
            assert record.spans(member) == [(0, 27)]
        assert three_turns.loss_lens == [15, 15]

        assert isinstance(again, m.Settled)
        assert again.reason.startswith("tokens: a turn's prompt must begin with")

        assert isinstance(branches, m.Commit)
        assert branches.response_lens == [3, 7, 3, 7]
        head = hub.read(branches).head
        assert head.members == [0, 0, 1, 1]
        assert branches.rewards == [7.0] * 4
        assert (head.reward_mean, head.reward_count) == (7.0, 2)
        assert [own.get("branch") for own in head.sample_metadata] == ["other", None, "other", None]

        assert isinstance(raising, m.Settled)
        assert raising.reason.startswith('generate: KeyError: "the user\'s own mistake"')
        assert "user_code.py" in raising.reason
        assert isinstance(forgetful, m.Settled)
        assert forgetful.reason.startswith("samples: a custom generate must return")

        assert isinstance(no_room, m.Commit)
        assert hub.read(no_room).head.finish_reasons == ["length", "length"]


def test_a_group_that_takes_too_long_fails_by_its_deadline_and_its_requests_are_aborted(
    tmp_path: Path, play: Play
) -> None:
    engine = play()
    tree = run_tree(tmp_path, engine.url, rollout={"group_timeout_s": 0.5})
    with HubEnd(tree) as hub:
        hub.wait_for(m.GeneratorReady)
        play(tokens_per_s=1.0)
        hub.issue(0)
        (settled,) = hub.wait_for(m.Settled)
        assert settled.outcome is m.Settlement.FAILED
        assert settled.reason == "deadline: not done within 0.5 s"
        hub.until(lambda: engine.state()["num_running"] == 0)


def test_a_sample_that_no_micro_batch_holds_fails_its_group_and_the_run_goes_on(
    tmp_path: Path, play: Play
) -> None:
    engine = play()
    limit = len(prompt_ids(3)) + NUM_TOKENS - 1
    tree = run_tree(tmp_path, engine.url, trainer={"max_tokens_per_micro_batch": limit})
    with HubEnd(tree) as hub:
        hub.wait_for(m.GeneratorReady)
        hub.issue(3)
        settled = hub.answers(1)[3]
        assert isinstance(settled, m.Settled)
        assert settled.outcome is m.Settlement.FAILED
        assert (
            f"over-long: a sample may have {limit} tokens (trainer.max_tokens_per_micro_batch)"
            in settled.reason
        )


def test_a_prompt_that_no_micro_batch_holds_is_not_sent(tmp_path: Path, play: Play) -> None:
    engine = play()
    tree = run_tree(tmp_path, engine.url, trainer={"max_tokens_per_micro_batch": len(prompt_ids(3))})
    with HubEnd(tree) as hub:
        hub.wait_for(m.GeneratorReady)
        engine.clear()
        hub.issue(3)
        settled = hub.answers(1)[3]
        assert isinstance(settled, m.Settled)
        assert "over-long: a prompt and its answer may have" in settled.reason
        assert not engine.requests("/generate")
