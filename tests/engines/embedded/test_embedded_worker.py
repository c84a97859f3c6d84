"""If the engine itself fails, whoever waits learns of it at once, and nobody waits for it again."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fa_rollout.engines.embedded.engine.engine import StepEngine
from fa_rollout.engines.embedded.engine.frontend import Frontend
from fa_rollout.engines.embedded.engine.scheduler import Limits
from fa_rollout.engines.embedded.errors import EngineStopped
from fa_rollout.engines.embedded.model.request import GenerationRequest
from fa_rollout.engines.embedded.model.runner import Runner
from fa_rollout.engines.embedded.model.sampling_params import SamplingParams


class FailingRunner(Runner):
    """Its second decode step fails, as when memory runs out."""

    num_steps = 0

    def decode(self, requests: Any) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps == 2:
            raise MemoryError("no memory left for this step")
        return super().decode(requests)


def make_request(rid: str) -> GenerationRequest:
    return GenerationRequest(
        rid=rid, prompt_ids=[1, 2], params=SamplingParams(), max_new_tokens=50, seed=1, arrived_s=0.0
    )


def make_engine(runner: Runner) -> StepEngine:
    limits = Limits(context_length=256, max_running_requests=8, max_total_tokens=4096, max_prefill_tokens=512)
    return StepEngine(runner, limits, weight_version="0")


def test_the_engines_own_failure_reaches_everybody(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        ended = asyncio.Event()
        frontend = Frontend(make_engine(FailingRunner(model_folder)), ended=ended, num_threads=1)
        with caplog.at_level(logging.CRITICAL + 1):
            frontend.start()
            tickets = frontend.submit([make_request("a"), make_request("b")])
            for ticket in tickets:
                with pytest.raises(EngineStopped, match="died"):
                    await ticket.progress()
        await ended.wait()
        assert frontend.has_died
        assert not frontend.is_alive
        with pytest.raises(EngineStopped):
            frontend.submit([make_request("c")])
        with pytest.raises(EngineStopped):
            await frontend.call(frontend.engine.resume)
        await frontend.stop()

    asyncio.run(scene())


def test_an_error_of_a_call_is_the_callers_and_the_engine_goes_on(model_folder: Path) -> None:
    def fail() -> None:
        raise ValueError("mine")

    async def scene() -> None:
        frontend = Frontend(make_engine(Runner(model_folder)), ended=asyncio.Event(), num_threads=1)
        frontend.start()
        with pytest.raises(ValueError, match="mine"):
            await frontend.call(fail)
        (ticket,) = frontend.submit([make_request("a")])
        await ticket.progress()
        assert ticket.num_output == 50
        await frontend.stop()
        assert not frontend.is_alive

    asyncio.run(scene())
