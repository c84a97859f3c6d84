"""The generate and reward functions of a chaos job.

The reward is a pure function of the tokens, so that a checker can tell whose it is. Where a row names a file
for marks, a few calls misbehave, by their group, member and attempt: each first adds a line to that file, so
that the checker knows which groups may fail, whatever the run's own log says.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa_rollout.generator.rollouts.custom import GenerateContext
from fa_rollout.sample import Sample

MODULUS = 8191
SHARE = 0.02
"""Of the calls of each function that misbehave."""
IN_GENERATE = ("cancels itself", "leaks a cancellation", "raises", "exits", "hangs", "forks")
IN_REWARD = ("raises", "hangs", "dies", "forks", "starts a program and hangs")
HARMLESS = ("forks",)
"""Faults that must not fail the sample."""


def reward_of(token_ids: Sequence[int]) -> float:
    return float(sum((place + 1) * token for place, token in enumerate(token_ids)) % MODULUS)


def reward(sample: Sample) -> float:
    time.sleep(0.002)
    match _fault(sample, "reward", IN_REWARD):
        case "raises":
            raise ValueError("no verdict")
        case "hangs":
            time.sleep(600)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "forks":
            _fork(600.0)
        case "starts a program and hangs":
            subprocess.Popen(["sleep", "600"], start_new_session=True).wait()
    return reward_of([int(token) for token in sample.response_ids])


async def generate(context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One turn, as without it; a few samples misbehave before or after it."""
    fault = _fault(sample, "generate", IN_GENERATE)
    if fault == "hangs":
        await asyncio.Event().wait()
    context.append_turn(sample, await context.generate(context.ids(sample), sampling_params))
    match fault:
        case "cancels itself":
            _cancel_this_task()
            await asyncio.sleep(0)
        case "leaks a cancellation":
            _cancel_this_task()
        case "raises":
            raise ValueError("no answer")
        case "exits":
            raise GeneratorExit
        case "forks":
            _fork(1.0)
    return sample


def _cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def _fork(lives_s: float) -> None:
    """A child with all that this process has open."""
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            time.sleep(lives_s)
        os._exit(0)


def _fault(sample: Sample, function: str, faults: Sequence[str]) -> str | None:
    path = sample.metadata.get("marks")
    dice = random.Random(f"{function} {sample.group} {sample.member} {sample.attempt}")
    if not path or dice.random() >= SHARE:
        return None
    fault = dice.choice(faults)
    with Path(path).open("a") as file:
        file.write(json.dumps({"group": sample.group, "function": function, "fault": fault}) + "\n")
    return fault
