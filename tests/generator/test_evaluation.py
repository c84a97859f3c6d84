"""Evaluation beside training: own limit and settings, every prompt answered once, never in the stream."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.generator.hub_end import VOCAB_SIZE
from tests.hub.rig import WITH_SPARE, Rig
from tests.kit.scripted import Lengths, ScriptedEngine, expected_ids, sequence_key
from trainer_hook import EvaluationFailed, TrainerHook
from trainer_hook import messages as m

Play = Callable[..., ScriptedEngine]

PROMPTS = [f"question {i}" for i in range(9)]


def make_rig(folder: Path, engine: ScriptedEngine, **evaluation: object) -> Rig:
    rig = Rig(folder / "run", engine)
    path = folder / "test.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "label": text[-1]}) + "\n" for text in PROMPTS))
    rig.config["evaluation"] = {"path": str(path), "datasets": {"again": str(path)}} | evaluation
    return rig


def train(hook: TrainerHook, num_steps: int = 1, *, publish: bool = False) -> list[int]:
    """Groups that were trained."""
    groups: list[int] = []
    for _ in range(num_steps):
        with hook.next_batch() as batch:
            groups += {sample.group for sample in batch.samples}
        if publish:
            with hook.update_weights():
                pass
    return groups


def evaluation_requests(engine: ScriptedEngine) -> list[str]:
    """Wire ids of requests that belong to evaluations."""
    return [r.rid for r in engine.requests("/generate") if r.rid and "-e" in r.rid]


def test_an_evaluation_brings_every_prompt_of_its_data_set_once_with_its_own_settings(
    tmp_path: Path, play: Play
) -> None:
    engine = play(lengths=Lengths(tokens=20))
    rig = make_rig(tmp_path, engine, samples_per_prompt=3, sampling={"temperature": 0.25})
    with rig, rig.attach() as hook:
        for source in (None, "again", str(tmp_path / "test.jsonl")):
            result = hook.evaluate(source, sampling={"max_new_tokens": 7})
            assert [(p.index, p.prompt, p.label) for p in result.prompts] == [
                (i, text, text[-1]) for i, text in enumerate(PROMPTS)
            ]
            assert result.num_failed == 0
            assert (result.version, result.is_mixed, result.versions) == (0, False, (0,))
            assert [sample.member for sample in result.samples] == [0, 1, 2] * len(PROMPTS)
            assert result.reward_mean == 7.0
        sample = result.samples[-1]
        tokens, start = sample.tokens, sample.prompt_length
        ids = expected_ids(sequence_key(tokens[:start]), start, len(tokens), VOCAB_SIZE)
        np.testing.assert_array_equal(tokens[start:], ids)
        assert sample.finish_reason == "length"
        assert sample.version_spans == [(0, 7)]
        assert len(sample.logprobs) == len(sample.loss_mask) == sample.response_length == 7
        mine = [r.body["sampling_params"] for r in engine.requests("/generate") if r.rid and "-e" in r.rid]
        assert {(p["temperature"], p["max_new_tokens"]) for p in mine} == {(0.25, 7)}
        others = [r.body["sampling_params"] for r in engine.requests("/generate") if r.rid and "-g" in r.rid]
        assert {(p["temperature"], p["max_new_tokens"]) for p in others} == {(1.0, 256)}


def test_prompts_can_be_brought_along_as_text_messages_or_dicts(tmp_path: Path, play: Play) -> None:
    rig = make_rig(tmp_path, play())
    with rig, rig.attach() as hook:
        result = hook.evaluate(["plain", {"prompt": "full", "label": 4, "metadata": {"of": "me"}}])
        assert [(p.prompt, p.label) for p in result.prompts] == [("plain", None), ("full", 4)]
        assert result.samples[1].metadata == {"of": "me"}
        for wrong in ([], [""], [{"label": 4}], [7]):
            with pytest.raises(ValueError, match="prompt"):
                hook.evaluate(wrong)


def test_an_evaluation_leaves_no_trace_in_training(tmp_path: Path, play: Play) -> None:
    rig = make_rig(tmp_path, play(), samples_per_prompt=2)
    with rig, rig.attach() as hook:
        pending = hook.begin_evaluation()
        trained = train(hook, 3, publish=True)
        assert len(pending.result().samples) == 2 * len(PROMPTS)
        trained += train(hook, 3, publish=True)
        counts = hook.statistics().hub["counts"]
    assert sorted(trained) == list(range(24))
    assert (counts["taken"], counts["trained"]) == (24, 24)
    assert rig.last_words is not None
    assert rig.last_words.counts["taken"] == 24


def test_evaluations_have_places_of_their_own_and_no_more(tmp_path: Path, play: Play) -> None:
    engine = play(tokens_per_s=20.0, lengths=Lengths(tokens=20))
    rig = make_rig(tmp_path, engine, max_concurrent_samples=3)
    rig.config["engine"]["max_concurrent_samples"] = 4
    with rig, rig.attach() as hook:
        rig.until(lambda: engine.state()["num_running"] == 4)
        pending = hook.begin_evaluation()
        rig.until(lambda: engine.state()["num_running"] == 7)
        deadline_s = time.monotonic() + 1.0
        while time.monotonic() < deadline_s:
            assert engine.state()["num_running"] <= 7
            time.sleep(0.02)
        pending.cancel()
        rig.until(lambda: engine.state()["num_running"] <= 4)


def test_a_weight_update_in_an_evaluation_makes_it_mixed_and_loses_no_prompt(
    tmp_path: Path, play: Play
) -> None:
    engine = play(tokens_per_s=50.0, lengths=Lengths(tokens=50))
    rig = make_rig(tmp_path, engine)
    with rig, rig.attach() as hook:
        pending = hook.begin_evaluation(sampling={"ignore_eos": True, "max_new_tokens": 50})
        rig.until(lambda: len(evaluation_requests(engine)) == len(PROMPTS))
        time.sleep(0.2)  # some tokens under the first version
        with hook.update_weights():
            pass
        result = pending.result()
        assert (result.version, result.is_mixed, result.versions) == (None, True, (0, 1))
        assert all(sample.response_length == 50 for sample in result.samples)
        assert hook.evaluate(PROMPTS[:2], sampling={"max_new_tokens": 3}).version == 1


def test_a_generator_that_is_killed_in_an_evaluation_repeats_no_answer_and_owes_none(
    tmp_path: Path, play: Play
) -> None:
    engine = play(tokens_per_s=40.0, lengths=Lengths(kind="list", values=[1, 1, 1, 40, 40, 40, 40, 40, 40]))
    rig = make_rig(tmp_path, engine)
    rig.config["run"] |= WITH_SPARE
    with rig, rig.attach() as hook:
        pending = hook.begin_evaluation()
        rig.until(lambda: not pending.is_ready() and pending.num_done >= 1)
        generator = rig.generator()
        generator.kill()
        generator.wait(5)
        result = pending.result()
        assert [p.index for p in result.prompts] == list(range(len(PROMPTS)))
        assert result.num_failed == 0


def test_a_prompt_that_fails_is_an_answer_and_counts_in_no_mean(tmp_path: Path, play: Play) -> None:
    rig = make_rig(tmp_path, play())
    rig.config["reward"] = {"function": "tests.generator.user_code.fails_on_odd_prompts", "in_loop": True}
    rig.config["rollout"]["max_failure_rate"] = 1.0
    with rig, rig.attach() as hook:
        result = hook.evaluate()
        failures = {p.index: p.failure for p in result.prompts if p.failure}
        assert sorted(failures) == [1, 3, 5, 7]
        assert "no verdict" in (failures[1] or "")
        assert (result.num_failed, result.reward_mean) == (4, 1.0)


@pytest.mark.parametrize(
    ("source", "sampling", "text"),
    [
        ("no/such/file.jsonl", {}, "matches no file"),
        (None, {"temprature": 0.0}, "temprature"),
        (None, {"top_p": 7.0}, "top_p"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error_of_the_call_alone(
    tmp_path: Path, play: Play, source: str | None, sampling: dict[str, float], text: str
) -> None:
    rig = make_rig(tmp_path, play())
    with rig, rig.attach() as hook:
        with pytest.raises(EvaluationFailed, match=text):
            hook.evaluate(source, sampling=sampling)
        assert len(train(hook)) == 4


def test_without_a_configured_data_set_an_evaluation_says_what_to_name(tmp_path: Path, play: Play) -> None:
    rig = Rig(tmp_path / "run", play())
    with rig, rig.attach() as hook, pytest.raises(EvaluationFailed, match=r"evaluation\.path"):
        hook.evaluate()


def test_the_death_of_the_rank_that_asked_ends_its_evaluation_at_the_engines(
    tmp_path: Path, play: Play
) -> None:
    engine = play(tokens_per_s=2.0, lengths=Lengths(tokens=200))
    rig = make_rig(tmp_path, engine)
    rig.config["rollout"]["groups_per_step"] = 1
    rig.config["rollout"]["staleness"] = 0
    code = "from trainer_hook import TrainerHook; TrainerHook.attach().evaluate()"
    with rig:
        rank = subprocess.Popen([sys.executable, "-c", code], env=rig.environment, cwd=os.getcwd())
        rig.until(lambda: engine.state()["num_running"] == 2 + len(PROMPTS))
        rank.send_signal(signal.SIGKILL)
        rank.wait()
        rig.until(lambda: engine.state()["num_running"] == 2)


def test_a_run_that_ends_says_so_to_who_waits_for_an_evaluation(tmp_path: Path, play: Play) -> None:
    rig = make_rig(tmp_path, play(tokens_per_s=2.0, lengths=Lengths(tokens=200)))
    with rig, rig.attach() as hook:
        pending = hook.begin_evaluation()
        assert not pending.is_ready()
        rig.channel.send(m.encode(m.Stop(grace_s=3.0, reason="the test is over")))
        with pytest.raises(EvaluationFailed, match="the test is over"):
            pending.result()
        hook.close()
        message = rig.hear()
        assert isinstance(message, m.RunEnded)
        rig.last_words = message
