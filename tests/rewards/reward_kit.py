"""Samples, runners and process checks for the tests of rewards."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from fa_rollout import config
from fa_rollout.rewards.outcomes import RewardFailed, RewardOutcome, Scored
from fa_rollout.rewards.runner import RewardRunner
from fa_rollout.sample import FinishReason, Sample
from trainer_hook.record import VersionSpan


def make_sample(
    member: int = 0, *, num_tokens: int = 3, response: str = "", label: Any = None, **metadata: Any
) -> Sample:
    return Sample(
        group=7,
        member=member,
        attempt=1,
        epoch=0,
        prompt_index=5,
        prompt=[{"role": "user", "content": "How many?"}],
        label=label,
        metadata=metadata,
        prompt_ids=np.arange(4, dtype=np.int32),
        response_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        loss_mask=np.ones(num_tokens, np.uint8),
        version_spans=[VersionSpan(1, num_tokens)],
        response=response,
        finish_reason=FinishReason.STOP,
    )


@asynccontextmanager
async def running(
    function: str | bytes | Callable[..., Any] = "reward_functions.as_metadata_says", **options: Any
) -> AsyncIterator[RewardRunner]:
    options.setdefault("num_workers", 1)
    path = function if isinstance(function, str) else "given.in_python"
    patience_s = options.pop("patience_s", 600.0)
    runner = RewardRunner(
        config.Reward(function=path, **options),
        function=None if isinstance(function, str) else function,
        patience_s=patience_s,
    )
    await runner.start()
    try:
        yield runner
    finally:
        await runner.aclose()


def score(
    samples: list[Sample], function: Any = "reward_functions.as_metadata_says", **options: Any
) -> list[RewardOutcome]:
    """Start, score once, close."""

    async def run() -> list[RewardOutcome]:
        async with running(function, **options) as runner:
            return await runner.score(samples)

    return asyncio.run(run())


def values(outcomes: list[RewardOutcome]) -> list[Any]:
    """The reward of each outcome, or the reason why there is none."""
    return [outcome.value if isinstance(outcome, Scored) else outcome.reason for outcome in outcomes]


def failure(outcome: RewardOutcome) -> RewardFailed:
    assert isinstance(outcome, RewardFailed), outcome
    return outcome


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def children() -> set[int]:
    """Live children of this process."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    found = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid() and is_alive(pid):
                    found.add(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
