"""Everything opened side by side, so that little time passes from a kill to the next life's first request.

In: the configuration and where the run stands. Out: open parts, or the `ConfigError` that says what the user
has to change.
"""

import asyncio
import dataclasses
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import cast

import msgspec

from fa_rollout.client.base.errors import ControlFailed
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine.labels import IN_PIECES, is_first, is_foreign
from fa_rollout.client.engine.probe import model_config, vocab_size_of
from fa_rollout.client.engine.standing import EngineInfo
from fa_rollout.client.fleet.dispatch import Balance
from fa_rollout.client.fleet.weights import taken
from fa_rollout.client.pool import EnginePool
from fa_rollout.config import Config, ConfigError
from fa_rollout.data.prompts import PromptSource
from fa_rollout.data.tokenizer import Tokenizer, eos_ids_in
from fa_rollout.filters import GroupFilter
from fa_rollout.generator.agents.runner import AgentRunner
from fa_rollout.generator.base.tasks import first_error
from fa_rollout.generator.rollouts.custom import Generate
from fa_rollout.generator.turns.versions import VersionBook, parse_label
from fa_rollout.generator.updates.engine_updates import ENGINE_MODE
from fa_rollout.generator.updates.following import follows
from fa_rollout.process.own_threads import in_thread
from fa_rollout.rewards.runner import RewardRunner
from fa_rollout.user_code.dotted import resolve
from shm.ring.segment import Segment
from trainer_hook.messages import Resume

logger = logging.getLogger(__name__)

_BALANCES = {
    "least_loaded": Balance.LEAST_LOADED,
    "round_robin": Balance.ROUND_ROBIN,
    "group": Balance.STICKY,
    "sample": Balance.STICKY,
}
POOL_CLOSE_S = 0.5
"""Longest time for the pool to close; our requests were aborted before, as far as engines answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the generator works with."""

    segment: Segment
    source: PromptSource
    tokenizer: Tokenizer
    rewards: RewardRunner
    group_filter: GroupFilter | None
    generate: Generate | None
    pool: EnginePool
    agents: AgentRunner | None = None


async def open_parts(
    config: Config, resumed: Callable[[], Awaitable[Resume]], ring_fd: int, stack: AsyncExitStack
) -> tuple[Parts, Resume]:
    """Open all parts at once; `stack` closes them.

    What needs no `Resume` is opened before `resumed` brings it: a spare stands there with all of it, for as
    long as the generator at work lives. Where this life takes over, rewards are loaded while first groups are
    sampled.

    Raises:
        ConfigError: data, tokenizer, reward, filter or custom function cannot be used.
        ClientError: an address cannot be read, or an engine does not come up.
    """
    generate = _generate(config)
    group_filter = None if config.rollout.filter is None else GroupFilter.load(config.rollout.filter)
    rewards = RewardRunner(config.reward, patience_s=config.trainer.stall_s)
    folder = config.engine.tokenizer or config.engine.model
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            segment = tasks.create_task(in_thread(Segment.attach, ring_fd, writable=True))
            source = tasks.create_task(in_thread(PromptSource.open, config.data))
            tokenizer = None if folder is None else tasks.create_task(in_thread(Tokenizer.load, folder))
            resume = await resumed()
            pool = _pool(config, resume)
            tasks.create_task(_start_rewards(rewards, stack, takes_over=resume.incarnation > 1))
            await _start_pool(pool, stack)
            if tokenizer is None:
                tokenizer = tasks.create_task(in_thread(Tokenizer.load, _folder_of(pool)))
    agents = None
    if config.rollout.has_agent:
        agents = AgentRunner(config, tokenizer.result())
        stack.push_async_callback(agents.aclose)
        await agents.start()
    parts = Parts(
        segment=segment.result(),
        source=source.result(),
        tokenizer=tokenizer.result(),
        rewards=rewards,
        group_filter=group_filter,
        generate=generate,
        agents=agents,
        pool=pool,
    )
    return parts, resume


def answer_ends(config: Config, parts: Parts) -> set[int]:
    """Every token by which an engine may end an answer, by the files of tokenizer and model."""
    folders = {config.engine.model, *(engine.first_path for engine in parts.pool.engines)}
    return set(parts.tokenizer.eos_ids).union(*(eos_ids_in(folder) for folder in folders if folder))


def _pool(config: Config, resume: Resume) -> EnginePool:
    return EnginePool(
        resume.engines or config.engine.urls,
        router=config.engine.router,
        max_concurrent_samples=config.engine.max_concurrent_samples + _evaluation_share(config),
        policy=_failure_policy(config),
        balance=Balance.STICKY if config.rollout.has_agent else _BALANCES[config.engine.balance],
        vocab_size=vocab_size_of(model_config(config.engine.model) or model_config(config.engine.tokenizer)),
        takes_over=resume.incarnation > 1,  # the life before may have died in the middle of an update
        ends_pauses=not follows(config),
        known=_known_engines(resume),
    )


def _known_engines(resume: Resume) -> list[EngineInfo]:
    if not resume.known_engines:
        return []
    return msgspec.msgpack.decode(resume.known_engines, type=list[EngineInfo])


