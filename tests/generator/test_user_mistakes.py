"""User code that ends itself, or says what no message can carry: its group is answered, the run goes on."""

from collections.abc import Callable
from pathlib import Path

from tests.generator.hub_end import HubEnd, run_tree
from tests.generator.test_evaluation import make_rig
from tests.kit.scripted import ScriptedEngine
from trainer_hook import messages as m

Play = Callable[..., ScriptedEngine]
USER = "tests.generator.user_code"

REASONS = [
    (0, "generate: CancelledError: it was cancelled, but not by the run"),
    (1, "generate: SystemExit: a library's own usage message"),
    (2, "generate: CancelledError: it was cancelled, but not by the run"),
    (3, r"generate: ValueError: a lone surrogate: \ud800"),
    (4, "generate: ValueError: longlong"),
    (5, "metadata: must be plain data"),
    (6, "reward: bad_value: a reward must be a number, found str '1.0'"),
]


def test_a_custom_function_that_ends_itself_ends_its_group_alone(tmp_path: Path, play: Play) -> None:
    tree = run_tree(tmp_path, play().url, rollout={"generate": f"{USER}.ends_itself"})
    with HubEnd(tree) as hub:
        hub.issue(*range(9))
        answers = hub.answers(9)
        for group, start in REASONS:
            answer = answers[group]
            assert isinstance(answer, m.Settled)
            assert answer.outcome is m.Settlement.FAILED
            assert answer.reason.startswith(start)
            assert len(answer.reason) < 10_000
        for group in range(5):
            assert "user_code.py:" in answers[group].reason.partition("\n")[0]
        own, plain = answers[7], answers[8]
        assert isinstance(own, m.Commit)
        assert isinstance(plain, m.Commit)
        assert own.rewards == [2.5, 2.5]


def test_a_filter_that_ends_itself_is_one_that_fails(tmp_path: Path, play: Play) -> None:
    tree = run_tree(tmp_path, play().url, rollout={"filter": f"{USER}.exits"})
    with HubEnd(tree) as hub:
        hub.issue(4)
        (settled,) = hub.wait_for(m.Settled)
        assert settled.outcome is m.Settlement.FAILED
        assert settled.reason.startswith("filter: SystemExit: 4 (")
        assert "user_code.py:" in settled.reason.partition("\n")[0]


def test_every_prompt_of_an_evaluation_is_answered_by_functions_that_end_themselves(
    tmp_path: Path, play: Play
) -> None:
    rig = make_rig(tmp_path, play())
    rig.config["rollout"]["generate"] = f"{USER}.ends_itself"
    with rig, rig.attach() as hook:
        result = hook.evaluate()
        failures = [prompt.failure for prompt in result.prompts]
        assert len(failures) == 9
        for index, start in REASONS:
            failure = failures[index]
            assert failure is not None
            assert start in failure
        assert failures[7:] == [None, None]
        assert {sample.reward for sample in result.prompts[7].samples} == {2.5}
