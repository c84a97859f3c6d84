"""A server's condition fails no group; one that lasts ends the run in the server's name."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.generator.hub_end import HubEnd, run_tree
from tests.kit.scripted import Rule, ScriptedEngine
from trainer_hook import messages as m

Play = Callable[..., ScriptedEngine]


@pytest.mark.parametrize(("status", "rollout"), [(429, {}), (500, {"group_timeout_s": 1.5})])
def test_an_outage_within_patience_fails_no_group_though_its_deadline_is_shorter(
    tmp_path: Path, play: Play, status: int, rollout: dict[str, float]
) -> None:
    engine = play()
    tree = run_tree(tmp_path, engine.url, rollout=rollout)
    with HubEnd(tree) as hub:
        hub.wait_for(m.GeneratorReady)
        play(rules=[Rule(status=status, body="busy", retry_after_s=0)])
        hub.issue(*range(8))
        hub.listen(2.0)
        play(rules=[])
        answers = hub.answers(8)
    assert all(isinstance(answer, m.Commit) for answer in answers.values())


def test_a_server_that_answers_nobody_for_longer_ends_the_run_by_its_name(tmp_path: Path, play: Play) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url, trainer={"stall_s": 1.0})) as hub:
        hub.wait_for(m.GeneratorReady)
        play(rules=[Rule(status=503, body="busy")])
        hub.issue(*range(8))
        (told,) = hub.wait_for(m.GaveUp)
        assert not hub.all(m.Settled)
    assert told.error == "EngineUnavailable"
    assert engine.url in told.text
    assert "503 busy" in told.text


def test_a_group_that_is_refused_while_others_are_answered_spends_none_of_its_time(
    tmp_path: Path, play: Play
) -> None:
    engine = play()
    tree = run_tree(tmp_path, engine.url, rollout={"group_timeout_s": 1.0})
    with HubEnd(tree) as hub:
        hub.wait_for(m.GeneratorReady)
        play(rules=[Rule(rid="g7.0", status=429, body="busy", retry_after_s=0)])
        hub.issue(7)
        until_s, num_others = time.monotonic() + 2.5, 0
        while time.monotonic() < until_s:
            hub.issue(0, attempt=num_others)
            num_others += 1
            assert 7 not in hub.answers(num_others)
            time.sleep(0.05)  # no record leaves the ring: a fast machine would fill it
        play(rules=[])
        answers = hub.answers(num_others + 1)
    assert all(isinstance(answer, m.Commit) for answer in answers.values())
