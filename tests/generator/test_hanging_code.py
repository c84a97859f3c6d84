"""User code that never returns costs its own group; the reason names the line; the run goes to its end."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub.rig import Rig
from tests.kit.scripted import ScriptedEngine
from trainer_hook import EndOfData

Play = Callable[..., ScriptedEngine]
CODE = "tests.generator.hanging_code"
PLACES = {
    0: r"generate: timeout: it asked no engine for 1 s .*; it has been at .*hanging_code.py:\d+ in _tool",
    1: r"generate: LoopBlocked: it blocked the event loop.* \(.*hanging_code.py:\d+ in _block\)",
    2: r"generate: timeout: .*hanging_code.py:\d+ in _hang",
    3: r"no room: 64 turns in a row had no room .*hanging_code.py:\d+ in _hang\)",
    4: r"generate: timeout: .*hanging_code.py:\d+ in _hang",
    5: r"filter: LoopBlocked: .*hanging_code.py:\d+ in keep\)",
    6: r"reward: timeout: the reward ran longer .*; it was at .*hanging_code.py:\d+ in reward$",
}
JUDGED = {
    0: r"reward: timeout: the reward ran longer .*hanging_code.py:\d+ in _tool",
    1: r"reward: LoopBlocked: it blocked the event loop.* \(.*hanging_code.py:\d+ in _block\)",
}


@pytest.mark.parametrize(
    ("functions", "places"),
    [
        ({"rollout": {"generate": f"{CODE}.generate", "filter": f"{CODE}.keep"}}, PLACES),
        ({"reward": {"function": f"{CODE}.judge"}}, JUDGED),
    ],
    ids=["generate, filter, reward worker", "async reward"],
)
def test_a_run_outlasts_user_code_that_hangs_and_says_where(
    tmp_path: Path, play: Play, functions: dict[str, dict[str, str]], places: dict[int, str]
) -> None:
    rig = Rig(tmp_path / "run", play())
    rig.config["rollout"] |= {"max_failure_rate": 1.0, "idle_timeout_s": 1.0} | functions.get("rollout", {})
    rig.config["reward"] = {"function": f"{CODE}.reward", "timeout_s": 1.0} | functions.get("reward", {})
    rig.config["run"]["heartbeat_s"] = 4.0
    num_groups = 0
    with rig, rig.attach() as hook:
        while True:
            try:
                with hook.next_batch() as batch:
                    num_groups += len({sample.group for sample in batch.samples})
            except EndOfData:
                break
            with hook.update_weights():
                pass
    assert num_groups == 24
    reasons = {event["group"]: event["reason"].partition("\n")[0] for event in rig.events("failed")}
    assert reasons.keys() == places.keys()
    for group, place in places.items():
        assert re.match(place, reasons[group]), reasons[group]
    assert not rig.events("generator_died")
    assert sum("the first failure of this kind" in text for text in rig.notices) >= 2
