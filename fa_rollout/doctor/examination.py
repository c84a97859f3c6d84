"""All checks in order; each uses the results of those before it.

In: a configuration and the trainer's command. Out: outcomes. Invariant: what is started here is ended
here, and engines are left as they were, apart from a few sampled tokens.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from fa_rollout.client.base.errors import ClientError
from fa_rollout.client.fleet.examine import Examined, Unanswered, answer, examine
from fa_rollout.client.wire.address import AddressError
from fa_rollout.client.wire.completion import Completion
from fa_rollout.config import Config
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.doctor import engines, machine, model, prompts, user_code
from fa_rollout.doctor.outcome import CheckOutcome, error, skipped
from fa_rollout.doctor.prompts import TriedPrompt
from fa_rollout.engines.with_key import KEY_VARIABLE
from fa_rollout.generator.turns.sampling import base_params
from fa_rollout.launcher.engines.engines import LaunchedEngines
from fa_rollout.sample import FinishReason, Sample
from trainer_hook.record import VersionSpan

NUM_TOKENS = 32
"""Length of the sampled answer: enough to read, and quick to sample."""
_ANSWER_S = 60.0
_LOOK_S = 0.1


async def examination(
    config: Config, command: Sequence[str], *, patience_s: float, starts_engine: bool
) -> list[CheckOutcome]:
    """Run all checks.

    Args:
        patience_s: longest wait for an engine to answer.
        starts_engine: if engine.urls is empty, start one of the engines that the run would start.
    """
    outcomes = [
        *machine.memory(config),
        *machine.lengths(config),
        *machine.shared_memory(),
        *machine.descriptors(config),
        *machine.proxies(config.engine.urls, os.environ),
        *machine.clock(),
        *machine.output(config),
        *machine.programs(command),
    ]
    async with _addresses(config, starts_engine=starts_engine) as urls:
        if isinstance(urls, CheckOutcome):
            outcomes.append(urls)
            urls = []
        found = await _examined(config, urls, patience_s)
        outcomes += engines.engines(config, found)
        outcomes += await _contents(config, [one for one in found if isinstance(one, Examined)])
    return [*outcomes, *machine.packages()]


async def _examined(config: Config, urls: list[str], patience_s: float) -> list[Examined | Unanswered]:
    router = config.engine.router and bool(config.engine.urls)
    try:
        return await examine(urls, router=router, patience_s=patience_s) if urls else []
    except AddressError as found:
        return [Unanswered(url=str(urls), text=str(found))]


async def _contents(config: Config, found: list[Examined]) -> list[CheckOutcome]:
    """Tokenizer, data and user code, with the engines that answer."""
    info = found[0].info if found else None
    folder = model.folder_of(config, info)
    outcomes, tokenizer = model.tokenizer(folder)
    outcomes += machine.weights(config, None if folder is None else Path(folder))
    if info is not None and tokenizer is not None:
        outcomes += model.agreement(info, tokenizer)
    more, source = prompts.data(config)
    outcomes += more
    first: list[TriedPrompt] = []
    if source is not None and tokenizer is not None:
        contexts = [one.info.context_length for one in found if one.info.context_length is not None]
        more, first = prompts.prompts(config, source, tokenizer, min(contexts, default=None))
        outcomes += more
    if source is not None:
        source.close()
    completion = None
    if info is not None and tokenizer is not None and first:
        more, completion = await _answer(config, info.url, first[0], tokenizer)
        outcomes += more
    samples = [
        _sample(first[0], member, completion, tokenizer)
        for member in range(config.rollout.samples_per_group if first and tokenizer else 0)
    ]
    outcomes += await user_code.reward(config, samples)
    outcomes += user_code.group_filter(config, samples)
    return [*outcomes, *user_code.generate(config), *user_code.agent(config, tokenizer)]


async def _answer(
    config: Config, url: str, prompt: TriedPrompt, tokenizer: Tokenizer
) -> tuple[list[CheckOutcome], Completion | None]:
    params = base_params(config.sampling)
    params["max_new_tokens"] = min(NUM_TOKENS, config.sampling.max_new_tokens)
    try:
        completion = await answer(url, prompt.ids, params, _ANSWER_S)
    except ClientError as found:
        return [error("answer", str(found), "see the engine's log")], None
    return model.spelling(completion, tokenizer), completion


def _sample(
    prompt: TriedPrompt, member: int, completion: Completion | None, tokenizer: Tokenizer | None
) -> Sample:
    """As a reward gets it; without an engine the answer is empty."""
    sample = Sample(
        group=0,
        member=member,
        attempt=0,
        epoch=0,
        prompt_index=prompt.index,
        prompt=prompt.row.prompt,
        label=prompt.row.label,
        metadata=prompt.row.metadata,
        prompt_ids=prompt.ids,
        finish_reason=FinishReason.LENGTH,
    )
    if completion is not None and tokenizer is not None:
        sample.response_ids, sample.logprobs = completion.output_ids, completion.logprobs
        sample.loss_mask = np.ones(len(completion.output_ids), np.uint8)
        sample.version_spans = [VersionSpan(0, len(completion.output_ids))]
        sample.response = tokenizer.decode(completion.output_ids)
    return sample


@asynccontextmanager
async def _addresses(config: Config, *, starts_engine: bool) -> AsyncIterator[list[str] | CheckOutcome]:
    """Addresses of the running engines, or of one that is started for the checks."""
    if config.engine.urls:
        yield config.engine.urls
        return
    if not starts_engine:
        yield skipped("engine", "not checked: engine.urls is empty; --start-engine starts one to check")
        return
    alone: Any = replace(
        config,
        engine=replace(config.engine, router=False),
        launch=replace(config.launch, number=1, max_restarts=0),
    )
    with tempfile.TemporaryDirectory() as logs:
        started = LaunchedEngines(
            alone,
            log=lambda name: Path(logs) / f"{name}.log",
            say=logging.getLogger(__name__).warning,
            change=lambda url, joins: None,
            down=lambda urls: None,
        )
        try:
            while started.urls is None and started.failure is None:
                started.look()
                await asyncio.sleep(_LOOK_S)
            os.environ[KEY_VARIABLE] = started.key  # where this process's client finds it
            yield started.urls or error("engine", str(started.failure), "see the last lines of its log")
        finally:
            started.close()
