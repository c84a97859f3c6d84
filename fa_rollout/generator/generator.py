"""The generator for a data set of prompts: its parts put together, and the messages that only it gets.

| who | waits for | unblocked by |
|---|---|---|
| every request | paused engines | `updates`, at the latest when the lease ends |

The rest of the table is in `serving`.
"""

import asyncio
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fa_rollout.client.pool import EnginePool
from fa_rollout.config import Config
from fa_rollout.generator.base.error_text import tellable
from fa_rollout.generator.base.hub_link import HubLink
from fa_rollout.generator.base.life import End, Life
from fa_rollout.generator.records.partials import PartialKeeper
from fa_rollout.generator.records.sample_log import SampleLog
from fa_rollout.generator.rollouts.evaluator import Evaluator
from fa_rollout.generator.rollouts.execution import Executor
from fa_rollout.generator.rollouts.group import GroupRunner
from fa_rollout.generator.rollouts.rollout import Rollout
from fa_rollout.generator.serving import ServingGenerator, ring_writer
from fa_rollout.generator.startup import Parts, answer_ends
from fa_rollout.generator.turns.ending import Ends
from fa_rollout.generator.turns.job import HeadStart
from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.generator.updates.engine_updates import EngineUpdates, pause_mode
from fa_rollout.generator.updates.following import FollowedUpdates, follows
from fa_rollout.generator.updates.membership import EngineChanges
from fa_rollout.user_code.failure import in_one_line
from trainer_hook import messages as m
from trainer_hook.record import columns_of, schema_fingerprint

_SESSIONS_PER_SLOT = 2
SETTLE_S = 20.0
"""Longest wait for our aborted requests before an update, where engines tell no version spans."""


