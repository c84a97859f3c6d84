"""The function is found at the start, or the start says what form is accepted."""

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reward_functions import Judge
from reward_kit import children, make_sample, score, values

from fa_rollout.config import ConfigError
from fa_rollout.rewards.function import check, load, pack
from fa_rollout.sample import Sample

FORM = r'"package\.module\.function" or "package\.module:function"'


def test_callables_of_python_reach_the_workers_by_value() -> None:
    factor = 3

    def closure(sample: Sample) -> float:
        return sample.member * factor

    for function in (closure, lambda sample: sample.member * factor, Judge(0.75).plain):
        assert values(score([make_sample(1)], function)) == [3.0]


def test_a_callable_may_travel_as_bytes_through_processes_in_between() -> None:
    packed = pack(lambda sample: sample.member + 0.5)
    assert values(score([make_sample(1)], packed)) == [1.5]
    assert values(score([make_sample(1)], packed, in_loop=True)) == [1.5]

    async def judge(sample: Sample) -> float:
        return 2.0

    assert values(score([make_sample(1)], pack(judge))) == [2.0]
    assert load(pack(load(packed)))(make_sample(2)) == 2.5


def test_functions_of_the_script_that_was_started_reach_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, json, sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from reward_kit import make_sample, running

            BONUS = 0.5

            class Scorer:
                def __call__(self, sample):
                    return json.loads("1") + BONUS

            def reward(sample):
                return Scorer()(sample) * 2

            async def main():
                for function in (reward, Scorer()):
                    async with running(function) as runner:
                        print([outcome.value for outcome in await runner.score([make_sample()])])

            asyncio.run(main())
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[3.0]\n[1.5]\n", 0), done.stderr


def test_a_callable_that_cannot_be_sent_is_an_error_at_start_that_names_the_accepted_form() -> None:
    for held in ((i for i in range(3)), sys._getframe()):
        with pytest.raises(ConfigError, match=f"cannot be sent to a worker process.*{FORM}"):
            score([make_sample()], lambda sample, held=held: 1.0)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("reward_functions.by_membr", r"no attribute 'by_membr'; did you mean 'by_member'\?"),
        ("reward_functions.not_callable", "callable, found int 3"),
        ("reward_functions.Judge", "found the class"),
    ],
)
def test_a_path_that_leads_to_no_function_is_an_error_at_start_that_says_why(path: str, says: str) -> None:
    before = children()
    for in_loop in (False, True):
        with pytest.raises(ConfigError, match=f"reward.function.*{says}"):
            score([make_sample()], path, in_loop=in_loop)
    assert children() == before


def test_a_worker_that_dies_while_it_imports_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="exit code 7 before the function was loaded"):
        score([make_sample()], "deadly.reward", num_workers=2)


def test_a_worker_that_is_killed_while_it_imports_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed_once.py").write_text(
        "import os, pathlib, signal\n"
        "if not pathlib.Path('killed').exists():\n"
        "    pathlib.Path('killed').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def reward(sample):\n    return 5\n"
    )
    (tmp_path / "killed_always.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.chdir(tmp_path)
    assert values(score([make_sample()], "killed_once.reward", num_workers=1)) == [5.0]
    with pytest.raises(ConfigError, match="signal 9"):
        score([make_sample()], "killed_always.reward", num_workers=1)


def test_the_working_directory_is_importable_in_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner_rewards.py").write_text("def reward(sample):\n    return 4\n")
    monkeypatch.chdir(tmp_path)
    assert values(score([make_sample()], "inner_rewards.reward")) == [4.0]


def test_classes_and_values_given_in_python_are_refused_too() -> None:
    not_a_function: Any = 3
    for given in (Judge, not_a_function):
        with pytest.raises(ConfigError, match=r"reward\.function must name"):
            score([make_sample()], given)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """As verl calls one."""
    return 1.0


def length_reward(completions: list[str], **kwargs: object) -> list[float]:
    """As TRL calls one."""
    return [1.0 for _ in completions]


def slimes_reward(args: object, sample: Sample) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (compute_score, "def reward(sample): return compute_score(sample.metadata.get('data_source'), "),
        (length_reward, "def reward(sample): return length_reward(completions=[sample.response], "),
        (slimes_reward, "found slimes_reward(args"),
        (lambda: 1.0, "must take one argument, a sample"),
    ],
)
def test_a_function_that_is_written_for_another_library_is_an_error_at_start_that_shows_the_wrapper(
    function: Callable[..., Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(function)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "function", [len, lambda sample, scale=1.0: 1.0, lambda *samples: 1.0, functools.partial(pow, 2.0)]
)
def test_whatever_takes_one_argument_is_a_reward_function(function: Callable[..., Any]) -> None:
    assert check(function) is function