def _evaluation_share(config: Config) -> int:
    """Samples of evaluations that each address may get, beside training's."""
    return -(-config.evaluation.max_concurrent_samples // max(1, len(config.engine.urls)))


def _failure_policy(config: Config) -> FailurePolicy:
    """Silence after an abort is not waited out for longer than silence before it, nor engines that are all
    lost for longer than a trainer waits: a large model takes minutes to load again."""
    request_timeout_s = config.engine.request_timeout_s
    policy = FailurePolicy(
        request_timeout_s=request_timeout_s,
        start_timeout_s=config.engine.start_limit_s,
        unavailable_timeout_s=config.trainer.stall_s,
    )
    return dataclasses.replace(policy, abort_grace_s=min(policy.abort_grace_s, request_timeout_s))


async def expect_version(pool: EnginePool, resume: Resume) -> None:
    """Where another run gives engines their weights: none gets requests that lacks this version."""
    label = VersionBook(lineage=resume.lineage, published=resume.version).label(resume.version)
    try:
        await pool.weights.changed(label)
    except ControlFailed as error:
        logger.info("event=no_engine_answers error=%s", error)


async def bring_to_version(pool: EnginePool, resume: Resume) -> list[str]:
    """See that every engine holds the run's version and reports it, now and when it is restarted.

    | the run | an engine reports | what becomes of it |
    |---|---|---|
    | begins | weights of its own start | they are version 0 |
    | begins | any other label | nothing counts until an update: it is among those returned |
    | waits for an update | any label | the same |
    | holds a version that a file has | another label | it loads the file |
    | holds a version that no file has | another label | it is out until the next update |

    Raises:
        EngineTaken: weights of another run took the place of ours.
        ClientError: an engine could not be brought there.
    """
    lineages = {resume.lineage, *resume.lineages}
    pool.weights.claim(lineages)
    strangers = [one for one in pool.engines if not is_first(one.version_label, lineages)]
    if resume.is_new and strangers:
        return [f"{one.url} reports weight version {one.version_label!r}" for one in strangers]
    if resume.weights_pending and not resume.is_new:
        return []
    for one in strangers:
        if not resume.is_new and is_foreign(one.version_label or "", lineages):
            raise taken(one.url, f"{resume.lineage}:{resume.version}", one.version_label)
    await _bring_to_version(pool, resume, lineages)
    return []


async def _bring_to_version(pool: EnginePool, resume: Resume, lineages: Collection[str]) -> None:
    label = VersionBook(lineage=resume.lineage, published=resume.version).label(resume.version)
    found = [engine.version_label for engine in pool.engines]
    numbers = {parse_label(text, resume.lineage) for text in found}
    is_cut_off = IN_PIECES in found or (resume.in_stream and any(text != label for text in found))
    if resume.is_streamed or (resume.weights is None and is_cut_off):
        pool.weights.expect_streamed(label)
        return
    if resume.weights is None and resume.version > 0 and numbers != {resume.version}:
        pool.weights.expect_streamed(label)  # pushed by hand, which nobody here can repeat
        return
    # A life before may have given one a version that was not published in the end.
    if resume.weights is None and not all(is_first(text, lineages) for text in found):
        pool.weights.expect_first(label)
        return
    if numbers != {resume.version}:
        if resume.weights is None:
            logger.info("event=engines_labelled found=%s label=%s", found, label)
            await pool.weights.set_label(label)
        else:
            await _load(pool, resume.weights, label)
    if resume.weights is not None or resume.version == 0:  # else pushed by hand, which nobody here can repeat
        pool.weights.assume(resume.weights, label)


async def _load(pool: EnginePool, path: str, label: str) -> None:
    try:
        await pool.pause(ENGINE_MODE)
        await pool.weights.load(path, label)
    finally:
        await pool.continue_()


def _folder_of(pool: EnginePool) -> str:
    """The tokenizer's, where it is known only from the engines: the one that they started with."""
    folder = pool.engines[0].tokenizer_path or pool.engines[0].model_path
    if folder is None:
        raise ConfigError("engine.tokenizer must name a folder: the engines do not tell their model's")
    return folder


async def _start_pool(pool: EnginePool, stack: AsyncExitStack) -> None:
    await pool.start()
    stack.push_async_callback(_within, POOL_CLOSE_S, pool.aclose)


async def _start_rewards(rewards: RewardRunner, stack: AsyncExitStack, *, takes_over: bool) -> None:
    stack.push_async_callback(rewards.aclose)
    if takes_over:
        rewards.begin()
    else:
        await rewards.start()


async def _within(limit_s: float, close: Callable[[], Awaitable[None]]) -> None:
    """An end must not hang on an engine that is silent."""
    try:
        async with asyncio.timeout(limit_s):
            await close()
    except TimeoutError:
        logger.warning(
            "event=close_timed_out what=%s limit_s=%g", getattr(close, "__qualname__", close), limit_s
        )


def _generate(config: Config) -> Generate | None:
    path = config.rollout.generate
    if path is None:
        return None
    function = resolve(path, option="rollout.generate")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"rollout.generate = {path!r} must be `async def generate(context, sample, sampling_params)`, "
            f"found {function!r}"
        )
    return cast(Generate, function)