class Generator(ServingGenerator):
    """One life of the generator, after its start."""

    def __init__(
        self, config: Config, parts: Parts, *, run: str, resume: m.Resume, link: HubLink, life: Life
    ) -> None:
        self._samples = SampleLog(config.run, name=run, incarnation=resume.incarnation, warn=self._warn)
        schema = schema_fingerprint(columns_of(config.record.columns))
        book = VersionBook(lineage=resume.lineage, published=resume.version)
        super().__init__(
            config,
            resume=resume,
            link=link,
            life=life,
            book=book,
            writer=ring_writer(config, parts.segment, resume, run=run, schema=schema),
            capacity=_capacity(config, parts.pool),
            on_ended=self._samples.ended,
        )
        self._parts = parts
        self._dispatcher.resize(_num_places(config, parts.pool))
        parts.rewards.warn = self._warn
        for name, patience in (("engines", parts.pool.patience), ("rewards", parts.rewards.patience)):
            patience.on_change = partial(self._sending.freeze, name)
        requester = self._request_by(
            parts.pool,
            seed=config.sampling.seed,
            context_length=parts.pool.context_length,
            ends=Ends(
                answer_ends(config, parts), lambda ids: parts.tokenizer.decode(ids, skip_special_tokens=False)
            ),
            keys_cache=config.engine.cache_per_version,
        )
        executor = Executor(
            config,
            tokenizer=parts.tokenizer,
            rollout=Rollout(config, requester, parts.tokenizer, generate=parts.generate, agents=parts.agents),
            rewards=parts.rewards,
            context_length=parts.pool.context_length,
        )
        self._runner = GroupRunner(
            config,
            source=parts.source,
            executor=executor,
            group_filter=parts.group_filter,
            outbox=self._outbox,
            log=self._samples,
        )
        self._partials = PartialKeeper(config, requester, self._sending, warn=self._warn)
        self._evaluator = Evaluator(config, executor=executor, sending=self._sending, send=link.send)
        self._changes = EngineChanges(
            parts.pool,
            label=lambda: book.label(book.published),
            on_capacity=self._resize,
            send=link.send,
        )
        has_spans = all(engine.has_spans for engine in parts.pool.engines)
        updates = FollowedUpdates if follows(config) else EngineUpdates
        self._updates = updates(
            parts.pool,
            requester=requester,
            book=book,
            gates=(self._sending, self._dispatcher.gate),
            mode=pause_mode(config.engine.pause_mode, has_spans=has_spans),
            settle_s=SETTLE_S,
            send=link.send,
        )
        self.strangers: list[str] = []
        """Engines that hold another run's weights: they get their first ones by an update."""

    @property
    def _groups(self) -> GroupRunner:
        return self._runner

    def _services(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "updates": self._updates.run(),
            "sample-log": self._samples.run(),
            "taken": self._parts.pool.weights.until_taken(),
        }

    async def _drain(self, end: End) -> None:
        await super()._drain(end)
        self._evaluator.drop_all()

    def _handle(self, message: m.Message, services: asyncio.TaskGroup) -> bool:
        match message:
            case m.Start():
                starts = [HeadStart(path=message.kept_path, entry=entry) for entry in message.kept]
                self._dispatcher.add(message.groups, starts)
            case m.SavePartials():
                services.create_task(self._save_partials(message), name="partials")
            case m.AbortRunning():
                services.create_task(self._abort(message), name="abort")
            case m.RunEvaluation():
                self._evaluator.begin(message, services)
            case m.DropEvaluation():
                self._evaluator.drop(message.evaluation)
            case m.ChangeEngines():
                self._changes.order(message, services)
            case m.PauseEngines() | m.EngineStage() | m.PublishWeights() | m.ContinueEngines():
                self._updates.order(message)
            case _:
                return False
        return True

    async def _abort(self, message: m.AbortRunning) -> None:
        try:
            assert self._requester is not None
            await self._requester.abort(self._dispatcher.running(message.groups), message.member)
        except Exception as error:  # whatever it is: the requests end by themselves
            self._warn(f"requests were not aborted: {in_one_line(error)}")

    def _warn(self, text: str) -> None:
        """What serves the run failed, and the run goes on."""
        self._link.send(m.Warned(text=tellable(text)))

    async def _save_partials(self, message: m.SavePartials) -> None:
        self._link.send(await self._partials.save(message, self._dispatcher.running))

    def _resize(self) -> int:
        """Engines came or went: samples that they take at once now."""
        self._capacity = _capacity(self._config, self._parts.pool)
        self._dispatcher.resize(_num_places(self._config, self._parts.pool))
        return self._capacity

    def _ready(self) -> m.GeneratorReady:
        return msgspec.structs.replace(
            super()._ready(),
            num_prompts=len(self._parts.source),
            known_engines=msgspec.msgpack.encode(self._parts.pool.engines),
            first_weights=_first_weights(self._config, self._parts.pool),
            strangers=self.strangers,
        )

    def figures(self) -> m.Pulse:
        rewards = self._parts.rewards.statistics()
        return msgspec.structs.replace(
            super().figures(),
            evaluations=self._evaluator.num_running,
            rewards_in_progress=rewards.num_in_progress,
            rewards_failed=sum(rewards.num_failed.values()),
        )


def _capacity(config: Config, pool: EnginePool) -> int:
    """Samples of training that engines take at once: evaluations have their own beside them."""
    beside_evaluations = max(pool.capacity // 2, pool.capacity - config.evaluation.max_concurrent_samples, 1)
    return min(beside_evaluations, config.engine.max_concurrent_samples * len(pool.engines))


def _num_places(config: Config, pool: EnginePool) -> int:
    """Samples that are made at once. With agents more than the engines take: while an agent works on its own
    its session occupies no engine, whose slots go from request to request."""
    if not config.rollout.has_agent:
        return _capacity(config, pool)
    return config.rollout.agent_sessions or _SESSIONS_PER_SLOT * _capacity(config, pool)


def _first_weights(config: Config, pool: EnginePool) -> str | None:
    """The folder of the weights that all engines started with, if that is one here."""
    paths = {engine.first_path for engine in pool.engines}
    if config.engine.model is not None and not all(engine.is_of_start for engine in pool.engines):
        paths = {config.engine.model}
    first = Path(paths.pop() or "") if len(paths) == 1 else Path()
    # A tokenizer may have a folder of its own.
    has_weights = any(first.glob("*.safetensors")) or any(first.glob("*.bin"))
    return str(first) if first != Path() and has_weights else None
