"""Reward functions as users write them, good and bad; workers import this module by name."""

import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import numpy as np

from fa_rollout.sample import Sample

if os.environ.get("REWARD_IMPORT_FAILS") and Path(os.environ["REWARD_IMPORT_FAILS"]).exists():
    raise RuntimeError("this module has had enough")


def by_member(sample: Sample) -> float:
    print("a reward that prints disturbs nothing", end="")
    return sample.member / 2


def label_fits(sample: Sample) -> dict[str, object]:
    """A dict: the reward, a part of it, something that is no number, and one reward a token."""
    tokens = np.asarray(sample.response_ids, np.float64) / 10
    return {
        "score": sample.label == sample.response,
        "length": len(sample.response),
        "text": "x",
        "token_rewards": tokens,
    }


def group_ranks(samples: list[Sample]) -> list[int]:
    return sorted(range(len(samples)), key=lambda index: samples[index].response)


def group_too_short(samples: list[Sample]) -> list[float]:
    return [1.0] * (len(samples) - 1)


def as_metadata_says(sample: Sample) -> float:
    """Does what `sample.metadata["do"]` says."""
    return _DEEDS[sample.metadata.get("do", "score")](sample)


def note(sample: Sample) -> None:
    """One line a call, with the worker's pid, into the file that the metadata names."""
    if "log" in sample.metadata:
        with open(sample.metadata["log"], "a") as log:
            log.write(f"{os.getpid()} {sample.member}\n")


def _score(sample: Sample) -> float:
    note(sample)
    return float(sample.member)


def _sleep(sample: Sample) -> float:
    note(sample)
    time.sleep(sample.metadata.get("seconds", 600))
    return 1.0


def _hold_the_interpreter(sample: Sample) -> float:
    """A regular expression that backtracks for longer than the universe is old, in C, without letting go."""
    note(sample)
    re.match(r"(a+)+$", "a" * 64 + "b")
    return 1.0


def _fork(sample: Sample) -> float:
    """The child comes back from here too."""
    if os.fork():
        time.sleep(0.2)
    return 1.0


def _be_killed(sample: Sample) -> float:
    note(sample)
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def _be_killed_once(sample: Sample) -> float:
    first = not Path(sample.metadata["log"]).exists()
    note(sample)
    return _be_killed(sample) if first else 1.0


def _segfault(sample: Sample) -> float:
    ctypes.string_at(0)
    return 1.0


def _alarm(sample: Sample) -> float:
    """The usual time limit of math verifiers."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError("verification took too long")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(30)
    except TimeoutError:
        return 0.25
    return 1.0


def _leave_an_alarm(sample: Sample) -> float:
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    return 1.0


def _use_a_pool(sample: Sample) -> float:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return float(sum(pool.map(abs, [-1, -2, -3])))


def _hang_with_a_child(sample: Sample) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(sample.metadata["child"]).write_text(str(child.pid))
    return _sleep(sample)


def _start_a_daemon(sample: Sample) -> None:
    """In a session of its own, without its parent, and with nothing of the worker's environment."""
    command = ["/bin/sh", "-c", "sleep 600 >/dev/null & echo $!"]
    shell = subprocess.run(command, start_new_session=True, env={}, stdout=subprocess.PIPE, check=True)
    Path(sample.metadata["child"]).write_bytes(shell.stdout)


def _hang_with_a_daemon(sample: Sample) -> float:
    _start_a_daemon(sample)
    return _sleep(sample)


def _die_with_a_daemon(sample: Sample) -> float:
    _start_a_daemon(sample)
    os._exit(7)


def _end_its_process_group(sample: Sample) -> float:
    _start_a_daemon(sample)
    os.killpg(0, signal.SIGKILL)
    return 1.0


def _raise(sample: Sample) -> float:
    raise KeyError("no such answer")


def _exit(sample: Sample) -> float:
    sys.exit(3)


class HarshTimeout(BaseException):
    """As math verifiers raise them: past every `except Exception`."""


def _raise_past_exception(sample: Sample) -> float:
    raise HarshTimeout("too long")


async def _answer() -> float:
    return 1.0


def _return_a_coroutine(sample: Sample) -> object:
    return _answer()


def _many_token_rewards(sample: Sample) -> object:
    return {"score": 1, "token_rewards": np.arange(len(sample.response_ids))}


def _what_is_imported(sample: Sample) -> float:
    return float(len({"torch", "transformers", "aiohttp", "pyarrow", "dill"} & set(sys.modules)))


_DEEDS = {name.removeprefix("_"): value for name, value in list(globals().items()) if callable(value)}


async def async_by_member(sample: Sample) -> float:
    return sample.member / 2


class Judge:
    def __init__(self, value: float = 0.5) -> None:
        self.value = value

    async def __call__(self, sample: Sample) -> float:
        return self.value

    async def method(self, sample: Sample) -> float:
        return self.value * 2

    def plain(self, sample: Sample) -> float:
        return self.value * 4


judge = Judge()
bound_method = judge.method
square = lambda sample: sample.member**2  # noqa: E731
not_callable = 3
